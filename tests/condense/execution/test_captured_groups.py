"""How captured groups live: when a shape is captured and when not, what they refuse, and what they keep alive."""

import copy
import gc
import threading
import weakref

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.checkpoint import checkpoint

from condense import FoldedCache
from condense.execution import captured_groups, cuda_graph, group_buffers, selection

from ...refusals import assert_refused
from ..models import (
    assert_same_gradients,
    gradients,
    gradients_of,
    moved_to_host,
    padded_batch,
    random_durations,
    random_ids,
    reference_gradients,
    tiny_model,
)
from .graphed import GROUPS, LENGTH, assert_follows_equations, checkpointed, graphed, trained, uses


def test_memories_wait_in_host_memory(counts, monkeypatch):
    model, ids = checkpointed(graphed(), offload_memories=True), random_ids(1, LENGTH)
    memory = (1, model.config.num_key_value_heads, 5, model.config.head_dim)
    for _ in range(3):  # nothing is moved by the computations that are captured in the second call
        moved = moved_to_host(monkeypatch)
        assert_follows_equations(model, ids)
        # Keys and values of three layers, before two groups and before the short segment.
        assert moved.count(memory) == 2 * 3 * 3


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("memory", [{}, {"memory_share": [1.0, 0.0, 0.3]}, {"bptt_segments": 2}], ids=str)
def test_groups_take_a_sink(memory, group, counts):
    model = trained(group, sink_token_id=7, **memory)
    assert_follows_equations(model, detach_after=memory.get("bptt_segments"))
    assert counts["replay"] > 0
    model.eval()
    ids, outputs = random_ids(2, LENGTH), []
    for schedule in ("graph", "graph", "graph", "sequential"):
        model.config.schedule = schedule
        with torch.no_grad():
            outputs.append(model(ids).logits)
    torch.testing.assert_close(outputs[2], outputs[3], atol=1e-10, rtol=0)


def test_stored_groups_do_not_ignore_hooks_on_what_is_saved(counts, monkeypatch):
    """torch.autograd.graph.save_on_cpu around a step moves all activations to the host: such a call has no graph."""
    model, ids = uses(trained(None), random_ids(1, LENGTH)), random_ids(1, LENGTH, seed=1)
    replays, saved = counts["replay"], []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (saved.append(tensor), tensor)[1], lambda one: one):
        gradients(model, ids)
    assert counts["replay"] == replays and len(saved) > 100


def test_without_a_recording_the_cpu_is_refused():
    assert_refused("replays CUDA graphs, and the model is on cpu", graphed(), random_ids(1, LENGTH))
    graphed()(random_ids(1, 4))  # no whole segment


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
        before, more = copy.deepcopy(cache), random_ids(2, 12)
        with pytest.raises(ValueError, match="replays CUDA graphs"):
            model(more, attention_mask=torch.cat([mask, torch.ones_like(more)], 1), past_key_values=cache)
        found, expected = ([layer.buffers for layer in one.layers] for one in (cache, before))
        torch.testing.assert_close(found, expected, atol=0, rtol=0)


def test_graphs_are_bounded(counts, monkeypatch):
    """Shapes that do not recur do not take the place of those that do."""
    monkeypatch.setattr(captured_groups, "PATIENCE", 20)
    model = graphed()
    with torch.no_grad():
        for batch_size in range(1, captured_groups.MAX_GROUPS + 3):
            for _ in range(2):
                model(random_ids(batch_size, 15), use_cache=False)
        assert counts["capture"] == captured_groups.MAX_GROUPS
        for _ in range(25):
            model(random_ids(batch_size, 15), use_cache=False)
    assert counts["capture"] == captured_groups.MAX_GROUPS + 1
    assert len(model.model.layers.__dict__["_captured_groups"]._groups) == captured_groups.MAX_GROUPS


@pytest.mark.parametrize("group", GROUPS)
def test_a_shape_without_enough_memory_is_not_tried_again(group, counts, monkeypatch, caplog):
    def fail(compute, device, pool=None):
        counts["capture"] += 1
        compute()
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setitem(cuda_graph.GRAPHS, "cpu", cuda_graph.GRAPHS["cpu"]._replace(capture=fail))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert_follows_equations(trained(group), *(random_ids(1, LENGTH, seed=seed) for seed in range(4)))
    assert len(caplog.records) == counts["capture"] == len(set(caplog.messages)) + (group in (1, 2))
    assert "not enough memory to capture" in caplog.text


@pytest.mark.parametrize("group", [None, 8])
def test_a_capture_without_enough_memory_leaves_no_gradients(group, counts, monkeypatch):
    """They are memory that is short, and must not be added to the sums of the next capture."""
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    buffers, add_products = [], group_buffers.GroupBuffers.add_products

    def fail(self, *arguments):
        buffers.append(weakref.ref(self))
        add_products(self, *arguments)
        raise torch.OutOfMemoryError("CUDA out of memory")

    model, ids = trained(group), random_ids(1, LENGTH)
    gradients(model, ids)
    with monkeypatch.context() as patch:
        patch.setattr(group_buffers.GroupBuffers, "add_products", fail)
        gradients(model, ids)
    groups = model.model.layers._captured_groups
    gc.collect()
    assert not groups._groups and [each() for each in buffers] == [None]
    assert_follows_equations(model, *(random_ids(2, LENGTH, seed=seed) for seed in range(3)))
    assert groups._groups


def test_a_stored_text_that_waits_is_not_written_over(counts):
    model = uses(trained(None), random_ids(1, LENGTH))
    waiting, ids = random_ids(1, LENGTH, seed=1), random_ids(1, LENGTH, seed=2)
    expected = reference_gradients(model, waiting)
    model.zero_grad()
    loss = model(waiting, labels=waiting).loss
    replays = counts["replay"]
    model(ids, labels=ids)
    with torch.no_grad():
        model(ids, labels=ids)
    assert counts["replay"] == replays  # nor a capture: the first use without gradients
    loss.backward()
    assert_same_gradients((loss, gradients_of(model)), expected, 1e-10)
    gradients(model, ids)  # `loss` still exists, and its backward pass is over
    assert counts["replay"] == replays + 3


def test_a_text_that_is_given_up_waits_for_nothing(counts):
    model, ids = uses(trained(None), random_ids(1, LENGTH)), random_ids(1, LENGTH, seed=1)
    loss = model(ids, labels=ids).loss
    del loss
    replays = counts["replay"]
    assert_follows_equations(model, ids)
    assert counts["replay"] == replays + 2


def test_a_kept_graph_is_refused(counts):
    """A backward pass writes its gradients over the activations, as another call does."""
    model, ids = uses(trained(None), random_ids(1, LENGTH)), random_ids(1, LENGTH, seed=1)
    loss = model(ids, labels=ids).loss
    torch.autograd.grad(loss, model.model.layers[0].mlp.up_proj.weight, retain_graph=True)
    assert_refused("a second backward pass through a call.*'wavefront'", loss.backward)
    loss = model(ids, labels=ids).loss
    gradients(model, ids)  # without a graph: the first text waits
    assert_follows_equations(model, ids)
    del loss


@pytest.mark.parametrize("group", [1, 2, 8])
def test_a_kept_graph_of_checkpoints(group, counts):
    model, ids = uses(trained(group), random_ids(1, LENGTH)), random_ids(1, LENGTH, seed=1)
    loss = model(ids, labels=ids).loss
    weight = model.model.layers[0].mlp.up_proj.weight
    first, second = (torch.autograd.grad(loss, weight, retain_graph=True)[0] for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_rows_that_detach_at_different_segments_run_without_graphs(counts):
    """A capture would keep which rows do."""
    model, other = (tiny_model(schedule=schedule, bptt_segments=2).train() for schedule in ("graph", "sequential"))
    for lengths in ([5, 10], [5, 10], [10, 5]):
        _, ids, mask = padded_batch(lengths, "left")
        more, found = random_ids(2, 15), []
        for each in (model, other):
            cache = FoldedCache(each.config)
            with torch.no_grad():
                each(ids, attention_mask=mask, past_key_values=cache)
            each.zero_grad()
            whole = torch.cat([mask, torch.ones_like(more)], 1)
            each(more, attention_mask=whole, past_key_values=cache, labels=more).loss.backward()
            found.append(gradients_of(each))
        torch.testing.assert_close(*found, atol=1e-10, rtol=0)


def test_weights_that_lie_unevenly_are_refused(counts, monkeypatch):
    """Those of a flat buffer in another order, as ZeRO's `round_robin_gradients` lays them out: a wave takes them."""
    monkeypatch.setattr(selection, "CAPTURING_DEVICES", ("cpu",))
    model, ids = tiny_model().train(), random_ids(1, LENGTH)
    weights = [weight for number in (0, 2, 1) for weight in model.model.layers[number].parameters()]
    flat = torch.empty(sum(map(torch.Tensor.numel, weights)), dtype=torch.float64)
    for weight, part in zip(weights, flat.split([weight.numel() for weight in weights]), strict=True):
        weight.data = part.view(weight.shape).copy_(weight.data)
    assert_follows_equations(model, ids, ids, ids)
    assert not counts["capture"]
    model.config.schedule = "graph"
    assert_refused("at unequal distances", model, ids)


def test_another_thread_runs_without_graphs(counts):
    model, ids, found = uses(trained(None), random_ids(1, LENGTH)), random_ids(1, LENGTH), []
    expected, replays = reference_gradients(model, ids), counts["replay"]
    thread = threading.Thread(target=lambda: found.append(gradients(model, ids)))
    thread.start()
    thread.join()
    assert counts["replay"] == replays
    assert_same_gradients(found[0], expected, 1e-10)


def test_anomaly_detection_runs_without_graphs(counts, monkeypatch):
    monkeypatch.setattr(selection, "CAPTURING_DEVICES", ("cpu",))
    model, ids = tiny_model().train(), random_ids(1, LENGTH)
    with torch.autograd.detect_anomaly(check_nan=True):
        uses(model, ids, 3)
    assert not counts["capture"]


@pytest.mark.parametrize("group", [None, 2])
def test_weights_that_change_before_the_gradient_of_an_input(group, counts):
    model, ids = uses(trained(group), random_ids(1, 30)), random_ids(1, 30)
    embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()
    loss = model(inputs_embeds=embeddings, labels=ids).loss
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(2)
    assert_refused("weights have changed since the forward pass", torch.autograd.grad, loss, embeddings)


@pytest.mark.parametrize("group", [None, 2])
def test_a_checkpoint_of_the_caller_around_the_model(group, counts):
    """It counts what is saved, and the pass that computes the model again has no captures."""
    model, ids = uses(trained(group), random_ids(1, LENGTH)), random_ids(1, LENGTH)
    expected = reference_gradients(model, ids)
    for _ in range(3):
        model.zero_grad()
        embeddings = model.get_input_embeddings()(ids)
        loss = checkpoint(lambda each: model(inputs_embeds=each, labels=ids).loss, embeddings, use_reentrant=False)
        loss.backward()
    assert_same_gradients((loss, gradients_of(model)), expected, 1e-10)


@pytest.mark.usefixtures("collected_by_hand")
def test_a_deleted_model_frees_its_weights_and_graphs_at_once(counts):
    model = uses(trained(None), random_ids(1, LENGTH))
    alive = [weakref.ref(model.model.layers[0].mlp.up_proj.weight)]
    alive.append(weakref.ref(model.model.layers.__dict__["_captured_groups"]))
    del model
    assert [each() for each in alive] == [None, None]


def test_embeddings_in_another_dtype_run_without_graphs(counts, monkeypatch):
    monkeypatch.setattr(selection, "CAPTURING_DEVICES", ("cpu",))
    model, ids = tiny_model(torch.float32).train(), random_ids(1, 30)
    model.get_input_embeddings().to(torch.bfloat16)
    losses = [gradients(model, ids)[0] for _ in range(3)]
    assert losses[0] == losses[1] == losses[2] and not counts["capture"]
    model.config.schedule = "graph"
    assert_refused(r"embeddings are in torch.bfloat16 and the layers in torch.float32", model, ids)


@pytest.mark.parametrize("group", GROUPS)
def test_second_derivatives_are_refused(group, counts):
    model, ids = uses(trained(group), random_ids(1, LENGTH)), random_ids(1, LENGTH, seed=1)
    logits = model(ids, use_cache=False).logits
    with pytest.raises(ValueError, match="create_graph=True: a captured CUDA graph"):
        torch.autograd.grad(logits.square().mean(), model.model.layers[0].mlp.up_proj.weight, create_graph=True)
    del logits  # else this text waits for its backward pass, and another one has no graph
    embeds = model.model.embed_tokens(ids).detach().requires_grad_()
    logits = model(inputs_embeds=embeds, use_cache=False).logits
    with pytest.raises(ValueError, match="is_grads_batched=True: a captured CUDA graph"):
        torch.autograd.grad(logits, embeds, torch.ones(2, *logits.shape, dtype=logits.dtype), is_grads_batched=True)


def forward_of_its_own(model):
    mlp = model.model.layers[0].mlp
    mlp.forward = mlp.forward


ADAPTERS = LoraConfig(target_modules=["v_proj"])
REFUSED = {
    "durations": (lambda model: model(random_ids(1, LENGTH), durations=random_durations(1, LENGTH)), "durations"),
    "flex": (lambda model: model.set_attn_implementation("flex_attention"), "attn_implementation='flex_attention'"),
    "dropout": (lambda model: setattr(checkpointed(model).config, "attention_dropout", 0.1), "attention_dropout=0.1"),
    "autocast": (lambda model: None, "autocast"),
    "hooks": (lambda model: model.model.layers[1].mlp.register_forward_hook(print), "layer 1 at 'mlp' has hooks"),
    "backward": (lambda model: model.model.layers[2].register_full_backward_hook(print), "2 at 'its top' has hooks"),
    "forward of an instance": (forward_of_its_own, "layer 0 at 'mlp' has hooks or a forward of its own"),
    "adapters": (lambda model: get_peft_model(model, ADAPTERS), "v_proj' is a Linear, which"),
    "hidden states": (lambda model: model(random_ids(1, 5), output_hidden_states=True), "schedule='graph'"),
}


@pytest.mark.parametrize(("prepare", "message"), REFUSED.values(), ids=REFUSED)
def test_what_a_graph_cannot_compute_is_refused(prepare, message, counts):
    model, needs_gradients = graphed(dtype=torch.float32), message.startswith("attention_dropout")
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=message == "autocast")
    with torch.set_grad_enabled(needs_gradients), autocast, pytest.raises(ValueError, match=message):  # noqa: PT012
        prepare(model)
        model(random_ids(1, LENGTH), use_cache=False)
    assert not counts["capture"]


@pytest.mark.parametrize("group", GROUPS)
def test_nothing_outlives_the_backward_pass(group, counts):
    model, ids = uses(trained(group), random_ids(1, LENGTH)), random_ids(1, LENGTH)
    embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()
    alive = []
    for _ in range(3):
        model(inputs_embeds=embeddings, labels=ids).loss.backward()
        gc.collect()
        alive.append(sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects()))
    # Tensors of other tests may still disappear meanwhile.
    assert alive[2] <= alive[1]


def test_copies_of_a_model_capture_their_own(counts):
    model, ids = graphed(), random_ids(1, LENGTH)
    with torch.no_grad():
        model(ids, use_cache=False)
        twin = copy.deepcopy(model)
        twin(ids, use_cache=False)
    groups = [one.model.layers.__dict__["_captured_groups"] for one in (model, twin)]
    assert isinstance(groups[0], captured_groups.CapturedGroups) and groups[0] is not groups[1]
