"""Sentences as functions of time, compared with cases computed by hand and with plain loops."""

import math

import pytest
import torch

from condense.labs.continuity.model import Sentence, TextSpan, interpolate
from tests.refusals import assert_refused

pytestmark = pytest.mark.unit

NAN, INF = float("nan"), float("inf")


def embedded(num_samples=4, width=6, seed=0, **parts):
    generator = torch.Generator().manual_seed(seed)
    return Sentence(embeddings=torch.randn(num_samples, width, generator=generator).double(), **parts)


def parts_of(sentence):
    return [sentence.ids_N, sentence.embeddings_ND, sentence.durations_N, sentence.positions_N]


def assert_close(tensor, expected):
    torch.testing.assert_close(tensor, torch.as_tensor(expected, dtype=tensor.dtype), atol=1e-12, rtol=1e-12)


# Times


def test_tokens_of_an_ordinary_sentence_last_one_unit():
    sentence = Sentence([7, 8, 9])
    assert len(sentence) == 3 and sentence.ids_N.tolist() == [7, 8, 9] and sentence.embeddings_ND is None
    assert sentence.durations_N.tolist() == [1, 1, 1] and sentence.time_steps_N.tolist() == [1, 2, 3]
    assert sentence.integration_start == 0 and sentence.positions_N is None


def test_time_steps_are_durations_from_the_integration_start():
    """Equation 3.12: d_1 = t_1 - alpha and d_i = t_i - t_{i-1}."""
    times = [0.5, 2.0, 2.25]
    assert Sentence([1, 2, 3], time_steps=times).durations_N.tolist() == [0.5, 1.5, 0.25]
    early = Sentence([1, 2, 3], time_steps=times, integration_start=-1)
    assert early.durations_N.tolist() == [1.5, 1.5, 0.25] and early.time_steps_N.tolist() == times
    late = Sentence([1, 2, 3], durations=[0.5, 1.5, 0.25], integration_start=10)
    assert late.time_steps_N.tolist() == [10.5, 12.0, 12.25]


def test_times_are_float64_on_the_host_and_embeddings_keep_their_dtype():
    sentence = Sentence(embeddings=torch.randn(2, 3).bfloat16(), durations=torch.tensor([1, 2]), positions=[1, 2])
    assert sentence.durations_N.dtype == sentence.positions_N.dtype == torch.float64
    assert sentence.embeddings_ND.dtype == torch.bfloat16
    assert Sentence([1] * 10**6, durations=torch.full((10**6,), 0.1)).time_steps_N[-1] == pytest.approx(1e5, rel=1e-6)


def test_set_duration_shifts_later_samples():
    sentence = Sentence([1, 2, 3, 4], integration_start=2).set_duration([1, 2], 0.25)
    assert sentence.durations_N.tolist() == [1, 0.25, 0.25, 1] and sentence.time_steps_N.tolist() == [3, 3.25, 3.5, 4.5]


@pytest.mark.parametrize("span", [slice(1, 3), range(1, 3), [2, 1, 1], (1, 2), slice(-3, -1), torch.tensor([1, 2])])
def test_spans_may_be_slices_ranges_sequences_or_tensors(span):
    sentence = Sentence([1, 2, 3, 4], durations=[1, 2, 4, 8])
    assert sentence.set_duration(span, 3).durations_N.tolist() == [1, 3, 3, 8]
    assert sentence.shrink(span, 0.25).durations_N.tolist() == [1, 0.5, 1, 8]


def test_shrinking_a_number_of_two_digits():
    """Equation 3.17: both digits last 1 - phi / 2, and later tokens come phi earlier."""
    phi = 0.5
    shrunk = Sentence(range(6)).shrink([2, 3], 1 - phi / 2)
    assert shrunk.time_steps_N.tolist() == [1, 2, 3 - phi / 2, 4 - phi, 5 - phi, 6 - phi]


def test_shift_and_scale_follow_the_equations():
    """Equations 3.19 and 3.21: `shift` moves the integration start too, `scale` leaves it where it is."""
    sentence = Sentence([1, 2, 3], durations=[1, 0.5, 2], integration_start=4)
    shifted, scaled = sentence.shift(2.5), sentence.scale(0.5)
    assert shifted.time_steps_N.tolist() == [7.5, 8, 10] and shifted.durations_N.tolist() == [1, 0.5, 2]
    assert shifted.integration_start == 6.5
    assert scaled.time_steps_N.tolist() == [4.5, 4.75, 5.75] and scaled.integration_start == 4
    at_zero = Sentence([1, 2, 3], durations=[1, 0.5, 2])
    assert at_zero.scale(0.5).time_steps_N.tolist() == (at_zero.time_steps_N * 0.5).tolist()


# Density


@pytest.mark.parametrize("density", [1, 2, 3, 7])
@pytest.mark.parametrize("values", ["constant", "linear"])
def test_densify_samples_the_same_function_of_time(density, values):
    sentence = embedded(durations=[1, 0.3, 2, 0.7], integration_start=-1)
    dense = sentence.densify(density, values)
    assert len(dense) == 4 * density and dense.integration_start == -1 and dense.positions_N is None
    for k in range(4):
        start = sentence.time_steps_N[k] - sentence.durations_N[k]
        x, before = sentence.embeddings_ND[k], sentence.embeddings_ND[max(k - 1, 0)]
        for j in range(density):
            at, share = k * density + j, (j + 1) / density
            assert_close(dense.durations_N[at], sentence.durations_N[k] / density)
            assert_close(dense.time_steps_N[at], start + share * sentence.durations_N[k])
            assert_close(dense.embeddings_ND[at], x if values == "constant" else before + share * (x - before))
    assert_close(dense.durations_N.view(4, density).sum(1), sentence.durations_N)
    assert_close(dense.time_steps_N[density - 1 :: density], sentence.time_steps_N)
    assert_close(dense.embeddings_ND[density - 1 :: density], sentence.embeddings_ND)


def test_densify_follows_the_equations():
    """Equations 3.22 and 3.23; each interval ends at the time step of its token."""
    dense = Sentence([5, 6]).densify(4)
    assert dense.ids_N.tolist() == [5] * 4 + [6] * 4
    assert dense.time_steps_N.tolist() == [0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2]


def test_densify_at_equal_positions():
    sentence = Sentence([5, 6, 7], durations=[1, 0.5, 2], integration_start=3)
    dense = sentence.densify(2, positions="equal")
    assert dense.positions_N.tolist() == [4, 4, 4.5, 4.5, 6.5, 6.5]
    assert dense.durations_N.tolist() == [0.5, 0.5, 0.25, 0.25, 1, 1]
    assert dense.time_steps_N.tolist() == sentence.densify(2).time_steps_N.tolist()


# Interpolation


@pytest.mark.parametrize("how", ["linear", "spherical"])
def test_interpolation_begins_at_the_first_and_ends_at_the_second_sentence(how):
    first = embedded(seed=0, durations=[1, 2, 3, 4], integration_start=1)
    second = embedded(seed=1, durations=[4, 3, 2, 1], integration_start=2)
    for factor, end in ((0, first), (0.0, first), (1, second), (1.0, second)):
        between = interpolate(first, second, factor, how)
        assert_close(between.embeddings_ND, end.embeddings_ND)
        assert_close(between.time_steps_N, end.time_steps_N)
    between = interpolate(first, second, 0.25, how)
    assert_close(between.durations_N, [1.75, 2.25, 2.75, 3.25])
    assert between.integration_start == 1.25
    assert_close(between.time_steps_N, first.time_steps_N.lerp(second.time_steps_N, 0.25))


def test_linear_interpolation_follows_the_equation():
    """Equation 3.15."""
    first, second = embedded(seed=0), embedded(seed=1)
    for phi in (0.1, 0.5, 0.9):
        expected = (1 - phi) * first.embeddings_ND + phi * second.embeddings_ND
        assert_close(interpolate(first, second, phi).embeddings_ND, expected)


def test_spherical_interpolation_of_a_quarter_turn():
    """From length 2 to length 4: after each third of the way, 30 and 60 degrees."""
    first, second = (Sentence(embeddings=torch.tensor([x]).double()) for x in ([2.0, 0.0], [0.0, 4.0]))
    for third in (1, 2):
        length, angle = 2 + third * 2 / 3, third * math.pi / 6
        between = interpolate(first, second, third / 3, "spherical").embeddings_ND[0]
        assert_close(between, [length * math.cos(angle), length * math.sin(angle)])


def angle_between(x_D, y_D):
    return math.acos(max(-1.0, min(1.0, float(x_D @ y_D / x_D.norm() / y_D.norm()))))


def test_spherical_interpolation_turns_at_constant_speed():
    first, second = embedded(seed=2), embedded(seed=3)
    factors = [n / 10 for n in range(11)]
    path = torch.stack([interpolate(first, second, factor, "spherical").embeddings_ND for factor in factors])
    for k in range(4):
        x, y = first.embeddings_ND[k], second.embeddings_ND[k]
        whole = angle_between(x, y)
        assert whole > 0.1
        for here, factor in zip(path[:, k], factors, strict=True):
            assert angle_between(x, here) == pytest.approx(factor * whole, abs=1e-6)
            assert angle_between(here, y) == pytest.approx((1 - factor) * whole, abs=1e-6)
            assert float(here.norm()) == pytest.approx(float((1 - factor) * x.norm() + factor * y.norm()), rel=1e-9)


@pytest.mark.parametrize("tilt", [0.0, 1e-12, 1e-9, 1e-7, 1e-4])
def test_spherical_interpolation_of_almost_the_same_direction(tilt):
    first, second = torch.tensor([[3, 0], [5 * math.cos(tilt), 5 * math.sin(tilt)]], dtype=torch.float64)[:, None]
    between = interpolate(Sentence(embeddings=first), Sentence(embeddings=second), 0.25, "spherical")
    expected = torch.tensor([[3.5 * math.cos(tilt / 4), 3.5 * math.sin(tilt / 4)]], dtype=torch.float64)
    torch.testing.assert_close(between.embeddings_ND, expected, atol=1e-16, rtol=1e-9)


def test_spherical_interpolation_of_zeros():
    zero, x = torch.zeros(1, 2), torch.tensor([[0.0, 2.0]])
    for first, second, expected in ((zero, x, [0, 0.5]), (x, zero, [0, 1.5]), (zero, zero, [0, 0])):
        between = interpolate(Sentence(embeddings=first), Sentence(embeddings=second), 0.25, "spherical")
        assert between.embeddings_ND.tolist() == [expected]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_spherical_interpolation_keeps_the_dtype(dtype):
    first, second = (Sentence(embeddings=embedded(seed=n).embeddings_ND.to(dtype)) for n in (0, 1))
    between = interpolate(first, second, 0.3, "spherical").embeddings_ND
    wide = interpolate(*(s.with_embeddings(s.embeddings_ND.double()) for s in (first, second)), 0.3, "spherical")
    assert between.dtype == dtype and torch.equal(between, wide.embeddings_ND.to(dtype))


# Sentences are immutable


OPERATIONS = {
    "set_duration": lambda s: s.set_duration([1], 0.5),
    "shrink": lambda s: s.shrink([1], 0.5),
    "scale": lambda s: s.scale(0.5),
    "shift": lambda s: s.shift(0.5),
    "densify": lambda s: s.densify(2, positions="equal"),
    "linear": lambda s: s.densify(2, "linear"),
    "interpolate": lambda s: interpolate(s, embedded(seed=1), 0.5, "spherical"),
    "with_embeddings": lambda s: s.with_embeddings(s.embeddings_ND + 1),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_do_not_change_the_sentence(name):
    sentence = embedded(durations=[1, 2, 3, 4], integration_start=1)
    before = [None if part is None else part.clone() for part in parts_of(sentence)]
    other = OPERATIONS[name](sentence)
    assert other is not sentence and sentence.integration_start == 1
    for part, old in zip(parts_of(sentence), before, strict=True):
        assert part is old or torch.equal(part, old)


def test_operations_keep_the_other_parts():
    sentence = Sentence([1, 2, 3], durations=[1, 2, 3], integration_start=7)
    for other in (sentence.set_duration([0], 5), sentence.shrink([0], 5), sentence.scale(2)):
        assert other.integration_start == 7 and other.ids_N.tolist() == [1, 2, 3]
    dense = sentence.densify(2, positions="equal")
    given = dense.with_embeddings(torch.ones(6, 4))
    assert given.ids_N is None and given.embeddings_ND.shape == (6, 4) and given.integration_start == 7
    assert torch.equal(given.durations_N, dense.durations_N) and torch.equal(given.positions_N, dense.positions_N)


@pytest.mark.parametrize("name", ["ids", "durations", "positions"])
def test_a_sentence_copies_its_arguments(name):
    given = torch.tensor([1, 2]) if name == "ids" else torch.tensor([1.0, 2.0]).double()
    sentence = Sentence(**({"ids": [5, 6]} | {name: given}))
    given[0] = 9
    assert getattr(sentence, f"{name}_N").tolist() == [1, 2]


# Refused arguments


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({}, "ids or of embeddings: pass one"),
        ({"ids": [1], "embeddings": torch.ones(1, 2)}, "ids or of embeddings: pass one"),
        ({"ids": [1], "durations": [1.0], "time_steps": [1.0]}, "durations and time_steps.*pass one"),
        ({"ids": [[1, 2]]}, r"shape \(1, 2\).*one row"),
        ({"ids": [1.0, 2.0]}, "shape .*float32"),
        ({"embeddings": torch.ones(3)}, r"shape \(3,\).*\[N, D\]"),
        ({"embeddings": torch.ones(1, 3, 2)}, r"shape \(1, 3, 2\)"),
        ({"embeddings": torch.ones(3, 2, dtype=torch.long)}, "shape .*int64"),
        ({"embeddings": torch.ones(0, 2)}, "at least one sample"),
        ({"ids": torch.ones(0, dtype=torch.long)}, "at least one sample"),
        ({"ids": [1, 2], "durations": [1.0]}, r"durations of shape \(1,\) for 2 samples"),
        ({"ids": [1, 2], "durations": [[1.0], [1.0]]}, r"durations of shape \(2, 1\) for 2 samples"),
        ({"ids": [1, 2], "time_steps": [1.0, 2.0, 3.0]}, r"time_steps of shape \(3,\) for 2 samples"),
        ({"ids": [1, 2], "positions": [1.0]}, r"positions of shape \(1,\) for 2 samples"),
        ({"ids": [1, 2], "durations": [1, 0]}, "sample 1 is 0.0.*leave it out of the sentence"),
        ({"ids": [1, 2], "durations": [-0.5, 1]}, "sample 0 is -0.5"),
        ({"ids": [1, 2], "durations": [1, NAN]}, "sample 1 is nan"),
        ({"ids": [1, 2], "durations": [INF, 1]}, "sample 0 is inf"),
        ({"ids": [1, 2], "time_steps": [1, INF]}, "sample 1 is inf"),
        ({"ids": [1, 2], "time_steps": [1, 1]}, "time step 1.*1.0 after 1.0.*increase"),
        ({"ids": [1, 2], "time_steps": [2, 1]}, "time step 1.*increase"),
        ({"ids": [1, 2], "time_steps": [1, NAN]}, "time step 1.*increase"),
        ({"ids": [1, 2], "time_steps": [1, 2], "integration_start": 1}, "time step 0.*1.0 after 1.0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_parts_that_do_not_fit_are_refused(parts, words):
    assert_refused(words, Sentence, **parts)


@pytest.mark.parametrize("span", [[4], [-1], [1, 9], [], slice(2, 2), slice(4, 9), range(3, 5)])
def test_spans_outside_the_sentence_are_refused(span):
    for operation in (Sentence([1] * 4).set_duration, Sentence([1] * 4).shrink):
        assert_refused("the sentence has 4 samples: pass indices from 0 to 3", operation, span, 0.5)


@pytest.mark.parametrize("number", [0, -1, NAN, INF])
def test_durations_that_are_not_finite_or_not_positive_are_refused(number):
    for operation in (lambda s: s.set_duration([1], number), lambda s: s.shrink([1], number)):
        assert_refused("duration of sample 1 is .*finite and more", operation, Sentence([1, 2, 3]))
    assert_refused("duration of sample 0 is .*finite and more", Sentence([1, 2, 3]).scale, number)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"density": 0}, "at least one sample"),
        ({"density": 2, "values": "cubic"}, "values='cubic'.*constant, linear"),
        ({"density": 2, "positions": "middle"}, "positions='middle'.*spread, equal"),
        ({"density": 2, "values": "linear"}, "this sentence has ids: embed it first"),
    ],
)
def test_arguments_of_densify_are_checked(arguments, words):
    assert_refused(words, Sentence([1, 2]).densify, **arguments)


def test_sentences_that_can_not_be_interpolated_are_refused():
    first, ids = embedded(), Sentence([1, 2, 3, 4])
    assert_refused("equally many samples", interpolate, first, embedded(3), 0.5)
    for pair in ((first, ids), (ids, first), (ids, ids)):
        assert_refused("token ids can't be interpolated: embed both", interpolate, *pair, 0.5)
    fixed = embedded(positions=[1, 2, 3, 4])
    for pair in ((first, fixed), (fixed, first)):
        assert_refused("fixed positions.*before densify", interpolate, *pair, 0.5)
    assert_refused("how='cubic'.*linear, spherical", interpolate, first, embedded(seed=1), 0.5, "cubic")
    turned = first.with_embeddings(torch.cat([first.embeddings_ND[:2], -2 * first.embeddings_ND[2:]]))
    assert_refused("sample 2 have opposite directions.*how='linear'", interpolate, first, turned, 0.5, "spherical")
    assert_close(interpolate(first, turned, 0.5).embeddings_ND[2], -first.embeddings_ND[2] / 2)


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("set_duration", lambda s: s.set_duration([0], 0.5)),
        ("shrink", lambda s: s.shrink([0], 0.5)),
        ("shrink", lambda s: s.scale(0.5)),
        ("shift", lambda s: s.shift(1)),
        ("densify", lambda s: s.densify(2)),
    ],
)
def test_samples_with_fixed_positions_are_not_moved(name, operation):
    with pytest.raises(ValueError, match=f"{name} moves samples.*fixed positions.*before densify"):
        operation(Sentence([1, 2]).densify(2, positions="equal"))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Sentence([1, 2], integration_start=NAN),
        lambda: Sentence([1, 2]).shift(INF),
        lambda: Sentence([1, 2], positions=[1, NAN]),
    ],
    ids=["start", "shift", "positions"],
)
def test_times_that_are_not_finite_are_refused(make):
    assert_refused("nan|inf", make)


def test_a_text_span_selects_its_tokens():
    span = TextSpan(3, 4, True)
    assert Sentence([0] * 6).set_duration(span, 0.5).durations_N.tolist() == [1, 1, 1, 0.5, 1, 1]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Sentence([]), "at least one sample"),
        (lambda: interpolate(embedded(width=6), embedded(width=5), 0.5), "width|6.*5"),
    ],
    ids=["no ids", "widths"],
)
def test_the_message_names_the_value_or_the_remedy(make, words):
    assert_refused(words, make)
