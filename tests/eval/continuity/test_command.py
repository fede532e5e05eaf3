"""Probes against plain loops and hand-worked cases, and every one of them from the command line."""

import pytest
import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

from condense import CondenseConfig, CondenseForCausalLM, cli
from condense.continuity import ContinuousLM, find_spans
from condense.eval.continuity.data import load
from condense.eval.continuity.engine import Reader
from condense.eval.continuity.items import Item, NotValid
from condense.eval.continuity.memory import dialled
from condense.eval.continuity.probe import Probe
from condense.eval.continuity.probes import PROBES
from condense.eval.continuity.prompts import counting_prompt
from condense.training.small_llama import small_llama

from .models import check_files, counts_and_adds_tokenizer, options, probe, shrink_sets


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A stock Llama, a folded model and a GPT-2 of random weights, which know the words of the package's prompts."""
    root = tmp_path_factory.mktemp("probed")
    tokenizer = counts_and_adds_tokenizer()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    folded = CondenseForCausalLM(CondenseConfig(vocab_size=len(tokenizer), segment_length=48, **sizes))
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=4, n_positions=512))
    stock = small_llama(tokenizer, seed=0, width=32, layers=2)
    for name, model in {"llama": stock, "folded": folded, "gpt2": gpt2}.items():
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return root


def condense(*arguments):
    return CliRunner().invoke(cli.app, [str(word) for word in arguments], catch_exceptions=False)


def reader(folder) -> Reader:
    model = CondenseForCausalLM.from_pretrained(folder).eval()
    return Reader(ContinuousLM(model), AutoTokenizer.from_pretrained(folder))


def test_own_data():
    assert {name: len(load(name)) for name in ("words", "tutorials", "sums", "objects")} == {
        "words": 200, "tutorials": 200, "sums": 200, "objects": 50,
    }  # fmt: skip
    for name in ("counting", "events", "sums"):
        for item in PROBES[name].prompts(options()):
            parts = [item.text[start:end] for start, end in item.char_spans]
            if name != "sums":
                assert len(parts) == item.facts["repetitions"]
            assert all(part and part == part.strip() for part in parts)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read as JSON"),
        ("{}", "no list of records"),
        ('[{"word": "a"}]', "record 0: 'category' is None"),
        ('[{"word": "a", "category": "b", "category_with_article": "a b", "repetitions": 0}]', "should be 1 to 9"),
    ],
)
def test_data_of_another_form(models, tmp_path, text, words):
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"mine\.json.*{words}"):
        probe("counting", [str(models / "llama")], tmp_path, data=path)


def test_a_record_is_a_plain_loop(models):
    probed = reader(models / "folded")
    text, char_spans = counting_prompt("apple", 3, "fruit", "a fruit")
    item = Item("a", "g", text, "shrink", (0.2, 0.7, 1.0), "digits", char_spans, one_token=True)
    record = probed.record(item)
    tokens = [token for span in find_spans(probed.tokenizer, text, "apple") for token in span.tokens]
    for number, factor in enumerate(item.factors):
        logits_V = probed.lm.logits(probed.sentence(text).shrink(tokens, factor))[-1]
        probabilities_V = logits_V.double().softmax(-1)
        for digit in map(str, range(10)):
            token = probed.tokenizer.convert_tokens_to_ids(digit)
            assert record["curves"][digit][number] == pytest.approx(probabilities_V[token].item(), rel=1e-4)
    assert record["distance"][-1] == pytest.approx(0, abs=1e-6) and record["same_top"][-1]


def test_what_is_not_valid(models):
    probed = reader(models / "folded")
    unknown = probed.record(Item("a", "g", "xylophonist apple", "scale", (1.0,), "digits"))
    assert not unknown["valid"] and "does not know 'xylophonist'" in unknown["reason"]
    two = probed.record(Item("a", "g", "apple cat", "interpolate", (0.0, 1.0), "digits", other="apple"))
    assert not two["valid"] and "3 and 2 tokens" in two["reason"]
    with pytest.raises(NotValid, match="2 tokens, not one"):
        probed.tokens(Item("a", "g", "apple cat", "shrink", (1.0,), "digits", ((0, 9),), one_token=True))


def test_the_dial_at_one_is_the_model(models):
    probed = reader(models / "folded")
    sentence = probed.sentence(counting_prompt("apple", 9, "fruit", "a fruit", "apart", 4)[0])
    assert len(sentence) > 2 * 48
    plain_NV = probed.lm.logits(sentence).double().softmax(-1)
    dialled_FNV = dialled(probed, sentence, (1.0, 0.01), keep=60)
    torch.testing.assert_close(dialled_FNV[0], plain_NV[-60:], rtol=1e-4, atol=1e-9)
    assert (dialled_FNV[1] - plain_NV[-60:]).abs().max() > 1e-6
    alone_FNV = dialled(probed, sentence, (0.01,), keep=1)
    torch.testing.assert_close(alone_FNV[0, 0], dialled_FNV[1, -1], rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("name", ["counting", "translation", "density"])
def test_models_side_by_side(models, tmp_path, name, monkeypatch):
    shrink_sets(monkeypatch)
    named = [item for kind in ("llama", "gpt2") for item in ("--model", models / kind)]
    limit = ["--limit", 2] if name == "counting" else []
    shown = condense("probe", name, *named, *limit, "--output", tmp_path)
    assert shown.exit_code == 0 and all(kind in shown.output for kind in ("llama", "gpt2"))
    reasons = [
        record["reason"]
        for model in check_files(tmp_path, name, ["llama", "gpt2"])["models"]
        for record in model["records"]
        if not record["valid"] and "position_anchor='start'" in record["reason"]
    ]
    assert not reasons
    told = "gpt2 learned its positions, from 0 on: tokens stand at the start of their intervals"
    assert told in shown.output and "llama learned" not in shown.output


def test_a_stopped_probe_goes_on(models, tmp_path, monkeypatch):
    monkeypatch.setattr(Probe, "draw", lambda *given: None)
    model = [str(models / "llama")]
    before = probe("counting", model, tmp_path, limit=4)
    path = tmp_path / "probe_counting.records.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-2]) + lines[-1][:30])
    measured, measure = [], Probe.measure
    monkeypatch.setattr(Probe, "measure", lambda *given: measured.append(given) or measure(*given))
    again = probe("counting", model, tmp_path, limit=4)
    assert len(measured) == 2 and again["models"] == before["models"]
    with pytest.raises(ValueError, match="limit was 4 and is 3"):
        probe("counting", model, tmp_path, limit=3)


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("weighing", {}, "no probe 'weighing': choose one of counting"),
        ("counting", {"template": "apart"}, "counting has sentence and listed"),
        ("events", {"template": "listed"}, "events has sentence\\."),
        ("boolean", {"limit": 3}, "leave out --data and --limit"),
        ("memory", {"timed": True}, "leave out --speed"),
        ("memory", {}, "is a stock model and has no memory"),
    ],
)
def test_what_does_not_apply(models, tmp_path, name, given, words):
    with pytest.raises(ValueError, match=words):
        probe(name, [str(models / "llama")], tmp_path, **given)
