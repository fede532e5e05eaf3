"""What `condense train RECIPE --dry-run` says: the resolved recipe, its size, and the memory it needs."""

from typing import Any

import yaml

from .estimate import estimates, plan, table
from .models import load_config
from .recipe import Recipe

FLOPS_PER_SECOND = 4e14  # of a rank: about 40 % of an H100's bfloat16 peak, an assumption


def dry_run(recipe: Recipe, ranks: int) -> tuple[dict[str, Any], str]:
    """Figures, and the same as text: for `ranks` ranks, and the memory for 1, 2, 4, ... up to as many."""
    config = load_config(recipe)
    deepspeed = recipe.deepspeed_settings()
    resolved = recipe.model_dump(mode="json", exclude_none=True)
    figures = plan(config, recipe, ranks)
    run_flops = figures["flops"] * (4 / 3 if recipe.gradient_checkpointing else 1)  # a second forward pass
    figures["assumed_flops_per_second"] = FLOPS_PER_SECOND
    figures["assumed_hours"] = run_flops / FLOPS_PER_SECOND / ranks / 3600
    numbers = sorted({2**power for power in range(ranks.bit_length()) if 2**power <= ranks} | {ranks})
    memory = estimates(config, recipe, deepspeed, numbers)
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
