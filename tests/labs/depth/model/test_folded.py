"""A folded model with a depth block: every way to read a text gives the same, and the same as the equations."""

import copy

import pytest
import torch

from condense import FoldedCache, to_stock
from condense.labs.depth.model import set_solver
from tests.condense.models import padded_batch, random_durations, random_ids, tiny_model

from .models import depth_model, random_control, reference_logits

EVERY = [
    ("mlp", {"solver": "euler"}),
    ("mlp_tau", {"solver": "midpoint", "steps": 2}),
    ("mlp", {"solver": "dopri5", "rtol": 0.1, "atol": 1e-2}),
    ("mlp_tau", {"solver": "adaptive_heun", "rtol": 0.3, "atol": 0.1}),
    ("layer", {"solver": "euler", "steps": 2}),
    ("layer", {"solver": "rk4", "steps": 1}),
]
NAMES = [f"{field}-{depth['solver']}" for field, depth in EVERY]
N = 13  # in segments of 5


def assert_close(actual, expected, tolerance=1e-8):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.fixture(scope="module", params=EVERY, ids=NAMES)
def model(request):
    field, depth = request.param
    with torch.no_grad():
        yield depth_model(field, depth=depth)


@pytest.mark.parametrize("solver", ["euler", "midpoint", "rk4"])
@pytest.mark.parametrize(
    ("field", "memory"),
    [
        ("mlp", {}),
        ("mlp_tau", {"memory_share": 0.3}),
        ("layer", {}),
        ("layer", {"memory_source": "layer_input"}),
        ("layer", {"memory_share": 0.3}),
    ],
    ids=str,
)
def test_equals_the_equations(field, solver, memory):
    """Over three segments: the memory of a flow of a layer is its end state."""
    model = depth_model(field, depth={"solver": solver, "steps": 2}, **memory)
    ids, control, durations = random_ids(1, N), random_control(1, N, 2), random_durations(1, N)
    with torch.no_grad():
        output = model(ids, control=control, durations=durations)
        # The model's rotary tables are float32.
        assert_close(output.logits[0], reference_logits(model, ids[0], control[0], durations[0]), 1e-10)
        assert_close(model(ids, control=control[:, 0]).logits[0], reference_logits(model, ids[0], control[0, 0]), 1e-10)
    stages = {"euler": 1, "midpoint": 2, "rk4": 4}[solver]
    assert output.function_evaluations.tolist() == [[2 * stages] * N]


@torch.no_grad()
def test_adaptive_solvers_come_near_the_equations():
    model = depth_model("mlp_tau", depth={"solver": "rk4", "steps": 8})
    ids, control = random_ids(1, N), random_control(1, N, 2)
    expected = reference_logits(model, ids[0], control[0])
    set_solver(model, "dopri5", rtol=1e-6, atol=1e-7)
    output = model(ids, control=control)
    torch.testing.assert_close(output.logits[0], expected, rtol=1e-3, atol=1e-3)
    assert len(set(output.function_evaluations[0].tolist())) > 1
    set_solver(model, "adaptive_heun", rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(model(ids, control=control).logits[0], expected, rtol=2e-2, atol=2e-2)


@torch.no_grad()
@pytest.mark.parametrize(("widths", "by_token"), [([1] * N, True), ([2, 7, 4], False)], ids=["tokens", "chunks"])
def test_a_cache_continues_where_the_last_call_ended(model, widths, by_token):
    ids, control = random_ids(2, N), random_control(2, N, 2) if by_token else random_control(2, 2)
    expected = model(ids, control=control, use_cache=False)
    cache, start, parts = FoldedCache(model.config), 0, []
    for width in widths:
        columns = slice(start, start + width)
        own = control[:, columns] if by_token else control
        parts.append(model(ids[:, columns], control=own, past_key_values=cache))
        start += width
    assert_close(torch.cat([part.logits for part in parts], 1), expected.logits)
    counts = torch.cat([part.function_evaluations for part in parts], 1)
    assert torch.equal(counts, expected.function_evaluations)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_row_does_not_depend_on_its_neighbours_or_padding(model, side):
    lengths = [N, 3, 8]
    texts, ids, mask = padded_batch(lengths, side)
    control = random_control(3, N, 2)
    control[mask == 0] = 50  # where nothing is read
    by_text = random_control(3, 2)
    output, output_by_text = (model(ids, attention_mask=mask, control=given) for given in (control, by_text))
    assert not output.function_evaluations[mask == 0].any()
    for row, text in enumerate(texts):
        real = mask[row] == 1
        alone = model(text[None], control=control[row, real][None])
        assert_close(output.logits[row, real], alone.logits[0])
        assert torch.equal(output.function_evaluations[row, real], alone.function_evaluations[0])
        assert_close(output_by_text.logits[row, real], model(text[None], control=by_text[row : row + 1]).logits[0])


@torch.no_grad()
def test_padding_that_needs_more_evaluations_than_allowed_is_not_read():
    model = depth_model("mlp", depth={"solver": "dopri5", "rtol": 1e-2})
    _, ids, mask = padded_batch([9, 4], "right")
    control = random_control(2, 9, 2)
    needed = model(ids, attention_mask=mask, control=control).function_evaluations.max().item()
    control[1, 4:] = 1e4
    set_solver(model, "dopri5", max_evaluations=needed)
    assert model(ids, attention_mask=mask, control=control).function_evaluations.max() == needed
    with pytest.raises(ValueError, match="max_evaluations"):
        model(ids, control=control)


@torch.no_grad()
@pytest.mark.parametrize(
    ("model", "by_token"),
    [(EVERY[0], False), (EVERY[2], True), (EVERY[4], False), (EVERY[4], True)],
    indirect=["model"],
)
def test_generate_with_a_control(model, by_token):
    """Greedy in a padded batch, in prefill chunks, from a cache, and with prompt lookup."""
    texts, ids, mask = padded_batch([7, 4], "left")
    control = random_control(2, 7, 2) if by_token else random_control(2, 2)
    options = {"max_new_tokens": 5, "do_sample": False}
    generated = model.generate(ids, attention_mask=mask, control=control, **options)
    for row, text in enumerate(texts):
        own = control[row, mask[row] == 1] if by_token else control[row]
        tokens = text
        for _ in range(5):  # a new token has the control of the last column
            shown = torch.cat([own, own[-1:].expand(len(tokens) - len(own), -1)]) if by_token else own
            tokens = torch.cat([tokens, model(tokens[None], control=shown[None]).logits[0, -1].argmax()[None]])
        assert torch.equal(generated[row, 7:], tokens[len(text) :])
    whole = model.generate(ids[:1], control=control[:1], **options)
    assert torch.equal(whole[0], generated[0])
    chunks = model.generate(ids[:1], control=control[:1], prefill_chunk_size=3, **options)
    lookup = model.generate(ids[:1], control=control[:1], prompt_lookup_num_tokens=2, **options)
    cache = FoldedCache(model.config)
    model(ids[:1, :4], control=control[:1, :4] if by_token else control[:1], past_key_values=cache)
    continued = model.generate(ids[:1], control=control[:1], past_key_values=cache, **options)
    assert torch.equal(chunks, whole) and torch.equal(lookup, whole) and torch.equal(continued, whole)


@torch.no_grad()
def test_beams_have_the_control_of_their_text():
    model = depth_model("layer", depth={"steps": 2})
    texts, ids, mask = padded_batch([7, 4], "left")
    options = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False}
    for control in (random_control(2, 2), random_control(2, 7, 2)):
        beams = model.generate(ids, attention_mask=mask, control=control, **options)
        for row in range(2):
            real = mask[row] == 1
            own = control[row : row + 1] if control.dim() == 2 else control[row, real][None]
            alone = model.generate(texts[row][None], control=own, **options)
            assert torch.equal(beams[row, 7:], alone[0, len(texts[row]) :])


@pytest.mark.parametrize("by_token", [False, True])
@torch.no_grad()
def test_assistants_of_every_kind_draft(by_token):
    """Also assistants that take no control: the model without its block, folded or stock."""
    plain, model, ids = tiny_model(), depth_model(), random_ids(1, 7)
    options = {"control": random_control(1, 7, 2) if by_token else random_control(1, 2), "max_new_tokens": 9}
    expected = model.generate(ids, do_sample=False, **options)
    for assistant in (copy.deepcopy(model), plain, to_stock(plain)):
        assert torch.equal(model.generate(ids, assistant_model=assistant, do_sample=False, **options), expected)
    assert torch.equal(model.generate(ids, assistant_early_exit=2, do_sample=False, **options), expected)


@torch.no_grad()
def test_snapshots_and_removed_tokens(model):
    ids, control = random_ids(2, N), random_control(2, 2)
    expected = model(ids, control=control, use_cache=False).logits
    cache = FoldedCache(model.config)
    model(ids[:, :6], control=control, past_key_values=cache)
    snapshot = cache.snapshot()
    for _ in range(2):
        assert_close(model(ids[:, 6:], control=control, past_key_values=cache).logits, expected[:, 6:])
        cache.restore(snapshot)
    cache.activate_past_recording()
    model(random_ids(2, 6, seed=9), control=-control, past_key_values=cache)
    cache.crop(-6)  # back across a border of segments
    assert_close(model(ids[:, 6:], control=control, past_key_values=copy.deepcopy(cache)).logits, expected[:, 6:])


@torch.no_grad()
def test_packed_documents_are_texts_of_their_own(model):
    ids, control = random_ids(1, N), random_control(1, N, 2)
    positions = torch.cat([torch.arange(6), torch.arange(N - 6)])[None]
    output = model(ids, position_ids=positions, control=control)
    labelled = model(ids, position_ids=positions, control=control, labels=ids, logits_to_keep=0)
    by_text = model(ids, position_ids=positions, control=control[:, 0])
    for part in (slice(0, 6), slice(6, N)):
        alone = model(ids[:, part], control=control[:, part])
        assert_close(output.logits[:, part], alone.logits)
        assert_close(labelled.logits[:, part], alone.logits)
        assert_close(by_text.logits[:, part], model(ids[:, part], control=control[:, 0]).logits)
        for counted in (output, labelled):
            assert torch.equal(counted.function_evaluations[:, part], alone.function_evaluations)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["eager", "blocked"])
def test_attention_implementations_agree(attention):
    models = [depth_model("layer", attn_implementation=name) for name in ("sdpa", attention)]
    _, ids, mask = padded_batch([N, 8], "left")
    control = random_control(2, 2)
    expected, actual = (m.float()(ids, attention_mask=mask, control=control).logits for m in models)
    torch.testing.assert_close(actual[mask == 1], expected[mask == 1], rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_a_wave_is_chosen_around_and_refused_by_name():
    """`auto` is sequential even if a model without the block would take a wave."""
    model = depth_model("layer", segment_length=4)
    ids, control = random_ids(1, 64), random_control(1, 2)
    expected = model(ids, control=control, use_cache=False).logits
    model.config.schedule = "sequential"
    assert torch.equal(model(ids, control=control, use_cache=False).logits, expected)
    model.config.schedule = "wavefront"
    with pytest.raises(ValueError, match=r"depth block.*schedule='sequential' \(or 'auto'\)"):
        model(ids, control=control, use_cache=False)


@torch.no_grad()
def test_static_decoding_is_refused_by_name():
    model = depth_model()
    model.fixed_decoding = True
    with pytest.raises(ValueError, match="fixed_decoding has no step for a depth block: set model.fixed_decoding"):
        model.generate(random_ids(1, 4), control=random_control(1, 2), max_new_tokens=3, do_sample=False)
