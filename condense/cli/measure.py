"""`condense convert --measure`: measures what folding costs before it folds, and chooses the memory by that."""

from pathlib import Path
from typing import Annotated, Any

import typer

from condense.eval.command import SCORING, show, writable
from condense.extras import check_installed

TOKENS = 1536  # of the text, at least, and 3 segments
SHARES = ("0", "0.2", "1")

Text = Annotated[
    str | None,
    typer.Argument(
        help="With --measure: the text to measure on, .txt, .jsonl or .parquet; default: the model's own samples.",
        show_default=False,
    ),
]
Measure = Annotated[
    bool,
    typer.Option(
        "--measure",
        help="Measure first what folding costs (condense eval fold-cost), into TARGET-fold-cost, and take the memory "
        "share and the sink that it chooses, unless they are given.",
    ),
]


def check_measurable(measure: bool, text: str | None, **others: Any) -> None:
    """Raises `ValueError` for a text without `--measure`, and for `others` that change more than the memory."""
    if not measure and text is not None:
        raise ValueError(f"{text}: a text is for --measure: add the option, or leave the text out.")
    for option, given in others.items():
        if measure and given:
            raise ValueError(f"--measure folds the weights of the source as they are: leave --{option} out.")


def measured_fields(
    source: str, target: Path, text: str | None, config: Any, given: dict[str, Any]
) -> tuple[dict[str, Any], str]:
    """Returns the fields of the memory to fold `source` with, and what they cost, in words.

    `config` is the folded model's configuration without a choice. The fields that are `given` are kept.
    """
    from condense.hub.loading import is_stock

    if not is_stock(source):
        raise ValueError(
            f"{source!r} is folded, and --measure chooses the memory of a stock checkpoint: leave it out, measure with "
            "condense eval fold-cost, or convert it --to stock first."
        )
    check_installed("condense convert --measure", "eval", without=SCORING)
    import torch

    from condense.eval.decoding import max_positions
    from condense.eval.ranks import check_alone
    from condense.eval.tasks import find_task, run_task
    from condense.eval.tasks.fold_arms import fields_of
    from condense.eval.tasks.fold_choice import choose
    from condense.eval.tasks.fold_shown import data_of, label_of
    from condense.eval.tasks.options import FoldCostOptions

    check_alone("convert --measure")
    memory, length = _given_share(given), config.segment_length
    positions = max_positions(config) or TOKENS
    options = FoldCostOptions(
        models=[source],
        data=() if text is None else (text,),
        num_texts=1,
        num_tokens=max(2 * length, min(max(TOKENS, 3 * length), positions)),
        segment_lengths=(length,),
        shares=SHARES if memory is None else (memory,),
        sink_token_id=given.get("sink_token_id"),
        by_position=(0,),
        dtype="auto" if torch.cuda.is_available() else "float32",  # half precision is slow on most CPUs
    )
    output = writable(target.with_name(f"{target.name}-fold-cost"))
    try:
        results = run_task("fold_cost", options, output)
    except ValueError as error:
        if "another measurement" not in str(error):
            raise
        raise ValueError(
            f"{output} holds the cost on another text or model: delete it, or pass another target."
        ) from None
    assert results is not None  # there is one process
    show(results, find_task("fold_cost"), output)
    sink = given["sink_token_id"] is not None if "sink_token_id" in given else None
    cost, _ = choose(results["costs"], memory, sink)
    (token,) = results["sinks"].values()
    fields = fields_of(cost["memory"], token if cost["sink"] else None, config)
    is_input = given.get("memory_source") == "layer_input"  # the share 0 by another name
    names = ["sink_token_id", *([] if is_input else ["memory_source", "memory_share"])]
    said = f"{label_of(cost['memory'], cost['sink'])}: {cost['cost']:+.3f} nats a token above full attention, untrained"
    return {name: fields[name] for name in names} | given, f"; {said} ({data_of(results)})"


def _given_share(given: dict[str, Any]) -> str | None:
    """Returns the name of the memory share that is given, if there is one."""
    if given.get("memory_source") == "layer_input":
        return "0"
    share = given.get("memory_share")
    if share is None:
        return None
    return ":".join(f"{one:g}" for one in (share if isinstance(share, list) else [share]))
