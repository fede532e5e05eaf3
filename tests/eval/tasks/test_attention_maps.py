"""Recomputed scores are those that the model attends with, and the masses and maps are made of them."""

import csv
import hashlib
import json
import math
from itertools import product

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen3Config,
)

from condense import CondenseForCausalLM, reference, to_stock
from condense.eval.models import EvaluatedModel, load_evaluated
from condense.eval.tasks import evaluate
from condense.eval.tasks.attention_maps import AttentionMaps
from condense.eval.tasks.attention_scores import CELLS, mass, queries_and_keys, scaled_map, scores, visible
from condense.eval.tasks.options import AttentionOptions
from condense.eval.tasks.windows import read_texts
from tests.condense.models import MEMORIES, random_ids, tiny_model, weights

from ...refusals import assert_refused
from ..measuring import command

LENGTH, SEGMENTS = 5, (1, 3)


def reference_scores(model, ids_N):
    """Returns (layer, segment) to [H, T, 2T]: each head by itself, in float64, from what the reference's layers see."""
    config, found, decoder_layer = model.config, {}, reference.decoder_layer
    groups, width = config.num_attention_heads // config.num_key_value_heads, config.head_dim

    def noting(layer, config, x_TD, context_KD, positions_K, durations_K):
        if len(x_TD) == 1:  # the sink alone
            return decoder_layer(layer, config, x_TD, context_KD, positions_K, durations_K)
        segment, n = divmod(len(found), config.num_hidden_layers)
        norm = layer["input_layernorm.weight"]
        query, key = (
            reference.linear(layer, f"self_attn.{name}", reference.rms_norm(one, norm, config))
            for name, one in (("q_proj", x_TD), ("k_proj", context_KD))
        )
        queries = [reference.rotate(part, positions_K[-LENGTH:], config) for part in query.split(width, 1)]
        keys = [reference.rotate(part, positions_K, config) for part in key.split(width, 1)]
        scored = [one @ keys[h // groups].T / math.sqrt(width) for h, one in enumerate(queries)]
        found[n, segment] = torch.stack(scored)
        return decoder_layer(layer, config, x_TD, context_KD, positions_K, durations_K)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "decoder_layer", noting)
        reference.reference_logits(weights(model), config, ids_N)
    return found


@pytest.mark.parametrize("memory", MEMORIES.values(), ids=MEMORIES)
def test_folded_scores_by_the_equations(memory):
    model, ids = tiny_model(segment_length=LENGTH, **memory), random_ids(1, 4 * LENGTH)[0]
    found = queries_and_keys(model, ids, LENGTH, range(3), SEGMENTS)
    expected = reference_scores(model, ids)
    assert set(found) == {(layer, segment) for layer in range(3) for segment in SEGMENTS}
    for index in found:
        # Positions are counted within memory and segment here, and in the whole text there.
        torch.testing.assert_close(scores(*found[index]), expected[index], rtol=0, atol=1e-10)


def test_folded_scores_give_what_the_layer_puts_out():
    """softmax(masked scores) @ values @ W_O, with the values of the layer, is the layer's attention."""
    model, ids = tiny_model(segment_length=LENGTH, attention_bias=True), random_ids(1, 4 * LENGTH)[0]
    seen, module = {}, model.model.layers[1].self_attn

    def note(module, arguments, outputs):
        (hidden, memory, metadata), (output, _) = arguments, outputs
        if memory is not None:
            value = module.v_proj(hidden).unflatten(-1, (-1, 8)).transpose(1, 2)
            seen[metadata.chunk.segments[0]] = torch.cat([memory.value_RGKE, value], dim=2)[0], output[0]

    module.register_forward_hook(note)
    found = queries_and_keys(model, ids, LENGTH, [1], SEGMENTS)
    for segment in SEGMENTS:
        value_GKE, output_TD = seen[segment]
        score_HTK = scores(*found[1, segment]).masked_fill(~visible(LENGTH, 2 * LENGTH), -math.inf)
        mixed_HTE = score_HTK.softmax(-1) @ value_GKE.repeat_interleave(2, dim=0)
        with torch.no_grad():
            torch.testing.assert_close(module.o_proj(mixed_HTE.transpose(0, 1).flatten(1)), output_TD)


def test_stock_scores_against_its_own_weights():
    folded = tiny_model(segment_length=LENGTH)
    model, ids = to_stock(folded), random_ids(1, 5 * LENGTH)[0]
    found = queries_and_keys(model, ids, LENGTH, range(3), SEGMENTS)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        own = model(ids[None, : 4 * LENGTH], output_attentions=True).attentions
    for (layer, segment), one in found.items():
        first, end = segment * LENGTH, (segment + 1) * LENGTH
        score_HTK = scores(*one)
        weight_HTK = score_HTK.masked_fill(~visible(LENGTH, end), -math.inf).softmax(-1)
        expected_HTK = own[layer][0, :, first:end, :end]
        # transformers takes this softmax in float32
        torch.testing.assert_close(weight_HTK, expected_HTK, rtol=1e-4, atol=1e-6)
        masses = mass(score_HTK)
        before_HT = expected_HTK[:, :, first - LENGTH : first].sum(-1)
        assert masses["on_previous"] == pytest.approx(before_HT.mean().item(), rel=1e-4)
        earlier = expected_HTK[:, :, : first - LENGTH].sum(-1).mean().item()
        assert masses["on_earlier"] == pytest.approx(earlier, abs=1e-5)
        np.testing.assert_allclose(masses["by_head"], before_HT.mean(1), rtol=1e-4)
        np.testing.assert_allclose(masses["by_position"], before_HT.mean(0), rtol=1e-4)
        assert (masses["on_earlier"] > 0) == (segment > 1)


def test_hooks_leave_the_model_as_it_was():
    model, ids = tiny_model(segment_length=LENGTH), random_ids(1, 4 * LENGTH)[0]
    queries_and_keys(model, ids, LENGTH, range(3), SEGMENTS)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_masses_by_hand():
    """Two tokens a segment, six keys: e^score is 1, except 3 for the first key of the segment before."""
    score_HTK = torch.zeros(1, 2, 6)
    score_HTK[:, :, 2] = math.log(3)
    masses = mass(score_HTK)
    # The first query sees 5 keys of weights 1 1 | 3 1 | 1, the second one more.
    assert masses["by_position"] == pytest.approx([4 / 7, 4 / 8])
    assert masses["on_previous"] == pytest.approx((4 / 7 + 4 / 8) / 2)
    assert masses["on_earlier"] == pytest.approx((2 / 7 + 2 / 8) / 2)
    assert masses["uniform"] == pytest.approx([2 / 5, 2 / 6])
    assert masses["on_first"] == pytest.approx((1 / 7 + 1 / 8) / 2)


def test_masses_with_a_sink_by_hand():
    """It is the first of four keys, and no part of the segment before."""
    score_HTK = torch.zeros(1, 2, 4)
    score_HTK[:, :, 0], score_HTK[:, :, 1] = math.log(5), math.log(3)
    masses = mass(score_HTK, has_sink=True)
    # Weights 5 | 3 | 1 1.
    assert masses["on_first"] == pytest.approx((5 / 9 + 5 / 10) / 2)
    assert masses["by_position"] == pytest.approx([3 / 9, 3 / 10]) and masses["on_earlier"] == 0
    assert masses["uniform"] == pytest.approx([1 / 3, 1 / 4])


def test_maps_by_hand():
    hidden = 99.0  # beyond all others: it must not count
    score_Tk = torch.tensor([[1.0, 2.0, 5.0, hidden], [3.0, -3.0, 0.0, 1.0]])
    assert scaled_map(score_Tk) == {"block": 1, "scores": [[0.5, 0.625, 1.0, None], [0.75, 0.0, 0.375, 0.5]]}
    assert scaled_map(torch.full((2, 4), 7.0))["scores"] == [[0, 0, 0, None], [0, 0, 0, 0]]
    with_sink = scaled_map(score_Tk, has_sink=True)
    assert with_sink == {
        "block": 1, "sink": [0.5, 0.75], "scores": [[None, 0.625, 1.0, None], [None, 0.0, 0.375, 0.5]],
    }  # fmt: skip


def test_maps_of_long_segments_are_block_means():
    length = 2 * CELLS + 1  # blocks of 3, the last of each half of 1
    score = torch.randn(length, 2 * length, generator=torch.Generator().manual_seed(0)).double()
    one = scaled_map(score)
    cells = np.array(one["scores"], dtype=float)
    rows = -(-length // 3)
    assert one["block"] == 3 and cells.shape == (rows, 2 * rows)
    seen = visible(length, 2 * length).numpy()
    scaled = np.where(seen, score, np.nan)
    scaled = (scaled - np.nanmin(scaled)) / (np.nanmax(scaled) - np.nanmin(scaled))
    assert cells[4, 7] == pytest.approx(scaled[12:15, 21:24].mean(), abs=1e-4)
    border = scaled[-2:, length : length + 3]  # the first block of the current half, and the last rows
    assert length % 3 == 2 and cells[-1, rows] == pytest.approx(border.mean(), abs=1e-4)
    assert cells[-1, -1] == pytest.approx(np.nanmean(scaled[-2:, -2:]), abs=1e-4)
    assert np.isnan(cells[0, -1])
    sink = scaled_map(score, has_sink=True)["sink"]
    assert len(sink) == rows and sink[-1] == pytest.approx(scaled[-2:, 0].mean(), abs=1e-4)


def record_of(model, ids, name="tiny", **options):
    evaluated = EvaluatedModel(name, "", model, None)
    task = AttentionMaps(AttentionOptions(models=[], text="", **options), [evaluated], {name: [ids]})
    return task.measure(evaluated)


@pytest.mark.parametrize("sink", [None, 7])
def test_measured_records(sink):
    model, ids = tiny_model(segment_length=LENGTH, sink_token_id=sink), random_ids(1, 99)[0]
    found = record_of(model, ids, layers=[0, 2], segments=SEGMENTS, heads=[3])
    positions_K = [(one["layer"], one["segment"]) for one in found["masses"]]
    assert positions_K == list(product(range(3), SEGMENTS))
    expected = reference_scores(model, ids[: 4 * LENGTH])
    maps = [(one["layer"], one["segment"], one["head"]) for one in found["maps"]]
    assert maps == list(product((0, 2), SEGMENTS, (None, 3)))
    for one in found["maps"]:
        score_HTK = expected[one["layer"], one["segment"]]
        wanted = scaled_map(score_HTK.mean(0) if one["head"] is None else score_HTK[3], sink is not None)
        np.testing.assert_allclose(np.array(one["scores"], float), np.array(wanted["scores"], float), atol=2e-4)
        assert one.get("sink") == pytest.approx(wanted.get("sink"), abs=2e-4)
    for one in found["masses"]:
        score_HTK = expected[one["layer"], one["segment"]].masked_fill(~visible(LENGTH, 2 * LENGTH), -math.inf)
        first = 0 if sink is None else 1
        weight_HTK = score_HTK.softmax(-1)
        assert one["on_first"] == pytest.approx(weight_HTK[:, :, 0].mean().item())
        assert one["on_previous"] == pytest.approx(weight_HTK[:, :, first:LENGTH].sum(-1).mean().item())
        assert 0 < one["on_previous"] < 1 and one["on_earlier"] == 0
        for part in ("by_head", "by_position"):
            assert one["on_previous"] == pytest.approx(np.mean(one[part]))


def test_stock_maps_are_of_the_same_pair():
    """Layer 0 sees the same embeddings, folded or not, if the memory is the layer's input."""
    folded, ids = tiny_model(segment_length=LENGTH, memory_source="layer_input"), random_ids(1, 99)[0]
    options = {"layers": [0], "segments": [3], "segment_length": LENGTH}
    maps = [record_of(model, ids, **options)["maps"][0] for model in (folded, to_stock(folded))]
    ours, stock = (np.array(one["scores"], float) for one in maps)
    np.testing.assert_allclose(ours, stock, atol=2e-4, equal_nan=True)


def test_the_first_token_of_a_stock_model_by_its_own_attention():
    stock, ids = to_stock(tiny_model(torch.float32)), random_ids(1, 4 * LENGTH)[0]
    found = record_of(stock, ids, segments=SEGMENTS, segment_length=LENGTH)["masses"]
    stock.config._attn_implementation = "eager"
    with torch.no_grad():
        attentions = stock(ids[None], output_attentions=True).attentions
    for one in found:
        queries = slice(one["segment"] * LENGTH, (one["segment"] + 1) * LENGTH)
        expected = attentions[one["layer"]][0, :, queries, 0].mean().item()
        assert one["on_first"] == pytest.approx(expected, rel=1e-5)


def test_the_sink_has_its_column_in_tables_and_pictures(tmp_path):
    with_sink, plain = (tiny_model(segment_length=LENGTH, sink_token_id=sink) for sink in (7, None))
    models = [EvaluatedModel(name, "", one, None) for name, one in (("with", with_sink), ("plain", plain))]
    models.append(EvaluatedModel("stock", "", to_stock(plain), None))
    texts = {model.name: [random_ids(1, 99)[0]] for model in models}
    task = AttentionMaps(AttentionOptions(models=[], text="", segments=[2], segment_length=LENGTH), models, texts)
    results = task.results(task.settings(), [(model, task.measure(model)) for model in models])
    columns = [table.columns[1] for table in AttentionMaps.tables(results)]
    assert columns == [
        f"segment 2: % on {first}" for first in ("the sink", "the memory's first token", "the first token")
    ]
    assert [model.get("sink_token_id") for model in results["models"]] == [7, None, None]
    AttentionMaps.draw(results, tmp_path / "attention")
    assert (tmp_path / "attention.svg").read_text().count("<!-- sink -->") == 3  # of one model, in each layer
    for one in results["masses"]:  # as an earlier version has stored them
        del one["on_first"]
    assert AttentionMaps.tables(results)[0].columns == ["layer", "segment 2: % on memory"]
    AttentionMaps.draw(results, tmp_path / "earlier")


def test_the_command_on_folded_and_stock(folders, tmp_path):
    arguments = ["--model", folders / "folded", "--model", folders / "llama", "--segment-length", 8, "--layers", "0,2"]
    arguments += ["--prompt-file", folders / "texts.jsonl", "--segments", "2,5", "--heads", "1", "--output", tmp_path]
    shown = command("attention", *arguments)
    results = json.loads((tmp_path / "attention.json").read_text())
    assert len(results["masses"]) == 2 * 3 * 2 and len(results["maps"]) == 2 * 2 * 2 * 2
    for one in results["maps"]:
        cells = np.array(one["scores"], dtype=float)
        assert cells.shape == (8, 16) and np.nanmin(cells) == 0 and np.nanmax(cells) == 1
        assert (np.isnan(cells) == ~visible(8, 16).numpy()).all()
    rows = list(csv.DictReader((tmp_path / "attention.csv").open()))
    assert list(rows[0]) == ["model", "layer", "segment", "on_first", "on_previous", "on_earlier"]
    assert [float(row["on_previous"]) for row in rows] == [one["on_previous"] for one in results["masses"]]
    assert {float(row["on_earlier"]) > 0 for row in rows if row["model"] == "llama"} == {True}
    for name in ("attention", "attention_mass"):
        assert all((tmp_path / f"{name}.{kind}").stat().st_size > 5_000 for kind in ("png", "svg"))
    first, second = AttentionMaps.tables(results)
    assert str(first) in shown and str(second) in shown
    kinds = ("the memory's first token", "memory")
    assert first.columns == ["layer", *(f"segment {segment}: % on {kind}" for segment in (2, 5) for kind in kinds)]
    shares = [results["masses"][0][kind] for kind in ("on_first", "on_previous")]
    assert first.rows[0][1:3] == [f"{100 * share:.1f}" for share in shares]
    # 8 keys of the memory among 9 to 16, and for segment 5 of the stock model among 41 to 48.
    assert first.rows[-1][2] == f"{100 * np.mean([8 / (8 + t) for t in range(1, 9)]):.1f}"
    assert second.rows[-1][5] == f"{100 * np.mean([8 / (40 + t) for t in range(1, 9)]):.1f}"


def test_the_prompt_for_a_summary_is_the_input_of_figure_10(folders, tmp_path, monkeypatch):
    """The first document whose prompt is long enough, in appendix D's words."""
    monkeypatch.setattr(AttentionMaps, "draw", lambda *_: None)  # takes longer than the rest
    options = {"models": [str(folders / "folded")], "segments": (1, 3), "layers": (0,)}
    plain = {"text": str(folders / "texts.jsonl"), **options}
    found = evaluate("attention", tmp_path / "prompt", summarize=True, **plain)
    tokenizer = load_evaluated(str(folders / "folded")).tokenizer
    document = "The sky is blue. Here we go, there and back again. " * 8
    ids = [tokenizer.bos_token_id, *tokenizer(f"Summarize this text:\n{document}\n----\nSummary:\n")["input_ids"]]
    assert found["sha256"] == {"folded": hashlib.sha256(torch.tensor(ids[:32]).numpy().tobytes()).hexdigest()}
    assert found["summarize"] and found["masses"] != evaluate("attention", tmp_path / "text", **plain)["masses"]
    with pytest.raises(ValueError, match=r"the longest of 2 texts has \d+ tokens"):
        evaluate("attention", tmp_path / "long", summarize=True, **plain | {"segments": (30,)})
    with pytest.raises(ValueError, match="Pass a .jsonl or .parquet file, or one of cnn_dailymail, booksum, scitldr"):
        evaluate("attention", tmp_path / "none", summarize=True, **plain | {"text": "booksums"})


def test_the_papers_layers_are_the_default():
    """1, 8 and 16 of 16, counted from 1."""
    model = tiny_model(segment_length=LENGTH, num_hidden_layers=16)
    found = record_of(model, random_ids(1, 99)[0], segments=[1])
    assert [one["layer"] for one in found["maps"]] == [0, 7, 15]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"--segments": "0"}, "segment 0 is the first and has no memory"),
        ({"--segments": "2,14"}, "the longest of 2 texts has 113 tokens, and the last segment ends at 120"),
        ({"--segments": "1;2"}, "'1;2' is not a whole number"),
        ({"--layers": "0,3"}, "folded has no layer 3: it has 3, counted from 0"),
        ({"--heads": "4"}, "folded has no head 4"),
        ({"--prompt-file": "nowhere.txt"}, "nowhere.txt"),
        ({"--model": "nowhere"}, "there is no folder 'nowhere'"),
    ],
)
def test_errors_are_named(folders, tmp_path, changed, words):
    options = {"--model": folders / "folded", "--prompt-file": folders / "texts.jsonl", "--output": tmp_path}
    assert_refused(words, command, "attention", *(part for pair in (options | changed).items() for part in pair))


def test_models_of_another_kind_are_refused():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=16, n_layer=1, n_head=2))
    with pytest.raises(ValueError, match="gpt is a 'gpt2': maps can be made for folded models and llama, mistral"):
        record_of(model, random_ids(1, 99)[0], "gpt", segment_length=8)


def test_a_window_that_hides_earlier_text_is_refused():
    """The masses are of attention to all text before a query."""
    shape = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    model, ids = MistralForCausalLM(MistralConfig(**shape, sliding_window=20)), random_ids(1, 99)[0]
    options = {"segment_length": LENGTH, "layers": [0]}
    assert len(record_of(model, ids, segments=[3], **options)["masses"]) == 2
    words = r"tiny has sliding_window=20, and segment 4 ends at 25 tokens: .* Choose earlier or shorter segments"
    assert_refused(words, record_of, model, ids, segments=[1, 4], **options)
    for kind, use in ((Qwen2Config, False), (Qwen3Config, True)):  # without a window, and with one in no layer
        config = kind(**shape, use_sliding_window=use, sliding_window=20, max_window_layers=2)
        model = AutoModelForCausalLM.from_config(config)
        assert len(record_of(model, ids, segments=[4], **options)["masses"]) == 2


def test_on_a_real_model(stories, novel):
    """Layer 0 of a Llama has the same keys and queries folded and stock, if the memory is the layer's input."""
    ids = read_texts(load_evaluated(str(stories)).tokenizer, [str(novel)], 200)[0]
    memory = {"memory_source": "layer_input", "sink_token_id": None}
    folded = CondenseForCausalLM.from_pretrained(stories, segment_length=64, **memory).eval()
    stock = LlamaForCausalLM.from_pretrained(stories).eval()
    ours, own = (queries_and_keys(model, ids[:192], 64, [0], [2])[0, 2] for model in (folded, stock))
    torch.testing.assert_close(scores(*ours), scores(*own)[:, :, 64:], rtol=1e-4, atol=1e-4)
