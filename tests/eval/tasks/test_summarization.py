"""Summaries are the model's own, scored as the reference package does, and stopped runs end as unbroken ones."""

import csv
import json
import sys
from collections import Counter
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from tokenizers import Regex, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import eval.models
from condense import CondenseForCausalLM
from eval.cli import evaluations
from eval.models import EvaluatedModel, load_evaluated
from eval.runner import measure
from eval.statistics import bootstrap
from eval.tasks import evaluate, summarization
from eval.tasks.corpus import Corpus, find_source, read_corpus
from eval.tasks.options import SummarizationOptions
from eval.tasks.rouge import METRICS, Rouge
from eval.tasks.summarization import Summarization
from training.data.summarization import BEFORE, BEHIND, prompt_ids
from training.recipe import Source
from training.small_llama import small_llama, word_tokenizer

from ...conftest import SHARED

TEXT = "a cat sat on the mat and saw two dogs run far away from one old red house by the sea"
WORDS = TEXT.split()
NEW = 14
GREEDY = SummarizationOptions(models=[], data="", temperature=0.0, new_tokens=NEW)


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def made_documents(number, seed=0):
    """Sentences of random length as lists, with two summaries each."""
    generator = np.random.default_rng(seed)

    def sentence(longest):
        return " ".join(generator.choice(WORDS, generator.integers(2, longest)))

    return [
        {"source": [sentence(40) for _ in range(3)], "target": [sentence(12), "not the first"]} for _ in range(number)
    ]


def letter_tokenizer():
    tokenizer = word_tokenizer([" ".join(BEFORE + BEHIND + TEXT)])
    letters = pre_tokenizers.Split(Regex(r"\w|[^\w\s]"), behavior="removed", invert=True)
    tokenizer.backend_tokenizer.pre_tokenizer = letters
    return tokenizer


def save_model(folder, tokenizer, seed, segment_length=None):
    model = small_llama(tokenizer, seed)
    with torch.no_grad():  # at the start of training a model repeats itself: larger weights tell documents apart
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.dim() > 1 else 1)
    model.save_pretrained(folder)
    if segment_length is not None:
        CondenseForCausalLM.from_pretrained(folder, segment_length=segment_length).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folded(tmp_path_factory):
    tokenizer = word_tokenizer([BEFORE, BEHIND, TEXT])
    return save_model(tmp_path_factory.mktemp("folded"), tokenizer, seed=1, segment_length=16)


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """Its tokenizer is another one: a token is a letter."""
    return save_model(tmp_path_factory.mktemp("stock"), letter_tokenizer(), seed=2)


@pytest.fixture
def data(tmp_path):
    return write_lines(tmp_path / "data.jsonl", made_documents(11))


def command(*arguments):
    fields = ("--text-field", "source", "--summary-field", "target", "--new-tokens", str(NEW), "--batch", "3")
    result = CliRunner().invoke(evaluations, ["summarization", *map(str, arguments), *fields], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def naive_rouge(reference, prediction):
    """By counting: n-grams, and all subsequences of the shorter text. Words of at most three letters have no stem."""
    reference, prediction = reference.split(), prediction.split()

    def f1(shared, total_reference, total_prediction):
        return 2 * shared / (total_reference + total_prediction) if shared else 0.0

    def grams(words, n):
        return Counter(zip(*(words[i:] for i in range(n)), strict=False))

    def is_within(words, text):
        rest = iter(text)
        return all(word in rest for word in words)

    scores = {}
    for n in (1, 2):
        ours, theirs = grams(reference, n), grams(prediction, n)
        scores[f"rouge{n}"] = f1((ours & theirs).total(), ours.total(), theirs.total())
    longest = max(
        n
        for n in range(len(prediction) + 1)
        if any(is_within(chosen, reference) for chosen in combinations(prediction, n))
    )
    return scores | {"rougeL": f1(longest, len(reference), len(prediction))}


def test_rouge_against_counting():
    generator = np.random.default_rng(0)
    for _ in range(60):
        reference, prediction = (" ".join(generator.choice(list("abcd"), generator.integers(1, 10))) for _ in "12")
        expected = naive_rouge(reference, prediction)
        found = Rouge().f1(reference, prediction)
        assert found == pytest.approx(expected | {"rougeLsum": expected["rougeL"]})  # one line: both are the same


@pytest.mark.parametrize(
    ("reference", "prediction", "expected"),
    [
        # The rouge-score package's own examples, from its tests.
        ("testing one two", "testing", {"rouge1": 1 / 2}),
        ("testing one two", "testing one", {"rouge2": 2 / 3, "rougeL": 4 / 5}),
        ("testing one two", "testing two", {"rougeL": 4 / 5}),
        ("testing one two", "", dict.fromkeys(METRICS, 0.0)),
        ("w1 w2 w3 w4 w5", "/", dict.fromkeys(METRICS, 0.0)),
        ("w1 w2 w3 w4 w5", "w1 w2 w6 w7 w8\nw1 w3 w8 w9 w5", {"rougeLsum": 2 * 0.8 * 0.4 / 1.2}),
        ("First sentence.\nSecond Sentence.", "Second sentence.\nFirst Sentence.", {"rougeLsum": 1.0, "rougeL": 1 / 2}),
        ("First sentence. Second Sentence.", "Second sentence. First Sentence.", {"rougeLsum": 1 / 2}),
        # the cat were run | the cat run: three words, all of the prediction, three quarters of the reference
        ("The cats were running", "the cat runs", {"rouge1": 6 / 7, "rouge2": 2 / 5, "rougeL": 6 / 7}),
        # Case and punctuation don't count, a hyphen parts words, digits do count.
        ("A well-known 7% rise!", "well known: 7 rise", {"rouge1": 8 / 9}),
    ],
)
def test_rouge_worked_by_hand(reference, prediction, expected):
    found = Rouge().f1(reference, prediction)
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_averages_by_hand():
    def document(tokens, score, new_tokens, model="one"):
        scores = {"rouge1": score, "rouge2": score / 2, "rougeL": 0.25, "rougeLsum": 0.0}
        return {
            "model": model, "tokens": tokens, "bucket": summarization.bucket_of(tokens), "new_tokens": new_tokens,
            **scores,
        }  # fmt: skip

    documents = [document(0, 0, 10), document(511, 1, 20), document(512, 0.6, 3), document(1023, 0.4, 4)]
    documents += [document(5, 0.3, 1, "other"), document(1024, 0.5, 2, "other"), document(90_000, 0.7, 3, "other")]
    cells = {(cell["model"], cell["bucket"]): cell for cell in summarization.average(documents)}
    assert list(cells) == [
        (name, bucket) for name in ("one", "other") for bucket in ("0-512", "512-1024", "1024+", "overall")
    ]
    assert [cell["documents"] for cell in cells.values()] == [2, 2, 0, 4, 1, 0, 2, 3]
    first = cells["one", "0-512"]
    assert (first["rouge1"], first["rouge2"], first["new_tokens"]) == (0.5, 0.25, 15)
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
            assert {metric: document[metric] for metric in METRICS} == expected
        assert len({document["prediction"] for document in found}) > len(found) // 2
        cell = next(c for c in results["cells"] if (c["model"], c["bucket"]) == (name, "overall"))
        scores = [document["rouge1"] for document in found]
        assert cell["rouge1"] == pytest.approx(np.mean(scores)) and (any(scores) or name == "stock")
        assert (cell["rouge1_low"], cell["rouge1_high"]) == bootstrap(scores)
        assert f"{cell['rouge1']:.4f} ({cell['rouge1_low']:.3f} to {cell['rouge1_high']:.3f})" in text
    assert [model["segment_length"] for model in results["models"]] == [16, None]
    rows = list(csv.DictReader((output / "summarization.csv").open()))
    assert [row["rouge1"] for row in rows] == [
        "" if cell["rouge1"] is None else str(cell["rouge1"]) for cell in results["cells"]
    ]
    assert "prompt over 95 tokens" in text and "summarization.svg" not in text and ".svg" in text
    assert (output / "summarization.png").stat().st_size > 20_000 and (output / "summarization.svg").exists()


def test_a_stopped_run_ends_as_an_unbroken_one(folded, stock, data, tmp_path, monkeypatch):
    arguments = ["--model", f"ours={folded}", "--model", f"stock={stock}", "--data", data]
    command(*arguments, "--output", tmp_path / "whole")
    whole = (tmp_path / "whole" / "summarization.records.jsonl").read_text()
    lines = whole.splitlines(keepends=True)
    assert len(lines) == 1 + 2 * 4  # settings, then 11 documents by threes for two models
    calls, real = [], summarization.generate

    def counted(model, ids, *rest, **options):
        calls.append(len(ids))
        return real(model, ids, *rest, **options)

    monkeypatch.setattr(summarization, "generate", counted)
    monkeypatch.setattr(Summarization, "draw", lambda *_: None)  # it takes longer than the models
    for name, kept, missing in (
        ("between lines", "".join(lines[:3]), [3, 2, 3, 3, 3, 2]),
        ("within a line", "".join(lines[:6]) + lines[6][:200], [3, 3, 2]),
        ("within the settings", lines[0][:40], [3, 3, 3, 2, 3, 3, 3, 2]),
        ("complete", whole, []),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "summarization.records.jsonl").write_text(kept)
        calls.clear()
        command(*arguments, "--output", folder)
        assert calls == missing
        assert (folder / "summarization.records.jsonl").read_text() == whole
        written = [json.loads((path / "summarization.json").read_text()) for path in (folder, tmp_path / "whole")]
        assert written[0]["documents"] == written[1]["documents"] and written[0]["cells"] == written[1]["cells"]


def test_other_documents_or_settings_are_another_measurement(folded, data, tmp_path):
    arguments = ["--model", folded, "--data", data, "--output", tmp_path / "out"]
    command(*arguments, "--documents", "3")
    with pytest.raises(ValueError, match=r"temperature was 0.3 and is 0.5"):
        command(*arguments, "--documents", "3", "--temperature", "0.5")
    lines = made_documents(11)
    lines[1]["target"][0] = "a cat"
    write_lines(data, lines)
    with pytest.raises(ValueError, match=r"another measurement: fingerprint was"):
        command(*arguments, "--documents", "3")


@pytest.mark.parametrize("kind", ["folded", "stock"])
@pytest.mark.parametrize("prefill", [8192, 32])
def test_a_padded_batch_writes_what_each_document_gets_alone(kind, prefill, request, monkeypatch):
    """Against greedy decoding that reads the whole text again for every token; long prompts are read in chunks."""
    monkeypatch.setattr(eval.models, "PREFILL_TOKENS", prefill)
    evaluated = load_evaluated(str(request.getfixturevalue(kind)))
    texts = [" ".join(line["source"]) for line in made_documents(6, seed=3)]
    texts[2] = "a cat"
    answers = summarization.summarize(evaluated, texts, GREEDY)
    assert len({answer for answer, _ in answers}) > 3
    for text, (answer, num_new) in zip(texts, answers, strict=True):
        ids = prompt_ids(evaluated.tokenizer, text)
        written = []
        while len(written) < NEW:
            with torch.no_grad():
                token = int(evaluated.model(torch.tensor([ids + written]), use_cache=False).logits[0, -1].argmax())
            if token == evaluated.tokenizer.eos_token_id:
                break
            written.append(token)
        assert (answer, num_new) == (evaluated.tokenizer.decode(written, skip_special_tokens=True), len(written))


def test_sampling_is_from_the_whole_vocabulary_at_the_temperature(folded):
    """Whatever the checkpoint's own generation_config says."""
    evaluated = load_evaluated(str(folded))
    evaluated.model.generation_config.update(
        top_k=1, top_p=0.1, repetition_penalty=9.0, temperature=0.01, do_sample=True
    )
    options = replace(GREEDY, temperature=0.9, seed=5)
    (found,) = summarization.summarize(evaluated, [TEXT], options, number=3)
    torch.manual_seed(int(np.random.SeedSequence([5, 3]).generate_state(1)[0]))
    ids, written = prompt_ids(evaluated.tokenizer, TEXT), []
    while len(written) < NEW:
        with torch.no_grad():
            logits = evaluated.model(torch.tensor([ids + written]), use_cache=False).logits[0, -1]
        token = int(torch.multinomial((logits / 0.9).softmax(-1), 1))
        if token == evaluated.tokenizer.eos_token_id:
            break
        written.append(token)
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


def test_a_model_without_an_end_is_refused(stock):
    evaluated = load_evaluated(str(stock))
    evaluated.model.generation_config.eos_token_id = evaluated.tokenizer.eos_token = None
    with pytest.raises(ValueError, match=r"no token that ends a text"):
        summarization.summarize(evaluated, ["a cat"], GREEDY)


def test_documents_are_the_first_and_the_shortest_come_first(tmp_path):
    tokenizer = word_tokenizer([BEFORE, BEHIND, *WORDS])
    texts = ["the cat sat on the mat", "two dogs", "a red house", "the sea", "one old mat"]
    path = write_lines(tmp_path / "data.jsonl", [{"text": text, "summary": text.upper()} for text in texts])
    corpus = read_corpus(find_source(str(path)), tokenizer, num_documents=4)
    assert [document.text for document in corpus.documents] == ["two dogs", "the sea", "a red house", texts[0]]
    assert corpus.num_tokens == [2, 2, 3, 6] and corpus.left_out == {}
    frame = len(prompt_ids(tokenizer, ""))
    corpus = read_corpus(find_source(str(path)), tokenizer, num_documents=4, longest=frame + 2)
    assert [document.text for document in corpus.documents] == ["two dogs", "the sea"]
    assert corpus.left_out == {f"prompt over {frame + 2} tokens": 2}  # of the first four, not of all
    with pytest.raises(ValueError, match=rf"no document to summarise \(prompt over {frame} tokens: 5\)"):
        read_corpus(find_source(str(path)), tokenizer, longest=frame)


def test_broken_documents(tmp_path):
    tokenizer = word_tokenizer(WORDS)
    lines = ['{"text": "a cat", "summary": "cat"}', '{"text": "a cat"}', "{", '{"text": "a cat", "summary": "猫 です"}']
    path = tmp_path / "data.jsonl"
    for broken, message in (
        (lines[1], r"data.jsonl:2: missing field \('summary'; there are 'text'\).*--bad-documents skip"),
        (lines[2], r"data.jsonl:2: broken JSON"),
        (lines[3], r"data.jsonl:2: summary without words of a-z and 0-9 \('猫 です'\)"),
    ):
        path.write_text(f"{lines[0]}\n{broken}\n", encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            read_corpus(find_source(str(path)), tokenizer)
    path.write_text("\n".join([*lines, lines[1], lines[0]]), encoding="utf-8")
    corpus = read_corpus(find_source(str(path)), tokenizer, num_documents=2, bad_documents="skip")
    assert len(corpus.documents) == 2  # broken ones don't count
    assert corpus.left_out == {"missing field": 2, "broken JSON": 1, "summary without words of a-z and 0-9": 1}
    path.write_text("")
    with pytest.raises(ValueError, match=r"data.jsonl has no document to summarise \(it is empty\)"):
        read_corpus(find_source(str(path)), tokenizer)


def test_known_data_sets(tmp_path, monkeypatch):
    """With the fields that they have on the hub; SciTLDR comes as the file of one of its configurations."""
    from datasets import Dataset, IterableDataset

    rows = {
        ("abisee/cnn_dailymail", "3.0.0", "test"): {"article": "long", "highlights": "one .\ntwo .", "id": "x"},
        ("kmfoda/booksum", None, "test"): {"chapter": "long", "summary_text": "one", "summary": "{}", "book_id": "y"},
    }

    def load_dataset(hub, name, split, **options):
        return IterableDataset.from_generator(lambda: iter([rows[hub, name, split]]))

    def download(repository, file, repo_type, revision):
        assert (repository, repo_type, revision) == ("allenai/scitldr", "dataset", "refs/convert/parquet")
        folder, split, name = file.split("/")
        assert (folder, split) == ("Abstract", "test")
        Dataset.from_list([{"source": ["a b.", "c."], "target": ["one", "two"]}]).to_parquet(tmp_path / name)
        return str(tmp_path / name)

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    tokenizer = word_tokenizer(WORDS)
    for name, text, summary in (
        ("cnn_dailymail", "long", "one .\ntwo ."), ("booksum", "long", "one"), ("scitldr", "a b. c.", "one")
    ):  # fmt: skip
        (document,) = read_corpus(find_source(name), tokenizer).documents
        assert (document.text, document.summary) == (text, summary)


def test_what_a_caller_may_get_wrong(folded, data, tmp_path):
    with pytest.raises(ValueError, match=r"files='scitdlr' names no file. Pass .* cnn_dailymail, booksum, scitldr"):
        evaluate("summarization", tmp_path, models=["nowhere"], data="scitdlr")
    with pytest.raises(ValueError, match=r"booksum has its own fields .* leave 'chapter' out"):
        evaluate("summarization", tmp_path, models=["nowhere"], data="booksum", text_field="chapter")
    with pytest.raises(ValueError, match=r"there is no folder '.*nowhere'"):
        evaluate("summarization", tmp_path, models=[str(tmp_path / "nowhere")], data=str(data))
    with pytest.raises(ValueError, match=r"data.jsonl:1: missing field \('text'; there are 'source', 'target'\)"):
        evaluate("summarization", tmp_path, models=[str(folded)], data=str(data))
    for wrong in ({"temperature": -0.1}, {"new_tokens": 0}, {"batch_size": 0}, {"seed": -1}):
        with pytest.raises(ValueError, match=rf"{next(iter(wrong))}={next(iter(wrong.values()))}"):
            evaluate("summarization", tmp_path, models=["nowhere"], data=str(data), **wrong)
    assert [path.name for path in tmp_path.iterdir()] == ["data.jsonl"]  # nothing stands in the way of a second try


def test_a_missing_metric_is_an_error_before_anything_else(data, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(ValueError, match=r"rouge-score .*pip install 'condense-llama\[eval\]'"):
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
