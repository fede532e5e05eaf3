"""Is a folded model on this device what the same weights are in float64 on the host?

Every implementation of attention and every schedule, on texts that segments divide and don't, with durations, and
with padding on the left: logits and gradients, in float32 and bfloat16. Distances are
||ours - reference|| / ||reference||.

Axes: B rows, N columns, V vocabulary.
"""

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ..profile.shapes import build
from .race import Bench, Variant, cast, configure, has_flash_attn, schedules

# Rounding alone stays below half of these; one query of a segment with one key too many is above twice as much.
LIMITS = {torch.float32: {"logits": 2e-5, "gradients": 1e-4}, torch.bfloat16: {"logits": 5e-2, "gradients": 1e-1}}
FLEX_SECONDS = 75  # each new shape is compiled
DECODED = 4  # tokens before a segment's border, and after it


class Text(NamedTuple):
    """Random tokens; `mask_BN` and `durations_BN` are None where the model gets none."""

    name: str
    ids_BN: torch.Tensor
    mask_BN: torch.Tensor | None
    durations_BN: torch.Tensor | None

    def on(self, device: torch.device) -> dict[str, torch.Tensor]:
        named = {"input_ids": self.ids_BN, "attention_mask": self.mask_BN, "durations": self.durations_BN}
        return {name: tensor.to(device) for name, tensor in named.items() if tensor is not None}


class Outcome(NamedTuple):
    """At real tokens, on the host, in float64."""

    logits: torch.Tensor
    gradients: torch.Tensor | None


def correctness(bench: Bench) -> None:
    """Each case is a check, also one that raises: a run shows all that is wrong."""
    torch.set_float32_matmul_precision("highest")  # no TF32
    _against_stock(bench)
    implementations = ["eager", "sdpa"]
    if has_flash_attn():
        implementations += ["flash_attention_2", "auto"]  # without the package, auto is sdpa there
    else:
        bench.check("flash_attention_2", None, "not installed, or there is no CUDA")
    if reason := schedules()[1]:
        bench.check("wavefront", None, reason)
    for _ in _compare(bench, implementations):
        pass


def flex(bench: Bench) -> None:
    """FlexAttention by itself: it is compiled, which takes minutes that the timings don't need."""
    end = time.monotonic() + FLEX_SECONDS
    for name in _compare(bench, ["flex_attention"], gradients=bench.device.type != "cpu"):
        if time.monotonic() > end or bench.left() < 0:
            bench.check("flex_attention", None, f"no time for what comes after {name}")
            return


def graph(bench: Bench) -> None:
    """New tokens by `fixed_decoding` against ordinary ones, over two segment borders, rows at different places."""
    torch.set_float32_matmul_precision("highest")
    for shape_name, (shape, segment) in bench.sizes.checked.items():
        reference = reference_model(shape, segment)
        text = next(text for text in _texts(shape["vocab_size"], segment) if text.name == "padded")
        for dtype, limits in LIMITS.items():
            model = cast(copy.deepcopy(reference).to(bench.device), dtype)
            for implementation in ("sdpa", "eager"):
                name = f"{shape_name}, {implementation}, {str(dtype).removeprefix('torch.')}"
                with _noted(bench, name):
                    pair = []
                    for fixed in (False, True):
                        configure(model, Variant("folded", implementation, segment, "auto", fixed_decoding=fixed))
                        pair.append(_continued(model, text, segment))
                    (theirs_BNV, _), (ours_BNV, step) = pair
                    _judge(bench, f"{name}: logits", ours_BNV, theirs_BNV, limits["logits"])
                    replayed = step is not None and (step.replay is not None or bench.device.type != "cuda")
                    bench.check(f"{name}: the steps were fixed ones, on CUDA a graph", replayed, "")


@torch.no_grad()
def _continued(model: Any, text: Text, segment: int) -> tuple[torch.Tensor, Any]:
    """Logits of new tokens, one by one, over two borders of each row; and the step that was fixed, if one was."""
    model.eval()
    assert text.mask_BN is not None
    first, end = segment - DECODED, 2 * segment + segment // 2 + 2 * DECODED
    given = Text("", text.ids_BN[:, :first], text.mask_BN[:, :first], None).on(model.device)
    cache = model(**given, use_cache=True).past_key_values
    columns = text.ids_BN[:, first:end].to(model.device).split(1, dim=1)
    logits = [model(input_ids=column_B1, past_key_values=cache).logits for column_B1 in columns]
    return torch.cat(logits, dim=1).double().cpu(), cache.fixed_step


def _compare(bench: Bench, implementations: Sequence[str], gradients: bool = True) -> Iterator[str]:
    """Makes the checks, and yields the name of each text and model after its own."""
    for shape_name, (shape, segment) in bench.sizes.checked.items():
        reference = reference_model(shape, segment)
        texts = _texts(shape["vocab_size"], segment)
        expected = {text.name: _outcome(reference, text, gradients) for text in texts}
        for dtype, limits in LIMITS.items():
            model = cast(copy.deepcopy(reference).to(bench.device), dtype)
            for implementation in implementations:
                if implementation == "flash_attention_2" and dtype == torch.float32:
                    continue  # its kernels are of half precision
                for schedule in schedules()[0]:
                    configure(model, Variant("folded", implementation, segment, schedule))
                    name = f"{shape_name}, {implementation}, {schedule}, {str(dtype).removeprefix('torch.')}"
                    for text in texts:
                        with _noted(bench, f"{name}, {text.name}"):
                            found = _outcome(model, text, gradients)
                            for figure, limit in limits.items():
                                ours, theirs = getattr(found, figure), getattr(expected[text.name], figure)
                                if ours is not None:
                                    _judge(bench, f"{name}, {text.name}: {figure}", ours, theirs, limit)
                        yield f"{name}, {text.name}"
                    with _noted(bench, f"{name}: token by token"):
                        whole_BNV = expected[texts[0].name].logits.unflatten(0, texts[0].ids_BN.shape)
                        theirs_BNV = whole_BNV[:, 2 * segment - DECODED : 2 * segment + DECODED]
                        ours_BNV = _decoded(model, texts[0].ids_BN, 2 * segment)
                        _judge(bench, f"{name}: token by token", ours_BNV, theirs_BNV, limits["logits"])
                    yield f"{name}, token by token"


@contextmanager
def _noted(bench: Bench, name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        bench.check(name, False, f"{type(error).__name__}: {str(error)[:500]}")


def _judge(bench: Bench, name: str, ours: torch.Tensor, theirs: torch.Tensor, limit: float) -> None:
    distance = float((ours - theirs).norm() / theirs.norm())
    bench.check(name, distance <= limit, f"distance {distance:.1e}, limit {limit:.0e}")


def reference_model(shape: dict[str, Any], segment: int) -> Any:
    """A folded model on the host in float64, with weights that bfloat16 holds exactly, none of them near zero."""
    torch.manual_seed(0)
    model = build("folded", shape | {"initializer_range": shape["hidden_size"] ** -0.5}, segment, "eager")
    model.config.schedule = "sequential"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return cast(cast(model, torch.bfloat16), torch.float64)


def _texts(vocab_size: int, segment: int) -> list[Text]:
    generator = torch.Generator().manual_seed(0)
    ids_BN = torch.randint(vocab_size, (2, 4 * segment), generator=generator)
    broken_BN = ids_BN[:, : 3 * segment + segment // 3]
    durations_BN = 0.2 + 1.6 * torch.rand(broken_BN.shape, generator=generator)
    mask_BN = torch.ones_like(broken_BN)
    mask_BN[1, : segment // 2 + 3] = 0
    return [
        Text("whole segments", ids_BN, None, None),
        Text("part of a segment left", broken_BN, None, None),
        Text("durations", broken_BN, None, durations_BN),
        Text("padded", broken_BN, mask_BN, None),
        Text("padded, durations", broken_BN, mask_BN, durations_BN),
    ]


def _outcome(model: Any, text: Text, gradients: bool) -> Outcome:
    model.train()
    model.zero_grad(set_to_none=True)
    given = text.on(model.device)
    with torch.set_grad_enabled(gradients):
        output = model(**given, labels=given["input_ids"], logits_to_keep=0)
    if gradients:
        output.loss.backward()
    real_BN = torch.ones_like(text.ids_BN, dtype=torch.bool) if text.mask_BN is None else text.mask_BN.bool()
    logits_nV = output.logits.detach().double().cpu()[real_BN]
    if not gradients:
        return Outcome(logits_nV, None)
    return Outcome(logits_nV, torch.cat([part.grad.flatten().double().cpu() for part in model.parameters()]))


@torch.no_grad()
def _decoded(model: Any, ids_BN: torch.Tensor, border: int) -> torch.Tensor:
    """Logits of the tokens around a segment's border, read one by one; what comes before is read in two calls."""
    model.eval()
    ids_BN = ids_BN.to(model.device)
    first, output, logits = border - DECODED, None, []
    sizes = [first // 2, first - first // 2, *[1] * (2 * DECODED)]
    for part_BN in ids_BN[:, : border + DECODED].split(sizes, dim=1):
        output = model(input_ids=part_BN, past_key_values=output and output.past_key_values, use_cache=True)
        logits.append(output.logits)
    return torch.cat(logits[2:], dim=1).double().cpu()


@torch.no_grad()
def _against_stock(bench: Bench) -> None:
    """The reference itself: a text of one segment gets the stock Llama's logits."""
    for name, (shape, segment) in bench.sizes.checked.items():
        reference = reference_model(shape, segment)
        stock = build("stock", shape, None, "eager").double()
        stock.load_state_dict(reference.state_dict())
        ids_BN = _texts(shape["vocab_size"], segment)[0].ids_BN[:, :segment]
        ours, theirs = (model.eval()(input_ids=ids_BN).logits for model in (reference, stock))
        _judge(bench, f"{name}: the reference is a stock Llama within a segment", ours, theirs, 1e-6)
