"""Groups of segments from a graph give the logits, state and gradients of the equations. A CUDA graph is replaced by a
recording that replays on the CPU."""

import pytest
import torch

from condense import FoldedCache
from condense.execution import captured_groups, selection, stacked_parameters

from ..models import gradients, gradients_of, padded_batch, random_ids, tiny_model
from .graphed import (
    GROUPS,
    LENGTH,
    assert_as_in_order,
    assert_follows_equations,
    graphed,
    in_order,
    trained,
    uses,
)

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


@pytest.mark.parametrize(
    ("fields", "group"), [({}, group) for group in GROUPS] + [(FIELDS[name], 2) for name in list(FIELDS)[1:]], ids=str
)
def test_gradients_follow_the_equations(fields, group, counts):
    assert_follows_equations(trained(group, **fields))
    assert counts["replay"] > counts["capture"] > 0


@pytest.mark.parametrize("group", [None, 2])
def test_gradients_of_weights_that_are_one_product(group, counts, monkeypatch):
    """Side by side, as on CUDA."""
    monkeypatch.setattr(stacked_parameters, "JOINING_DEVICES", ("cpu",))
    assert_follows_equations(trained(group))
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
    assert_follows_equations(uses(model, ids), ids, detach_after=segments)


PARTS = {  # that are trained; the others are frozen
    "values": (2, {}, lambda name: "v_proj" in name),
    "MLPs, and memories have no gradients": (2, {"bptt_segments": 1}, lambda name: "mlp" in name),
    "all but the layers, stored": (None, {}, lambda name: ".layers." not in name),
    "all but the layers": (2, {}, lambda name: ".layers." not in name),
}


@pytest.mark.parametrize(("group", "fields", "is_trained"), PARTS.values(), ids=PARTS)
def test_gradients_of_embeddings_and_of_a_partly_frozen_model(group, fields, is_trained, counts):
    """The inputs of frozen layers may need gradients all the same."""
    embeddings, ids = torch.randn(2, LENGTH, 24, dtype=torch.float64), random_ids(2, LENGTH)

    def gradients_of(schedule):
        model = trained(group, schedule=schedule, **fields)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(is_trained(name))
        for _ in range(3):
            model.zero_grad()
            given = embeddings.clone().requires_grad_()
            model(inputs_embeds=given, labels=ids).loss.backward()
            model(ids, labels=ids).loss.backward()
        found = {name: weight.grad for name, weight in model.named_parameters()}
        assert all((gradient is not None) == is_trained(name) for name, gradient in found.items())
        return given.grad, [gradient for gradient in found.values() if gradient is not None]

    assert_as_in_order(gradients_of)


@pytest.mark.parametrize("group", GROUPS)
def test_losses_of_two_texts_in_one_backward_pass(group, counts):
    """Their sums are added. Without checkpoints the second text runs without a graph: its activations would be written
    over those of the first."""
    model = uses(trained(group), random_ids(1, LENGTH, seed=2))
    first, second = random_ids(1, LENGTH), random_ids(1, LENGTH, seed=1)
    of_first, of_second = (gradients(model, ids)[1] for ids in (first, second))
    model.zero_grad()
    (model(first, labels=first).loss + model(second, labels=second).loss).backward()
    expected = {name: gradient + of_second[name] for name, gradient in of_first.items()}
    torch.testing.assert_close(gradients_of(model), expected, atol=1e-12, rtol=1e-9)


def test_an_optimizer_step_between_two_replays(counts):
    """A graph reads the weights as they are; weights that moved are captured again."""
    model, ids = graphed(), random_ids(1, LENGTH)
    with torch.no_grad():
        for change in (torch.Tensor.mul_, lambda weight, factor: setattr(weight, "data", weight * factor)):
            for _ in range(2):
                model(ids, use_cache=False)
            for layer in model.model.layers:
                change(layer.mlp.up_proj.weight, 1.1)
            expected = in_order(model)(ids, use_cache=False).logits
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
    torch.testing.assert_close(dict(model.named_parameters()), dict(twin.named_parameters()), atol=1e-5, rtol=1e-5)
    assert counts["replay"]


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
    found = gradients_of(model.model.layers)
    model.zero_grad()
    model(inputs_embeds=embeddings, labels=ids).loss.backward()
    torch.testing.assert_close(found, gradients_of(model.model.layers), atol=1e-12, rtol=1e-9)


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
    assert_follows_equations(model, random_ids(1, LENGTH, seed=1))


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
    assert_follows_equations(model, ids)
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
        found = model(ids, use_cache=False).logits
        torch.testing.assert_close(found, in_order(model)(ids, use_cache=False).logits, atol=1e-12, rtol=0)
    assert not torch.allclose(found, before)


@pytest.mark.parametrize("group", [None, 2])
def test_autograd_adds_nothing_of_a_weights_shape(group, counts):
    """Products add to the sums themselves, and a parameter receives its gradient once."""
    model = uses(trained(group, dtype=torch.bfloat16), random_ids(1, LENGTH))
    shapes = {tuple(weight.shape) for weight in model.model.layers.parameters() if weight.dim() == 2}
    shapes |= {(3, *shape) for shape in shapes}
    recorded = [record for captured in captured_groups_of(model) for record in records(captured._backward)]
    additions = (torch.ops.aten.add, torch.ops.aten.add_)
    added = [args for function, args, _, _ in recorded if function.overloadpacket in additions]
    assert added and not [args for args in added if tuple(args[0].shape) in shapes]
    assert any(function is torch.ops.condense.add_products_.default for function, *_ in recorded)


def captured_groups_of(model):
    return [captured for captured, _ in model.model.layers.__dict__["_captured_groups"]._groups.values()]


def records(replay):
    return replay.__closure__[1].cell_contents.records


@pytest.mark.parametrize(("group", "forward", "backward"), [(None, 49, 81), (64, 49, 130)], ids=["stored", "again"])
def test_operations_of_a_diagonal(group, forward, backward, counts, monkeypatch):
    """One more segment is one more diagonal: its operations, without views, by plain forms of the fused kernels."""
    monkeypatch.setattr(stacked_parameters, "JOINING_DEVICES", ("cpu",))
    found = []
    for segments in (8, 9):
        model = uses(trained(group, dtype=torch.bfloat16), random_ids(1, 5 * segments))
        (captured,) = captured_groups_of(model)
        found.append([num_operations(replay) for replay in (captured._forward, captured._backward)])
    (before, again), (more, more_again) = found
    assert (more - before, more_again - again) == (forward, backward)


def num_operations(replay):
    return sum(not is_view(function) and "empty" not in str(function) for function, *_ in records(replay))


def is_view(function):
    schema = function._schema
    writes = any(one.alias_info is not None and one.alias_info.is_write for one in schema.arguments)
    return not writes and any(one.alias_info is not None for one in schema.returns)
