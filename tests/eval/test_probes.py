"""Records against sentences made by hand, memory against its equations, and the command line: what it writes, what
it refuses, and how it goes on."""

import csv
import json
import re
import sys

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import condense_cli
from condense import CondenseForCausalLM
from condense.continuity import ContinuousLM, Sentence
from eval.probes import EXPERIMENTS, counts, memory, probe, probe_all, run, space, sums, tables, transformations
from eval.probes.classes import DIGITS
from eval.probes.data import load
from eval.probes.engine import Reader
from eval.probes.experiment import SET, Options
from eval.probes.items import Item, NotValid
from eval.probes.prompts import FILLER, counting_prompt
from eval.probes.show import shown_curves
from tests.condense import reference
from tests.condense.models import tiny_model, weights
from training.data.passkey import PASSKEY_TEXTS, PasskeyTask
from training.question_data import write_questions
from training.small_llama import word_tokenizer

TEXT = "the cat sat on 24 mats and the dog sat 7 times on 13"
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}


def with_bos(tokenizer):
    first = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{first} $A", special_tokens=[(first, tokenizer.bos_token_id)]
    )
    return tokenizer


@pytest.fixture(scope="module")
def words():
    return with_bos(word_tokenizer([TEXT, "yes no", "catdog", FILLER]))


def llama(tokenizer, layers=2, **fields):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), num_hidden_layers=layers, initializer_range=0.3, **TOKENS, **SIZES, **fields
    )
    return LlamaForCausalLM(config).eval()


TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def stock_reader(tokenizer, **fields):
    return Reader(ContinuousLM(llama(tokenizer, **fields).double()), tokenizer)


def folded_reader(tokenizer, segment_length=4, **fields):
    model = tiny_model(vocab_size=len(tokenizer), segment_length=segment_length, **fields)
    return Reader(ContinuousLM(model), tokenizer)


def gpt2_reader(tokenizer, n_positions=64, **options):
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3, **TOKENS}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_positions=n_positions, **sizes))
    return Reader(ContinuousLM(model.double().eval(), **options), tokenizer)


# Records


def plain_sentences(reader, item, ids):
    """Each factor's sentence, from numbers alone."""
    num, table = len(ids), reader.lm.model.get_input_embeddings().weight.detach()
    for factor in item.factors:
        if item.vary == "shift":
            yield Sentence(ids, integration_start=factor)
        elif item.vary == "scale":
            yield Sentence(ids, durations=[factor] * num)
        elif item.vary == "shrink":
            tokens = reader.tokenizer.convert_ids_to_tokens(ids)
            yield Sentence(ids, durations=[factor if token in ("cat", "dog") else 1.0 for token in tokens])
        elif item.vary == "densify":
            copies = [token for token in ids for _ in range(factor)]
            positions = [n + 1 for n in range(num) for _ in range(factor)] if item.positions == "equal" else None
            yield Sentence(copies, durations=[1 / factor] * (num * factor), positions=positions)
        else:
            other = reader.tokenizer(item.other)["input_ids"]
            yield Sentence(embeddings=(1 - factor) * table[ids] + factor * table[other])


ITEMS = {
    "shrink": Item("n", "g", TEXT, "shrink", (0.1, 0.35, 1.0), "digits", ((4, 7), (31, 34)), one_token=True),
    "shift": Item("n", "g", TEXT, "shift", (0.0, 0.5, 3.7), "digits"),
    "scale": Item("n", "g", TEXT, "scale", (0.05, 1.0, 1.9), "yes_no"),
    "spread": Item("n", "g", TEXT, "densify", (1, 2, 3), "digits"),
    "equal": Item("n", "g", TEXT, "densify", (1, 2, 3), "bits", positions="equal"),
    "interpolate": Item("n", "g", TEXT, "interpolate", (0.0, 0.3, 1.0), "yes_no", other=TEXT.replace("mats", "times")),
    "tokens": Item("n", "g", TEXT, "scale", (0.5, 1.5), "tokens"),
}
CLASSES = {"digits": DIGITS, "yes_no": ["yes", "no"], "bits": ["1", "0"], "tokens": []}


@pytest.mark.parametrize("kind", ["stock", "folded"])
@pytest.mark.parametrize("name", ITEMS)
def test_records_are_a_plain_loop(name, kind, words):
    reader, item = (stock_reader if kind == "stock" else folded_reader)(words), ITEMS[name]
    record = reader.record(item)
    if kind == "folded" and name == "equal":
        assert record["reason"] == "a folded model knows no positions but those that durations give"
        return
    ids = words(TEXT)["input_ids"]
    assert ids[0] == 1
    rows = [reader.lm.logits(sentence)[-1] for sentence in plain_sentences(reader, item, ids)]
    probabilities_FV = torch.stack(rows).double().softmax(-1)
    assert list(record)[:3] == ["name", "group", "valid"] and record["valid"]
    assert record["factors"] == list(item.factors)
    assert list(record["curves"]) == CLASSES[item.watched]
    for label, curve in record["curves"].items():
        expected = probabilities_FV[:, words.convert_tokens_to_ids(label)]
        assert curve == pytest.approx(expected.tolist(), rel=2e-5)
    likely = {n for row in probabilities_FV.tolist() for n, value in enumerate(row) if value >= 0.05}
    assert likely and set(record["likely"]) == {words.decode([n]) for n in likely}
    for token in likely:
        assert record["likely"][words.decode([token])] == pytest.approx(probabilities_FV[:, token].tolist(), rel=2e-5)
    if item.vary == "interpolate":
        assert "distance" not in record and "same_top" not in record
        return
    plain_V = reader.lm.model(torch.tensor([ids])).logits[0, -1].detach().softmax(-1)
    assert record["distance"] == pytest.approx([float((row - plain_V).abs().sum()) / 2 for row in probabilities_FV],
                                               rel=1e-4, abs=1e-6)  # fmt: skip
    assert record["same_top"] == [bool(row.argmax() == plain_V.argmax()) for row in probabilities_FV]
    if name != "shift":
        assert max(record["distance"]) > 1e-3


def test_facts_go_along(words):
    item = Item("n", "g", TEXT, "scale", (1.0,), "digits", facts={"repetitions": 4})
    record = stock_reader(words).record(item)
    assert record["repetitions"] == 4 and (record["name"], record["group"]) == ("n", "g")


@pytest.mark.parametrize(
    ("text", "fields", "reason"),
    [
        ("the cat sat on 24 mats", {"places": ((15, 17),)}, "'24' is 2 tokens, not one"),
        ("the cat sat on 24 mats", {"places": ((4, 7), (8, 14))}, "'sat on' is 2 tokens, not one"),
        ("the catdog sat", {"places": ((4, 7),)}, "'cat' shares a token with what stands beside it"),
        ("the catdog sat", {"places": ((7, 10),)}, "'dog' shares a token with what stands beside it"),
        ("the zebra sat on a cat", {"places": ((4, 9),)}, "the tokenizer does not know 'zebra'"),
        ("the cat", {"vary": "interpolate", "other": "the cat sat"}, "3 and 4 tokens: nothing lies between them"),
        ("the cat", {"vary": "interpolate", "other": "the zebra"}, "the tokenizer does not know 'zebra'"),
    ],
)
def test_what_a_tokenizer_cannot_pose(text, fields, reason, words):
    item = Item(
        "n", "g", text, **{"vary": "shrink", "factors": (1.0,), "watched": "digits", "one_token": True, **fields}
    )
    assert stock_reader(words).record(item) == {"name": "n", "group": "g", "valid": False, "reason": reason}


def test_a_place_of_several_tokens_shrinks_as_a_whole(words):
    item = Item("n", "g", "the cat sat on 24 mats", "shrink", (0.5,), "digits", ((15, 17), (4, 7)))
    (sentence,) = stock_reader(words).sentences(item)
    assert sentence.durations_N.tolist() == [1, 1, 0.5, 1, 1, 0.5, 0.5, 1]


def test_classes_that_a_vocabulary_lacks(words):
    tokenizer = with_bos(word_tokenizer(["the cat"]))
    record = stock_reader(tokenizer).record(Item("n", "g", "the cat", "scale", (1.0,), "yes_no"))
    assert not record["valid"] and record["reason"] == "the tokenizer has no token for yes, no"


def test_an_unknown_token_in_front_may_be_the_bos(words):
    tokenizer = with_bos(word_tokenizer([TEXT]))
    tokenizer.unk_token = tokenizer.bos_token
    reader = stock_reader(tokenizer)
    assert reader.tokenizer.unk_token_id == 1 and len(reader.sentence("the cat")) == 3


def test_positions_that_were_never_learned(words):
    """GPT-2 of 16 positions: a sentence of 15 tokens shifts by 1 and by no more; a short first token has none."""
    shift = Item("n", "g", TEXT, "shift", (0.0, 1.0, 1.5), "digits")
    reader = gpt2_reader(words, n_positions=len(words(TEXT)["input_ids"]) + 1)
    record = reader.record(shift)
    assert not record["valid"] and "position" in record["reason"]
    within = Item("n", "g", TEXT, "shift", (0.0, 1.0), "digits")
    assert reader.record(within)["valid"] and max(reader.record(within)["distance"]) > 1e-3
    scale = Item("n", "g", TEXT, "scale", (0.5, 1.0), "digits")
    assert "position_anchor='start'" in gpt2_reader(words).record(scale)["reason"]
    assert gpt2_reader(words, position_anchor="start").record(scale)["valid"]


def test_rounding_keeps_the_order_of_small_probabilities(words):
    reader, size = stock_reader(words), len(words)
    digits = words.convert_tokens_to_ids(DIGITS)
    probabilities_FV = torch.zeros(2, size, dtype=torch.float64)
    probabilities_FV[0, digits] = torch.tensor([1.234561e-12 + n * 1e-17 for n in range(10)], dtype=torch.float64)
    probabilities_FV[1, digits] = torch.tensor([3.3333334e-30 * 0.5**n for n in range(10)], dtype=torch.float64)
    curves = reader.curves(probabilities_FV, "digits")
    firsts, seconds = zip(*curves.values(), strict=True)
    assert list(firsts) == sorted(set(firsts)) and list(seconds) == sorted(set(seconds), reverse=True)
    assert seconds[0] == 3.33333e-30 and firsts[9] == 1.23465e-12


# Straight lines between embeddings, ever more samples


@pytest.mark.parametrize("kind", ["stock", "folded"])
@pytest.mark.parametrize("rule", ["rectangle", "trapezoid"])
def test_errors_against_the_densest(rule, kind, words, monkeypatch):
    monkeypatch.setattr(transformations, "DENSEST", 12)
    reader, text = (stock_reader if kind == "stock" else folded_reader)(words), "the cat sat on"
    item = Item("n", "g", text, "densify", (1, 4), "tokens", facts={"rule": rule})
    record = transformations.density_record(reader, item)
    if (kind, rule) == ("folded", "trapezoid"):
        assert record["reason"] == "a folded model knows rectangles only"
        return
    corners_ND = reader.lm.model.get_input_embeddings().weight.detach()[words(text)["input_ids"]]

    def probabilities(density, rule):
        samples, before = [], corners_ND[0]
        for corner in corners_ND:
            samples += [before + (corner - before) * step / density for step in range(1, density + 1)]
            before = corner
        sentence = Sentence(embeddings=torch.stack(samples), durations=[1 / density] * len(samples))
        return ContinuousLM(reader.lm.model, rule=rule).logits(sentence)[-1].softmax(-1)

    densest_V = probabilities(12, "rectangle" if kind == "folded" else "trapezoid")
    expected = [float((probabilities(density, rule) - densest_V).abs().sum()) / 2 for density in (1, 4)]
    assert record["curves"]["distance"] == pytest.approx(expected, rel=1e-3) and min(expected) > 1e-4
    assert record["factors"] == [1, 4] and record["rule"] == rule


# Memory


def dialled_reference(model, ids_N, dial):
    """Logits [N, V]: every key in memory weighs `dial` and sits where it sat."""
    config, w, remembered, hidden = model.config, weights(model), [None] * model.config.num_hidden_layers, []
    length = config.segment_length
    for start in range(0, len(ids_N), length):
        here = torch.arange(start, min(start + length, len(ids_N)))
        x_TD = w["model.embed_tokens.weight"][ids_N[here]]
        for n, memory_LD in enumerate(remembered):
            layer = {k.split(f"layers.{n}.", 1)[1]: v for k, v in w.items() if f"layers.{n}." in k}
            context_KD, places_K, weigh_K = x_TD, here.double(), torch.ones(len(here)).double()
            if memory_LD is not None:
                context_KD = torch.cat([memory_LD, x_TD])
                places_K = torch.cat([torch.arange(start - length, start), here]).double()
                weigh_K = torch.cat([torch.full((length,), dial).double(), weigh_K])
            y_TD = reference._layer(layer, config, config.rms_norm_eps, x_TD, context_KD, places_K, weigh_K)
            remembered[n] = y_TD if config.memory_source == "layer_output" else x_TD
            x_TD = y_TD
        hidden.append(reference._norm(x_TD, w["model.norm.weight"], config.rms_norm_eps))
    return torch.cat(hidden) @ w["lm_head.weight"].T


@pytest.mark.parametrize("memory_source", ["layer_output", "layer_input"])
@pytest.mark.parametrize("num_tokens", [10, 12, 13])
def test_the_dial_by_the_equations(num_tokens, memory_source, words):
    reader = folded_reader(words, memory_source=memory_source)
    ids_N = torch.randint(3, len(words), (num_tokens,), generator=torch.Generator().manual_seed(num_tokens))
    dials = (0.01, 0.5, 1.0, 40.0)
    found_FNV = memory.dialled(reader, Sentence(ids_N), dials, keep=num_tokens)
    assert found_FNV.dtype == torch.float64
    for dial, found_NV in zip(dials, found_FNV, strict=True):
        expected_NV = dialled_reference(reader.lm.model, ids_N, dial).softmax(-1)
        torch.testing.assert_close(found_NV, expected_NV, rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(found_FNV[2], reader.lm.logits(Sentence(ids_N)).softmax(-1), rtol=1e-5, atol=1e-9)
    assert (found_FNV[0] - found_FNV[2])[4:].abs().amax(1).min() > 1e-4  # every sample behind the first segment
    torch.testing.assert_close(found_FNV[0][:4], found_FNV[2][:4])  # that has no memory


@pytest.mark.parametrize("keep", [1, 2, 3, 5, 9])
def test_the_last_samples_of_all_dials(keep, words, monkeypatch):
    reader, ids_N = folded_reader(words), torch.arange(3, 13)
    whole_FNV = memory.dialled(reader, Sentence(ids_N), memory.DIALS[:7], keep=10)
    monkeypatch.setattr(memory, "TOKENS_AT_ONCE", 3 * 3 * 4)  # three dials at once
    rows, call = [], memory._dialled
    monkeypatch.setattr(
        memory, "_dialled", lambda m, e, dials, *rest: rows.append(len(dials)) or call(m, e, dials, *rest)
    )
    torch.testing.assert_close(memory.dialled(reader, Sentence(ids_N), memory.DIALS[:7], keep), whole_FNV[:, -keep:])
    assert rows == [3, 3, 1]


def memory_reader(segment_length):
    texts = [*PASSKEY_TEXTS, FILLER, "apple fruit a", counting_prompt("apple", 1, "fruit", "a fruit", "apart", 1).text]
    return folded_reader(with_bos(word_tokenizer(texts)), segment_length)


@pytest.mark.parametrize("segment_length", [9, 16, 23, 48])
def test_words_stand_so_many_segments_before_the_end(segment_length):
    """Against every number of fillers: not valid is what none of them brings there."""
    reader = memory_reader(segment_length)
    prompt = ["apple", 4, "fruit", "a fruit"]
    possible = set()
    for num_fillers in range(30):
        ids = reader.tokenizer(counting_prompt(*prompt, "apart", num_fillers).text)["input_ids"]
        places = [n for n, token in enumerate(reader.tokenizer.convert_ids_to_tokens(ids)) if token == "apple"]
        segments = {place // segment_length for place in places}
        if len(segments) == 1:
            possible.add((len(ids) - 1) // segment_length - min(segments))
    found = set()
    for distance in range(7):
        facts = {"repetitions": 4, "distance_in_segments": distance, "prompt": prompt}
        item = Item("n", "g", "", "shrink", (1.0,), "digits", one_token=True, facts=facts)
        try:
            placed = memory._place(reader, item)
        except NotValid:
            continue
        found.add(distance)
        ids = reader.tokenizer(placed.text)["input_ids"]
        places = [n for n, token in enumerate(reader.tokenizer.convert_ids_to_tokens(ids)) if token == "apple"]
        assert len(places) == 4 and {place // segment_length for place in places} == {
            (len(ids) - 1) // segment_length - distance
        }
        assert reader.tokens(placed) == places
    assert found == {distance for distance in possible if distance < 7}
    assert len(found) >= 3


def test_memory_items_one_by_one():
    reader = memory_reader(16)
    facts = {"repetitions": 4, "distance_in_segments": 3, "prompt": ["apple", 4, "fruit", "a fruit"]}
    shrinks = Item("s", "3 segments before", "", "shrink", (0.3, 1.0), "digits", one_token=True, facts=facts)
    turned = Item("d", "dial, counting", "", "dial", (0.1, 1.0, 2.0), "digits", one_token=True, facts=facts)
    placed = memory._place(reader, shrinks)
    assert memory.record(reader, shrinks) == reader.record(placed)
    record = memory.record(reader, turned)
    expected_FV = memory.dialled(reader, reader.sentence(placed.text), (0.1, 1.0, 2.0), keep=1)[:, 0]
    four = reader.tokenizer.convert_tokens_to_ids("4")
    assert record["recall"] == pytest.approx(expected_FV[:, four].tolist(), rel=1e-5)
    assert record["recall"] == record["curves"]["4"] and list(record["curves"]) == DIGITS
    assert record["recall"][1] == pytest.approx(memory.record(reader, shrinks)["curves"]["4"][1], rel=1e-4)
    assert record["factors"] == [0.1, 1.0, 2.0] and record["valid"] and len(set(record["recall"])) == 3


@torch.no_grad()
def test_recall_of_a_passkey():
    """Its digits one behind the other, as the model gives them at dial 1; found where each is the likeliest."""
    reader = memory_reader(32)
    model, length = reader.lm.model, 32
    item = Item("p", "dial, passkeys", "", "dial", (1.0, 0.2), "tokens", facts={"seed": 5})
    passkeys = PasskeyTask(reader.tokenizer).batch(1, 4 * length, np.random.default_rng(5), depth=0.0)
    prompt, answer = passkeys.prompt_ids_BN[0], passkeys.answer_ids_BA[0]
    first = passkeys.sentence_at_B[0]
    assert first // length == 1 and (len(prompt) - 1) // length == 3

    def recall(head):
        model.lm_head.weight.copy_(head)
        logits_AV = model(torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1]
        probabilities = [float(row.softmax(-1)[token]) for row, token in zip(logits_AV, answer, strict=True)]
        record = memory.record(reader, item)
        assert record["recall"][0] == pytest.approx(np.prod(probabilities), rel=1e-4)
        assert record["recall"][1] != pytest.approx(record["recall"][0], rel=1e-3)
        assert record["found"][0] == (logits_AV.argmax(-1).tolist() == answer.tolist())
        return record["found"][0]

    head = model.lm_head.weight.clone()
    assert not recall(head)
    embeddings_ND = model.get_input_embeddings().weight[torch.cat([prompt, answer])]
    hidden_AD = reference.reference_hidden(weights(model), model.config, embeddings_ND)[len(prompt) - 1 : -1]
    one_by_one = torch.linalg.lstsq(hidden_AD, 30 * torch.eye(len(answer)).double()).solution.T
    made = torch.zeros_like(head)
    for n, token in enumerate(answer):
        made[token] += one_by_one[n]
    assert recall(made)
    made[answer[2]] = 0
    assert not recall(made)


def test_passkeys_that_cannot_be_asked(words):
    item = Item("p", "dial, passkeys", "", "dial", (1.0,), "tokens", facts={"seed": 0})
    unknown = memory.record(folded_reader(words, 48), item)
    assert not unknown["valid"] and unknown["reason"] == "the tokenizer does not know the words of a passkey prompt"
    short = memory.record(memory_reader(8), item)
    assert not short["valid"] and "a passkey prompt needs" in short["reason"]


# From the command line


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models of random weights: `llama` and `folded` know the words of the questions, `stories` and `gpt2` those of
    the sentences and of the first objects."""
    folder = tmp_path_factory.mktemp("models")
    write_questions(folder, seed=0, num_questions=3, width=16, layers=1)
    tokenizer = AutoTokenizer.from_pretrained(folder / "llama")
    CondenseForCausalLM.from_pretrained(folder / "llama", segment_length=32).save_pretrained(folder / "folded")
    tokenizer.save_pretrained(folder / "folded")
    items = [*space.space_items(Options(limit=2)), *transformations.translation_items(Options())]
    known = with_bos(word_tokenizer([text for item in items for text in (item.text, item.other)]))
    for name, model in {"stories": llama(known, layers=1), "gpt2": gpt2_reader(known).lm.model.float()}.items():
        model.save_pretrained(folder / name)
        known.save_pretrained(folder / name)
    return folder


@pytest.fixture
def undrawn(monkeypatch):
    monkeypatch.setattr(run, "draw", lambda *given: None)


def asked(*arguments):
    return CliRunner().invoke(condense_cli.app, ["probe", *map(str, arguments)])


def probed(output, name, *models, options=()):
    """What the command wrote, and what it showed."""
    named = [word for model in models for word in ("--model", model)]
    done = asked(name, *named, "--output", output, *options)
    assert done.exit_code == 0, (done.output, done.exception)
    return json.loads((output / f"probe_{name}.json").read_text()), done.stdout


def cells_of(results):
    """The lines of the table that the JSON's records make."""
    for model in results["models"]:
        for record in model["records"]:
            for n, factor in enumerate(record["factors"] if record["valid"] else []):
                cells = {"model": model["name"], "group": record["group"], "item": record["name"], "factor": factor}
                cells |= {f"p({name})": curve[n] for name, curve in record.get("curves", {}).items()}
                cells |= {f"token({name})": curve[n] for name, curve in record.get("likely", {}).items()}
                for name in ("distance", "same_top", "recall", "found"):
                    cells |= {name: record[name][n]} if name in record else {}
                yield {name: str(value) for name, value in cells.items()}


WITH_LIMIT = {"counting", "events", "sums", "space", "memory"}
TITLES = {
    "counting": "normalised peak frequency, all peaks (table 2)",
    "events": "normalised peak frequency, expected peaks only (table 5)",
    "sums": "of these, how many have each property (table 7)",
    "space": "from one object to the other (tables 8, 9 and 10)",
    "boolean": "truth values between operators",
    "translation": "shifted by 0 to 10 units",
    "scaling": "durations scaled by 0.05 to 2",
    "density": "straight lines between embeddings",
    "memory": "mean probability of the right answer with all memory keys at one duration",
}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_figures_are_the_same_in_every_file(name, folder, tmp_path, undrawn):
    model = {
        "memory": "folded",
        "space": "stories",
        "translation": "stories",
        "scaling": "stories",
        "density": "stories",
    }
    source = folder / model.get(name, "llama")
    results, shown = probed(tmp_path, name, source, options=["--limit", 2] if name in WITH_LIMIT else [])
    (model,) = results["models"]
    assert results["kind"] == f"probe_{name}" and results["about"] == EXPERIMENTS[name].about
    assert (model["name"], model["source"]) == (source.name, str(source))
    assert results["limit"] == (2 if name in WITH_LIMIT else None) and results["data"] == "the package's own"
    items = EXPERIMENTS[name].items(Options(limit=2 if name in WITH_LIMIT else None))
    assert [(r["name"], r["group"]) for r in model["records"]] == [(item.name, item.group) for item in items]
    assert model["summary"] == json.loads(json.dumps(EXPERIMENTS[name].summary(model["records"])))
    share = sum(record["valid"] for record in model["records"]) / len(items)
    assert share == 1 if name != "memory" else share > 0.5
    with (tmp_path / f"probe_{name}.csv").open(newline="") as file:
        rows = [{key: value for key, value in row.items() if value} for row in csv.DictReader(file)]
    assert rows == list(cells_of(results)) and rows
    assert TITLES[name] in shown and f"{tmp_path}/probe_{name}.json" in shown
    assert "\n\n".join(map(str, tables(results))) == shown.split(f"\n\n{tmp_path}")[0]


@pytest.fixture(scope="module")
def whole(folder):
    """What the stock models of transformers themselves give behind a text: each token's probability, by its text."""
    loaded = {}

    @torch.no_grad()
    def probabilities(name, text):
        if name not in loaded:
            loaded[name] = (
                AutoModelForCausalLM.from_pretrained(folder / name).eval(),
                AutoTokenizer.from_pretrained(folder / name),
            )
        model, tokenizer = loaded[name]
        probabilities_V = model(**tokenizer(text, return_tensors="pt")).logits[0, -1].double().softmax(-1)
        return dict(zip(tokenizer.convert_ids_to_tokens(range(len(tokenizer))), probabilities_V.tolist(), strict=True))

    return probabilities


@pytest.mark.parametrize("name", ["counting", "events", "sums", "space", "boolean"])
def test_unchanged_sentences_get_the_models_own_answers(name, folder, tmp_path, undrawn, whole):
    model = "stories" if name == "space" else "llama"
    results, _ = probed(tmp_path, name, folder / model, options=["--limit", 2] if name in WITH_LIMIT else [])
    items = EXPERIMENTS[name].items(Options(limit=2 if name in WITH_LIMIT else None))
    compared = 0
    for item, record in zip(items, results["models"][0]["records"], strict=True):
        ends = {
            "interpolate": [(0, item.text), (-1, item.other)],
            "shift": [(0, item.text)],
            "densify": [(0, item.text)],
        }
        for place, text in ends.get(item.vary, [(-1, item.text)]):
            own = whole(model, text)
            for label, curve in record["curves"].items():
                expected = sum(value for word, value in own.items() if word.lower() == label)
                assert curve[place] == pytest.approx(expected, rel=1e-3), (item.name, label)
                compared += 1
            for label, curve in record["likely"].items():
                assert curve[place] == pytest.approx(own[label], rel=1e-3), (item.name, label)
    assert compared > 20


def test_what_moving_and_stretching_does(folder, tmp_path, undrawn):
    """A rotary model sees no translation, and one layer of it no copies at equal positions; GPT-2's positions move."""
    results, shown = probed(tmp_path, "translation", folder / "stories", f"two={folder / 'gpt2'}")
    rotary, learned = (model["summary"] for model in results["models"])
    assert [model["name"] for model in results["models"]] == ["stories", "two"] and "two" in shown
    assert rotary["valid"] == learned["valid"] == 4
    assert all(one["most"] < 1e-4 and one["same_top"] == 1 for one in rotary["sentences"].values())
    assert all(one["most"] > 1e-3 for one in learned["sentences"].values())
    for model in results["models"]:
        assert all(record["distance"][0] < 1e-6 for record in model["records"])  # unchanged
    scaled, _ = probed(tmp_path, "scaling", folder / "stories")
    assert all(one["most"] > 1e-3 for one in scaled["models"][0]["summary"]["sentences"].values())
    dense, _ = probed(tmp_path, "density", folder / "stories")
    for sentence, one in dense["models"][0]["summary"]["sentences"].items():
        assert one["most"] < 1e-5 if "equal" in sentence else one["most"] > 1e-4
    rules = dense["models"][0]["summary"]["rules"]
    for sentence in transformations.SENTENCES:
        trapezoids, rectangles = rules[f"{sentence}, trapezoids"], rules[f"{sentence}, rectangles"]
        assert trapezoids[5] < rectangles[5] < rectangles[2]


def test_positions_that_run_out_are_recorded(folder, tmp_path, undrawn):
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(folder / "gpt2")
    sizes = {"n_positions": 17, "n_embd": 16, "n_layer": 1, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    results, shown = probed(tmp_path / "out", "translation", tmp_path)
    valid = {record["name"]: record["valid"] for record in results["models"][0]["records"]}
    # With <s> in front France has 6 tokens and Gatsby 7, Romeo 10 and Lily 11: the last sits 10 further.
    assert valid == {"France": True, "Gatsby": True, "Romeo": False, "Lily": False}
    assert "records that are not valid" in shown and results["models"][0]["summary"]["valid"] == 2


def test_words_that_are_not_known_are_counted(folder, tmp_path, undrawn):
    results, shown = probed(tmp_path, "translation", folder / "llama")
    model = results["models"][0]
    reasons = [record["reason"] for record in model["records"] if not record["valid"]]
    assert reasons and model["summary"]["valid"] == 4 - len(reasons)
    (line,) = [line for line in shown.splitlines() if "the tokenizer does not know" in line]
    assert line.split()[-1] == str(len(reasons))


def test_a_folded_models_own_limits(folder, tmp_path, undrawn):
    results, _ = probed(tmp_path, "density", folder / "folded")
    reasons = {record["reason"] for record in results["models"][0]["records"] if not record["valid"]}
    assert "a folded model knows rectangles only" in reasons
    assert "a folded model knows no positions but those that durations give" in reasons
    assert set(results["models"][0]["summary"]["rules"]) == {"France, rectangles"}


def test_all_of_them_on_two_models_and_a_page(folder, tmp_path, monkeypatch):
    """Small sets of everything, drawn."""
    for module, name, few in (
        (sums, "PAIRS", ()),
        (counts, "WORDS", counts.WORDS[:1]),
        (memory, "WORDS", counts.WORDS[:1]),
        (memory, "DISTANCES", (0, 1, 2)),
        (counts, "PASSAGES", {"shop": counts.PASSAGES["shop"]}),
        (space, "OPERATORS", space.OPERATORS[:1]),
        (transformations, "SENTENCES", {"France": transformations.SENTENCES["France"]}),
    ):
        monkeypatch.setattr(module, name, few)
    named = ["--model", f"one={folder / 'llama'}", "--model", f"two={folder / 'folded'}"]
    done = asked("all", *named, "--output", tmp_path, "--limit", 1, "--template", "listed", "--speed")
    assert done.exit_code == 0, (done.output, done.exception)
    assert done.output.strip().endswith("report.html") and "time for three items" in done.output
    page = (tmp_path / "report.html").read_text()
    pictures = 0
    for name in EXPERIMENTS:
        results = json.loads((tmp_path / f"probe_{name}.json").read_text())
        assert [model["name"] for model in results["models"]] == (["two"] if name == "memory" else ["one", "two"])
        assert results["template"] == ("listed" if name == "counting" else "sentence")
        assert results["limit"] == (1 if name in WITH_LIMIT else None)
        assert ("speed" in results["models"][0]) == (name == "counting")
        assert (tmp_path / f"probe_{name}.csv").stat().st_size > 1_000
        groups = {record["group"] for model in results["models"] for record in model["records"] if record["valid"]}
        for group in groups:
            path = tmp_path / f"probe_{name}-{''.join(c if c.isalnum() else '_' for c in group)}.png"
            assert path.stat().st_size > 5_000 and path.with_suffix(".svg").stat().st_size > 5_000, path
        assert len(list(tmp_path.glob(f"probe_{name}-*.png"))) == len(groups)
        pictures += len(groups)
        assert TITLES[name] in page
    assert page.count("data:image/png;base64,") == pictures


def test_what_lies_between_objects_is_drawn(folder, tmp_path, monkeypatch):
    for name in ("QUESTIONS", "SENTENCES", "STORIES"):
        words, (frame, *_) = next(iter(getattr(space, name).items()))
        monkeypatch.setattr(space, name, {words: (frame,)})
    results, _ = probed(tmp_path, "space", folder / "stories", options=["--limit", 1])
    summary = results["models"][0]["summary"]
    assert (summary["records"], summary["valid"], len(summary["m_max_of_each"])) == (4, 4, 4)
    assert {path.name for path in tmp_path.glob("*.png")} == {
        f"probe_space-{group}.png" for group in ("set", "questions", "sentences", "stories")
    }


def test_all_of_them_on_stock_models_leave_memory_out(folder, tmp_path, undrawn, monkeypatch):
    monkeypatch.setattr(run, "_run", lambda name, candidates, output, options, timed: name)
    assert list(probe_all([str(folder / "llama")], tmp_path)) == [name for name in EXPERIMENTS if name != "memory"]
    assert list(probe_all([str(folder / "folded")], tmp_path)) == list(EXPERIMENTS)


def test_own_data(folder, tmp_path, undrawn):
    records = load("words")[5:8]
    (tmp_path / "own.json").write_text(json.dumps(records))
    options = ["--data", tmp_path / "own.json", "--limit", 5]  # more than there are
    results, _ = probed(tmp_path / "out", "counting", folder / "llama", options=options)
    in_set = [record for record in results["models"][0]["records"] if record["group"] == SET]
    assert [record["name"] for record in in_set] == [f"{n} {record['word']}" for n, record in enumerate(records)]
    assert results["data"] == str(tmp_path / "own.json") and results["models"][0]["summary"]["records"] == 3


def test_templates_pose_other_prompts(folder, tmp_path, undrawn, whole):
    results, _ = probed(tmp_path, "counting", folder / "llama", options=["--limit", 1, "--template", "listed"])
    record = results["models"][0]["records"][0]
    own = whole("llama", counting_prompt("apple", 4, "fruit", "a fruit", "listed").text)
    assert results["template"] == "listed" and record["curves"]["4"][-1] == pytest.approx(own["4"], rel=1e-3)


def test_positions_at_the_start(folder, tmp_path, undrawn):
    results, _ = probed(tmp_path, "scaling", folder / "gpt2", options=["--position-anchor", "start"])
    assert results["models"][0]["position_anchor"] == "start" and results["models"][0]["summary"]["valid"] == 4
    results, _ = probed(tmp_path / "end", "scaling", folder / "gpt2")
    assert results["models"][0]["position_anchor"] == "end" and results["models"][0]["summary"]["valid"] == 0


def test_speed_is_measured_once(folder, tmp_path, undrawn, monkeypatch):
    results, shown = probed(tmp_path, "events", folder / "llama", options=["--limit", 2, "--speed"])
    speed = results["models"][0]["speed"]
    assert speed["items"] == 2 and speed["one_by_one"] > 0 and speed["together"] > 0
    assert speed["speed_up"] == speed["one_by_one"] / speed["together"] and "time for three items" in shown
    monkeypatch.setattr(run, "speed", lambda *given: pytest.fail("measured again"))
    again, _ = probed(tmp_path, "events", folder / "llama", options=["--limit", 2, "--speed"])
    assert again["models"] == results["models"]
    (tmp_path / "own.json").write_text(json.dumps([load("words")[0] | {"word": "zebra crossing"}]))
    monkeypatch.undo()
    monkeypatch.setattr(run, "draw", lambda *given: None)
    options = ["--data", tmp_path / "own.json", "--speed"]
    nothing, shown = probed(tmp_path, "counting", folder / "llama", options=options)
    assert nothing["models"][0]["speed"] == {"items": 0} and "time for three items" not in shown


def test_one_pass_a_factor_and_all_together(words, monkeypatch):
    """What is timed: a run of each sentence without a shared beginning, and one call for all."""
    reader, item = stock_reader(words), ITEMS["shrink"]
    item = Item(**{**vars(item), "group": SET})
    calls = []

    def noted(self, sentences, **options):
        calls.append((len(sentences), options))
        return torch.zeros(len(sentences), 2)

    monkeypatch.setattr(Reader, "probabilities", noted)
    other = Item(**{**vars(item), "group": "words"})
    found = run.speed(reader, [other, item, item], [{"valid": True}, {"valid": False}, {"valid": True}])
    assert found["items"] == 1
    assert calls == [(2, {}), *[(1, {"reuse_prefix": False})] * 3, (3, {})]
    calls.clear()
    assert run.speed(reader, [item] * 5, [{"valid": True}] * 5)["items"] == run.NUM_TIMED == 3


def test_a_stopped_probe_goes_on(folder, tmp_path, undrawn, monkeypatch):
    """Of two models, in the second one's items."""
    models = folder / "llama", f"b={folder / 'folded'}"
    whole, _ = probed(tmp_path / "whole", "boolean", *models)
    probed(tmp_path / "cut", "boolean", *models)
    path = tmp_path / "cut" / "probe_boolean.records.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    assert len(lines) == 1 + 2 * 16
    path.write_text("".join(lines[:22]) + lines[22][:-1])
    measured, experiment = [], EXPERIMENTS["boolean"]

    def noted(reader, item):
        measured.append(item.name)
        return experiment.record(reader, item)

    monkeypatch.setitem(run.EXPERIMENTS, "boolean", experiment._replace(record=noted))
    again, _ = probed(tmp_path / "cut", "boolean", *models)
    assert measured == [item.name for item in experiment.items(Options())][5:]
    assert again["models"] == whole["models"]
    same = [(tmp_path / name / "probe_boolean.csv").read_text() for name in ("whole", "cut")]
    assert same[0] == same[1]


def test_another_measurement_is_not_gone_on_with(folder, tmp_path, undrawn):
    (tmp_path / "own.json").write_text(json.dumps(load("tutorials")[:1]))
    first = ("events", "--model", folder / "llama", "--output", tmp_path)
    assert asked(*first, "--limit", 1).exit_code == 0
    for options, changed in (
        (["--limit", 2], "limit was 1 and is 2"),
        (["--limit", 1, "--data", tmp_path / "own.json"], "data was"),
        (["--limit", 1, "--position-anchor", "start"], "models was"),
        (["--limit", 1, "--model", folder / "folded"], "models was"),
    ):
        done = asked(*first, *options)
        assert isinstance(done.exception, ValueError) and "comes from another measurement" in str(done.exception)
        assert changed in str(done.exception)
    assert asked(*first, "--limit", 1).exit_code == 0


def test_changed_data_in_the_same_file_are_another_measurement(folder, tmp_path, undrawn):
    path, asked_for = tmp_path / "own.json", ("counting", "--model", folder / "llama", "--output", tmp_path / "out")
    path.write_text(json.dumps(load("words")[:1]))
    assert asked(*asked_for, "--data", path).exit_code == 0
    path.write_text(json.dumps(load("words")[1:2]))
    done = asked(*asked_for, "--data", path)
    assert "items was" in str(done.exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["weight", "--model", "llama"], "no probe 'weight': choose one of counting, .*memory, or all"),
        (["counting", "--model", "llama", "--template", "apart"], "template='apart': choose sentence or listed"),
        (["counting", "--model", "llama", "--template", "x"], "template='x': choose sentence or listed"),
        (["sums", "--model", "llama", "--template", "listed"], "template='listed' belongs to counting.*for sums"),
        (["boolean", "--model", "llama", "--data", "x.json"], "boolean has no data set: leave out --data"),
        (["translation", "--model", "llama", "--limit", "3"], "translation has no data set"),
        (["density", "--model", "llama", "--speed"], "density has no data set to time"),
        (["memory", "--model", "folded", "--speed"], "memory has no data set to time"),
        (["memory", "--model", "llama"], "llama is a stock model and has no memory"),
        (["memory", "--model", "folded", "--model", "llama"], "llama is a stock model and has no memory"),
        (["all", "--model", "llama", "--data", "x.json"], "--data belongs to one probe"),
        (["all", "--model", "llama", "--template", "x"], "template='x'"),
        (["counting", "--model", "nowhere"], "model '.*nowhere' can't be loaded"),
        (["counting", "--model", "llama", "--model", "llama"], "two models are called"),
        (["counting", "--model", "llama", "--data", "nowhere.json"], r"nowhere\.json can't be read"),
        (["counting", "--model", "llama", "--position-anchor", "middle"], "position_anchor='middle'"),
        (["counting", "--model", "folded", "--position-anchor", "start"], "the folded model's is 'end'"),
    ],
)
def test_what_is_refused(arguments, message, folder, tmp_path, undrawn):
    places = {"llama": folder / "llama", "folded": folder / "folded", "nowhere": folder / "nowhere"}
    done = asked(*(places.get(word, word) for word in arguments), "--output", tmp_path / "out")
    assert isinstance(done.exception, ValueError) and re.search(message, str(done.exception)), done.exception
    assert not (tmp_path / "out").exists()


def test_a_refusal_is_one_line(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["condense", "probe", "weight", "--model", "m", "--output", str(tmp_path)])
    with pytest.raises(SystemExit) as left:
        condense_cli.main()
    assert left.value.code == 1 and capsys.readouterr().err.startswith("condense: there is no probe 'weight'")
    assert asked("counting", "--model", "m", "--output", tmp_path, "--limit", 0).exit_code == 2


def test_from_python(folder, tmp_path, undrawn):
    results = probe("events", [str(folder / "llama")], tmp_path, limit=1)
    assert json.loads((tmp_path / "probe_events.json").read_text()) == results


# Tables and curves


def test_tables_by_hand():
    """Figures of the model, then those of the paper; reasons of the same kind are one line."""
    summary = {"records": 4, "valid": 3, "right_at_1": 0.5, "counterfactual": 0.25, "observed": 0.5,
               "observed_expected": 0.4, "ratio": 2.0, "ratio_expected": 1.5}  # fmt: skip
    reasons = ["'cat' is 2 tokens, not one", "'catfish' is 3 tokens, not one", "3 and 4 tokens: nothing lies between"]
    records = [{"valid": False, "reason": reason} for reason in reasons] + [{"valid": True}]
    model = {"name": "m", "summary": summary, "records": records, "speed": {"items": 0}}
    timed = {"name": "t", "summary": summary, "records": []}
    timed["speed"] = {"items": 3, "one_by_one": 4.0, "together": 1.0, "speed_up": 4.0}
    found = {table.title: table for table in tables({"kind": "probe_counting", "models": [model, timed]})}
    rows = {title: table.rows for title, table in found.items()}
    assert rows["valid records (table 1)"][0] == ["m", "75.00 %", "3 of 4", "50.00 %"]
    assert rows["valid records (table 1)"][2] == ["Llama 3 8b (paper)", "93.50 %", "", ""]
    every, expected = (rows[f"normalised peak frequency, {which}"] for which in
                       ("all peaks (table 2)", "expected peaks only (table 3)"))  # fmt: skip
    assert every[0] == ["m", "0.2500", "0.5000", "2.00"] and expected[0] == ["m", "0.2500", "0.4000", "1.50"]
    assert every[3] == ["Llama 2 13b (paper)", "0.2599", "0.9174", "3.60"]
    assert expected[4] == ["Gemma 1 7b (paper)", "0.2610", "0.3503", "1.34"]
    assert rows["time for three items"] == [["t", "4.00", "1.00", "4.00"]]
    assert [row[::2] for row in rows["records that are not valid"]] == [["m", 2], ["m", 1]]


def test_papers_figures_in_the_tables():
    nothing = {"records": 0, "valid": 0, "P1": None, "P2": None, "P3": None}
    rates, shares = sums.tables({"m": nothing})
    assert rates.rows[0] == ["m", "-", "0 of 0"] and rates.rows[2] == ["Llama 2 13b (paper)", "19.50 %", ""]
    assert shares.rows[0] == ["m", "-", "-", "-"]
    assert shares.rows[1] == ["Llama 3 8b (paper)", "29.17 %", "25.83 %", "25.83 %"]
    nothing = {"records": 0, "valid": 0, "derivative": None, "m_max": None, "far_outside": None}
    (table,) = space.space_tables({"m": nothing})
    assert table.rows[0] == ["m", "-", "0 of 0", "-", "-", "-"]
    assert table.rows[4] == ["Gemma 2 9b (paper)", "84.00 %", "", "5.402", "0.0178", "9.52 %"]


def test_curves_that_are_drawn():
    """Of the digits those that reach 5 %, the others in one, and all that is no digit in another."""
    curves = {digit: [0.0, 0.0] for digit in DIGITS} | {"3": [0.5, 0.1], "4": [0.2, 0.6], "7": [0.04, 0.01]}
    shown = shown_curves({"factors": [0.5, 1.0], "curves": curves, "likely": {"x": [0.3, 0.3]}})
    assert list(shown) == ["3", "4", "other digits", "other tokens"]
    assert shown["other digits"] == pytest.approx([0.04, 0.01]) and shown["other tokens"] == pytest.approx([0.26, 0.29])
    likely = {"cat": [0.5, 0.1], "dog": [0.3, 0.7]}
    shown = shown_curves({"factors": [0.5, 1.0], "curves": {}, "likely": likely})
    assert list(shown) == ["cat", "dog", "other tokens"] and shown["other tokens"] == pytest.approx([0.2, 0.2])
