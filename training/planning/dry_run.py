"""The output of `condense train RECIPE --dry-run`: the resolved recipe, its size, and the memory it needs."""

from collections.abc import Sequence
from dataclasses import asdict
from math import isfinite
from typing import Any

import yaml
from transformers import LlamaConfig

from condense.families import FAMILIES
from condense.ops.kernels.availability import has_triton

from ..deepspeed_file import deepspeed_settings
from ..launch import CPU_RANKS
from ..preflight import check_former_recipe
from ..recipe import Recipe
from ..recipe.models import CondenseModel
from .checkpoint_groups import with_checkpoint_segments
from .documents import planned_documents
from .fit import GIB, NODE, UNCOUNTED, default_ranks, propose, reasons_without_waves
from .memory import estimate
from .operations import count_operations, describe_uncounted
from .speed import hours, parse_rate


def dry_run(
    recipe: Recipe,
    ranks: int | None = None,
    gpus: int = 0,
    gpu_memory: float | None = None,
    tokens_per_second: str | None = None,
) -> tuple[dict[str, Any], str]:
    """Returns figures of a run on `ranks` ranks, and its memory on 1, 2, 4 ... up to `ranks`; and the same as text.

    The run is on the machine's `gpus`, or on its CPU if it has none, unless `gpu_memory` says that it is on others.
    Without `ranks`, they are as many as `condense train` starts there; of GPUs elsewhere, a number that the recipe
    divides by. `gpu_memory` in GiB asks for the micro-batch that fills it. `tokens_per_second` is a rate or a log, see
    `parse_rate`. Raises `ValueError` for numbers that are impossible, and for models that are not counted.
    """
    if gpu_memory is not None and not (isfinite(gpu_memory) and gpu_memory > 0):
        raise ValueError(f"--gpu-memory {gpu_memory}: give the memory of a GPU in GiB, a finite number above 0.")
    check_former_recipe(recipe.model.source)
    config = recipe.model.load_config()
    if not isinstance(config, LlamaConfig) and config.model_type not in FAMILIES:
        raise ValueError(
            f"model.kind={recipe.model.kind!r}: a dry run only counts models of the types {', '.join(FAMILIES)}. Start "
            "the run to see its needs."
        )
    device = "cuda" if gpus or gpu_memory is not None else "cpu"
    given, ranks = ranks, ranks or (default_ranks(config, recipe, gpus) if device == "cuda" else CPU_RANKS)
    rate = None if tokens_per_second is None else parse_rate(tokens_per_second, ranks)
    deepspeed = deepspeed_settings(recipe)
    resolved = recipe.model_dump(mode="json", exclude_none=True)
    figures = {"device": device, **count_operations(config, recipe, ranks)}
    duration, duration_in_words = hours(recipe, figures, ranks, rate, device)
    figures |= duration
    numbers = sorted({2**power for power in range(ranks.bit_length()) if 2**power <= ranks} | {ranks})
    memory = memory_by_ranks(config, recipe, deepspeed, numbers, device)
    stages = ", ".join(f"{stage['steps']:,} steps of {stage['total_length']:,} tokens" for stage in figures["stages"])
    trained = f", {figures['trained_parameters']:,} of them trained" if recipe.lora else ""
    lines = [
        yaml.safe_dump(resolved, sort_keys=False, default_flow_style=None, width=110),
        _machine(device, ranks, gpus, is_given=given is not None),
        f"{figures['parameters']:,} parameters{trained}; {stages}",
        f"{figures['tokens_per_step']:,} tokens a step at most, {figures['tokens']:,} tokens in all, "
        f"{figures['flops']:.3g} floating-point operations",
        f"{ranks} ranks x {figures['accumulation']} micro-batches x {figures['sequences_at_once']} sequences: "
        f"{duration_in_words}",
    ]
    figures["sources"], of_documents = planned_documents(recipe, config)
    lines += of_documents
    if samples := recipe.num_samples():
        figures["samples"] = samples
        lines.append(
            f"first the model writes {samples:,} texts of {recipe.longest_text():,} tokens, token by token in one "
            "process: that is not counted here, and may take longer than the training"
        )
    plan: dict[str, Any] = {"recipe": resolved, "plan": figures, "memory": memory}
    if isinstance(recipe.model, CondenseModel) and recipe.gradient_checkpointing:
        groups = with_checkpoint_segments(config, recipe, ranks)
        assert isinstance(groups.model, CondenseModel)
        figures["checkpoint_segments"] = groups.model.checkpoint_segments
        lines.append(f"gradient checkpointing by groups of {groups.model.checkpoint_segments} segments")
    if (not_counted := describe_uncounted(recipe)) is not None:
        figures["uncounted"] = not_counted
        lines.append(not_counted)
    if recipe.model.has_segments:
        figures["without_waves"] = reasons_without_waves(config, recipe, deepspeed, ranks, device)
        lines.append(waves_in_words(figures["without_waves"]))
    lines += [
        "",
        f"memory of a rank by the number of ranks, in GiB, as {recipe.deepspeed} divides it (an estimate):",
        table(memory),
        *_notes(memory, device),
    ]
    if gpu_memory is not None:
        plan["proposals"] = propose(config, recipe, deepspeed, ranks, gpu_memory)
        lines += [
            "",
            f"the largest micro-batch in {gpu_memory:g} GiB on {ranks} ranks, {UNCOUNTED / GIB:g} GiB of which are "
            "left for the CUDA context, NCCL and fragments:",
            *(proposal_in_words(row, recipe.model.has_segments) for row in plan["proposals"]),
        ]
    return plan, "\n".join(lines)


def _notes(memory: Sequence[dict[str, Any]], device: str) -> list[str]:
    """Explains what the table counts."""
    notes = []
    if any("without_graphs" in row for row in memory):
        notes.append("graphs are captured if memory is left for them: a run without them has the total without graphs")
    if device == "cuda" and not has_triton():
        notes.append("Triton is not installed here: plain operations are counted, which keep up to a third more")
    return notes


def _machine(device: str, ranks: int, gpus: int, is_given: bool) -> str:
    """Says which processors the plan is for, and how they were chosen."""
    if device == "cpu":
        return (
            f"planned for {ranks} ranks on this machine's CPU, as it has no GPU; --gpu-memory GIB plans for GPUs of "
            "this memory"
        )
    if gpus == ranks:
        return f"planned for the {gpus} GPUs of this machine"
    why = "as --ranks says" if is_given else f"the most up to {NODE} that the batch divides by"
    return f"planned for {ranks} GPUs, {why}; this machine has {gpus or 'none'}"


def waves_in_words(reasons: dict[int, str | None]) -> str:
    """Says whether the layers run in waves (the schedule `wavefront`), or why not; by length if they differ."""
    if set(reasons.values()) == {None}:
        return "layers run in waves"
    if len(set(reasons.values())) == 1:
        return f"no waves: {next(iter(reasons.values()))}"
    return "; ".join(f"{length:,} tokens: {reason or 'in waves'}" for length, reason in reasons.items())


def proposal_in_words(row: dict[str, Any], has_segments: bool) -> str:
    name = f"{'with' if row['gradient_checkpointing'] else 'without'} gradient checkpointing"
    if "error" in row:
        return f"  {name}: none. {row['error']}"
    waves = f"; {waves_in_words(row['without_waves'])}" if has_segments else ""
    return f"  {name}: {' '.join(row['overrides'])}  ({row['needed'] / GIB:.1f} GiB{waves})"


def memory_by_ranks(
    config: LlamaConfig, recipe: Recipe, deepspeed: dict[str, Any], ranks: Sequence[int], device: str = "cuda"
) -> list[dict[str, Any]]:
    """Returns a row of bytes for each number of ranks, or the reason why the recipe does not run on it.

    `without_graphs` has the total of a run that has no memory left for graphs.
    """
    rows: list[dict[str, Any]] = []
    for number in ranks:
        try:
            parts = estimate(config, recipe, deepspeed, number, device)
            rows.append({"ranks": number, **asdict(parts), "total": parts.total})
            if parts.graphs:
                least = estimate(config, recipe, deepspeed, number, device, captures=False)
                rows[-1]["without_graphs"] = least.total
        except ValueError as error:
            rows.append({"ranks": number, "error": str(error)})
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the rows of `memory_by_ranks` as text, in GiB per rank, without the parts that are always 0."""
    names = [name for row in rows for name in row if name not in ("ranks", "error")]
    names = [name for name in dict.fromkeys(names) if any(row.get(name) for row in rows)]
    last = "total", "without_graphs", "host"
    names.sort(key=lambda name: last.index(name) if name in last else -1)
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
