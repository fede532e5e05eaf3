"""The evaluations by name. A name leads to its class without importing it, since that loads torch."""

from pathlib import Path
from pkgutil import resolve_name
from typing import Any

TASKS = {
    "passkey": "condense.eval.tasks.passkey:Passkey",
    "summarization": "condense.eval.tasks.summarization:Summarization",
    "perplexity": "condense.eval.tasks.perplexity:Perplexity",
    "suite": "condense.eval.tasks.suite:Suite",
    "attention": "condense.eval.tasks.attention_maps:AttentionMaps",
}


def find_task(kind: str) -> Any:
    """The class of a task. Raises `ValueError` for an unknown name."""
    if kind not in TASKS:
        raise ValueError(f"there is no evaluation {kind!r}: choose from {', '.join(TASKS)}.")
    return resolve_name(TASKS[kind])


def evaluate(kind: str, output: Path, **options: Any) -> dict[str, Any]:
    """Runs one evaluation and returns what KIND.json holds; the options are the fields in `eval/tasks/options.py`."""
    from ..runner import run

    task = find_task(kind)
    return run(task.load(task.Options(**options)), output)
