"""Which layers make a fold diverge: every memory is held against a loop with the reference's layers in float64."""

import pytest
import torch

from condense import CondenseForCausalLM, reference
from condense.eval.models import EvaluatedModel
from condense.eval.runner import measure
from condense.eval.tasks.fold_layers import REMEDIES
from condense.eval.tasks.fold_stability import Arm, FoldStability, label_of
from condense.eval.tasks.options import FoldStabilityOptions
from tests.condense.models import random_ids, tiny_config, tiny_model

from ...refusals import assert_refused

LENGTH, SEGMENTS, SINK = 5, 4, 7
TOLERANCE = 1e-5  # a model's norms are in float32


def task_of(model, **options):
    fields = {"models": [], "data": [], "segment_length": LENGTH, "num_segments": SEGMENTS, "sink_token_id": SINK}
    evaluated = EvaluatedModel("tiny", "", model, None)
    texts = {"tiny": random_ids(1, LENGTH * SEGMENTS + 1)[0]}
    return FoldStability(FoldStabilityOptions(**(fields | options)), [evaluated], texts)


@pytest.fixture(scope="module")
def model():
    return tiny_model(segment_length=64, sink_token_id=None)


@pytest.fixture(scope="module")
def records(model):
    return dict(measure(task_of(model, shares=("0.3", "1:0:0.5"))))


def length_of(x_D):
    return sum(float(x) ** 2 for x in x_D) ** 0.5


def rescaled(xs, ys):
    return [y * (length_of(x) / length_of(y)) for x, y in zip(xs, ys, strict=True)]


def limited(xs, ys):
    ratios = [min(1.0, length_of(x) / (10 * length_of(y - x))) for x, y in zip(xs, ys, strict=True)]
    return [x + ratio * (y - x) for x, y, ratio in zip(xs, ys, ratios, strict=True)]


def centred(xs, ys):
    mean = sum(y - x for x, y in zip(xs, ys, strict=True)) / len(xs)
    return [y - mean for y in ys]


def clipped(xs, ys):
    found = torch.stack(list(ys)).clone()
    for d in range(found.shape[1]):
        values = sorted(abs(float(x[d])) for x in xs)
        place = 0.99 * (len(values) - 1)
        low = int(place)
        high = min(low + 1, len(values) - 1)
        most = values[low] + (place - low) * (values[high] - values[low])
        for t in range(len(xs)):
            found[t, d] = min(most, max(-most, float(found[t, d])))
    return list(found)


HAND_WORKED = {"rescaled": rescaled, "limited": limited, "centred": centred, "clipped": clipped}


def loop(model, remember, noted=None):
    """Returns the mean loss of each segment; `remember(layer, xs, ys)` is a segment's memory."""
    weights = {name: weight.double() for name, weight in model.state_dict().items()}
    config = tiny_config(segment_length=LENGTH, sink_token_id=SINK)
    count = config.num_hidden_layers
    layers = [
        {k.split(f"model.layers.{n}.", 1)[1]: v for k, v in weights.items() if f"model.layers.{n}." in k}
        for n in range(count)
    ]
    sinks = reference.sink_inputs(weights, layers, config)
    ids = random_ids(1, LENGTH * SEGMENTS + 1)[0]
    memories, losses = [None] * count, []
    for segment in range(SEGMENTS):
        own = ids[segment * LENGTH : (segment + 1) * LENGTH + 1]
        x = weights["model.embed_tokens.weight"][own[:-1]]
        for n, w in enumerate(layers):
            context = x if memories[n] is None else torch.cat([sinks[n], memories[n][1:], x])
            ends = torch.arange(len(context), dtype=torch.float64)
            y = reference.decoder_layer(w, config, x, context, ends, torch.ones_like(ends))
            memories[n] = torch.stack(remember(n, list(x), list(y)))
            if noted is not None:
                noted[n, segment] = (w, x, context, ends, memories[n])
            x = y
        hidden = reference.rms_norm(x, weights["model.norm.weight"], config)
        log_p = (hidden @ weights["lm_head.weight"].T).log_softmax(-1)
        losses.append(-sum(log_p[t, own[t + 1]] for t in range(LENGTH)).item() / LENGTH)
    return losses


def share(shares):
    def remember(layer, xs, ys):
        a = shares[layer] if isinstance(shares, list) else shares
        return [x + a * (y - x) for x, y in zip(xs, ys, strict=True)]

    return remember


@pytest.mark.parametrize(
    ("kind", "value", "shares"),
    [("share", "0", 0.0), ("share", "0.3", 0.3), ("share", "1", 1.0), ("share", "1:0:0.5", [1.0, 0.0, 0.5])]
    + [("layer", str(n), [float(n == one) for one in range(3)]) for n in range(3)],
)
def test_a_share_is_that_of_the_loop(model, records, kind, value, shares):
    found = records[Arm("tiny", kind, value)]["losses"]
    assert found == pytest.approx(loop(model, share(shares)), abs=TOLERANCE)


@pytest.mark.parametrize("remedy", REMEDIES)
def test_a_remedy_is_that_of_the_loop(model, records, remedy):
    def remember(_, xs, ys):
        return HAND_WORKED[remedy](xs, ys)

    expected = loop(model, remember)
    assert records[Arm("tiny", "remedy", remedy)]["losses"] == pytest.approx(expected, abs=TOLERANCE)
    if remedy != "rescaled":
        assert expected != pytest.approx(loop(model, share(1.0)), abs=100 * TOLERANCE)


def test_the_length_of_a_remembered_state_says_nothing(model, records):
    """Layers norm what they remember: only the epsilon of the norm tells lengths apart."""
    expected = records[Arm("tiny", "share", "1")]["losses"]
    assert records[Arm("tiny", "remedy", "rescaled")]["losses"] == pytest.approx(expected, abs=1e-4)


def test_traces_are_those_of_the_loop(model, records):
    noted = {}
    loop(model, share(1.0), noted)
    config = tiny_config(segment_length=LENGTH, sink_token_id=SINK)
    traces = {(one["layer"], one["segment"]): one for one in records[Arm("tiny", "share", "1")]["traces"]}
    assert set(traces) == {(n, s) for n in range(3) for s in range(SEGMENTS - 1)}  # the last is not remembered
    for key, one in traces.items():
        w, x, context, ends, memory = noted[key]
        norms = sorted(length_of(state) for state in memory)
        cosines = [float(a @ b) / (length_of(a) * length_of(b)) for a, b in zip(memory[1:], memory[:-1], strict=True)]
        assert one["norm"] == pytest.approx(norms[(LENGTH - 1) // 2], rel=1e-4)
        assert one["alike"] == pytest.approx(sum(cosines) / len(cosines), abs=1e-4)
        first, memory_mass = attention(w, config, x, context, ends)
        assert one["on_first"] == pytest.approx(first, abs=1e-4)
        assert one["on_memory"] == pytest.approx(memory_mass, abs=1e-4)


def attention(w, config, x, context, ends):
    """Returns the mean attention on the first row of the memory, and on its other rows."""
    num_memory = len(context) - len(x)
    if not num_memory:
        return 0.0, 0.0
    normed_x, normed = (reference.rms_norm(part, w["input_layernorm.weight"], config) for part in (x, context))
    q = reference.linear(w, "self_attn.q_proj", normed_x).unflatten(-1, (-1, config.head_dim))
    k = reference.linear(w, "self_attn.k_proj", normed).unflatten(-1, (-1, config.head_dim))
    first, rest = [], []
    for head in range(config.num_attention_heads):
        keys = reference.rotate(k[:, head // 2], ends, config)
        queries = reference.rotate(q[:, head], ends[num_memory:], config)
        for t in range(len(x)):
            weights = (keys[: num_memory + t + 1] @ queries[t] / config.head_dim**0.5).softmax(-1)
            first.append(weights[0].item())
            rest.append(weights[1:num_memory].sum().item())
    return sum(first) / len(first), sum(rest) / len(rest)


def test_norms_of_the_sink_are_those_of_a_lone_token(model, records):
    states = model(torch.tensor([[SINK]]), output_hidden_states=True).hidden_states
    found = records[Arm("tiny", "share", "1")]["sink_norms"]
    assert found[:-1] == pytest.approx([state.norm().item() for state in states[1:-1]], rel=1e-5)  # the last is normed


def test_results_say_what_diverges(model):
    task = task_of(model, shares=())
    losses = {"0": [3.0, 2.0, 2.0, 2.0], "1": [3.0, 2.5, 3.0, 3.5]}
    measured = [
        (item, {"losses": losses.get(item.value, losses["0"]), "traces": [], "sink_norms": []}) for item in task.items()
    ]
    arms = {(arm["kind"], arm["value"]): arm for arm in task.summarise(measured)["arms"]}
    assert arms["share", "1"]["excess"] == pytest.approx(1.0)
    assert arms["share", "1"]["late"] == pytest.approx(1.5)
    assert [key for key, arm in arms.items() if arm["diverges"]] == [("share", "1"), ("layer", "1")]


def test_labels_name_the_layers_of_other_shares():
    assert label_of("share", "0.2") == "share 0.2"
    assert label_of("share", "1:1:0:1:0.5") == "share 1, 0 in layer 2, 0.5 in layer 4"
    assert label_of("share", "1:0:1:0") == "share 1, 0 in layer 1, 3"


def test_shares_for_other_layers_are_refused(model):
    assert_refused("memory_share", task_of, model, shares=("1:0",))


def test_the_model_is_left_as_it_was(model, records):
    assert not any(module._forward_hooks for module in model.modules())
    assert isinstance(model, CondenseForCausalLM) and model.config.memory_share == 1.0
