"""The harness gets from a folded model what the model gives for each single text, whatever the batch and the chunks."""

import json
import math
import os
import re
import subprocess
import sys
from importlib.metadata import distributions
from importlib.util import module_from_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import logging

pytest.importorskip("lm_eval", reason="needs the extra harness")

import lm_eval
from lm_eval import simple_evaluate
from lm_eval.api import registry
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

import condense.cli.main
import condense.eval.harness
from condense import CondenseForCausalLM
from condense.eval.harness import CondenseLM, StockLM
from condense.training.small_llama import small_llama, word_tokenizer

from ..condense.models import in_float64
from ..refusals import assert_refused
from .measuring import save_folded

pytestmark = pytest.mark.process

TEXT = "a cat sat on the mat and saw two dogs run far away from one old red house by the sea . , : ?"
WORDS = TEXT.split()
LENGTH = 5  # of a segment


def words(number, seed=0):
    return " ".join(np.random.default_rng([seed, number]).choice(WORDS, number))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Writes a Llama with large weights that says it was trained for 16 tokens, and folds it at 5 and at 200 tokens."""
    logging.disable_progress_bar()
    root = tmp_path_factory.mktemp("models")
    tokenizer = word_tokenizer([TEXT])
    tokenizer.model_max_length = 16
    llama = small_llama(tokenizer, seed=3, width=32).double()
    llama.config.max_position_embeddings = 16
    with torch.no_grad():
        for name, parameter in llama.named_parameters():
            parameter.mul_(1.3 if "norm" in name else 12)
        llama.lm_head.weight[:4] = 0  # special tokens are never the likeliest
    llama.save_pretrained(root / "llama")
    tokenizer.save_pretrained(root / "llama")
    for name, length in {"folded": LENGTH, "wide": 200}.items():
        save_folded(root / "llama", root / name, length)
    return root


class Own:
    """The model's own log-likelihoods of a text: one row, one call, without a state."""

    def __init__(self, folder):
        self.model = CondenseForCausalLM.from_pretrained(folder).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder, model_max_length=10**6)

    @torch.no_grad()
    def scores(self, ids):
        return self.model(torch.tensor([ids])).logits[0].log_softmax(-1)

    def answer(self, context, continuation):
        ids = self.tokenizer(context)["input_ids"] or [self.tokenizer.bos_token_id]
        scored = torch.tensor(self.tokenizer(continuation)["input_ids"])
        scores_nV = self.scores(ids + scored.tolist()[:-1])[len(ids) - 1 :]
        return scores_nV.gather(1, scored[:, None]).sum().item(), bool((scores_nV.argmax(1) == scored).all())

    def greedy(self, prompt, number):
        ids = self.tokenizer(prompt)["input_ids"]
        for _ in range(number):
            ids.append(int(self.scores(ids)[-1].argmax()))
        return self.tokenizer.decode(ids[-number:])


@pytest.fixture(scope="module")
def own(folders):
    return Own(folders / "folded")


@pytest.fixture(scope="module")
def pairs(own):
    """Returns contexts of 0 to 23 tokens, some asked several times, with continuations of 1 to 17 tokens."""
    found = [(words(size, 1), words(scored)) for size, scored in [(0, 4), (1, 1), (4, 7), (5, 17), (6, 5), (23, 2)]]
    found += [(words(11, 2), words(scored, 3)) for scored in (1, 6, 12)]
    found += [(words(13, 4), own.greedy(words(13, 4), 8))]  # the only one that is greedy
    found += [(words(13, 4), own.greedy(words(13, 4), 7) + " " + WORDS[0])]
    return [(context, " " + continuation) for context, continuation in found]


def load(folder, batch_size=1, **options):
    return CondenseLM(str(folder), batch_size=batch_size, **options)


def ask(lm, kind, arguments):
    requests = [Instance(kind, {}, texts, index) for index, texts in enumerate(arguments)]
    return getattr(lm, kind)(requests, disable_tqdm=True)


def check(answers, expected):
    assert [greedy for _, greedy in answers] == [greedy for _, greedy in expected]
    assert [total for total, _ in answers] == pytest.approx([total for total, _ in expected], abs=1e-9, rel=0)


@pytest.mark.parametrize(
    ("batch_size", "read", "scored"),
    [(1, 4096, 1024), (4, 4096, 1024), (1, 1, 1), (4, 1, 1), (1, 30, 13), (4, 30, 13), ("auto", 30, 13)],
)
def test_log_likelihoods_are_the_models_own(folders, own, pairs, batch_size, read, scored, monkeypatch):
    monkeypatch.setattr(condense.eval.harness, "TOKENS_PER_CALL", read)
    monkeypatch.setattr(condense.eval.harness, "SCORED_PER_CALL", scored)
    expected = [own.answer(*pair) for pair in pairs]
    assert [greedy for _, greedy in expected] == [False] * 9 + [True, False]
    check(ask(load(folders / "folded", batch_size), "loglikelihood", pairs), expected)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_document_is_one_text_of_any_length(folders, own, batch_size, monkeypatch):
    monkeypatch.setattr(condense.eval.harness, "SCORED_PER_CALL", 7)
    documents = [(words(size, 5),) for size in (1, 23, 71, 4, 50)]
    expected = [own.answer("", document)[0] for (document,) in documents]
    found = ask(load(folders / "folded", batch_size), "loglikelihood_rolling", documents)
    assert found == pytest.approx(expected, abs=1e-9, rel=0)


@pytest.fixture(scope="module")
def written(own):
    """Returns what the model writes after each prompt."""
    return {prompt: own.greedy(prompt, 12) for prompt in (words(size, 6) for size in (3, 5, 29, 17, 10, 9))}


@pytest.mark.parametrize("batch_size", [1, 4])
def test_generation_goes_on_from_the_whole_prompt(folders, written, batch_size):
    prompts, texts = list(written), list(written.values())
    lm = load(folders / "folded", batch_size, truncation=True)
    found = ask(lm, "generate_until", [(prompt, {"until": [], "max_gen_toks": 12}) for prompt in prompts])
    assert found == texts and len(set(texts)) == len(texts)
    stop = texts[2].split()[6]
    assert any(stop in text.split()[:-1] for text in texts) and any(stop not in text for text in texts)
    found = ask(lm, "generate_until", [(prompt, {"until": [stop], "max_gen_toks": 12}) for prompt in prompts])
    assert found == [text.split(stop)[0] for text in texts]


@pytest.mark.parametrize("max_length", [16, 1000])
def test_texts_within_a_segment_get_what_hf_gives_the_stock_model(folders, pairs, max_length):
    stock = HFLM(str(folders / "llama"), device="cpu", batch_size=4, max_length=max_length)
    in_float64(stock.model)
    folded = load(folders / "wide", 4, max_length=max_length)
    short = [pair for pair in pairs if len(pair[1].split()) <= max_length]
    assert any(len(context.split()) > 16 for context, _ in short)
    check(ask(folded, "loglikelihood", short), ask(stock, "loglikelihood", short))
    documents = [(words(size, 5),) for size in (1, 23, 71)]
    expected = ask(stock, "loglikelihood_rolling", documents)
    assert ask(folded, "loglikelihood_rolling", documents) == pytest.approx(expected, abs=1e-9, rel=0)
    prompts = [(words(size, 6), {"until": ["."], "max_gen_toks": 9}) for size in (3, 29)]
    assert ask(folded, "generate_until", prompts) == ask(stock, "generate_until", prompts)


def test_only_scored_tokens_have_logits_and_a_context_is_read_once(folders, monkeypatch):
    monkeypatch.setattr(condense.eval.harness, "TOKENS_PER_CALL", 64)
    monkeypatch.setattr(condense.eval.harness, "SCORED_PER_CALL", 16)
    lm = load(folders / "folded", 2)
    logits, read = [], []
    lm.model.lm_head.register_forward_hook(lambda module, args, output: logits.append(output.shape[:2].numel()))
    lm.model.model.embed_tokens.register_forward_hook(lambda module, args, output: read.append(args[0].numel()))
    ask(lm, "loglikelihood", [(words(1001), " " + choice) for choice in ("a cat", "two dogs", "the sea", "far away")])
    assert sum(read) == 1000 + 4 * 2 and max(read) <= 64
    assert max(logits) == 2 * 2 and sum(logits) == math.ceil(1000 / 60) + 4 * 2  # one for every call that reads
    logits.clear()
    ask(lm, "loglikelihood_rolling", [(words(999),)])
    assert max(logits) == 16 and sum(logits) == 999


def test_the_largest_batch_is_found_on_texts_of_a_few_segments(folders, monkeypatch):
    lm = load(folders / "folded", "auto", max_batch_size=16)
    assert lm._detect_batch_size() == 16
    forward, columns = lm._forward, []

    def small_device(ids_BN, **options):
        columns.append(ids_BN.shape[1])
        if len(ids_BN) > 10:
            raise RuntimeError("CUDA out of memory.")
        return forward(ids_BN, **options)

    monkeypatch.setattr(lm, "_forward", small_device)
    assert 9 <= lm._detect_batch_size() <= 10
    assert max(columns) <= 3 * LENGTH


def test_half_precision_is_not_added_up_in_half_precision(own, monkeypatch):
    scores_NV = 3 * torch.randn(2000, len(own.tokenizer), generator=torch.Generator().manual_seed(0)).bfloat16()
    lm = CondenseLM(own.model, tokenizer=own.tokenizer)
    done = []

    def forward(ids_BN, **options):
        done.extend(ids_BN[0].tolist())
        return CausalLMOutputWithPast(logits=scores_NV[None, len(done) - ids_BN.shape[1] : len(done)])

    monkeypatch.setattr(lm, "_forward", forward)
    text = words(2000)
    expected = scores_NV.double().log_softmax(-1).gather(1, torch.tensor(own.tokenizer(text)["input_ids"])[:, None])
    (found,) = ask(lm, "loglikelihood_rolling", [(text,)])
    assert found == pytest.approx(expected.sum().item(), abs=1e-3) and len(done) == 2000


def test_what_does_not_fit_is_refused(folders, tmp_path, monkeypatch):
    assert_refused(re.escape("'llama' is not folded: run it as --model stock"), load, folders / "llama")
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert_refused("the harness reads folders. Write one with condense convert", StockLM, str(tmp_path / "m.gguf"))
    small = load(folders / "folded", max_length=3)
    for text, message in ((" sat on the mat", "4 tokens are to be scored and max_length=3"), (" ", "0 to score")):
        assert_refused(message, ask, small, "loglikelihood", [("a cat", text)])
    with pytest.raises(ValueError, match="tokenizer has 40 tokens and the model a vocabulary of 38"):
        load(folders / "folded", tokenizer=word_tokenizer([TEXT + " more words"]))
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", None)
    spec = condense.eval.harness.__spec__
    with pytest.raises(ImportError, match=re.escape("pip install -e '.[harness]'")):
        spec.loader.exec_module(module_from_spec(spec))


TASKS = {
    "choice": """
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: label
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "writing": """
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["%s"], max_gen_toks: 9}
metric_list: [{metric: exact_match}]
""",
    "document": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory, own):
    """Returns a folder of three tasks, and the results that follow from what the model says."""
    root = tmp_path_factory.mktemp("tasks")
    docs = {"choice": [], "writing": [], "document": [{"text": words(size, 9)} for size in (40, 6, 17)]}
    for size in (3, 19, 31, 8, 12):
        choices = [words(n, size) for n in (1, 2, 7, 3)]
        docs["choice"].append({"text": words(size, 7), "choices": choices, "label": size % 4})
    stop = own.greedy(words(6, 8), 9).split()[4]
    for index, size in enumerate((6, 33, 14, 21)):
        answer = own.greedy(words(size, 8), 9).split(stop)[0]
        docs["writing"].append({"text": words(size, 8), "answer": answer if index % 2 else "the sea"})
    for name, lines in docs.items():
        (root / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (root / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ntest_split: test\nmetadata: {{version: 1}}\n"
            f"dataset_kwargs: {{cache_dir: {root / 'cache'}, data_files: {{test: {root / name}.jsonl}}}}\n"
            + TASKS[name].replace("%s", stop)
        )

    totals = [[own.answer(doc["text"], " " + choice)[0] for choice in doc["choices"]] for doc in docs["choice"]]
    sizes = [[len(choice) for choice in doc["choices"]] for doc in docs["choice"]]
    label = [doc["label"] for doc in docs["choice"]]
    rolling = -sum(own.answer("", doc["text"])[0] for doc in docs["document"])
    num_words = sum(len(re.split(r"\s+", doc["text"])) for doc in docs["document"])
    num_bytes = sum(len(doc["text"].encode()) for doc in docs["document"])
    return root, {
        ("choice", "acc"): np.mean(np.argmax(totals, 1) == label),
        ("choice", "acc_norm"): np.mean(np.argmax(np.divide(totals, sizes), 1) == label),
        ("writing", "exact_match"): 0.5,
        ("document", "word_perplexity"): math.exp(rolling / num_words),
        ("document", "byte_perplexity"): math.exp(rolling / num_bytes),
        ("document", "bits_per_byte"): rolling / num_bytes / math.log(2),
    }


def measured(results, expected):
    return {(task, metric): results["results"][task][f"{metric},none"] for task, metric in expected}


@pytest.mark.parametrize("batch_size", [1, 4])
def test_tasks_of_local_files(folders, tasks, batch_size):
    root, expected = tasks
    manager = TaskManager(include_path=str(root), include_defaults=False)
    results = simple_evaluate(
        model="condense", model_args={"pretrained": str(folders / "folded")}, tasks=list(TASKS),
        batch_size=batch_size, task_manager=manager, bootstrap_iters=0,
    )  # fmt: skip
    assert measured(results, expected) == pytest.approx(expected, rel=1e-9)
    assert 0 < expected["choice", "acc"] < 1


@pytest.fixture(scope="module")
def without_own_tasks(tmp_path_factory):
    """Makes a folder for PYTHONPATH with the harness without its own tasks: to read their 14,000 files takes 12 s."""
    installed, root = Path(lm_eval.__file__).parent, tmp_path_factory.mktemp("harness")
    for source, folder, taken in (
        (installed, root / "lm_eval", lambda path: path.name != "tasks"),
        (installed / "tasks", root / "lm_eval" / "tasks", lambda path: path.suffix == ".py" or path.name[0] == "_"),
    ):
        folder.mkdir()
        for path in filter(taken, source.iterdir()):
            (folder / path.name).symlink_to(path)
    return root


HAS_PLUGINS = hasattr(registry, "import_plugins")
FINDS_PLUGINS = pytest.mark.skipif(not HAS_PLUGINS, reason="this lm-eval looks for no entry points")
OURS, THEIRS = [sys.executable, "-m", "condense", "eval", "harness"], [str(Path(sys.executable).with_name("lm_eval"))]


@pytest.mark.parametrize("command", [OURS, pytest.param(THEIRS, marks=FINDS_PLUGINS)])
def test_the_command_line(folders, tasks, without_own_tasks, tmp_path, command):
    root, expected = tasks
    arguments = ["--model", "condense", "--model_args", f"pretrained={folders / 'folded'}", "--batch_size", "4"]
    arguments += ["--tasks", ",".join(TASKS), "--include_path", root, "--output_path", tmp_path / "results.json"]
    searched = os.pathsep.join([str(without_own_tasks), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "PYTHONPATH": searched}
    run = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    (path,) = tmp_path.rglob("*.json")
    assert measured(json.loads(path.read_text()), expected) == pytest.approx(expected, rel=1e-9)
    assert "byte_perplexity" in run.stdout


def test_the_entry_point_leads_to_the_registered_class():
    packages = distributions(name="condense-llama")  # an editable install is found twice
    (entry,) = {entry for package in packages for entry in package.entry_points if entry.group == "lm_eval.models"}
    assert entry.name == "condense" and entry.load() is CondenseLM is registry.get_model("condense")
