"""The gain from text before a segment is taken on the same tokens throughout, from the model's own loss."""

import csv
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from condense import CondenseForCausalLM, to_stock
from condense.eval.models import EvaluatedModel, load_evaluated
from condense.eval.results_store import ResultsStore
from condense.eval.runner import measure
from condense.eval.tasks import windows
from condense.eval.tasks.options import CURVES, PerplexityOptions
from condense.eval.tasks.perplexity import Perplexity, curve_models
from condense.state.cache_argument import CACHE
from tests.condense.models import random_ids, tiny_model

from ...refusals import assert_refused
from ..measuring import command

SEGMENTS, LENGTH = 4, 5


def text(num_tokens, seed=0):
    return random_ids(1, num_tokens, seed)[0]


def naive(model, texts, num_segments, length):
    """Returns losses [J, S, l], each by a whole forward pass over the segment and those before it, without a cache."""
    found = []
    for ids in texts:
        for j in range(num_segments - 1, (len(ids) - 1) // length):
            by_before = []
            for before in range(num_segments):
                part = ids[(j - before) * length : (j + 1) * length + 1]
                with torch.no_grad():
                    log_p = model(part[None, :-1], use_cache=False).logits[0].double().log_softmax(-1)
                by_before.append([-log_p[t, part[t + 1]].item() for t in range(before * length, len(part) - 1)])
            found.append(by_before)
    return np.array(found)


def curves_of(evaluated, texts, store=None, **options):
    task = Perplexity(PerplexityOptions(models=[], data=[], **options), [evaluated], {evaluated.name: texts})
    return task.summarise(measure(task, store))["curves"]


@pytest.fixture(scope="module")
def measured():
    """Measures texts of 33, 12 and 27 tokens: 6, 2 (too short) and 5 segments; a batch ends amid the texts."""
    model = tiny_model(segment_length=LENGTH)
    texts = [text(33, 1), text(12, 2), text(27, 3)]
    curves = curves_of(EvaluatedModel("tiny", "", model, None), texts, num_segments=SEGMENTS, batch_size=4)
    return model, texts, {curve["curve"]: curve for curve in curves}


def models_of(model):
    other = tiny_model(segment_length=LENGTH, memory_source="layer_input")
    other.load_state_dict(model.state_dict())
    return {"folded": model, "layer_input": other, "full_attention": to_stock(model)}


@pytest.mark.parametrize("curve", CURVES)
def test_against_whole_passes_one_by_one(measured, curve):
    model, texts, curves = measured
    expected_JSl = naive(models_of(model)[curve], texts, SEGMENTS, LENGTH)
    assert len(expected_JSl) == 3 + 2  # segments 3, 4, 5 of the first text and 3, 4 of the last
    points = curves[curve]["points"]
    assert [point["segments_before"] for point in points] == [0, 1, 2, 3]
    assert all(point["segments"] == 5 for point in points)
    np.testing.assert_allclose([point["loss"] for point in points], expected_JSl.mean((0, 2)), rtol=1e-9)
    np.testing.assert_allclose(curves[curve]["loss"], expected_JSl.mean(0), rtol=1e-9)
    losses_JS = expected_JSl.mean(2)
    gained_JS = losses_JS[:, :1] - losses_JS
    np.testing.assert_allclose([point["gained"] for point in points], gained_JS.mean(0), atol=1e-12)
    # Of few segments the bootstrap's interval lies between the worst and the best, and around the mean.
    for point, column in zip(points, gained_JS.T, strict=True):
        low, mean, high = point["gained_low"], point["gained"], point["gained_high"]
        assert column.min() - 1e-9 <= low <= mean + 1e-12 and mean <= high + 1e-12 <= column.max() + 1e-9
    assert points[2]["gained_low"] < points[2]["gained_high"]


def test_the_curves_part_where_they_must(measured):
    """All begin at the memory cut off; one segment back, Transformer-XL's memory is full attention; then none agree."""
    curves = measured[2]
    loss = {name: [point["loss"] for point in curve["points"]] for name, curve in curves.items()}
    cut_off = loss["cut_off"][0]
    assert list(curves) == ["cut_off", *CURVES] and len(loss["cut_off"]) == 1
    # A stock Llama has norms and rotary tables in float32.
    assert all(loss[name][0] == pytest.approx(cut_off, rel=1e-6) for name in CURVES)
    assert loss["layer_input"][1] == pytest.approx(loss["full_attention"][1], rel=1e-6)
    assert abs(loss["folded"][1] - loss["full_attention"][1]) > 1e-3
    assert len({round(loss[name][2], 4) for name in CURVES}) == 3


@pytest.mark.parametrize("kind", ["folded", "stock"])
def test_a_window_has_the_models_own_loss(kind):
    """By its `labels`, in one pass over whole windows, the last target included."""
    model = tiny_model(segment_length=LENGTH)
    model = to_stock(model) if kind == "stock" else model
    ids = random_ids(3, SEGMENTS * LENGTH + 1)
    losses = windows.segment_losses(model, ids, LENGTH)
    assert losses.shape == (3, SEGMENTS, LENGTH) and losses.dtype == np.float64
    with torch.no_grad():
        own = model(input_ids=ids, labels=ids, use_cache=False).loss.item()
    assert losses.mean() == pytest.approx(own, rel=1e-6)  # a stock Llama takes its loss in float32


def test_cut_off_is_every_segment_alone(measured):
    model, texts, curves = measured
    segments = [ids[j * LENGTH : (j + 1) * LENGTH + 1] for ids in texts for j in range(3, (len(ids) - 1) // LENGTH)]
    alone = windows.segment_losses(model, torch.stack(segments), LENGTH)[:, 0]
    np.testing.assert_allclose(curves["cut_off"]["loss"][0], alone.mean(0), rtol=1e-12)


@pytest.mark.parametrize("own", ["layer_output", "layer_input"])
def test_curves_differ_in_what_is_attended_to_alone(own):
    model = tiny_model(segment_length=LENGTH, memory_source=own, attn_implementation="eager")
    models = curve_models(EvaluatedModel("tiny", "", model, None), CURVES)
    assert models["folded" if own == "layer_output" else "layer_input"] is model and model.config.memory_source == own
    sources = {name: getattr(one.config, "memory_source", None) for name, one in models.items()}
    assert sources == {"folded": "layer_output", "layer_input": "layer_input", "full_attention": None}
    for one in models.values():
        assert one.config._attn_implementation == "eager" and not one.training
        for name, parameter in model.named_parameters():  # shared, not copied
            assert one.get_parameter(name).data_ptr() == parameter.data_ptr()


def test_no_logits_of_more_than_a_segment():
    model, seen = tiny_model(segment_length=LENGTH), []
    model.lm_head.register_forward_hook(lambda module, inputs, logits: seen.append(tuple(logits.shape[:2])))
    windows.segment_losses(model, random_ids(2, 4 * LENGTH + 1), LENGTH)
    assert seen == [(2, LENGTH)] * 4


class Recaller:
    """Knows what followed the tokens two segments before, if it has read them; else all tokens are alike to it."""

    device, vocabulary = torch.device("cpu"), 32
    config = SimpleNamespace(model_type="recaller")

    def __call__(self, ids, use_cache=True, **options):
        read = options.get(CACHE) or []
        logits = torch.zeros(*ids.shape, self.vocabulary)
        if len(read) >= 2:
            followed = torch.cat([read[-2][:, 1:], read[-1][:, :1]], dim=1)
            logits.scatter_(2, followed[:, :, None], 100.0)
        return type("Output", (), {"logits": logits, CACHE: [*read, ids]})


def test_a_memory_that_matters_by_construction():
    """A text that repeats itself every two segments: the first segment before buys nothing, the second everything."""
    ids = torch.arange(2 * LENGTH).repeat(5)[: 8 * LENGTH + 1]
    recaller = EvaluatedModel("recaller", "", Recaller(), None)
    _, curve = curves_of(recaller, [ids], num_segments=4, segment_length=LENGTH, curves=["full_attention"])
    evenly = np.log(Recaller.vocabulary)
    assert [point["loss"] for point in curve["points"]] == pytest.approx([evenly, evenly, 0, 0], abs=1e-4)
    assert [point["gained"] for point in curve["points"]] == pytest.approx([0, 0, evenly, evenly], abs=1e-4)
    assert curve["points"][2]["gained_low"] == pytest.approx(evenly, abs=1e-4)


def test_the_command_on_folded_and_stock(folders, tmp_path):
    arguments = [
        "eval",
        "perplexity",
        "--model",
        folders / "folded",
        "--model",
        folders / "llama",
        "--segment-length",
        8,
    ]
    arguments += ["--data", folders / "text.txt", "--segments", 3, "--tokens", 150, "--output", tmp_path]
    shown = command(*arguments)
    results = json.loads((tmp_path / "perplexity.json").read_text())
    curves = [(curve["model"], curve["curve"]) for curve in results["curves"]]
    assert curves == [("folded", name) for name in ["cut_off", *CURVES]] + [
        ("llama", "cut_off"), ("llama", "full_attention")
    ]  # fmt: skip
    assert results["texts"]["llama"]["tokens"] == 150
    of = dict(zip(curves, results["curves"], strict=True))
    # The folded checkpoint has the stock one's weights: unfolded it gives the stock one's curve.
    np.testing.assert_allclose(of["folded", "full_attention"]["loss"], of["llama", "full_attention"]["loss"], rtol=1e-6)
    rows = list(csv.DictReader((tmp_path / "perplexity.csv").open()))
    assert len(rows) == 1 + 3 * 3 + 1 + 3
    assert float(rows[3]["loss"]) == of["folded", "folded"]["points"][2]["loss"]
    assert all((tmp_path / f"perplexity.{kind}").stat().st_size > 5_000 for kind in ("png", "svg"))
    (table,) = Perplexity.tables(results)
    assert str(table) in shown and len(table.rows) == 1 + 3 * 2 + 1 + 2
    assert f"{of['folded', 'layer_input']['points'][2]['gained']:+.4f}" in shown


@pytest.mark.parametrize("sink", [None, 7])
def test_a_share_of_the_layers_output_and_a_sink_are_named(tmp_path, sink):
    """The memory of a model with `memory_share` is not the layer's output alone."""
    model = tiny_model(segment_length=LENGTH, memory_share=0.25, sink_token_id=sink)
    evaluated = EvaluatedModel("tiny", "", model, None)
    options = PerplexityOptions(models=[], data=[], num_segments=2)
    task = Perplexity(options, [evaluated], {"tiny": [text(16)]})
    results = task.results(task.settings(), measure(task))
    labels = [row[1] for row in Perplexity.tables(results)[0].rows]
    more = "" if sink is None else ", sink_token_id=7"
    assert labels == [
        "memory cut off", f"folded: memory_share=0.25{more}", f"Transformer-XL: the layer's input{more}",
        "full attention",
    ]  # fmt: skip


def test_records_hold_what_the_numbers_are_made_of(measured, tmp_path):
    model, texts, curves = measured
    store = ResultsStore(tmp_path / "records.jsonl", {})
    curves_of(EvaluatedModel("tiny", "", model, None), texts, store, num_segments=SEGMENTS, batch_size=4)
    kept = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()[1:]]
    sums = sum(np.array(line["record"]["sums"]) for line in kept if line["key"]["curve"] == "folded")
    np.testing.assert_allclose(sums / 5, curves["folded"]["loss"], rtol=1e-12)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"--segments": "50"}, r"the longest of 1 texts has 229 tokens; 50 segments of 8 need 401"),
        ({"--tokens": "20"}, "has 20 tokens; 3 segments of 8 need 25"),
        ({"--data": "EMPTY"}, "empty document"),
        ({"--data": "NONE"}, "holds no document"),
        ({"--data": "nowhere.txt"}, "nowhere.txt"),
        ({"--model": "nowhere"}, "there is no folder 'nowhere'"),
        ({"--curves": "xl"}, r"curves \['xl'\] are not known"),
        ({"--model": "LLAMA", "--segment-length": "8", "--curves": "folded"}, "llama has none of the curves"),
    ],
)
def test_errors_are_named(folders, tmp_path, changed, words):
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "none.jsonl").touch()
    named = {"EMPTY": tmp_path / "empty.txt", "NONE": tmp_path / "none.jsonl", "LLAMA": folders / "llama"}
    options = {"--model": str(folders / "folded"), "--data": str(folders / "text.txt"), "--segments": "3"}
    options |= {name: str(named.get(value, value)) for name, value in changed.items()} | {"--output": tmp_path / "out"}
    assert_refused(words, command, "eval", "perplexity", *(part for pair in options.items() for part in pair))


def test_on_a_real_model(stories, novel):
    """A Llama that was never folded still gains from the segment before, and saturates soon."""
    tokenizer = load_evaluated(str(stories)).tokenizer
    folded = CondenseForCausalLM.from_pretrained(stories, segment_length=64).eval()
    texts = windows.read_texts(tokenizer, [str(novel)], 4_000)
    evaluated = EvaluatedModel("stories", str(stories), folded, tokenizer)
    points = curves_of(evaluated, texts, num_segments=3, curves=["folded"], batch_size=16)[1]["points"]
    assert points[0]["segments"] == 60 and points[1]["gained_low"] > 0.05


def test_stock_models_of_another_kind(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=16, n_layer=2, n_head=2, n_positions=64)).eval()
    texts = [text(31)]
    curves = curves_of(EvaluatedModel("gpt2", "", model, None), texts, num_segments=3, segment_length=5)
    assert [curve["curve"] for curve in curves] == ["cut_off", "full_attention"]
    np.testing.assert_allclose(curves[1]["loss"], naive(model, texts, 3, 5).mean(0), rtol=1e-5)
