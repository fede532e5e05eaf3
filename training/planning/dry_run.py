"""The output of `condense train RECIPE --dry-run`: the resolved recipe, its size, and the memory it needs."""

from collections.abc import Sequence
from typing import Any

import yaml
from transformers import LlamaConfig

from ..recipe import Recipe
from .memory import estimate
from .operations import count_operations

GIB = 2**30
FLOPS_PER_SECOND = 4e14  # of a rank: about 40 % of an H100's bfloat16 peak, an assumption


def dry_run(recipe: Recipe, ranks: int) -> tuple[dict[str, Any], str]:
    """Figures, and the same as text: for `ranks` ranks, and the memory for 1, 2, 4, ... up to `ranks`."""
    config = recipe.model.load_config()
    deepspeed = recipe.deepspeed_settings()
    resolved = recipe.model_dump(mode="json", exclude_none=True)
    figures = count_operations(config, recipe, ranks)
    run_flops = figures["flops"] * (4 / 3 if recipe.gradient_checkpointing else 1)  # a second forward pass
    figures["assumed_flops_per_second"] = FLOPS_PER_SECOND
    figures["assumed_hours"] = run_flops / FLOPS_PER_SECOND / ranks / 3600
    numbers = sorted({2**power for power in range(ranks.bit_length()) if 2**power <= ranks} | {ranks})
    memory = memory_by_ranks(config, recipe, deepspeed, numbers)
    stages = ", ".join(f"{stage['steps']:,} steps of {stage['total_length']:,} tokens" for stage in figures["stages"])
    lines = [
        yaml.safe_dump(resolved, sort_keys=False, default_flow_style=None, width=110),
        f"{figures['parameters']:,} parameters; {stages}",
        f"{figures['tokens_per_step']:,} tokens a step at most, {figures['tokens']:,} tokens in all, "
        f"{figures['flops']:.3g} floating-point operations",
        f"{ranks} ranks x {figures['accumulation']} micro-batches x {figures['sequences_at_once']} sequences: "
        f"{figures['assumed_hours']:.1f} hours if each rank does {FLOPS_PER_SECOND:.0e} operations a second",
        "",
        f"memory of a rank by the number of ranks, in GiB, as {recipe.deepspeed} divides it (an estimate):",
        table(memory),
    ]
    return {"recipe": resolved, "plan": figures, "memory": memory}, "\n".join(lines)


def memory_by_ranks(
    config: LlamaConfig, recipe: Recipe, deepspeed: dict[str, Any], ranks: Sequence[int]
) -> list[dict[str, Any]]:
    """One row of bytes for each number of ranks, or the reason why the recipe does not run on that number."""
    rows: list[dict[str, Any]] = []
    for number in ranks:
        try:
            rows.append({"ranks": number, **estimate(config, recipe, deepspeed, number).as_dict()})
        except ValueError as error:
            rows.append({"ranks": number, "error": str(error)})
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows of `memory_by_ranks` as text, in GiB per rank; parts that are 0 in every row are left out."""
    names = [name for row in rows for name in row if name not in ("ranks", "error")]
    names = [name for name in dict.fromkeys(names) if any(row.get(name) for row in rows)]
    names.sort(key=lambda name: ("total", "host").index(name) if name in ("total", "host") else -1)
    titles = {name: name.replace("_", " ") for name in names}
    lines = ["  ".join(["ranks", *titles.values()])]
    for row in rows:
        cells = [f"{row['ranks']:5}"]
        if "error" in row:
            cells.append(row["error"])
        else:
            cells += [f"{row[name] / GIB:{len(title)}.2f}" for name, title in titles.items()]
        lines.append("  ".join(cells))
    return "\n".join(lines)
