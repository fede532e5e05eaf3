"""A layer's equations stand three times: in `condense.reference`, in `condense.layers`, and for bands. All agree.

Three layers work on a segment each, with inputs and memories of their own; the text's first segment is at the highest
layer. The reference computes the expected outputs, next memories, and all gradients, row by row.
"""

import pytest
import torch

from condense.attention import AttentionMask, AttentionMetadata
from condense.attention.metadata import rotary_tables
from condense.execution import group_buffers
from condense.execution.band import Band, run_band
from condense.execution.executor import run_layers
from condense.execution.group_buffers import GroupBuffers
from condense.execution.stacking import stack_of
from condense.execution.static_sums import static_sums
from condense.execution.wavefront import band_metadata
from condense.reference import decoder_layer, head_norm, linear, rms_norm, rotate
from condense.segmentation import SegmentPositions
from condense.state.memory import Memory

from ..models import MEMORIES, random_durations, tiny_model

LAYERS, ROWS, LENGTH = 3, 2, 5


class Case:
    """Inputs [layer, row, token, width], memories likewise, and the data of the segments, newest first."""

    def __init__(self, has_first: bool = True, detached=(), durations: bool = False, **fields):
        self.model = tiny_model(**fields)
        self.config, self.layers = self.model.config, self.model.model.layers
        self.detached = detached or [False] * LAYERS
        size = self.config.hidden_size
        torch.manual_seed(1)
        self.inputs = torch.randn(LAYERS, ROWS, LENGTH, size, dtype=torch.float64).requires_grad_()
        self.remembered = torch.randn(LAYERS, ROWS, LENGTH, size, dtype=torch.float64).requires_grad_()
        self.num_with = LAYERS - has_first  # layers with a memory
        self.sinks = None
        if self.config.sink_token_id is not None:
            shape = LAYERS, 2, 1, self.config.num_key_value_heads, 1, self.config.head_dim
            self.sinks = [Memory(*pair) for pair in torch.randn(shape, dtype=torch.float64)]
        units = torch.ones(LAYERS * ROWS, 2 * LENGTH, dtype=torch.float64)
        both = random_durations(LAYERS * ROWS, 2 * LENGTH) if durations else units
        self.durations = both.view(LAYERS, ROWS, 2 * LENGTH)
        self.has_durations = durations

    def keys(self, number: int) -> slice:
        """The keys that a layer's queries see, of [memory ; segment]."""
        return slice(0 if number < self.num_with else LENGTH, None)

    def positions(self, number: int):
        """Of the keys [R, K], and of the segment as a memory [R, T]."""
        durations_RK = self.durations[number]
        as_memory = durations_RK[:, LENGTH:].cumsum(1)
        return durations_RK[:, self.keys(number)].cumsum(1), as_memory

    def metadata(self) -> list[AttentionMetadata]:
        chunks = list(SegmentPositions(ROWS, LENGTH).chunks([LENGTH * LAYERS] * ROWS))
        first = 0 if self.num_with < LAYERS else 1  # the segment at the highest layer
        chunks = (chunks + chunks[-1:])[first : first + LAYERS][::-1]
        found = []
        for number, chunk in enumerate(chunks):
            position_RK, as_memory_RT = self.positions(number)
            tables = [
                rotary_tables(self.model.model.rotary_emb, self.inputs, one)
                for one in (position_RK[:, -LENGTH:], as_memory_RT)
            ]
            log_durations = self.durations[number][:, self.keys(number)].log() if self.has_durations else None
            detach_R = (self.detached[number],) * ROWS
            mask = AttentionMask(chunk, log_durations)
            found.append(AttentionMetadata(chunk, *tables, mask, True, detach_R, sinks=self.sinks))
        return found

    def memory(self, number: int, states_RTD: torch.Tensor, position_RT: torch.Tensor) -> Memory:
        """Keys and values of states, after the reference."""
        w = dict(self.layers[number].named_parameters())
        pairs = []
        for states_TD, position_T in zip(states_RTD, position_RT, strict=True):
            normed_TD = rms_norm(states_TD, w["input_layernorm.weight"], self.config)
            heads = [linear(w, f"self_attn.{name}_proj", normed_TD).unflatten(-1, (-1, 8)) for name in "kv"]
            key_TGE = head_norm(w, "self_attn.k_norm", heads[0], self.config)
            keys = [rotate(key_TGE[:, group], position_T, self.config) for group in range(key_TGE.shape[1])]
            pairs.append((torch.stack(keys), heads[1].transpose(0, 1)))
        return Memory(*(torch.stack(parts) for parts in zip(*pairs, strict=True)))

    def memory_before(self, number: int) -> Memory | None:
        if number >= self.num_with:
            return None
        return self.memory(number, self.remembered[number], self.positions(number)[0][:, :LENGTH])


def by_reference(case: Case):
    outputs, memories = [], []
    for number, layer in enumerate(case.layers):
        w, rows = dict(layer.named_parameters()), []
        position_RK, as_memory_RT = case.positions(number)
        for row in range(ROWS):
            x_TD, durations_K = case.inputs[number, row], case.durations[number, row, case.keys(number)]
            context_KD = torch.cat([case.remembered[number, row], x_TD])[case.keys(number)]
            rows.append(decoder_layer(w, case.config, x_TD, context_KD, position_RK[row], durations_K))
        outputs.append(torch.stack(rows))
        input_RTD, share = case.inputs[number], case.config.memory_shares[number]
        states_RTD = input_RTD + share * (outputs[-1] - input_RTD)
        memory = case.memory(number, states_RTD.detach() if case.detached[number] else states_RTD, as_memory_RT)
        if case.sinks is not None:
            pairs = zip(memory, case.sinks[number], strict=True)
            memory = Memory(*(torch.cat([sink.expand(ROWS, -1, -1, -1), one[:, :, 1:]], 2) for one, sink in pairs))
        memories.append(memory)
    return outputs, memories


def by_layers(case: Case):
    results = []
    for number, metadata in enumerate(case.metadata()):
        sinks = case.sinks and case.sinks[number : number + 1]
        own = AttentionMetadata(**{**vars(metadata), "sinks": sinks})
        results.append(run_layers([case.layers[number]], case.inputs[number], [case.memory_before(number)], own))
    return [output for output, _ in results], [memory for _, (memory,) in results]


def by_band(case: Case, sums=None, buffers=None):
    memories = [case.memory_before(number) for number in range(case.num_with)]
    memory = Memory(*map(torch.cat, zip(*memories, strict=True)))
    metadata = band_metadata(case.metadata(), case.num_with, low=0)
    newest = metadata.chunk.segments[0]
    band = Band(stack_of(case.layers), slice(0, LAYERS), newest, sums or {}, buffers)
    output_RTD, memory = run_band(band, case.inputs.flatten(0, 1), memory, metadata)
    return output_RTD.split(ROWS), [memory.rows(row, row + ROWS) for row in range(0, LAYERS * ROWS, ROWS)]


def gradients(case: Case, outputs, memories) -> list[torch.Tensor]:
    """Of a weighted sum of everything that is computed, by inputs, memories and weights."""
    results = [*outputs, *(one for memory in memories for one in memory)]
    torch.manual_seed(2)
    factors = [torch.randn(result.shape, dtype=torch.float64) for result in results]
    inputs = [case.inputs, case.remembered, *case.layers.parameters()]
    for one in inputs:
        one.grad = None
    torch.autograd.backward(results, factors)
    return [torch.zeros_like(one) if one.grad is None else one.grad for one in inputs]


CASES = {
    **MEMORIES,
    "no first segment": {"has_first": False},
    "detached": {"detached": [True, True, True]},
    "input, detached": {**MEMORIES["input"], "detached": [True, True, True]},
    "some are detached": {**MEMORIES["shares"], "detached": [False, True, False]},
    "durations": {"durations": True, "position_anchor": "end"},
    "durations, share": {"durations": True, "memory_share": 0.2},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {"family": "qwen2"},
    "qwen3": {"family": "qwen3"},
    "eager": {"attn_implementation": "eager", **MEMORIES["sink, shares"]},
    "gelu": {"hidden_act": "gelu"},
}
OF_THE_REFERENCE = [name for name in CASES if name != "gelu"]  # which has one activation


@pytest.mark.parametrize("compute", [by_layers, by_band])
@pytest.mark.parametrize("name", OF_THE_REFERENCE)
def test_layers_and_bands_follow_the_reference(name, compute):
    case = Case(**CASES[name])
    found, expected = compute(case), by_reference(case)
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(gradients(case, *found), gradients(case, *expected), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("waiting", [1, 10, 1000])
@pytest.mark.parametrize("name", CASES)
def test_gradients_of_a_captured_band_are_in_its_sums(name, waiting, monkeypatch):
    """Each product at once, those of a segment together, and all at the end. Autograd has the rest: what the memories
    before the band give."""
    monkeypatch.setattr(group_buffers, "WAITING_TOKENS", waiting)
    case = Case(**CASES[name])
    expected = gradients(case, *by_layers(case))
    sums = static_sums(stack_of(case.layers))
    buffers = GroupBuffers(sums, LAYERS, first=0, num_segments=LAYERS + 1, tokens=ROWS * LENGTH)
    found = gradients(case, *by_band(case, buffers.begun, buffers))
    buffers.finish()
    names = [(name, number) for number, layer in enumerate(case.layers) for name, _ in layer.named_parameters()]
    assert any(sums[name].memory_MOx.any() for name in sums)
    totals = [sums[name].memory_MOx[number] for name, number in names]
    found = [*found[:2], *(one + total for one, total in zip(found[2:], totals, strict=True))]
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)
