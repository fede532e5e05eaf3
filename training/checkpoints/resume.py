"""Finds the checkpoint a run resumes from, in a form that this number of ranks can load."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock

from condense.hub.adapters import check_adapters, with_former_memory

from ..output_lock import was_finished
from ..recipe import MAY_CHANGE_FROM_HERE, DigitsData, DocumentData, Evaluation, GeneratedData, Recipe, Stage
from ..recipe.models import CondenseModel
from ..recipe.section import Section, may_change
from .complete import newest_checkpoint, read_marker
from .contents import contents
from .pickles import check_pickles


def find_checkpoint(recipe: Recipe) -> Path | None:
    """Returns the checkpoint to resume from: the output's newest complete one, or else `resume`.

    Raises `ValueError` for a damaged checkpoint, for one that could run code when loaded, and for one whose recipe
    differs in ways a resumed run can't follow. Moved files count as unchanged; files with different content do not.
    """
    checkpoint = newest_checkpoint(recipe.output) or recipe.resume
    if checkpoint is not None:
        refused = changes(checkpoint, recipe).refused
        if refused:
            raise ValueError(
                f"checkpoint {checkpoint} comes from another recipe: {'; '.join(refused)}. A run resumes under the "
                f"recipe it began with, except for its steps and its learning rate: undo the change, or start another "
                f"run from these weights with {_from_weights(checkpoint)} output=FOLDER."
            )
        check_pickles(checkpoint)
        if recipe.lora:
            _check_adapters(checkpoint)
    return checkpoint


def _from_weights(checkpoint: Path) -> str:
    """Says how another run starts from a checkpoint's weights; with `lora` a checkpoint holds only adapters."""
    marker = read_marker(checkpoint)
    if not marker["recipe"].get("lora"):
        return f"model={checkpoint}"
    return f"condense convert {marker['recipe']['model']['source']} MERGED --merge {checkpoint}, then model=MERGED"


def _check_adapters(checkpoint: Path) -> None:
    """Raises `ValueError` for damaged adapters, and for others in subfolders, which Trainer would load too."""
    check_adapters(checkpoint, "resume")
    if below := sorted(checkpoint.glob("*/adapter_model.*")):
        raise ValueError(
            f"{below[0].parent} holds adapters that the run has not written: delete the folder, or take the checkpoint "
            "from a place that you trust."
        )


def describe_finished(recipe: Recipe) -> str | None:
    """Says where a finished run's model is and how to continue; None if the run has steps left."""
    checkpoint = newest_checkpoint(recipe.output)
    if checkpoint is None or not was_finished(recipe.output) or not any(recipe.output.glob("*.safetensors")):
        return None
    if read_marker(checkpoint)["step"] != recipe.steps or changes(checkpoint, recipe).refused:
        return None
    return (
        f"this run is finished: all of its {recipe.steps} steps are done, and the model is in {recipe.output}. To go "
        f"on from {checkpoint} with the optimizer's state, give more steps, such as steps={2 * recipe.steps}; to start "
        f"another run from these weights, give model={recipe.output} output=FOLDER."
    )


def how_to_resume(recipe: Recipe) -> str:
    """Says where the same command begins after a run has ended early."""
    checkpoint = newest_checkpoint(recipe.output) or recipe.resume
    if checkpoint is None:
        return "there is no checkpoint yet, so the same command begins the run anew"
    return f"the same command resumes it from {checkpoint}"


class Changes(NamedTuple):
    """The changes since a checkpoint was written, each in words."""

    refused: list[str]
    followed: list[str]  # from the checkpoint on


def changes(checkpoint: Path, recipe: Recipe) -> Changes:
    """Returns how a recipe differs from a checkpoint's, leaving out differences that affect nothing."""
    marker = read_marker(checkpoint)
    before, now = _stored_recipe(marker, recipe), recipe.model_dump(mode="json")
    free = _may_change(before, now, has_documents=not isinstance(recipe.data, GeneratedData | DigitsData))
    follows = may_change(Recipe, MAY_CHANGE_FROM_HERE)
    if _same_until(marker["step"], before["stages"], now["stages"]):
        follows.add("stages")
    before, now = _flat(before), _flat(now)
    # Those of former versions have none, or of parts of the files: their paths must be the same.
    held = marker.get("digests", {})
    holds = contents(recipe) if held else {}
    found = Changes([], [])
    if recipe.steps < marker["step"]:
        found.refused.append(f"{marker['step']} steps are done, and the recipe has {recipe.steps}")
    for name in before | now:
        was, is_now = before.get(name), now.get(name)
        if name in holds and name in held:
            if _without_paths(was, held[name]) == _without_paths(is_now, holds[name]):
                continue
            if was == is_now:
                found.refused.append(f"the files of {name} ({is_now!r}) hold something else than when the run began")
                continue
        if name not in free and was != is_now:
            (found.followed if name in follows else found.refused).append(f"{name} was {was!r} and is {is_now!r}")
    return found


def former_stages(checkpoint: Path, recipe: Recipe) -> list[list[Stage]]:
    """Returns the stages that a checkpoint's run had before the recipe's own, oldest first."""
    marker = read_marker(checkpoint)
    stages = [*marker.get("former_stages", []), _stored_recipe(marker, recipe)["stages"]]
    found = [[Stage(**stage) for stage in one] for one in stages if one]
    return found[:-1] if found and found[-1] == recipe.stages else found


def other_order(checkpoint: Path, recipe: Recipe) -> str | None:
    """Says that a former version, which wrote the checkpoint, drew from a part of the files' documents only."""
    sources = recipe.data.sources if isinstance(recipe.data, DocumentData) else []
    if "digests" in read_marker(checkpoint) or not sources or any(source.files is None for source in sources):
        return None
    return (
        f"a former version wrote {checkpoint}: it drew from the first documents only, as many as its steps need. From "
        "here on the run draws from all documents of its files"
    )


def _stored_recipe(marker: dict[str, Any], recipe: Recipe) -> dict[str, Any]:
    stored = marker["recipe"]
    if isinstance(recipe.model, CondenseModel):
        stored = stored | {"model": with_former_memory(stored["model"], recipe.model.source)}
    return with_defaults(stored, recipe)


def _same_until(step: int, before: list[dict] | None, now: list[dict] | None) -> bool:
    """Returns whether the first `step` steps use the same lengths, and the longest texts are as long as before."""
    if not before or not now:
        return False
    lengths = [[stage["total_length"] for stage in stages for _ in range(stage["steps"])] for stages in (before, now)]
    return len(lengths[1]) >= step and lengths[0][:step] == lengths[1][:step] and max(lengths[0]) == max(lengths[1])


def _may_change(before: dict[str, Any], now: dict[str, Any], has_documents: bool) -> set[str]:
    free = may_change(Recipe)
    if not (has_documents and (_holds_out(before) or _holds_out(now))):
        free |= {f"evaluation.{name}" for name in Evaluation.model_fields}
    return free - {"log_every"} if now["curriculum"] else free  # a curriculum grows with the logged losses


def _holds_out(recipe: dict[str, Any]) -> bool:
    """Returns whether validation takes documents away from training."""
    evaluation = recipe.get("evaluation")
    return evaluation is not None and not evaluation["sources"]


def _without_paths(value: Any, held: list[list[str] | None]) -> list[Any]:
    """Returns `data.sources` or `model.source`, with the content of files in place of their paths."""
    parts = value if isinstance(value, list) else [value]
    if len(parts) != len(held):
        return parts
    return [
        part if content is None else [content, part | {"files": ""} if isinstance(part, dict) else ""]
        for part, content in zip(parts, held, strict=True)
    ]


def with_defaults(before: Any, now: Any) -> Any:
    """Adds to a checkpoint's section the keys introduced since, with their defaults; `now` is today's section.

    So the default of a new key must be what runs did without it. Lists of sections hold sections of one class.
    """
    if isinstance(before, list) and isinstance(now, list) and now:
        return [with_defaults(part, now[0]) for part in before]
    if not (isinstance(before, dict) and isinstance(now, Section)):
        return before
    defaults = type(now).model_construct().model_dump(mode="json")
    return {name: with_defaults(part, getattr(now, name, None)) for name, part in (defaults | before).items()}


def _flat(fields: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def check_zero_stage(checkpoint: Path, zero_stage: int | None) -> None:
    """Raises `ValueError` if a run under this ZeRO stage can't read the checkpoint; None is a run without DeepSpeed."""
    written = read_marker(checkpoint)["zero_stage"]
    if (written is None) != (zero_stage is None):
        with_or_without = "without" if written is None else "with"
        raise ValueError(f"checkpoint {checkpoint} was written {with_or_without} DeepSpeed: resume it in the same way.")
    if written != zero_stage and {written, zero_stage} != {1, 2}:
        raise ValueError(
            f"checkpoint {checkpoint} was written under ZeRO-{written}, and deepspeed says ZeRO-{zero_stage}: only "
            "ZeRO-1 and ZeRO-2 can read each other's optimizer state. Resume it under the same stage."
        )


def make_universal(checkpoint: Path, ranks: int, zero_stage: int | None) -> bool:
    """Returns whether the checkpoint must be loaded in DeepSpeed's universal form, and makes this form once.

    From stage 1 on, ZeRO divides the optimizer's state among the ranks that wrote it; the universal form is undivided.
    """
    marker = read_marker(checkpoint)
    if zero_stage in (None, 0) or (marker["ranks"], marker["zero_stage"]) == (ranks, zero_stage):
        return False
    with FileLock(checkpoint.parent / f".{checkpoint.name}.lock"):
        if not (checkpoint / "latest_universal").exists():  # written last
            print(f"{checkpoint} was written by {marker['ranks']} ranks: rewriting it for {ranks}", flush=True)
            shutil.rmtree(checkpoint / "universal", ignore_errors=True)
            command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
            command += ["--input_folder", str(checkpoint / (checkpoint / "latest").read_text().strip())]
            command += ["--output_folder", str(checkpoint / "universal")]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
    return True
