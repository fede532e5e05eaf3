"""Groups of segments from a graph give the logits, state and gradients of the equations. A CUDA graph is replaced by a
recording that replays on the CPU."""

import copy
import gc
import threading
import weakref

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.checkpoint import checkpoint

from condense import FoldedCache
from condense.execution import captured_groups, cuda_graph, selection, stacked_parameters

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


def graphed(dtype=torch.float64, schedule="graph", **fields):
    return tiny_model(dtype, schedule=schedule, **fields)


def uses(model, ids, times=2):
    """Calls for gradients: from the second on a graph is replayed."""
    for _ in range(times):
        gradients(model, ids)
    return model


def checkpointed(model, **options):
    options = {"checkpoint_segments": 2, **options}
    model.gradient_checkpointing_enable({"use_reentrant": False, **options})
    return model.train()


FIELDS = {
    "plain": {},
    "eager": {"attn_implementation": "eager"},
    "layer_input": {"memory_source": "layer_input"},
    "shares": {"memory_share": [1.0, 0.0, 0.3]},
    "biases and tied embeddings": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "norms of queries and keys": {"family": "qwen3"},
}


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
@torch.no_grad()
def test_logits_are_those_of_the_sequential_order(fields, counts):
    model = graphed(**fields)
    for seed in range(3):  # captured at the second use, and replayed at the third
        ids = random_ids(2, LENGTH, seed=seed)
        logits = model(ids, use_cache=False).logits
        sequential = tiny_model(schedule="sequential", **fields)
        torch.testing.assert_close(logits, sequential(ids, use_cache=False).logits, atol=1e-12, rtol=0)
    assert counts == {"warm_up": 1, "capture": 1, "replay": 2}


@pytest.mark.parametrize("lengths", [[33, 33], [33, 12, 5]], ids=str)
@torch.no_grad()
def test_the_state_of_a_cache_over_several_calls(lengths, counts):
    """Calls that begin within segments, rows that end early, and new tokens afterwards."""
    _, ids, mask = padded_batch(lengths, "left")
    found = {}
    for schedule in ("sequential", "graph"):
        model = tiny_model(schedule=schedule)
        cache, seen, found[schedule] = FoldedCache(model.config), mask[:, :0], []
        more = [random_ids(len(lengths), num_tokens, seed=num_tokens) for num_tokens in (22, 3, 10)]
        for _ in range(2):
            for part, part_mask in [(ids, mask), *((part, torch.ones_like(part)) for part in more)]:
                seen = torch.cat([seen, part_mask], 1)
                found[schedule].append(model(part, attention_mask=seen, past_key_values=cache).logits)
    torch.testing.assert_close(found["graph"], found["sequential"], atol=1e-12, rtol=0)
    assert counts["replay"] > 0


def trained(group, **fields):
    """A model whose segments are stored, or with checkpoints of so many segments."""
    model = graphed(**fields)
    return model.train() if group is None else checkpointed(model, checkpoint_segments=group)


GROUPS = [None, 1, 2, 8]  # 2 leaves a group of its own kind at the beginning and at the end of a text


@pytest.mark.parametrize(
    ("fields", "group"), [({}, group) for group in GROUPS] + [(FIELDS[name], 2) for name in list(FIELDS)[1:]], ids=str
)
def test_gradients_follow_the_equations(fields, group, counts):
    """At each use of another text: as without a graph, when it is captured, and from a replay."""
    model = trained(group, **fields)
    for seed in range(3):
        ids = random_ids(2, LENGTH, seed=seed)
        assert_same_gradients(gradients(model, ids), reference_gradients(model, ids), 1e-5)
    assert counts["replay"] > counts["capture"] > 0


@pytest.mark.parametrize("group", [None, 2])
def test_gradients_of_weights_that_are_one_product(group, counts, monkeypatch):
    """Side by side, as on CUDA."""
    monkeypatch.setattr(stacked_parameters, "JOINING_DEVICES", ("cpu",))
    model = trained(group)
    for seed in range(3):
        ids = random_ids(2, LENGTH, seed=seed)
        assert_same_gradients(gradients(model, ids), reference_gradients(model, ids), 1e-5)
    assert counts["replay"] > counts["capture"] > 0


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("in_waves", [False, True])
def test_gradients_in_bfloat16_are_rounded_once(in_waves, group, counts, monkeypatch):
    """Their sums are in float32, as in waves without a graph."""
    monkeypatch.setattr(captured_groups, "WAVE_TOKENS", 2048 if in_waves else 0)
    model, wave = trained(group, dtype=torch.bfloat16), tiny_model(torch.bfloat16, schedule="wavefront").train()
    for seed in range(3):
        found, expected = (gradients(each, random_ids(1, LENGTH, seed=seed))[1] for each in (model, wave))
        for name in expected:
            error = (found[name] - expected[name]).float().norm() / expected[name].float().norm()
            assert error < (0.05 if in_waves else 0.1), name
    assert counts["replay"]


@pytest.mark.parametrize("segments", [1, 2, 3])
@pytest.mark.parametrize("group", GROUPS)
def test_truncated_backpropagation(segments, group, counts):
    model, ids = trained(group, bptt_segments=segments), random_ids(1, LENGTH)
    uses(model, ids)
    assert_same_gradients(gradients(model, ids), reference_gradients(model, ids, detach_after=segments), 1e-5)


def test_gradients_of_embeddings_and_of_a_partly_frozen_model(counts):
    embeddings = torch.randn(2, LENGTH, 24, dtype=torch.float64)
    labels, found = random_ids(2, LENGTH), []
    for schedule in ("sequential", "graph"):
        model = checkpointed(tiny_model(schedule=schedule))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("v_proj" in name)
        for _ in range(2):
            model.zero_grad()
            given = embeddings.clone().requires_grad_()
            model(inputs_embeds=given, labels=labels).loss.backward()
        found.append([given.grad, *(layer.self_attn.v_proj.weight.grad for layer in model.model.layers)])
        assert model.model.layers[0].mlp.up_proj.weight.grad is None
    for expected, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("group", GROUPS)
def test_losses_of_two_texts_in_one_backward_pass(group, counts):
    """Their sums are added. Without checkpoints the second text runs without a graph: its activations would be written
    over those of the first."""
    model = uses(trained(group), random_ids(1, LENGTH, seed=2))
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
            for _ in range(2):
                model(ids, use_cache=False)
            for layer in model.model.layers:
                change(layer.mlp.up_proj.weight, 1.1)
            sequential = copy.deepcopy(model)
            sequential.config.schedule = "sequential"
            expected = sequential(ids, use_cache=False).logits
            for _ in range(2):
                torch.testing.assert_close(model(ids, use_cache=False).logits, expected, atol=1e-12, rtol=0)
    assert counts["capture"] == 2


@pytest.mark.parametrize("group", GROUPS)
def test_an_optimizer_step_between_two_backward_passes(group, counts):
    model, twin = trained(group), tiny_model(schedule="sequential").train()
    for each in (model, twin):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for seed in range(4):
            gradients(each, random_ids(1, LENGTH, seed=seed))
            optimizer.step()
    for (name, weight), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(weight, other, atol=1e-5, rtol=1e-5, msg=name)
    assert counts["replay"]


def test_memories_wait_in_host_memory(counts, monkeypatch):
    model, ids = checkpointed(graphed(), offload_memories=True), random_ids(1, LENGTH)
    memory = (1, model.config.num_key_value_heads, 5, model.config.head_dim)
    for _ in range(3):  # nothing is moved by the computations that are captured in the second call
        moved = moved_to_host(monkeypatch)
        assert_same_gradients(gradients(model, ids), reference_gradients(model, ids), 1e-5)
        # Keys and values of three layers, before two groups and before the short segment.
        assert moved.count(memory) == 2 * 3 * 3


def test_stored_groups_do_not_ignore_hooks_on_what_is_saved(counts, monkeypatch):
    """torch.autograd.graph.save_on_cpu around a step moves all activations to the host: such a call has no graph."""
    model, ids = uses(trained(None), random_ids(1, LENGTH)), random_ids(1, LENGTH, seed=1)
    replays, saved = counts["replay"], []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (saved.append(tensor), tensor)[1], lambda one: one):
        gradients(model, ids)
    assert counts["replay"] == replays and len(saved) > 100


def test_without_a_recording_the_cpu_is_refused():
    with pytest.raises(ValueError, match="replays CUDA graphs, and the model is on cpu"):
        graphed()(random_ids(1, LENGTH))
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
        before = [tensor.clone() for layer in cache.layers for tensor in layer.buffers]
        more = random_ids(2, 12)
        with pytest.raises(ValueError, match="replays CUDA graphs"):
            model(more, attention_mask=torch.cat([mask, torch.ones_like(more)], 1), past_key_values=cache)
        for tensor, was in zip((one for layer in cache.layers for one in layer.buffers), before, strict=True):
            assert torch.equal(tensor, was)


@pytest.mark.parametrize("group", GROUPS)
def test_a_backward_pass_for_some_tensors_leaves_nothing_behind(group, counts):
    model, ids = trained(group), random_ids(1, LENGTH)
    uses(model, ids).zero_grad()
    embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()
    loss = model(inputs_embeds=embeddings, labels=ids).loss
    torch.autograd.grad(loss, embeddings, retain_graph=group is not None)
    if group is None:  # a kept graph is refused
        loss = model(inputs_embeds=embeddings, labels=ids).loss
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
        for _ in range(2):
            model.zero_grad()
            model(ids, labels=ids).loss.backward()
        found.append([layer.mlp.up_proj.weight.grad for layer in model.model.layers])
    for expected, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-10, rtol=1e-8)


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
    model = trained(group)
    for seed in range(4):
        ids = random_ids(1, LENGTH, seed=seed)
        assert_same_gradients(gradients(model, ids), reference_gradients(model, ids), 1e-5)
    assert len(caplog.records) == counts["capture"] == len(set(caplog.messages)) + (group in (1, 2))
    assert "not enough memory to capture" in caplog.text


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
    assert_same_gradients((loss, {name: one.grad for name, one in model.named_parameters()}), expected, 1e-5)
    gradients(model, ids)  # `loss` still exists, and its backward pass is over
    assert counts["replay"] == replays + 3


def test_a_text_that_is_given_up_waits_for_nothing(counts):
    model, ids = uses(trained(None), random_ids(1, LENGTH)), random_ids(1, LENGTH, seed=1)
    loss = model(ids, labels=ids).loss
    del loss
    replays = counts["replay"]
    assert_same_gradients(gradients(model, ids), reference_gradients(model, ids), 1e-5)
    assert counts["replay"] == replays + 2


def test_a_kept_graph_is_refused(counts):
    """A backward pass writes its gradients over the activations, as another call does."""
    model, ids = uses(trained(None), random_ids(1, LENGTH)), random_ids(1, LENGTH, seed=1)
    loss = model(ids, labels=ids).loss
    weight = model.model.layers[0].mlp.up_proj.weight
    torch.autograd.grad(loss, weight, retain_graph=True)
    with pytest.raises(ValueError, match="a second backward pass through a call.*'wavefront'"):
        loss.backward()
    loss = model(ids, labels=ids).loss
    gradients(model, ids)  # without a graph: the first text waits
    assert_same_gradients(gradients(model, ids), reference_gradients(model, ids), 1e-5)
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
            found.append({name: weight.grad.clone() for name, weight in each.named_parameters()})
        for name, gradient in found[1].items():
            torch.testing.assert_close(found[0][name], gradient, atol=1e-9, rtol=1e-6)


def test_weights_that_lie_unevenly_are_refused(counts, monkeypatch):
    """Those of a flat buffer in another order, as ZeRO's `round_robin_gradients` lays them out: a wave takes them."""
    monkeypatch.setattr(selection, "CAPTURING_DEVICES", ("cpu",))
    model, ids = tiny_model().train(), random_ids(1, LENGTH)
    weights = [weight for number in (0, 2, 1) for weight in model.model.layers[number].parameters()]
    flat = torch.empty(sum(map(torch.Tensor.numel, weights)), dtype=torch.float64)
    for weight, part in zip(weights, flat.split([weight.numel() for weight in weights]), strict=True):
        weight.data = part.view(weight.shape).copy_(weight.data)
    for _ in range(3):
        assert_same_gradients(gradients(model, ids), reference_gradients(model, ids), 1e-5)
    assert not counts["capture"]
    model.config.schedule = "graph"
    with pytest.raises(ValueError, match="at unequal distances"):
        model(ids)


def test_another_thread_runs_without_graphs(counts):
    model, ids, found = uses(trained(None), random_ids(1, LENGTH)), random_ids(1, LENGTH), []
    expected, replays = reference_gradients(model, ids), counts["replay"]
    thread = threading.Thread(target=lambda: found.append(gradients(model, ids)))
    thread.start()
    thread.join()
    assert counts["replay"] == replays
    assert_same_gradients(found[0], expected, 1e-5)


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
    with pytest.raises(ValueError, match="weights have changed since the forward pass"):
        torch.autograd.grad(loss, embeddings)


@pytest.mark.parametrize("group", [None, 2])
def test_frozen_layers(group, counts):
    """Their inputs may need gradients all the same."""
    found = []
    for schedule in ("sequential", "graph"):
        model = tiny_model(schedule=schedule).train()
        model = model if group is None else checkpointed(model)
        model.model.layers.requires_grad_(False)
        for _ in range(3):
            model.zero_grad()
            model(random_ids(1, LENGTH), labels=random_ids(1, LENGTH)).loss.backward()
        found.append(model.get_input_embeddings().weight.grad)
    torch.testing.assert_close(*found, atol=1e-6, rtol=1e-5)


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
    assert_same_gradients((loss, {name: one.grad for name, one in model.named_parameters()}), expected, 1e-5)


def test_a_deleted_model_frees_its_weights_and_graphs_at_once(counts):
    model = uses(trained(None), random_ids(1, LENGTH))
    alive = [weakref.ref(model.model.layers[0].mlp.up_proj.weight)]
    alive.append(weakref.ref(model.model.layers.__dict__["_captured_groups"]))
    gc.collect()
    gc.disable()
    try:
        del model
        assert [each() for each in alive] == [None, None]
    finally:
        gc.enable()


def test_embeddings_in_another_dtype_run_without_graphs(counts, monkeypatch):
    monkeypatch.setattr(selection, "CAPTURING_DEVICES", ("cpu",))
    model, ids = tiny_model(torch.float32).train(), random_ids(1, 30)
    model.get_input_embeddings().to(torch.bfloat16)
    losses = [gradients(model, ids)[0] for _ in range(3)]
    assert losses[0] == losses[1] == losses[2] and not counts["capture"]
    model.config.schedule = "graph"
    with pytest.raises(ValueError, match=r"embeddings are in torch.bfloat16 and the layers in torch.float32"):
        model(ids)


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


@pytest.mark.parametrize("group", GROUPS)
def test_no_buffer_becomes_a_gradient(group, counts):
    """An optimizer, or ZeRO, may write to gradients and keep them."""
    model = uses(trained(group), random_ids(1, LENGTH))
    kept = {name: parameter.grad for name, parameter in model.named_parameters()}
    copies = {name: gradient.clone() for name, gradient in kept.items()}
    model.zero_grad(set_to_none=True)
    gradients(model, random_ids(1, LENGTH, seed=1))
    for name, gradient in kept.items():
        assert torch.equal(gradient, copies[name]), name
        gradient.zero_()
    ids = random_ids(1, LENGTH, seed=1)
    assert_same_gradients(gradients(model, ids), reference_gradients(model, ids), 1e-5)


@pytest.mark.parametrize("group", GROUPS)
def test_auto_trains_by_graphs(group, counts, monkeypatch):
    """Nothing is to be set; texts without gradients, and partly frozen layers, do not."""
    monkeypatch.setattr(selection, "CAPTURING_DEVICES", ("cpu",))
    model, ids = trained(group, schedule="auto"), random_ids(1, LENGTH)
    with torch.no_grad():
        for _ in range(3):
            model(ids, use_cache=False)
    assert not counts["capture"]
    uses(model, ids, 3)
    assert counts["replay"]
    assert_same_gradients(gradients(model, ids), reference_gradients(model, ids), 1e-5)
    model.model.layers[0].requires_grad_(False)
    replays = counts["replay"]
    for _ in range(3):
        model(ids, labels=ids).loss.backward()
    assert counts["replay"] == replays


def test_changed_rotary_tables_are_read_anew(counts):
    model, ids = graphed(), random_ids(1, LENGTH)
    with torch.no_grad():
        model(ids, use_cache=False)
        before = model(ids, use_cache=False).logits
        model.model.rotary_emb.inv_freq *= 0.5
        sequential = copy.deepcopy(model)
        sequential.config.schedule = "sequential"
        found = model(ids, use_cache=False).logits
        torch.testing.assert_close(found, sequential(ids, use_cache=False).logits, atol=1e-12, rtol=0)
    assert not torch.allclose(found, before)


REFUSED = {
    "durations": (lambda model: model(random_ids(1, LENGTH), durations=random_durations(1, LENGTH)), "durations"),
    "flex": (lambda model: model.set_attn_implementation("flex_attention"), "attn_implementation='flex_attention'"),
    "dropout": (lambda model: setattr(checkpointed(model).config, "attention_dropout", 0.1), "attention_dropout=0.1"),
    "autocast": (lambda model: None, "autocast"),
    "hooks": (lambda model: model.model.layers[1].mlp.register_forward_hook(print), "layer 1 at 'mlp' has hooks"),
    "backward hooks": (
        lambda model: model.model.layers[2].register_full_backward_hook(lambda *given: None),
        "layer 2 at 'its top' has hooks",
    ),
    "forward of an instance": (
        lambda model: setattr(model.model.layers[0].mlp, "forward", model.model.layers[0].mlp.forward),
        "layer 0 at 'mlp' has hooks or a forward of its own",
    ),
    "adapters": (
        lambda model: get_peft_model(model, LoraConfig(target_modules=["v_proj"])),
        "v_proj' is a Linear, which",
    ),
    "hidden states": (lambda model: model(random_ids(1, 5), output_hidden_states=True), "schedule='graph'"),
}


@pytest.mark.parametrize(("prepare", "message"), REFUSED.values(), ids=REFUSED)
def test_what_a_graph_cannot_compute_is_refused(prepare, message, counts):
    model, needs_gradients = graphed(dtype=torch.float32), message.startswith("attention_dropout")
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=message == "autocast")

    def call():
        prepare(model)
        model(random_ids(1, LENGTH), use_cache=False)

    with torch.set_grad_enabled(needs_gradients), autocast, pytest.raises(ValueError, match=message):
        call()
    assert not counts["capture"]


@pytest.mark.parametrize("group", GROUPS)
def test_nothing_outlives_the_backward_pass(group, counts):
    model, ids = uses(trained(group), random_ids(1, LENGTH)), random_ids(1, LENGTH)
    embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()
    alive = []
    for _ in range(4):
        model(inputs_embeds=embeddings, labels=ids).loss.backward()
        gc.collect()
        alive.append(sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects()))
    # Tensors of other tests may still disappear meanwhile.
    assert max(alive[2:]) <= alive[1]


def test_copies_of_a_model_capture_their_own(counts):
    model, ids = graphed(), random_ids(1, LENGTH)
    with torch.no_grad():
        model(ids, use_cache=False)
        twin = copy.deepcopy(model)
        twin(ids, use_cache=False)
    groups = [one.model.layers.__dict__["_captured_groups"] for one in (model, twin)]
    assert isinstance(groups[0], captured_groups.CapturedGroups) and groups[0] is not groups[1]


@pytest.mark.parametrize("group", [None, 2])
def test_autograd_adds_nothing_of_a_weights_shape(group, counts):
    """Products add to the sums themselves, and a parameter receives its gradient once."""
    model = uses(trained(group, dtype=torch.bfloat16), random_ids(1, LENGTH))
    shapes = {tuple(weight.shape) for weight in model.model.layers.parameters() if weight.dim() == 2}
    shapes |= {(3, *shape) for shape in shapes}
    recorded = [
        record
        for captured, _ in model.model.layers.__dict__["_captured_groups"]._groups.values()
        for record in captured._backward.__closure__[1].cell_contents.records
    ]
    added = [
        args
        for function, args, _, _ in recorded
        if function.overloadpacket in (torch.ops.aten.add, torch.ops.aten.add_)
    ]
    assert added and not [args for args in added if tuple(args[0].shape) in shapes]
    assert any(function is torch.ops.condense.add_products_.default for function, *_ in recorded)


@pytest.mark.parametrize(
    ("group", "forward", "backward"), [pytest.param(None, 49, 81, id="stored"), pytest.param(64, 49, 130, id="again")]
)
def test_operations_of_a_diagonal(group, forward, backward, counts, monkeypatch):
    """One more segment is one more diagonal: its operations, without views, by plain forms of the fused kernels."""
    monkeypatch.setattr(stacked_parameters, "JOINING_DEVICES", ("cpu",))
    found = []
    for segments in (8, 9):
        model = uses(trained(group, dtype=torch.bfloat16), random_ids(1, 5 * segments))
        ((captured, _),) = model.model.layers.__dict__["_captured_groups"]._groups.values()
        found.append([num_operations(replay) for replay in (captured._forward, captured._backward)])
    (before, again), (more, more_again) = found
    assert (more - before, more_again - again) == (forward, backward)


def num_operations(replay):
    records = replay.__closure__[1].cell_contents.records
    return sum(not is_view(function) and "empty" not in str(function) for function, *_ in records)


def is_view(function):
    schema = function._schema
    writes = any(one.alias_info is not None and one.alias_info.is_write for one in schema.arguments)
    return not writes and any(one.alias_info is not None for one in schema.returns)
