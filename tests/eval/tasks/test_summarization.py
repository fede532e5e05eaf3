"""Summaries are the model's own, scored as the reference package does, and stopped runs end as unbroken ones."""

import csv
import json
import sys
from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from tokenizers import Regex, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

import condense.eval.models
from condense import CondenseForCausalLM
from condense.eval.models import EvaluatedModel, load_evaluated
from condense.eval.runner import measure
from condense.eval.statistics import bootstrap
from condense.eval.tasks import evaluate, evaluation, summarization
from condense.eval.tasks.corpus import Corpus, read_corpus
from condense.eval.tasks.options import SummarizationOptions
from condense.eval.tasks.rouge import METRICS, SCORES, Rouge
from condense.eval.tasks.summarization import Summarization
from condense.training.data.summarization import AFTER, BEFORE, prompt_ids
from condense.training.recipe import Source
from condense.training.small_llama import small_llama, word_tokenizer

from ...chat_models import save_chat_model
from ...conftest import SHARED
from ...pictures import is_drawn
from ...refusals import assert_refused
from ..measuring import command as run_command
from ..measuring import save_folded
from .documents import TEXT, made_documents, write_lines

NEW = 14
GREEDY = SummarizationOptions(models=[], data="", temperature=0.0, new_tokens=NEW)


def letter_tokenizer():
    tokenizer = word_tokenizer([" ".join(BEFORE + AFTER + TEXT)])
    letters = pre_tokenizers.Split(Regex(r"\w|[^\w\s]"), behavior="removed", invert=True)
    tokenizer.backend_tokenizer.pre_tokenizer = letters
    return tokenizer


def save_model(folder, tokenizer, seed, segment_length=None):
    model = small_llama(tokenizer, seed)
    with torch.no_grad():  # at the start of training a model repeats itself: larger weights tell documents apart
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.dim() > 1 else 1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder if segment_length is None else save_folded(folder, folder, segment_length)


@pytest.fixture(scope="module")
def folded(tmp_path_factory):
    tokenizer = word_tokenizer([BEFORE, AFTER, TEXT])
    return save_model(tmp_path_factory.mktemp("folded"), tokenizer, seed=1, segment_length=16)


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """Writes a model with a different tokenizer, whose tokens are letters."""
    return save_model(tmp_path_factory.mktemp("stock"), letter_tokenizer(), seed=2)


@pytest.fixture
def data(tmp_path):
    return write_lines(tmp_path / "data.jsonl", made_documents(11))


def command(*arguments):
    fields = ("--text-field", "source", "--summary-field", "target", "--new-tokens", NEW, "--batch", 3)
    return run_command("eval", "summarization", *arguments, *fields)


def written_by(model, ids, ends, temperature=0.0):
    """Returns the tokens up to one of the ends, likeliest or sampled; the whole text is read again for each."""
    written = []
    while len(written) < NEW:
        with torch.no_grad():
            logits = model(torch.tensor([ids + written]), use_cache=False).logits[0, -1]
        drawn = torch.multinomial((logits / temperature).softmax(-1), 1) if temperature else logits.argmax()
        if int(drawn) in ends:
            break
        written.append(int(drawn))
    return written


def test_averages_by_hand():
    def document(tokens, score, new_tokens, model="one"):
        scores = dict.fromkeys(SCORES, 0.0) | {"rouge1": score, "rouge2": score / 2, "rougeL": 0.25}
        scores["rouge1_unstemmed"] = score / 4
        return {
            "model": model, "chat": model == "other", "tokens": tokens, "bucket": summarization.bucket_of(tokens),
            "new_tokens": new_tokens, **scores,
        }  # fmt: skip

    documents = [document(0, 0, 10), document(511, 1, 20), document(512, 0.6, 3), document(1023, 0.4, 4)]
    documents += [document(5, 0.3, 1, "other"), document(1024, 0.5, 2, "other"), document(90_000, 0.7, 3, "other")]
    cells = {(cell["model"], cell["bucket"]): cell for cell in summarization.average(documents)}
    assert list(cells) == list(product(("one", "other"), ("0-512", "512-1024", "1024+", "overall")))
    assert [cell["chat"] for cell in cells.values()] == [False] * 4 + [True] * 4
    assert [cell["documents"] for cell in cells.values()] == [2, 2, 0, 4, 1, 0, 2, 3]
    first = cells["one", "0-512"]
    assert (first["rouge1"], first["rouge2"], first["rouge1_unstemmed"]) == (0.5, 0.25, 0.125)
    assert first["new_tokens"] == 15
    # Two values 0 and 1: a resample's mean is 0 or 1 with a chance of a quarter each, which is beyond 2.5 %.
    assert (first["rouge1_low"], first["rouge1_high"]) == (0, 1)
    assert (first["rougeL_low"], first["rougeL_high"]) == (0.25, 0.25)
    assert cells["one", "overall"]["rouge1"] == pytest.approx(0.5)
    assert cells["other", "overall"]["rouge1"] == pytest.approx(0.5)
    alone, empty = cells["other", "0-512"], cells["other", "512-1024"]
    assert (alone["rouge1"], alone["rouge1_low"], alone["rouge1_high"]) == (0.3, None, None)
    assert (empty["rouge1"], empty["rouge1_low"], empty["new_tokens"]) == (None, None, None)


def test_command_on_folded_and_stock_models(folded, stock, data, tmp_path):
    output = tmp_path / "out"
    arguments = ["--model", f"ours={folded}", "--model", f"stock={stock}", "--data", data, "--output", output]
    text = command(*arguments, "--longest", "95")
    results = json.loads((output / "summarization.json").read_text())
    lines = made_documents(11)
    tokenizer = AutoTokenizer.from_pretrained(folded)
    texts = [" ".join(line["source"]) for line in lines]
    lengths = [len(text.split()) for text in texts]  # a token is a word
    kept = sorted((n for n in range(11) if len(prompt_ids(tokenizer, texts[n])) <= 95), key=lambda n: lengths[n])
    assert 4 < len(kept) < 11 and results["left_out"] == {"prompt over 95 tokens": 11 - len(kept)}
    for name in ("ours", "stock"):
        found = [document for document in results["documents"] if document["model"] == name]
        assert [document["where"] for document in found] == [f"{data}:{n + 1}" for n in kept]
        assert [document["tokens"] for document in found] == [lengths[n] for n in kept]  # words, for both models
        assert [document["reference"] for document in found] == [lines[n]["target"][0] for n in kept]
        for document in found:
            expected = Rouge().f1(document["reference"], document["prediction"])
            assert {metric: document[metric] for metric in SCORES} == expected
        assert len({document["prediction"] for document in found}) > len(found) // 2
        cell = next(c for c in results["cells"] if (c["model"], c["bucket"]) == (name, "overall"))
        scores = [document["rouge1"] for document in found]
        assert cell["rouge1"] == pytest.approx(np.mean(scores)) and (any(scores) or name == "stock")
        assert (cell["rouge1_low"], cell["rouge1_high"]) == bootstrap(scores)
        assert f"{cell['rouge1']:.4f} ({cell['rouge1_low']:.3f} to {cell['rouge1_high']:.3f})" in text
    assert [model["segment_length"] for model in results["models"]] == [16, None]
    rows = list(csv.DictReader((output / "summarization.csv").open()))
    expected = ["" if cell["rouge1"] is None else str(cell["rouge1"]) for cell in results["cells"]]
    assert [row["rouge1"] for row in rows] == expected
    assert "prompt over 95 tokens" in text and "summarization.svg" not in text and ".svg" in text
    assert is_drawn(output / "summarization.png") and (output / "summarization.svg").exists()


def test_the_papers_rows_stand_beside_what_is_measured_alike():
    """Table II of the paper, where documents and decoding are its own."""
    cells = [dict.fromkeys(SCORES, 0.5) | dict.fromkeys([f"{name}_low" for name in METRICS])
             | {"model": "ours", "bucket": "overall", "documents": 1, "new_tokens": 4.0}]  # fmt: skip
    cells[0] |= dict.fromkeys([f"{name}_high" for name in METRICS])
    results = {
        "models": [{"name": "ours"}], "cells": cells, "left_out": {}, "data": "cnn_dailymail", "temperature": 0.3,
        "new_tokens": 256,
    }  # fmt: skip
    (table,) = Summarization.tables(results)
    by_row = {tuple(row[:2]): row[3:] for row in table.rows}
    assert by_row["ours", "overall"] == ["0.5000"] * 8 + ["4.0"] and len(table.rows) == 1 + 4 * 4
    assert by_row["paper: Condensation (3 K)", "1024+"] == ["0.3996", "0.1510", "0.2566"] + [""] * 6
    assert by_row["paper: Instruction model", "overall"][:3] == ["0.3180", "0.1236", "0.1981"]
    assert "does not say whether its words are stemmed" in table.title
    for other in ({"data": "booksum"}, {"temperature": 0.0}, {"new_tokens": 128}):
        assert len(Summarization.tables(results | other)[0].rows) == 1


@pytest.mark.usefixtures("without_pictures")
def test_other_documents_or_settings_are_another_measurement(folded, data, tmp_path):
    arguments = ["--model", folded, "--data", data, "--output", tmp_path / "out"]
    command(*arguments, "--documents", "3")
    assert_refused(r"temperature was 0.3 and is 0.5", command, *arguments, "--documents", "3", "--temperature", "0.5")
    lines = made_documents(11)
    lines[1]["target"][0] = "a cat"
    write_lines(data, lines)
    assert_refused(r"another measurement: fingerprint was", command, *arguments, "--documents", "3")


@pytest.mark.parametrize("kind", ["folded", "stock"])
@pytest.mark.parametrize("prefill", [8192, 32])
def test_a_padded_batch_writes_what_each_document_gets_alone(kind, prefill, request, monkeypatch):
    """Against greedy decoding that reads the whole text again for every token; long prompts are read in chunks."""
    monkeypatch.setattr(condense.eval.models, "PREFILL_TOKENS", prefill)
    evaluated = load_evaluated(str(request.getfixturevalue(kind)))
    texts = [" ".join(line["source"]) for line in made_documents(6, seed=3)]
    texts[2] = "a cat"
    answers = summarization.summarize(evaluated, texts, GREEDY)
    assert len({answer for answer, _ in answers}) > 3
    for text, (answer, num_new) in zip(texts, answers, strict=True):
        ids = prompt_ids(evaluated.tokenizer, text)
        written = written_by(evaluated.model, ids, {evaluated.tokenizer.eos_token_id})
        assert (answer, num_new) == (evaluated.tokenizer.decode(written, skip_special_tokens=True), len(written))


def test_sampling_is_from_the_whole_vocabulary_at_the_temperature(folded):
    """Whatever the checkpoint's own generation_config says."""
    evaluated = load_evaluated(str(folded))
    own = {"top_k": 1, "top_p": 0.1, "repetition_penalty": 9.0, "temperature": 0.01, "do_sample": True}
    evaluated.model.generation_config.update(**own)
    options = replace(GREEDY, temperature=0.9, seed=5)
    (found,) = summarization.summarize(evaluated, [TEXT], options, number=3)
    torch.manual_seed(int(np.random.SeedSequence([5, 3]).generate_state(1)[0]))
    ids, ends = prompt_ids(evaluated.tokenizer, TEXT), {evaluated.tokenizer.eos_token_id}
    written = written_by(evaluated.model, ids, ends, temperature=0.9)
    assert found == (evaluated.tokenizer.decode(written, skip_special_tokens=True), len(written)) and len(written) > 3
    others = (options, 4), (replace(options, seed=6), 3)  # each batch draws its own numbers
    assert all(summarization.summarize(evaluated, [TEXT], *other)[0] != found for other in others)


def test_a_summary_stops_at_each_of_the_ends(stock):
    evaluated = load_evaluated(str(stock))
    texts = [" ".join(line["source"]) for line in made_documents(2, seed=4)]
    free = summarization.summarize(evaluated, texts, GREEDY)
    words = [answer.split() for answer, _ in free]
    other = next(word for word in words[1] if word not in words[0])
    evaluated.model.generation_config.eos_token_id = [
        evaluated.tokenizer.convert_tokens_to_ids(words[0][2]), evaluated.tokenizer.convert_tokens_to_ids(other)
    ]  # fmt: skip
    for (answer, num_new), before in zip(summarization.summarize(evaluated, texts, GREEDY), words, strict=True):
        stop = min(before.index(word) for word in (words[0][2], other) if word in before)
        assert answer.split() == before[:stop] and num_new == stop


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    return save_chat_model(tmp_path_factory.mktemp("chat"), [BEFORE, AFTER, TEXT])


@pytest.mark.usefixtures("without_pictures")
def test_a_chat_model_reads_its_template_and_stops_at_its_turns_end(chat, folded, data, tmp_path):
    """A padded batch of a folded model, against reading the whole text again for every token."""
    command(
        "--model", f"talks={chat}", "--model", f"ours={folded}", "--chat", "talks", "--data", data, "--temperature",
        "0", "--output", tmp_path / "out",
    )  # fmt: skip
    results = json.loads((tmp_path / "out" / "summarization.json").read_text())
    tokenizer, model = AutoTokenizer.from_pretrained(chat), CondenseForCausalLM.from_pretrained(chat).eval()
    ends = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|eot|>")}
    texts = {line["target"][0]: " ".join(line["source"]) for line in made_documents(11)}
    stopped, asked = 0, [document for document in results["documents"] if document["model"] == "talks"]
    for document in asked:
        prompt = [{"role": "user", "content": f"{BEFORE}{texts[document['reference']]}{AFTER}"}]
        ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        assert ids[:2] == tokenizer.convert_tokens_to_ids(["<s>", "<|start|>"])
        written = written_by(model, ids, ends)
        assert document["prediction"] == tokenizer.decode(written, skip_special_tokens=True)
        stopped += 0 < len(written) < NEW
    assert stopped and results["chat"] == ["talks"]
    assert {(row["model"], row["chat"]) for row in csv.DictReader((tmp_path / "out" / "summarization.csv").open())} == {
        ("talks", "True"), ("ours", "False")
    }  # fmt: skip
    assert [row[0] for row in Summarization.tables(results)[0].rows[::4]] == ["talks (chat)", "ours"]


def test_chats_that_cannot_be_are_refused_before_a_model_is_loaded(folded, chat, data, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation, "load_models", None)
    for kind, more in (("summarization", {"data": str(data)}), ("passkey", {"lengths": [80]})):
        options = {"models": [f"ours={folded}", str(chat)], **more}
        with pytest.raises(ValueError, match=r"--chat theirs: no model has this name; there are ours, .*chat"):
            evaluate(kind, tmp_path, chat=["theirs"], **options)
        with pytest.raises(ValueError, match=r"the tokenizer of '.*folded.*' has no chat template: leave --chat out"):
            evaluate(kind, tmp_path, chat=["ours"], **options)


def test_a_model_without_an_end_is_refused(stock):
    evaluated = load_evaluated(str(stock))
    evaluated.model.generation_config.eos_token_id = evaluated.tokenizer.eos_token = None
    assert_refused(r"no end-of-text token", summarization.summarize, evaluated, ["a cat"], GREEDY)


def test_what_a_caller_may_get_wrong(folded, data, tmp_path):
    with pytest.raises(ValueError, match=r"files='scitdlr' names no file. Pass .* cnn_dailymail, booksum, scitldr"):
        evaluate("summarization", tmp_path, models=["nowhere"], data="scitdlr")
    with pytest.raises(ValueError, match=r"booksum has its own fields .* leave 'chapter' out"):
        evaluate("summarization", tmp_path, models=["nowhere"], data="booksum", text_field="chapter")
    with pytest.raises(ValueError, match=r"there is no folder '.*nowhere'"):
        evaluate("summarization", tmp_path, models=[str(tmp_path / "nowhere")], data=str(data))
    words = r"data.jsonl:1: missing field \('text'; there are 'source', 'target':.* --text-field"
    with pytest.raises(ValueError, match=words):
        evaluate("summarization", tmp_path, models=[str(folded)], data=str(data))
    for wrong in ({"temperature": -0.1}, {"new_tokens": 0}, {"batch_size": 0}, {"seed": -1}):
        with pytest.raises(ValueError, match=rf"{next(iter(wrong))}={next(iter(wrong.values()))}"):
            evaluate("summarization", tmp_path, models=["nowhere"], data=str(data), **wrong)
    assert [path.name for path in tmp_path.iterdir()] == ["data.jsonl"]  # nothing stands in the way of a second try


def test_a_missing_metric_is_an_error_before_anything_else(data, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(ValueError, match=r"rouge-score .*pip install -e '.\[eval\]'"):
        evaluate("summarization", tmp_path / "out", models=["nowhere"], data=str(data))
    with pytest.raises(ValueError, match=r"pip install"):
        Summarization(GREEDY, [], Corpus([], [], {}))
    assert not (tmp_path / "out").exists()


def test_real_abstracts_on_a_real_model(stories, tmp_path):
    path = SHARED / "data" / "scitldr" / "test.jsonl"
    if not path.exists():
        pytest.skip("needs ../shared/data/scitldr beside the checkout")
    tokenizer = AutoTokenizer.from_pretrained(stories)
    folded = CondenseForCausalLM.from_pretrained(stories, segment_length=64).eval()
    stock = AutoModelForCausalLM.from_pretrained(stories).eval()
    corpus = read_corpus(Source(files=str(path), text="source", summary="target"), tokenizer, 10)
    lines = [json.loads(line) for line in path.open()][:10]
    texts = {line["target"][0]: " ".join(line["source"]) for line in lines}
    lengths = {key: len(tokenizer(text, add_special_tokens=False)["input_ids"]) for key, text in texts.items()}
    buckets = Counter("0-512" if n < 512 else "512-1024" if n < 1024 else "1024+" for n in lengths.values())
    documents, options = [], replace(GREEDY, new_tokens=12, batch_size=4)
    for name, model in (("folded", folded), ("stock", stock)):
        task = Summarization(options, [EvaluatedModel(name, str(stories), model, tokenizer)], corpus)
        found = task.summarise(measure(task))["documents"]
        assert len(found) == 10 and all(document["tokens"] == lengths[document["reference"]] for document in found)
        for document in found[::3]:
            ids = torch.tensor([prompt_ids(tokenizer, texts[document["reference"]])])
            alone = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
            expected = tokenizer.decode(alone[0, ids.shape[1] :], skip_special_tokens=True).strip()
            assert document["prediction"] == expected
        documents += found
    for cell in summarization.average(documents):
        assert cell["documents"] == (10 if cell["bucket"] == "overall" else buckets[cell["bucket"]])
    assert sum(document["rouge1"] for document in documents) > 0
