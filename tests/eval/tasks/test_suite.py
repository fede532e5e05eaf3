"""The suite asks what lm-evaluation-harness itself asks, keeps RULER's samples, and never lets a prompt be cut."""

import json
from types import SimpleNamespace

import datasets
import pytest

pytest.importorskip("lm_eval", reason="needs the extra harness")

import lm_eval
import wonderwords
from lm_eval.tasks import TaskManager
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

import condense.eval.tasks.suite
from condense.eval.harness import CondenseLM
from condense.eval.harness_tasks import _manager, load_task, tasks_of
from condense.eval.tasks import evaluate
from condense.eval.tasks.options import SuiteOptions
from condense.eval.tasks.suite import Suite
from condense.training.small_llama import small_llama, word_tokenizer

from ...pictures import is_drawn
from ...refusals import assert_refused
from ..measuring import command, save_folded
from ..rivals import save_rival

pytestmark = pytest.mark.process

TEXT = "The grass is green . The sky is blue . The sun is yellow . Here we go . One of the special magic numbers for"
TASK, LENGTH, PROMPTS = "niah_single_1", 1024, 2
NODES = "a node and an edge "


@pytest.fixture(scope="module", autouse=True)
def without_a_network():
    """RULER's module asks a server for nltk's sentence splitter, which only essays need.

    It also sorts all pairs of an adjective and a noun, for 13 s: there are some words of each here.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nltk.data.find", lambda name: name)
        words = {name: found[:99] for name, found in wonderwords.RandomWord()._categories.items()}
        patch.setattr("wonderwords.RandomWord", lambda: SimpleNamespace(_categories=words))
        yield


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("suite")
    tokenizer = word_tokenizer([TEXT])
    llama = small_llama(tokenizer, seed=1, width=32)
    for name, positions in {"llama": 2048, "short": 512}.items():
        llama.config.max_position_embeddings = positions
        llama.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    save_folded(root / "llama", root / "folded", 64)
    return root


def options(root, **changed):
    given = {"models": [str(root / "folded")], "benchmarks": [TASK], "lengths": (LENGTH,), "num_prompts": PROMPTS}
    return SuiteOptions(**given | {"samples": str(root / "samples")} | changed)


@pytest.fixture(scope="module")
def measured(root):
    arguments = ["eval", "suite", "--model", root / "folded", "--model", root / "llama", "--lengths", LENGTH]
    arguments += ["--benchmarks", f"{TASK},babilong_qa1", "--prompts", PROMPTS]
    arguments += ["--samples", root / "samples", "--output", root / "results"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets, "load_dataset", texts)
        shown = command(*arguments)
    return json.loads((root / "results" / "suite.json").read_text()), shown


def test_prompts_and_answers_are_those_of_the_harness(root, measured):
    cells = {(cell["model"], cell["task"], cell["length"]): cell for cell in measured[0]["cells"]}
    manager = TaskManager(
        include_path=next(iter(_manager().include_path)),  # RULER's folder
        include_defaults=False,
        metadata={"pretrained": str(root / "folded"), "max_seq_lengths": [LENGTH]},
    )
    fixed = dict.fromkeys(("random_seed", "numpy_random_seed", "bootstrap_iters"), 0)
    model, asked = CondenseLM(str(root / "folded")), {"tasks": [TASK], "limit": PROMPTS, "task_manager": manager}
    theirs = lm_eval.simple_evaluate(model=model, **asked, **fixed)["samples"][TASK]
    ours = cells["folded", TASK, LENGTH]["samples"]
    assert [one["prompt"] for one in ours] == [one["prompt_hash"] for one in theirs]
    assert [one["answer"] for one in ours] == [one["filtered_resps"] for one in theirs]
    assert all(LENGTH / 2 < one["tokens"] < LENGTH for one in ours)
    stock = cells["llama", TASK, LENGTH]["samples"]
    assert [one["prompt"] for one in stock] == [one["prompt"] for one in ours]
    assert [one["answer"] for one in stock] != [one["answer"] for one in ours]


def test_files_and_tables(root, measured):
    results, printed = measured
    expected = [(model, *counted) for model in ("folded", "llama") for counted in (("ruler", 2), ("babilong", 1))]
    assert [(mean["model"], mean["benchmark"], mean["prompts"]) for mean in results["means"]] == expected
    assert results["left_out"] == [] and "score of 100 (prompts), by tokens" in printed
    assert is_drawn(root / "results" / "suite.png")
    assert "niah_single_1,1024" in (root / "results" / "suite.csv").read_text()


def test_samples_are_made_once(root, measured, monkeypatch):
    made = {path.name: path.stat().st_mtime_ns for path in (root / "samples").iterdir() if path.is_dir()}
    assert len(made) == 1  # for two models with one tokenizer
    monkeypatch.setattr("random.seed", lambda seed: pytest.fail("samples are made again"))
    Suite.load(options(root))
    assert {path.name: path.stat().st_mtime_ns for path in (root / "samples").iterdir() if path.is_dir()} == made


def test_scores_are_means_over_the_samples(root, measured, monkeypatch):
    suite = Suite.load(options(root))
    outputs = suite._load(suite.items()[0]).eval_docs["outputs"][:PROMPTS]
    answers = [f"it is {outputs[0][0]}", outputs[0][0]]  # the second repeats the first
    monkeypatch.setattr(suite.reader_of(suite.models[0]), "generate_until", lambda requests: answers)
    (cell,) = suite.items()
    results = suite.summarise([(cell, suite.measure(cell))])
    assert [sample["score"] for sample in results["cells"][0]["samples"]] == [1, 0]
    assert results["means"][0]["score"] == 0.5 and results["means"][0]["prompts"] == 2


def test_lengths_that_a_benchmark_is_not_made_at(root):
    suite = Suite.load(options(root, benchmarks=["babilong"], lengths=(512, 1500)))
    results = suite.summarise([])
    assert suite.items() == []
    assert [(one["task"], one["length"]) for one in results["left_out"]] == [("babilong", 512), ("babilong", 1500)]
    assert "the benchmark has no texts of this length" in str(suite.tables(results)[-1])


def test_a_task_that_does_not_fill_a_length_is_left_out(root, monkeypatch):
    monkeypatch.setattr(condense.eval.tasks.suite, "longest_sample", lambda task: LENGTH // 2)
    suite = Suite.load(options(root))
    (cell,) = suite.items()
    record = suite.measure(cell)
    assert record["samples"] == [] and record["left_out"] == "its samples end at 512 tokens"


def test_a_prompt_is_never_cut(root, measured, monkeypatch):
    with pytest.raises(ValueError, match="short reads 512 tokens at most, and prompts of 1,024 would be cut"):
        Suite.load(options(root, models=[str(root / "short")]))
    monkeypatch.setattr(datasets, "load_dataset", texts)  # prompts of 300 and 700 tokens, answers of 16,384
    words = "graphwalks_128k at 1,024 tokens: a prompt of 700 tokens and an answer of up"
    with pytest.raises(ValueError, match=words):  # before anything is measured
        Suite.load(options(root, models=[str(root / "llama")], benchmarks=["graphwalks_128k"]))


def test_a_model_without_positions_reads_texts_of_any_length(root, measured, tmp_path):
    """The harness itself would cut them to 2,048 tokens."""
    tokenizer = AutoTokenizer.from_pretrained(root / "llama")
    save_rival(tmp_path / "mamba", "mamba", tokenizer, hidden_size=16, num_hidden_layers=1)
    suite = Suite.load(options(root, models=[str(tmp_path / "mamba")], num_prompts=1))
    assert suite.reader_of(suite.models[0]).max_length > 2**30
    (cell,) = suite.items()
    (sample,) = suite.measure(cell)["samples"]
    ours = next(one for one in measured[0]["cells"] if (one["model"], one["task"]) == ("llama", TASK))["samples"][0]
    assert (sample["prompt"], sample["tokens"]) == (ours["prompt"], ours["tokens"])


def texts(path, name=None, data_files=None, split=None, **more):
    """Returns what the hub would send: the fields of its data sets, with few texts."""
    if path == "openai/graphwalks":
        rows = [{"prompt": NODES * (size // 5), "answer_nodes": ["a"]} for size in (300, 700, 600, 5000)]
        return datasets.Dataset.from_list(rows)
    if path == "recursal/longbench-v2":
        row = {"context": NODES * 100, "question": "who", "choices": ["1", "2", "3", "4"], "answer": 2}
        return datasets.DatasetDict({"train": datasets.Dataset.from_list([row])})
    assert (path, name, split) == ("RMT-team/babilong-1k-samples", "1k", "qa1")
    return datasets.Dataset.from_list([{"input": NODES * 150, "question": "Where is a", "target": "edge"}])


def test_texts_with_lengths_of_their_own(root, monkeypatch):
    """A length holds the texts of more than half of it; the others are counted."""
    monkeypatch.setattr(datasets, "load_dataset", texts)
    suite = Suite.load(options(root, benchmarks=["graphwalks_128k", "longbench2_graph"], lengths=(512, 1024)))
    reader = suite.reader_of(suite.models[0])
    monkeypatch.setattr(reader, "generate_until", lambda requests: ["Final Answer: [a]"] * len(requests))
    found = {cell.length: [s["tokens"] for s in suite.measure(cell)["samples"]] for cell in suite.items()[1:2]}
    assert found == {1024: [700, 600]}
    scored = suite.measure(suite.items()[3])
    assert [sample["score"] in (0, 1) for sample in scored["samples"]] == [True]
    measured = [(cell, suite.measure(cell)) for cell in suite.items()[:2]]
    resumed = Suite.load(suite.options)  # has counted nothing
    why = "1 of 4 texts have other lengths: 300 to 5,000 tokens"
    left_out = {"model": "folded", "task": "graphwalks_128k", "length": None, "why": why}
    assert resumed.summarise(measured)["left_out"] == [left_out]


def test_names_of_benchmarks_and_tasks():
    every = tasks_of(["ruler", "babilong", "longbench2", "infinitebench", "graphwalks"])
    counts = {name: list(every.values()).count(name) for name in dict.fromkeys(every.values())}
    assert counts == {"ruler": 13, "babilong": 5, "longbench2": 20, "infinitebench": 11, "graphwalks": 2}
    assert_refused("no benchmark or task 'glue': choose from ruler, babilong", tasks_of, ["ruler", "glue"])


def test_a_generator_that_would_not_end_is_refused(root):
    characters = AutoTokenizer.from_pretrained(root / "folded")
    characters.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    words = "ruler_vt cannot be made for the tokenizer of here, which has 89 tokens for 19 w"
    assert_refused(words, load_task, "ruler", "ruler_vt", LENGTH, "here", characters, 0, root / "samples")


def test_texts_that_cannot_be_had(root):
    with pytest.raises(ValueError, match=r"the texts of graphwalks_1M can.t be loaded .* openai/graphwalks"):
        Suite.load(options(root, benchmarks=["graphwalks_1M"]))


@pytest.mark.slow
def test_two_processes_give_the_records_of_one(root, tmp_path, monkeypatch):
    (tmp_path / "nltk" / "tokenizers" / "punkt_tab").mkdir(parents=True)  # which nothing reads
    monkeypatch.setenv("NLTK_DATA", str(tmp_path / "nltk"))
    given = {"models": [str(root / "folded"), str(root / "llama")], "benchmarks": [TASK], "lengths": (LENGTH,)}
    given |= {"num_prompts": PROMPTS, "samples": str(root / "samples")}
    for ranks in (1, 2):
        evaluate("suite", tmp_path / str(ranks), ranks=ranks, **given)
    alone, shared = ((tmp_path / name / "suite.records.jsonl").read_bytes() for name in "12")
    assert alone == shared and alone.count(b"\n") == 3
