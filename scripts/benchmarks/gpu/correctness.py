"""Checks a folded model on this device against the same weights in float64 on the host.

Every implementation of attention and every schedule is checked in float32 and bfloat16, by logits and gradients. The
texts have whole and partial segments, durations, and padding on the left. The distance of two tensors is
||ours - reference|| / ||reference||.

Axes: B rows, N tokens of an input, V vocabulary.
"""

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product

import torch
from transformers.utils import is_flash_attn_2_available

from condense.eval.benchmark.cases import SCHEDULES, ModelVariant
from condense.eval.benchmark.models import build_model, cast_parameters, configure

from .reference import (
    DECODED_TOKENS,
    Outcome,
    decode_around,
    decode_over_two_borders,
    make_texts,
    outcome_of,
    reference_model,
)
from .session import Session, has_graphs

# A correct model's distances stay below half of these limits. If one query of each segment sees one key too many, they
# are more than twice the limits.
LIMITS = {torch.float32: {"logits": 2e-5, "gradients": 1e-4}, torch.bfloat16: {"logits": 5e-2, "gradients": 1e-1}}
FLEX_SECONDS = 75  # every new shape is compiled


def correctness(session: Session) -> None:
    """Makes a check for each case. A case that raises an error fails, and the cases after it still run."""
    torch.set_float32_matmul_precision("highest")  # no TF32
    _check_reference(session)
    implementations = ["eager", "sdpa"]
    if session.device.type == "cuda":
        implementations += ["varlen", "auto"]
    else:
        session.check("varlen", None, "there is no CUDA")
    if is_flash_attn_2_available():
        implementations += ["flash_attention_2"]
    else:
        session.check("flash_attention_2", None, "not installed, or there is no CUDA")
    for _ in _compare(session, implementations):
        pass


def flex(session: Session) -> None:
    """Checks FlexAttention, in a separate part because its compilation takes minutes that the timings do not need."""
    end = time.monotonic() + FLEX_SECONDS
    for name in _compare(session, ["flex_attention"], gradients=session.device.type != "cpu"):
        if time.monotonic() > end or session.seconds_left() < 0:
            session.check("flex_attention", None, f"no time is left for the checks after {name}")
            return


def graph(session: Session) -> None:
    """Checks new tokens by `fixed_decoding` against ordinary ones, over two segment borders, with rows at different
    positions."""
    torch.set_float32_matmul_precision("highest")
    for shape_name, (shape, segment) in session.sizes.checked.items():
        reference = reference_model(shape, segment)
        text = next(text for text in make_texts(shape["vocab_size"], segment) if text.name == "padded")
        for dtype, limits in LIMITS.items():
            model = cast_parameters(copy.deepcopy(reference).to(session.device), dtype)
            for implementation in ("sdpa", "eager"):
                name = f"{shape_name}, {implementation}, {_name(dtype)}"
                with _failing(session, name):
                    pair = []
                    for fixed in (False, True):
                        variant = _variant(implementation, segment, "auto", fixed_decoding=fixed)
                        configure(model, variant)
                        pair.append(decode_over_two_borders(model, text, segment))
                    (theirs_BNV, _), (ours_BNV, step) = pair
                    _check_distance(session, f"{name}: logits", ours_BNV, theirs_BNV, limits["logits"])
                    replayed = step is not None and (step.replay is not None or session.device.type != "cuda")
                    session.check(f"{name}: the steps were fixed ones, on CUDA a graph", replayed, "")


def captured_groups(session: Session) -> None:
    """Checks groups of segments by replayed graphs: logits and gradients of several texts.

    All texts end with a partial segment. The graphs run without checkpoints, and with checkpoints of one and of two
    segments; then while another text waits for its backward pass.
    """
    if not has_graphs(session):
        session.check("schedule='graph'", None, "there is no CUDA")
        return
    torch.set_float32_matmul_precision("highest")
    for shape_name, (shape, segment) in session.sizes.checked.items():
        reference = reference_model(shape, segment)
        text = next(text for text in make_texts(shape["vocab_size"], segment) if text.name == "part of a segment left")
        texts = [text, text._replace(ids_BN=text.ids_BN.flip(1)), text._replace(ids_BN=text.ids_BN.roll(1, 1))]
        expected = [outcome_of(reference, each, gradients=True) for each in texts]
        for dtype, implementation, group in product(LIMITS, ("sdpa", "eager"), (None, 1, 2)):
            model = cast_parameters(copy.deepcopy(reference).to(session.device), dtype)
            name = f"{shape_name}, {implementation}, {_name(dtype)}, group of {group or 'all'}"
            with _failing(session, name):
                variant = replace(_variant(implementation, segment, "graph"), checkpointing=group is not None)
                configure(model, replace(variant, checkpoint_segments=group or 1))
                for number, (each, theirs) in enumerate(zip(texts, expected, strict=True)):
                    _check_outcome(session, f"{name}, use {number + 1}", outcome_of(model, each, True), theirs, dtype)
                waiting = texts[2].on(session.device)
                model.zero_grad(set_to_none=True)
                loss = model(**waiting, labels=waiting["input_ids"]).loss
                with torch.no_grad():  # a text without gradients must not overwrite the waiting one's values
                    model(**texts[0].on(session.device))
                arguments = texts[1].on(session.device)
                (loss + model(**arguments, labels=arguments["input_ids"]).loss).backward()
                found_x = torch.cat([parameter.grad.flatten().double().cpu() for parameter in model.parameters()])
                both_x = torch.stack([one.gradients_x for one in expected[1:] if one.gradients_x is not None]).sum(0)
                _check_distance(session, f"{name}, two texts", found_x, both_x, LIMITS[dtype]["gradients"])


def _check_outcome(session: Session, name: str, ours: Outcome, theirs: Outcome, dtype: torch.dtype) -> None:
    _check_distance(session, f"{name}: logits", ours.logits_nV, theirs.logits_nV, LIMITS[dtype]["logits"])
    assert ours.gradients_x is not None and theirs.gradients_x is not None
    _check_distance(session, f"{name}: gradients", ours.gradients_x, theirs.gradients_x, LIMITS[dtype]["gradients"])


def _compare(session: Session, implementations: Sequence[str], gradients: bool = True) -> Iterator[str]:
    """Makes the checks, and yields the name of each text and variant after them."""
    for shape_name, (shape, segment) in session.sizes.checked.items():
        reference = reference_model(shape, segment)
        texts = make_texts(shape["vocab_size"], segment)
        expected = {text.name: outcome_of(reference, text, gradients) for text in texts}
        whole = texts[0]
        whole_BNV = expected[whole.name].logits_nV.unflatten(0, whole.ids_BN.shape)
        decoded_BNV = whole_BNV[:, 2 * segment - DECODED_TOKENS : 2 * segment + DECODED_TOKENS]
        for dtype, limits in LIMITS.items():
            model = cast_parameters(copy.deepcopy(reference).to(session.device), dtype)
            for implementation, schedule in product(implementations, SCHEDULES):
                if implementation in ("flash_attention_2", "varlen") and dtype == torch.float32:
                    continue  # its kernels have half precision
                configure(model, _variant(implementation, segment, schedule))
                variant = f"{shape_name}, {implementation}, {schedule}, {_name(dtype)}"
                for text in texts:
                    name = f"{variant}, {text.name}"
                    with _failing(session, name):
                        ours, theirs = outcome_of(model, text, gradients), expected[text.name]
                        _check_distance(session, f"{name}: logits", ours.logits_nV, theirs.logits_nV, limits["logits"])
                        if ours.gradients_x is not None and theirs.gradients_x is not None:
                            limit = limits["gradients"]
                            _check_distance(session, f"{name}: gradients", ours.gradients_x, theirs.gradients_x, limit)
                    yield name
                name = f"{variant}: token by token"
                with _failing(session, name):
                    ours_BNV = decode_around(model, whole.ids_BN, 2 * segment)
                    _check_distance(session, name, ours_BNV, decoded_BNV, limits["logits"])
                yield f"{variant}, token by token"


@torch.no_grad()
def _check_reference(session: Session) -> None:
    """Checks the reference itself: a text of one segment gets the stock Llama's logits."""
    for name, (shape, segment) in session.sizes.checked.items():
        reference = reference_model(shape, segment)
        stock = build_model("stock", shape, None, "eager").double()
        stock.load_state_dict(reference.state_dict())
        ids_BN = make_texts(shape["vocab_size"], segment)[0].ids_BN[:, :segment]
        ours_BNV, theirs_BNV = (model.eval()(input_ids=ids_BN).logits for model in (reference, stock))
        _check_distance(session, f"{name}: the reference is a stock Llama within a segment", ours_BNV, theirs_BNV, 1e-6)


@contextmanager
def _failing(session: Session, name: str) -> Iterator[None]:
    """Records an exception as a failed check."""
    try:
        yield
    except Exception as error:
        session.check(name, False, f"{type(error).__name__}: {str(error)[:500]}")


def _check_distance(session: Session, name: str, ours: torch.Tensor, theirs: torch.Tensor, limit: float) -> None:
    distance = float((ours - theirs).norm() / theirs.norm())
    session.check(name, distance <= limit, f"distance {distance:.1e}, limit {limit:.0e}")


def _variant(attention: str, segment: int, schedule: str, fixed_decoding: bool = False) -> ModelVariant:
    return ModelVariant(
        kind="folded",
        attention=attention,
        segment_length=segment,
        schedule=schedule,
        fixed_decoding=fixed_decoding,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
