"""The timed parts: training steps, prefill, decoding, and the schedules against each other.

Axes: B rows, N tokens of an input.
"""

import copy
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from transformers.utils import is_flash_attn_2_available

from condense.attention.sdpa import without_cudnn
from condense.eval.benchmark.cases import WITHOUT_SEGMENTS, BenchmarkCase, ModelVariant
from condense.eval.benchmark.models import configure, folded_variants
from condense.eval.benchmark.timing import free_memory
from condense.eval.benchmark.workloads import decoding_step, random_ids, read_context
from condense.eval.decode_state import state_bytes
from condense.execution.cuda_graph import STATIC_IMPLEMENTATIONS

from .comparison import Entry, compare, compare_variants
from .session import OutOfTimeError, Session, build_models, has_graphs

TRAINED_KINDS = ("folded", *WITHOUT_SEGMENTS)
WARM_UP_TOKENS = 4
CHECKPOINT_SEGMENTS = 8  # segments of a group of gradient checkpointing
WARM_UPS = 3  # in training: a shape is captured the second time it is used
SEGMENTS_PER_CALL = 64  # while a context is read before decoding


def attentions() -> list[str]:
    """Returns the fastest implementations of stock transformers; SDPA's CUDA kernel is FlashAttention."""
    return ["sdpa", "flash_attention_2"] if is_flash_attn_2_available() else ["sdpa"]


def raced(session: Session, segments: Sequence[int], attention: str = "sdpa", graph: bool = True) -> list[ModelVariant]:
    """Returns the schedules to race, without checkpointing: on CUDA also the graph, unless its check failed."""
    variants = folded_variants(segments, attention)
    right = all(check["passed"] for check in session.checks if check["part"] == "captured_groups")
    if graph and right and has_graphs(session) and attention in STATIC_IMPLEMENTATIONS:
        of_graph = ModelVariant(kind="folded", attention=attention, schedule="graph")
        variants += [replace(of_graph, segment_length=segment) for segment in segments]
    return variants


def checkpointed(variant: ModelVariant) -> list[ModelVariant]:
    """Returns the variant with gradient checkpointing: by single segments, and by groups. Waves need groups."""
    sizes = {"sequential": (1, CHECKPOINT_SEGMENTS), "wavefront": (CHECKPOINT_SEGMENTS,)}
    segments = sizes.get(variant.schedule or "", (1,))
    return [replace(variant, checkpointing=True, checkpoint_segments=number) for number in segments]


def without_segments(attention: str, checkpointing: bool) -> list[ModelVariant]:
    """Returns the stock model, and the stock model with the folded model's loss, to separate the savings of both."""
    return [ModelVariant(kind=kind, attention=attention, checkpointing=checkpointing) for kind in WITHOUT_SEGMENTS]


def training(session: Session) -> None:
    """Measures peak memory and time of training steps of the Table I shape, with and without gradient checkpointing."""
    sizes, models = session.sizes, build_models(session, session.sizes.table_1, TRAINED_KINDS)
    rows = [
        (f"training {length:,}", length, attention) for length in sizes.training_steps for attention in attentions()
    ]
    rows += [("training memory", sizes.training_memory, attention) for attention in attentions()]
    rows += [("training memory, eager", sizes.training_eager, "eager")]
    for checkpointing in (False, True):
        for row, length, attention in rows:
            ours = raced(session, sizes.training_segments, attention, graph=checkpointing and "memory" not in row)
            if checkpointing:
                ours = [each for variant in ours for each in checkpointed(variant)]
            variants = [*without_segments(attention, checkpointing), *ours]
            row += ", checkpointing" * checkpointing
            compare_variants(session, row, "training", models, variants, length, warm_ups=WARM_UPS)


def training_large(session: Session) -> None:
    """Measures the time of training steps of the 1.2 B shape, with checkpointing; peak memory without the graph."""
    sizes, models = session.sizes, build_models(session, session.sizes.large, TRAINED_KINDS)
    for length in sizes.large_training:
        ours = [each for variant in raced(session, [sizes.segment]) for each in checkpointed(variant)]
        variants = [*without_segments("sdpa", checkpointing=True), *ours]
        row = f"training, large, {length:,}, checkpointing"
        compare_variants(session, row, "training", models, variants, length, warm_ups=WARM_UPS)


def prefills(session: Session) -> None:
    """Measures a long prompt of the 1.2 B shape: schedules against each other, and against full attention."""
    sizes, models = session.sizes, build_models(session, session.sizes.large)
    for attention in attentions():
        ours = raced(session, [sizes.segment], attention)
        stock = ModelVariant(kind="stock", attention=attention)
        compare_variants(session, "prefill", "prefill", models, ours, sizes.prefill_schedules)
        compare_variants(session, "prefill, full", "prefill", models, [stock, *ours], sizes.prefill_full)


def decoding(session: Session) -> None:
    """Measures new tokens one at a time, after short and long contexts in turn; each context is read once.

    The tokens lie around a segment border at all lengths, so a segment becomes the memory among them. Folded models
    take part twice: with ordinary steps, and with a replayed graph unless its check failed. cuDNN's attention is off,
    because it slows the stock model down: it prepares a kernel for every new number of keys.
    """
    sizes, models = session.sizes, build_models(session, session.sizes.large)
    graphs = all(check["passed"] for check in session.checks if check["part"] == "graph")
    for batch, longest in sizes.decode_long.items():
        contexts = [("folded", sizes.decode_short), ("folded", longest), ("stock", sizes.stock_decode[batch])]
        contexts += [("stock", sizes.decode_short)] if sizes.stock_decode[batch] != sizes.decode_short else []
        entries = []
        for kind, length in contexts:
            segment, schedule = (sizes.segment, "auto") if kind == "folded" else (None, None)
            variant = ModelVariant(kind=kind, segment_length=segment, schedule=schedule)
            case = BenchmarkCase(**asdict(variant), mode="decoding", length=length, batch=batch)
            entries += _decoders(session, models[kind], case, graphs and kind == "folded")
        with without_cudnn():
            compare(session, entries, sizes.new_tokens, WARM_UP_TOKENS)


def _decoders(session: Session, model: Any, case: BenchmarkCase, graph: bool) -> list[Entry]:
    """Returns the entries for new tokens after a context: with ordinary steps, and if `graph` also with a graph."""
    context_BN = random_ids(model, case.batch, case.length - session.sizes.new_tokens // 2)
    cache = _read(session, model, case, context_BN)
    cases = [(f"decoding, batch {case.batch}", case, cache)]
    if graph:
        twin = replace(case, fixed_decoding=True)
        cases.append((f"decoding, graph, batch {case.batch}", twin, copy.deepcopy(cache)))
    held = state_bytes(cache)
    return [Entry(row, each, model, decoding_step(model, own, context_BN[:, -1:]), held) for row, each, own in cases]


def _read(session: Session, model: Any, case: BenchmarkCase, context_BN: torch.Tensor) -> Any:
    """Returns the cache after a context; a stock model reads it in one call."""

    def check_time() -> None:
        if session.seconds_left() < 0:
            raise OutOfTimeError(f"while a context of {context_BN.shape[1]:,} tokens was read")

    configure(model, case)
    tokens_per_call = SEGMENTS_PER_CALL * case.segment_length if case.segment_length else context_BN.shape[1]
    return read_context(model, context_BN, tokens_per_call, check_time)[0]


def schedule_table(session: Session) -> None:
    """Measures the schedules over shapes, segments and lengths, for the rule of `auto`."""
    sizes = session.sizes
    for name, shape in (("1.2B", sizes.large), ("Table I", sizes.table_1)):
        models = build_models(session, shape, ["folded"])
        for mode, lengths in (("prefill", sizes.schedule_lengths), ("training", sizes.schedule_training_lengths)):
            for segment in sizes.schedule_segments:
                for length in lengths:
                    if session.seconds_left() < 0:
                        raise OutOfTimeError(f"before {name} {mode} at segment {segment}, {length:,} tokens")
                    row = f"schedules, {name}, {mode}, segment {segment}, {length:,}"
                    variants = raced(session, [segment], graph=mode == "prefill")
                    compare_variants(session, row, mode, models, variants, length)
        del models
        free_memory()
