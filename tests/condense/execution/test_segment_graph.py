"""Segments from a graph give the logits, state and gradients of the equations. A CUDA graph is replaced by a recording
that replays on the CPU."""

import copy
import gc

import pytest
import torch
from peft import LoraConfig, get_peft_model

from condense import FoldedCache
from condense.execution import cuda_graph, segment_steps

from ..models import (
    assert_same_gradients,
    gradients,
    moved_to_host,
    padded_batch,
    random_durations,
    random_ids,
    reference_gradients,
    tiny_model,
)
from .recording import recordings

LENGTH = 33  # six whole segments of 5 and a short one


@pytest.fixture
def counts(monkeypatch):
    counts = {"warm_up": 0, "capture": 0, "replay": 0}
    monkeypatch.setitem(cuda_graph.GRAPHS, "cpu", recordings(counts))
    return counts


def graphed(**fields):
    return tiny_model(schedule="graph", **fields)


def checkpointed(model, **options):
    model.gradient_checkpointing_enable({"use_reentrant": False, **options})
    return model.train()


FIELDS = {
    "plain": {},
    "eager": {"attn_implementation": "eager"},
    "layer_input": {"memory_source": "layer_input"},
    "biases and tied embeddings": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "norms of queries and keys": {"family": "qwen3"},
}


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
@torch.no_grad()
def test_logits_are_those_of_the_sequential_order(fields, counts):
    model, ids = graphed(**fields), random_ids(2, LENGTH)
    for _ in range(2):  # the second call replays what the first one has captured
        logits = model(ids, use_cache=False).logits
        sequential = tiny_model(schedule="sequential", **fields)
        torch.testing.assert_close(logits, sequential(ids, use_cache=False).logits, atol=1e-12, rtol=0)
    assert counts == {"warm_up": 1, "capture": 1, "replay": 5 + 5}  # the first segment has no memory


@pytest.mark.parametrize("lengths", [[33, 33], [33, 12, 5]], ids=str)
@torch.no_grad()
def test_the_state_of_a_cache_over_several_calls(lengths, counts):
    """Calls that begin within segments, rows that end early, and new tokens afterwards."""
    _, ids, mask = padded_batch(lengths, "left")
    found = {}
    for schedule in ("sequential", "graph"):
        model = tiny_model(schedule=schedule)
        cache, seen, found[schedule] = FoldedCache(model.config), mask[:, :0], []
        more = (random_ids(len(lengths), num_tokens, seed=num_tokens) for num_tokens in (22, 3, 10))
        for part, part_mask in [(ids, mask), *((part, torch.ones_like(part)) for part in more)]:
            seen = torch.cat([seen, part_mask], 1)
            found[schedule].append(model(part, attention_mask=seen, past_key_values=cache).logits)
    torch.testing.assert_close(found["graph"], found["sequential"], atol=1e-12, rtol=0)
    assert counts["replay"] > 0


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
def test_gradients_follow_the_equations(fields, counts):
    model, ids = checkpointed(graphed(**fields)), random_ids(2, LENGTH)
    assert_same_gradients(gradients(model, ids), reference_gradients(model, ids), 1e-5)
    assert counts == {"warm_up": 2, "capture": 2, "replay": 5 + 5}  # forward and backward
    again = gradients(model, ids)
    assert_same_gradients(again, reference_gradients(model, ids), 1e-5)


@pytest.mark.parametrize("segments", [1, 2, 3])
def test_truncated_backpropagation(segments, counts):
    model, ids = checkpointed(graphed(bptt_segments=segments)), random_ids(1, LENGTH)
    assert_same_gradients(gradients(model, ids), reference_gradients(model, ids, detach_after=segments), 1e-5)


def test_gradients_of_embeddings_and_of_a_partly_frozen_model(counts):
    embeddings = torch.randn(2, LENGTH, 24, dtype=torch.float64)
    labels, found = random_ids(2, LENGTH), []
    for schedule in ("sequential", "graph"):
        model, given = checkpointed(tiny_model(schedule=schedule)), embeddings.clone().requires_grad_()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("v_proj" in name)
        model(inputs_embeds=given, labels=labels).loss.backward()
        found.append([given.grad, *(layer.self_attn.v_proj.weight.grad for layer in model.model.layers)])
        assert model.model.layers[0].mlp.up_proj.weight.grad is None
    for expected, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-10, rtol=1e-8)


def test_losses_of_two_texts_in_one_backward_pass(counts):
    """The sums of weights' gradients of two runs in one graph do not mix."""
    model = checkpointed(graphed())
    first, second = random_ids(1, LENGTH), random_ids(1, LENGTH, seed=1)
    expected = []
    for ids in (first, second):
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        expected.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    model.zero_grad()
    (model(first, labels=first).loss + model(second, labels=second).loss).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[0][name] + expected[1][name], atol=1e-12, rtol=1e-9)


def test_an_optimizer_step_between_two_replays(counts):
    """A graph reads the weights as they are; weights that moved are captured again."""
    model, ids = graphed(), random_ids(1, LENGTH)
    with torch.no_grad():
        for change in (torch.Tensor.mul_, lambda weight, factor: setattr(weight, "data", weight * factor)):
            model(ids, use_cache=False)
            for layer in model.model.layers:
                change(layer.mlp.up_proj.weight, 1.1)
            sequential = copy.deepcopy(model)
            sequential.config.schedule = "sequential"
            expected = sequential(ids, use_cache=False).logits
            torch.testing.assert_close(model(ids, use_cache=False).logits, expected, atol=1e-12, rtol=0)
    assert counts["capture"] == 2


def test_memories_wait_in_host_memory(counts, monkeypatch):
    model, ids = checkpointed(graphed(), offload_memories=True), random_ids(1, LENGTH)
    moved = moved_to_host(monkeypatch)
    assert_same_gradients(gradients(model, ids), reference_gradients(model, ids), 1e-5)
    memory = (1, model.config.num_key_value_heads, 5, model.config.head_dim)
    # Keys and values of three layers; the last of the six segments with a memory is the short one.
    assert moved.count(memory) == 2 * 3 * 6
    first = len(moved)
    gradients(model, ids)
    assert len(moved) == 2 * first  # nothing was moved by the computations that were captured in the first call


def test_without_a_recording_the_cpu_is_refused():
    with pytest.raises(ValueError, match="replays CUDA graphs, and the model is on cpu"):
        graphed()(random_ids(1, LENGTH))
    graphed()(random_ids(1, 5))  # nothing to replay


@pytest.mark.parametrize("lengths", [[9, 6], [5, 3], [4, 4]], ids=str)
def test_rows_that_are_aligned_by_their_first_chunk_are_refused_in_time(lengths):
    """A cache stays as it was."""
    model = graphed()
    _, ids, mask = padded_batch(lengths, "left")
    cache = FoldedCache(model.config)
    with torch.no_grad():
        model.config.schedule = "sequential"
        model(ids, attention_mask=mask, past_key_values=cache)
        model.config.schedule = "graph"
        before = [tensor.clone() for layer in cache.layers for tensor in layer.buffers]
        more = random_ids(2, 12)
        with pytest.raises(ValueError, match="replays CUDA graphs"):
            model(more, attention_mask=torch.cat([mask, torch.ones_like(more)], 1), past_key_values=cache)
        for tensor, was in zip((one for layer in cache.layers for one in layer.buffers), before, strict=True):
            assert torch.equal(tensor, was)


def test_a_backward_pass_for_some_tensors_leaves_nothing_behind(counts):
    model, ids = checkpointed(graphed()), random_ids(1, LENGTH)
    embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()
    loss = model(inputs_embeds=embeddings, labels=ids).loss
    torch.autograd.grad(loss, embeddings, retain_graph=True)
    loss.backward()
    found = {name: parameter.grad.clone() for name, parameter in model.model.layers.named_parameters()}
    model.zero_grad()
    model(inputs_embeds=embeddings, labels=ids).loss.backward()
    for name, parameter in model.model.layers.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, atol=1e-12, rtol=1e-9)


def test_memories_without_gradients_of_a_partly_frozen_model(counts):
    found = []
    for schedule in ("sequential", "graph"):
        model = checkpointed(tiny_model(schedule=schedule, bptt_segments=1))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("mlp" in name)
        ids = random_ids(1, LENGTH)
        model(ids, labels=ids).loss.backward()
        found.append([layer.mlp.up_proj.weight.grad for layer in model.model.layers])
    for expected, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-10, rtol=1e-8)


def test_graphs_are_bounded(counts):
    model = graphed()
    with torch.no_grad():
        for batch_size in range(1, segment_steps.MAX_STEPS + 3):
            model(random_ids(batch_size, 15), use_cache=False)
    assert len(model.model.layers.__dict__["_static_steps"]._steps) == segment_steps.MAX_STEPS


def test_changed_rotary_tables_are_read_anew(counts):
    model, ids = graphed(), random_ids(1, LENGTH)
    with torch.no_grad():
        before = model(ids, use_cache=False).logits
        model.model.rotary_emb.inv_freq *= 0.5
        sequential = copy.deepcopy(model)
        sequential.config.schedule = "sequential"
        found = model(ids, use_cache=False).logits
        torch.testing.assert_close(found, sequential(ids, use_cache=False).logits, atol=1e-12, rtol=0)
    assert not torch.allclose(found, before)


REFUSED = {
    "gradients": (lambda model: model(random_ids(1, LENGTH)), "gradient_checkpointing_enable"),
    "durations": (lambda model: model(random_ids(1, LENGTH), durations=random_durations(1, LENGTH)), "durations"),
    "flex": (lambda model: model.set_attn_implementation("flex_attention"), "attn_implementation='flex_attention'"),
    "dropout": (lambda model: setattr(checkpointed(model).config, "attention_dropout", 0.1), "attention_dropout=0.1"),
    "groups": (lambda model: checkpointed(model, checkpoint_segments=2), "checkpoint_segments=2: schedule='graph'"),
    "autocast": (lambda model: None, "autocast"),
    "hooks": (lambda model: model.model.layers[1].mlp.register_forward_hook(print), "layers.1.mlp has hooks"),
    "backward hooks": (
        lambda model: model.model.layers[2].register_full_backward_hook(lambda *given: None),
        "layers.2 has hooks",
    ),
    "forward of an instance": (
        lambda model: setattr(model.model.layers[0].mlp, "forward", model.model.layers[0].mlp.forward),
        "layers.0.mlp has hooks or a forward of its own",
    ),
    "adapters": (
        lambda model: get_peft_model(model, LoraConfig(target_modules=["v_proj"])),
        "v_proj is a Linear, whose changes",
    ),
    "hidden states": (lambda model: model(random_ids(1, 5), output_hidden_states=True), "schedule='graph'"),
}


@pytest.mark.parametrize(("prepare", "message"), REFUSED.values(), ids=REFUSED)
def test_what_a_graph_cannot_compute_is_refused(prepare, message, counts):
    with_gradients = [REFUSED[name][0] for name in ("gradients", "dropout", "groups")]
    model, needs_gradients = graphed(dtype=torch.float32), prepare in with_gradients
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=message == "autocast")

    def call():
        prepare(model)
        model(random_ids(1, LENGTH), use_cache=False)

    with torch.set_grad_enabled(needs_gradients), autocast, pytest.raises(ValueError, match=message):
        call()
    assert not counts["capture"]


def test_nothing_outlives_the_backward_pass(counts):
    model, ids = checkpointed(graphed()), random_ids(1, LENGTH)
    embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()
    alive = []
    for _ in range(4):
        model(inputs_embeds=embeddings, labels=ids).loss.backward()
        gc.collect()
        alive.append(sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects()))
    # The first one captures the graphs. Tensors of other tests may still disappear meanwhile.
    assert max(alive[2:]) <= alive[1]


def test_copies_of_a_model_capture_their_own(counts):
    model, ids = graphed(), random_ids(1, LENGTH)
    with torch.no_grad():
        model(ids, use_cache=False)
        twin = copy.deepcopy(model)
        twin(ids, use_cache=False)
    steps = [one.model.layers.__dict__["_static_steps"] for one in (model, twin)]
    assert isinstance(steps[0], segment_steps.Steps) and steps[0] is not steps[1]
