"""Checks the folder that a run writes its model into."""

import json
from pathlib import Path

from condense.hub.adapters import RECIPE
from condense.utils.files import check_not_linked, check_output_folder, read_text

from .checkpoints.complete import newest_checkpoint

MODEL = ("config.json", "adapter_config.json", "*.safetensors", "*.bin")
OF_A_RUN = ("checkpoint-[0-9]*", RECIPE, "log.jsonl", "curriculum.json", "tokenizer*")


def check_output(output: Path) -> None:
    """Raises `ValueError` if a run that has no checkpoint in `output` would write over a model there, or over the files
    of something else, and if any run would write through a link."""
    check_output_folder(output)
    there = sorted(output.iterdir()) if output.is_dir() else []
    check_not_linked(*(path for path in there if not path.is_dir() or path.match("checkpoint-*")))
    if newest_checkpoint(output) is not None:
        return  # the run goes on from it
    kept = MODEL if _is_recipe(output / RECIPE) else (*MODEL, *OF_A_RUN)
    if found := next((path for path in there if any(map(path.match, kept))), None):
        raise ValueError(
            f"output={output} holds {found.name} and no complete checkpoint to go on from, so the run would begin anew "
            "and write over what is there: set output to a new folder."
        )


def _is_recipe(path: Path) -> bool:
    """Returns whether a run has begun in a file's folder: it then has its recipe there, and nothing else that counts
    before its first checkpoint."""
    try:
        fields = json.loads(read_text(path))
    except ValueError:
        return False
    return isinstance(fields, dict) and fields.keys() >= {"model", "output", "data"}
