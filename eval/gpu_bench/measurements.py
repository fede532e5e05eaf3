"""What is timed: training steps, prefill, decoding, and the schedules against each other.

Axes: B rows, N tokens.
"""

import copy
from dataclasses import replace
from typing import Any

import torch

from condense.prefill import prefill as read_context

from .race import (
    Bench,
    Entrant,
    OutOfTimeError,
    Variant,
    attentions,
    build_models,
    compare,
    folded,
    free,
    prefill,
    race,
)

WARM_UP_TOKENS = 4


def training(bench: Bench) -> None:
    """Peak memory and time of a training step of the Table I shape, with and without gradient checkpointing."""
    sizes, models = bench.sizes, build_models(bench, bench.sizes.table_1)
    points = [
        (f"training {length:,}", length, attention) for length in sizes.training_steps for attention in attentions()
    ]
    points += [("training memory", sizes.training_memory, attention) for attention in attentions()]
    points += [("training memory, eager", sizes.training_eager, "eager")]
    for checkpointing in (False, True):
        for row, length, attention in points:
            variants = [
                Variant("stock", attention, checkpointing=checkpointing),
                *folded(sizes.training_segments, attention, checkpointing),
            ]
            compare(bench, row + ", checkpointing" * checkpointing, "training", models, variants, length)


def prefills(bench: Bench) -> None:
    """A long prompt of the 1.2 B shape: schedules against each other, and against full attention."""
    sizes, models = bench.sizes, build_models(bench, bench.sizes.large)
    for attention in attentions():
        ours = folded([sizes.segment], attention)
        compare(bench, "prefill", "prefill", models, ours, sizes.prefill_schedules)
        compare(bench, "prefill, full", "prefill", models, [Variant("stock", attention), *ours], sizes.prefill_full)


def decoding(bench: Bench) -> None:
    """New tokens one at a time, behind short and long contexts in turn; the text before is read once.

    The tokens lie around a segment's border, so that the rolling of the memory is among them, at all lengths.
    Folded models race twice: with ordinary steps and, unless that was found to be wrong, with a replayed graph.
    """
    sizes, models = bench.sizes, build_models(bench, bench.sizes.large)
    graphs = all(check["passed"] for check in bench.checks if check["part"] == "graph")
    for batch, longest in sizes.decode_long.items():
        contexts = [("folded", sizes.decode_short), ("folded", longest), ("stock", sizes.stock_decode[batch])]
        contexts += [("stock", sizes.decode_short)] if sizes.stock_decode[batch] != sizes.decode_short else []
        entrants = []
        for kind, length in contexts:
            segment, schedule = (sizes.segment, "auto") if kind == "folded" else (None, None)
            point = {"row": f"decoding, batch {batch}", "mode": "decoding", "length": length, "batch": batch}
            context_BN = bench.random_ids(models[kind], batch, length - sizes.new_tokens // 2)
            variant = Variant(kind, "sdpa", segment, schedule)
            cache = _read(bench, models[kind], variant, context_BN, point)
            entrants.append(_decoder(models[kind], variant, cache, context_BN[:, -1:], point))
            if kind == "folded" and graphs:
                twin = replace(variant, fixed_decoding=True), copy.deepcopy(cache)
                graph_point = point | {"row": f"decoding, graph, batch {batch}"}
                entrants.append(_decoder(models[kind], *twin, context_BN[:, -1:], graph_point))
        race(bench, entrants, sizes.new_tokens, WARM_UP_TOKENS)


def _read(bench: Bench, model: Any, variant: Variant, context_BN: torch.Tensor, point: dict[str, Any]) -> Any:
    """The state after a context."""

    def watch(_segments: int) -> None:
        if bench.left() < 0:
            raise OutOfTimeError(f"while a context of {context_BN.shape[1]:,} tokens was read")

    if variant.kind == "folded":
        model.config.segment_length, model.config.schedule = variant.segment_length, variant.schedule
        cache = read_context(model.eval(), context_BN, progress=watch)
        point["state_bytes"] = cache.num_bytes
    else:
        cache = prefill(model, context_BN).past_key_values
        point["state_bytes"] = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return cache


def _decoder(model: Any, variant: Variant, cache: Any, next_B1: torch.Tensor, point: dict[str, Any]) -> Entrant:
    @torch.no_grad()
    def step() -> None:
        nonlocal next_B1
        logits_B1V = model(input_ids=next_B1, past_key_values=cache, use_cache=True).logits
        next_B1 = logits_B1V.argmax(-1)

    return Entrant(variant, model, step, point)


def schedule_table(bench: Bench) -> None:
    """Sequential against wavefront over shapes, segments and lengths: what the rule of `auto` is fitted to."""
    sizes = bench.sizes
    for name, shape in (("1.2B", sizes.large), ("Table I", sizes.table_1)):
        models = build_models(bench, shape, ["folded"])
        for mode, lengths in (("prefill", sizes.schedule_lengths), ("training", sizes.schedule_training_lengths)):
            for segment in sizes.schedule_segments:
                for length in lengths:
                    if bench.left() < 0:
                        raise OutOfTimeError(f"before {name} {mode} at segment {segment}, {length:,} tokens")
                    row = f"schedules, {name}, {mode}, segment {segment}, {length:,}"
                    compare(bench, row, mode, models, folded([segment]), length)
        del models
        free(bench)
