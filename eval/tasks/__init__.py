"""The evaluations by name. Classes are imported only when used, because that loads torch."""

import json
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from ..results_store import stored_settings

TASKS = {
    "passkey": "condense.eval.tasks.passkey:Passkey",
    "facts": "condense.eval.tasks.facts:Facts",
    "recall": "condense.eval.tasks.recall:Recall",
    "summarization": "condense.eval.tasks.summarization:Summarization",
    "perplexity": "condense.eval.tasks.perplexity:Perplexity",
    "answers": "condense.eval.tasks.answers:Answers",
    "suite": "condense.eval.tasks.suite:Suite",
    "attention": "condense.eval.tasks.attention_maps:AttentionMaps",
}


def find_task(kind: str) -> Any:
    """Returns the class of a task. Raises `ValueError` for an unknown name."""
    if kind not in TASKS:
        raise ValueError(f"there is no evaluation {kind!r}: choose from {', '.join(TASKS)}.")
    return resolve_name(TASKS[kind])


def evaluate(kind: str, output: str | Path, **options: Any) -> dict[str, Any]:
    """Runs one evaluation and returns the contents of KIND.json; `eval/tasks/options.py` has the options."""
    results = run_task(kind, find_task(kind).Options(**options), Path(output))
    assert results is not None, "processes of a launcher call run_task"
    return results


def with_former_models(options: Any, records: Path) -> Any:
    """Adds the models with existing records to the options: they stay, and only new ones are measured.

    Raises `ValueError` if such a model is no longer in its folder.
    """
    from ..models import split_name

    settings, given = stored_settings(records), {split_name(named)[0]: named for named in options.models}
    if len(given) < len(options.models):
        return options  # two models of one name are refused when they are loaded
    sources = {model["name"]: model["source"] for model in settings.get("models", ())}
    for name, source in sources.items():
        if name not in given and Path(source).is_absolute() and not Path(source).is_dir():
            raise ValueError(
                f"{records.parent} holds records of {name}, and its folder {source} is gone: put it back, or pass "
                "another --output."
            )
    former = {name: source if split_name(source)[0] == name else f"{name}={source}" for name, source in sources.items()}
    changed: dict[str, Any] = {"models": list({**former, **given}.values())}
    if chat := [name for name in settings.get("chat", ()) if name not in given]:
        changed["chat"] = [*chat, *options.chat]
    return replace(options, **changed)


def run_task(kind: str, options: Any, output: Path) -> dict[str, Any] | None:
    """Runs one evaluation on `options.ranks` processes, or as one of a launcher's processes.

    Returns the contents of KIND.json; None in any process of a launcher except the first.
    """
    from ..ranks import call_on_ranks, check_ranks, join
    from ..runner import measure_share, run

    check_ranks(options.ranks, options.device_map)
    options = with_former_models(options, output / f"{kind}.records.jsonl")
    if options.ranks > 1:
        call_on_ranks(options.ranks, run_task, kind, replace(options, ranks=1), output)
        return json.loads((output / f"{kind}.json").read_text(encoding="utf-8"))
    ranks, task_class = join(), find_task(kind)
    if ranks is None or ranks.is_first:
        return run(task_class.load(options), output, ranks)
    try:
        task = task_class.load(options)
        settings = task.settings()
    except (ValueError, OSError):
        ranks.accepted()  # exits if the first process refuses too, so that only one prints the error
        raise
    measure_share(task, ranks, ranks.pending(settings))
    return None
