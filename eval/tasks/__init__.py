"""The evaluations by name. Classes are imported only when used, because that loads torch."""

from dataclasses import replace
from functools import partial
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
    "fold_cost": "condense.eval.tasks.fold_cost:FoldCost",
    "loss": "condense.eval.tasks.loss:Loss",
    "fold_stability": "condense.eval.tasks.fold_stability:FoldStability",
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
        if name not in given and Path(source).is_absolute() and not Path(source).exists():
            raise ValueError(
                f"{records.parent} holds records of {name}, and its folder {source} is gone: put it back, or pass "
                "another --output."
            )
    former = {name: source if split_name(source)[0] == name else f"{name}={source}" for name, source in sources.items()}
    changed: dict[str, Any] = {"models": list({**former, **given}.values())}
    if chat := [name for name in settings.get("chat", ()) if name not in given or name in options.chat]:
        changed["chat"] = [*chat, *(name for name in options.chat if name not in chat)]  # in the stored order
    return replace(options, **changed)


def run_task(kind: str, options: Any, output: Path) -> dict[str, Any] | None:
    """Runs one evaluation: see `condense.eval.runner.run_on_ranks`."""
    from ..ranks import check_ranks
    from ..runner import run_on_ranks

    check_ranks(options.ranks, options.device_map)
    options = with_former_models(options, output / f"{kind}.records.jsonl")
    return run_on_ranks(partial(_load, kind), kind, options, output)


def _load(kind: str, options: Any, output: Path) -> Any:
    return find_task(kind).load_for(options, output)
