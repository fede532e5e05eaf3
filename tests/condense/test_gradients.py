"""Losses and gradients against autograd on the equations (`condense.reference`), in float64."""

import gc
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import condense.loss
from condense import FoldedCache, modeling, to_stock
from condense.execution.checkpointing import _say_non_reentrant
from condense.state.memory import TransientState

from .models import (
    MEMORIES,
    VOCAB,
    Operations,
    assert_same_gradients,
    gradients,
    gradients_of,
    logits_in_parts,
    moved_to_host,
    random_ids,
    reference_gradients,
    tiny_model,
    torch_checkpoint,
)

LENGTH = 23  # four whole segments of 5 and a short one


@pytest.mark.parametrize("memory", MEMORIES.values(), ids=MEMORIES)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_gradients_through_the_memory_follow_the_equations(memory, implementation):
    model, ids = tiny_model(attn_implementation=implementation, **memory), random_ids(2, LENGTH)
    assert_same_gradients(gradients(model, ids), reference_gradients(model, ids), 1e-10)


@pytest.mark.parametrize("memory", list(MEMORIES.values())[1:], ids=list(MEMORIES)[1:])
@pytest.mark.parametrize("segments", [1, 2])
def test_truncated_memories_of_the_input_follow_the_equations(segments, memory):
    """Memories that pass a gradient share the segment's own keys and values, the others don't."""
    model, ids = tiny_model(bptt_segments=segments, **memory), random_ids(1, LENGTH)
    assert_same_gradients(gradients(model, ids), reference_gradients(model, ids, detach_after=segments), 1e-10)


@pytest.mark.parametrize(("memory_source", "products"), [("layer_output", 9), ("layer_input", 7)])
def test_products_of_a_segment_in_a_layer(memory_source, products):
    """A memory of the input has the keys and values of the segment itself, those of the output are two products more.
    No gradient is a copy of a slice of all rows."""
    counts, settings = [], {"memory_source": memory_source, "schedule": "sequential", "num_hidden_layers": 1}
    for num_segments in (3, 4):
        model, ids = tiny_model(**settings), random_ids(1, 5 * num_segments)
        with Operations() as counted:
            loss = model(ids, labels=ids).loss
        counts.append(counted.counts["mm"])
        with Operations() as counted:
            loss.backward()
        assert not counted.counts["slice_backward"]
    assert counts[1] - counts[0] == products  # the head is one product for all segments


@pytest.fixture(scope="module")
def untruncated():
    return reference_gradients(tiny_model(), random_ids(1, LENGTH))[1]


@pytest.mark.parametrize("segments", [1, 2, 3, 4])
def test_truncated_backpropagation_detaches_after_the_stated_segments(segments, untruncated):
    model, ids = tiny_model(bptt_segments=segments), random_ids(1, LENGTH)
    truncated = gradients(model, ids)
    assert_same_gradients(truncated, reference_gradients(model, ids, detach_after=segments), 1e-10)
    name = "model.layers.0.self_attn.v_proj.weight"
    assert not torch.allclose(truncated[1][name], untruncated[name], atol=1e-3)


@pytest.mark.parametrize("segments", [None, 2])
def test_the_graph_crosses_exactly_the_stated_borders(segments):
    """Only embeddings within the graph of the last segment's loss have gradients."""
    model = tiny_model(bptt_segments=segments)
    embeddings = torch.randn(1, 25, model.config.hidden_size, dtype=torch.float64, requires_grad=True)
    labels = torch.full((1, 25), -100)
    labels[:, 21:] = 7  # predicted from the fifth segment
    model(inputs_embeds=embeddings, labels=labels).loss.backward()
    has_gradient_S = embeddings.grad.abs().sum(-1)[0].view(5, 5).sum(1) > 0
    # With 2, the memory is detached after segments 2 and 4: only the fifth segment is in the graph.
    assert has_gradient_S.tolist() == ([True] * 5 if segments is None else [False, False, False, False, True])


@pytest.mark.parametrize("bptt_segments", [None, 2])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("segments", [1, 2, 3, 100])
def test_checkpointing_does_not_change_gradients(bptt_segments, padded, segments):
    model, ids = tiny_model(bptt_segments=bptt_segments), random_ids(3, LENGTH)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :9] = mask[1, 12:] = 0
    plain = gradients(model, ids, attention_mask=mask)
    model.gradient_checkpointing_enable({"use_reentrant": False, "checkpoint_segments": segments})
    assert_same_gradients(gradients(model, ids, attention_mask=mask), plain, 1e-12)


def saved_bytes(model, ids):
    """Bytes that autograd saves for the backward pass, without parameters; each storage counts once."""
    storages = {}

    def note(tensor):
        storages[tensor.untyped_storage().data_ptr()] = (tensor, tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model(ids, labels=ids).loss
    assert loss.requires_grad
    for parameter in model.parameters():  # after the forward pass, in which a wavefront moves parameters
        storages.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(size for _, size in storages.values())


def test_checkpointing_saves_only_memories():
    model = tiny_model(segment_length=8, intermediate_size=160).train()
    plain = saved_bytes(model, random_ids(1, 80)) - saved_bytes(model, random_ids(1, 40))
    model._set_gradient_checkpointing(True, torch_checkpoint())
    saved = saved_bytes(model, random_ids(1, 80)) - saved_bytes(model, random_ids(1, 40))
    assert saved / 5 <= 1.3 * memory_bytes(model.config) + 200
    assert saved < 0.1 * plain


def memory_bytes(config):
    """Returns the bytes for a segment of 8 tokens in all layers, in float64."""
    return config.num_hidden_layers * 2 * config.num_key_value_heads * 8 * config.head_dim * 8


def test_groups_of_segments_save_the_memories_before_them():
    """By formula: of 12 segments, only the memory before each group is saved; groups of four run as waves."""
    model, ids, saved = tiny_model(segment_length=8).train(), random_ids(1, 96), {}
    for segments in (1, 2, 3, 4, 6):
        model._set_gradient_checkpointing(True, torch_checkpoint(checkpoint_segments=segments))
        saved[segments] = saved_bytes(model, ids)
    for segments in (2, 3, 4, 6):
        spared = (11 - (12 // segments - 1)) * memory_bytes(model.config)
        assert saved[1] - saved[segments] == pytest.approx(spared, rel=0.1)


@pytest.mark.parametrize("segments", [0, -1, "many", 2.0])
def test_groups_without_a_segment_are_refused(segments):
    with pytest.raises(ValueError, match=f"checkpoint_segments={segments!r}: pass"):
        tiny_model().gradient_checkpointing_enable({"use_reentrant": False, "checkpoint_segments": segments})


@pytest.mark.parametrize(("schedule", "segments"), [("sequential", 1), ("sequential", 3), ("wavefront", 3)])
def test_memories_are_offloaded_to_the_host(schedule, segments, monkeypatch):
    """`save_on_cpu` moves the memories before every group of segments; gradients do not change."""
    model, ids = tiny_model(schedule=schedule), random_ids(2, 40)
    options = {"use_reentrant": False, "checkpoint_segments": segments}
    model.gradient_checkpointing_enable(options)
    expected, moved = gradients(model, ids), moved_to_host(monkeypatch)
    model.gradient_checkpointing_enable(options | {"offload_memories": True})
    assert_same_gradients(gradients(model, ids), expected, 1e-12)
    config = model.config
    memories = [shape for shape in moved if len(shape) == 4 and shape[1] != 1]  # rotary tables are [R or 1, 1, T, E]
    assert all(shape[1:] == (config.num_key_value_heads, 5, config.head_dim) for shape in memories)
    # Keys and values of two rows, before all groups but the first.
    assert sum(shape[0] for shape in memories) == 2 * 2 * ((8 - 1) // segments) * config.num_hidden_layers
    moved.clear()
    model.gradient_checkpointing_enable(options | {"offload_memories": False})
    assert_same_gradients(gradients(model, ids), expected, 1e-12)
    assert not moved


@pytest.mark.parametrize("options", [{"use_reentrant": True}, {"use_reentrant": True, "checkpoint_segments": 2}, {}])
def test_the_reentrant_form_is_replaced(options, caplog):
    """Its results are the same, and a warning says it once; without the option there is nothing to say."""
    model, ids = tiny_model(), random_ids(2, LENGTH)
    expected = gradients(model, ids)
    _say_non_reentrant.cache_clear()
    for _ in range(2):
        model.gradient_checkpointing_enable(options)
    assert_same_gradients(gradients(model, ids), expected, 1e-12)
    assert not model.model._gradient_checkpointing_func.keywords["use_reentrant"]
    said = [record for record in caplog.records if "use_reentrant=True" in record.getMessage()]
    assert len(said) == ("use_reentrant" in options)


def test_gradients_cross_calls_through_the_cache():
    model, ids = tiny_model(), random_ids(2, LENGTH)
    model(ids, use_cache=False).logits.square().sum().backward()
    expected = gradients_of(model)
    model.zero_grad()
    logits, _ = logits_in_parts(model, ids, [4, 4, 4, 4, 4, 3])
    logits.square().sum().backward()
    torch.testing.assert_close(gradients_of(model), expected, atol=1e-8, rtol=1e-8)


@pytest.mark.parametrize("schedule", ["sequential", "wavefront"])
def test_a_long_text_is_trained_in_parts(schedule):
    """One backward pass per part, in constant memory; earlier parts count as text read without gradients."""
    model, ids = tiny_model(schedule=schedule).train(), random_ids(2, 60)
    cache, cache_bytes = FoldedCache(model.config), []
    for part in ids.split(20, dim=1):
        model(part, labels=part, past_key_values=cache).loss.backward()
        cache.detach()
        cache_bytes.append(cache.num_bytes)
    assert len(set(cache_bytes)) == 1
    found = gradients_of(model)
    model.zero_grad()
    for start in (0, 20, 40):
        cache = FoldedCache(model.config)
        if start:
            with torch.no_grad():
                model(ids[:, :start], past_key_values=cache)
        part = ids[:, start : start + 20]
        model(part, labels=part, past_key_values=cache).loss.backward()
    torch.testing.assert_close(found, gradients_of(model), atol=1e-9, rtol=1e-9)


class Results(TorchDispatchMode):
    """Records the elements of the largest result, and the peak of the bytes of all results that exist at a time."""

    def __init__(self):
        super().__init__()
        self.sizes, self.now, self.peak, self.largest = {}, 0, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.largest, storage = max(self.largest, tensor.numel()), tensor.untyped_storage()
                if storage._cdata not in self.sizes:
                    self.sizes[storage._cdata] = storage.nbytes()
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self.forget, storage._cdata)
        self.peak = max(self.peak, self.now)
        return result

    def forget(self, key):
        self.now -= self.sizes.pop(key, 0)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_makes_no_tensor_of_all_logits(checkpointing, monkeypatch):
    monkeypatch.setattr(condense.loss, "MAX_LOGITS", 2 * 5 * 2000)
    model = tiny_model(vocab_size=2000, tie_word_embeddings=True).train()
    if checkpointing:
        model._set_gradient_checkpointing(True, torch_checkpoint())
    ids = random_ids(2, 30)
    parameters = model.lm_head.weight.numel()
    with Results() as results:
        model(ids, labels=ids).loss.backward()
    assert results.largest <= max(2 * 5 * 2000, parameters) < 2 * 30 * 2000


def test_no_logits_are_saved_for_the_backward_pass():
    """This holds without checkpointing too."""
    small, large = tiny_model(vocab_size=100).train(), tiny_model(vocab_size=4000).train()
    growth = [saved_bytes(model, random_ids(1, 50)) - saved_bytes(model, random_ids(1, 25)) for model in (small, large)]
    assert growth[1] - growth[0] < 100 * 25


@torch.no_grad()
def test_evaluation_saves_neither_logits_nor_hidden_states(monkeypatch):
    """The peak memory of a loss does not depend on the length of the text."""
    monkeypatch.setattr(condense.loss, "BLOCK_TOKENS", 10)
    model = tiny_model(vocab_size=2000)
    peaks = []
    for tokens in (50, 250):
        ids = random_ids(1, tokens)
        with Results() as results:
            loss = model(ids, labels=ids).loss
        peaks.append(results.peak)
        expected = torch.nn.functional.cross_entropy(model(ids, use_cache=False).logits[0, :-1], ids[0, 1:])
        torch.testing.assert_close(loss, expected, atol=1e-10, rtol=0)
    assert peaks[1] - peaks[0] < 250 * 8 * 4  # token ids and targets, but no hidden states (24 numbers per token)


def test_training_and_evaluation_loss_are_the_same():
    model, ids = tiny_model(torch.float32), random_ids(2, LENGTH)
    evaluated = model.eval()(ids, labels=ids).loss
    assert torch.equal(model.train()(ids, labels=ids).loss, evaluated)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_losses_of_segments_add_up_to_the_loss(checkpointing):
    """Three rows end in different segments; the losses of each segment's predictions come from the logits."""
    model, ids = tiny_model(), random_ids(3, 13)
    mask = torch.ones_like(ids)
    mask[1, 6:] = mask[2, 2:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, 4] = -100
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    output = model(input_ids=ids, attention_mask=mask, labels=labels)
    with torch.no_grad():
        log_p = model.eval()(input_ids=ids, attention_mask=mask).logits.log_softmax(-1)
    losses, targets = [0.0] * 3, [0] * 3
    for row, column in (labels[:, 1:] != -100).nonzero().tolist():
        losses[column // 5] -= log_p[row, column, labels[row, column + 1]].item()
        targets[column // 5] += 1
    assert output.segment_targets.tolist() == targets == [10, 5, 2]
    torch.testing.assert_close(output.segment_losses, torch.tensor(losses), check_dtype=False)
    torch.testing.assert_close(output.segment_losses.sum() / sum(targets), output.loss.detach())
    assert not output.segment_losses.requires_grad


def test_loss_in_parts_of_the_logits_is_the_same(monkeypatch):
    model, ids = tiny_model(), random_ids(2, LENGTH)
    expected = gradients(model, ids)
    monkeypatch.setattr(condense.loss, "MAX_LOGITS", 3 * VOCAB)
    assert_same_gradients(gradients(model, ids), expected, 1e-10)


@torch.no_grad()
def test_loss_follows_transformers_conventions():
    """The mean is over targets other than -100 and padding; `num_items_in_batch` replaces their number."""
    model, ids = tiny_model(segment_length=50), random_ids(2, 12)
    labels = ids.clone()
    labels[:, :4] = -100
    labels[1, 9] = -100
    stock = to_stock(model)(ids, labels=labels).loss
    torch.testing.assert_close(model(ids, labels=labels).loss, stock.double(), atol=1e-6, rtol=1e-6)
    halved = model(ids, labels=labels, num_items_in_batch=30).loss
    torch.testing.assert_close(halved * 30, stock.double() * 15, atol=1e-5, rtol=1e-5)

    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    losses = [model(row[None], labels=row[None]).loss * (len(row) - 1) for row in (ids[0, 5:], ids[1])]
    torch.testing.assert_close(model(ids, labels=ids, attention_mask=mask).loss, sum(losses) / (6 + 11))
    assert model(ids, labels=torch.full_like(ids, -100)).loss == 0


@torch.no_grad()
def test_logits_come_with_labels_on_request():
    model, ids = tiny_model(), random_ids(2, LENGTH)
    all_logits = model(ids).logits
    assert model(ids, labels=ids).logits is None
    torch.testing.assert_close(model(ids, labels=ids, logits_to_keep=0).logits, all_logits)
    torch.testing.assert_close(model(ids, labels=ids, logits_to_keep=7).logits, all_logits[:, -7:])
    torch.testing.assert_close(model(ids, logits_to_keep=1).logits, all_logits[:, -1:])


def test_checkpointing_is_enabled_and_disabled():
    """The rest of transformers' test of it, which looks for layers that are checkpointed; here segments are."""
    model, ids = tiny_model().train(), random_ids(2, LENGTH)
    assert not model.is_gradient_checkpointing
    model.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing and model.model.gradient_checkpointing
    few = saved_bytes(model, ids)
    model.gradient_checkpointing_disable()
    assert not model.is_gradient_checkpointing and not model.model.gradient_checkpointing
    assert few < saved_bytes(model, ids) / 2
    with pytest.raises(ValueError, match="every_n_layers=2.*checkpoint_segments=k"):
        model._set_gradient_checkpointing(True, torch_checkpoint(), every_n_layers=2)


@pytest.mark.parametrize(("schedule", "segments"), [("sequential", 1), ("sequential", 2), ("wavefront", 2)])
def test_checkpoints_do_not_keep_the_state(schedule, segments, monkeypatch):
    """Each group stores the memories that it reads; the state, which holds the last ones, is freed after the call."""
    states = []

    class Noted(TransientState):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            states.append(weakref.ref(self))

    monkeypatch.setattr(modeling, "TransientState", Noted)
    model, ids = tiny_model(schedule=schedule).train(), random_ids(2, 23)
    model._set_gradient_checkpointing(True, torch_checkpoint(checkpoint_segments=segments))
    loss = model(ids, labels=ids).loss
    gc.collect()
    assert [state() for state in states] == [None]
    loss.backward()
