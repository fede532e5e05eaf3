"""The stored settings of each measurement, word for word: a change here makes stopped measurements unresumable."""

import hashlib
import json
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from condense.eval.tasks import find_task
from condense.eval.tasks.options import (
    AttentionOptions,
    FoldCostOptions,
    PasskeyOptions,
    PerplexityOptions,
    SummarizationOptions,
)
from condense.labs.continuity.study.options import ProbeOptions
from condense.labs.continuity.study.probes import PROBES
from condense.training.data.summarization import AFTER, BEFORE
from condense.training.small_llama import small_llama, word_tokenizer

from ..measuring import save_folded
from .documents import write_lines

TEXT = "the grass is green and the sky is blue and here we go"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    tokenizer = word_tokenizer([TEXT, BEFORE, AFTER])
    small_llama(tokenizer, seed=0).save_pretrained(root / "llama")
    tokenizer.save_pretrained(root / "llama")
    save_folded(root / "llama", root / "folded", 8)
    (root / "text.txt").write_text(f"{TEXT} " * 10)
    lines = [{"text": TEXT, "summary": "green and blue"}, {"text": "the sky", "summary": "blue"}]
    write_lines(root / "documents.jsonl", lines)
    return root


def described(folders):
    """Returns the descriptions of the folded model as `a`, and of the stock one."""
    digest = hashlib.sha256()
    for parameter in LlamaForCausalLM.from_pretrained(folders / "llama").parameters():
        digest.update(parameter.detach().numpy().tobytes())
    shared = {
        "parameters": sum(one.numel() for one in LlamaForCausalLM.from_pretrained(folders / "llama").parameters()),
        "dtype": "float32",
        "device": "cuda" if torch.cuda.is_available() else "cpu",
        "weights": digest.hexdigest()[:16],
    }
    folded = {"model_type": "condense_llama", "segment_length": 8, "memory_source": "layer_output"}
    stock = {"model_type": "llama", "segment_length": None, "memory_source": None}
    return [
        {"name": "a", "source": str(folders / "folded"), **folded, **shared, **settings_of_files(folders / "folded")},
        {"name": "llama", "source": str(folders / "llama"), **stock, **shared, **settings_of_files(folders / "llama")},
    ]


def settings_of_files(folder):
    names = "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"
    lines = [f"{name} {hashlib.sha256((folder / name).read_bytes()).hexdigest()}\n" for name in names]
    return {"config_and_tokenizer": hashlib.sha256("".join(lines).encode()).hexdigest()[:16]}


def settings_of(kind, options):
    return json.loads(json.dumps(find_task(kind).load_for(options, Path()).settings()))


@pytest.fixture
def models(folders):
    return [f"a={folders / 'folded'}", str(folders / "llama")]


def test_passkey(folders, llama):
    options = PasskeyOptions(models=[str(llama)], lengths=(80,), depths=(0.0, 0.5), num_prompts=3, seed=7)
    found = settings_of("passkey", options)
    (model,) = found.pop("models")
    assert model.keys() == described(folders)[1].keys() and model["parameters"] == 102_208
    assert found == {"chat": [], "depths": [0.0, 0.5], "num_prompts": 3, "num_keys": 1, "num_digits": 4, "seed": 7}


def test_perplexity(folders, models):
    options = PerplexityOptions(
        models=models, data=[str(folders / "text.txt")], num_segments=3, segment_length=9, max_tokens=64
    )
    ids = torch.cat(list(find_task("perplexity").load(options).texts["a"]))
    text = {"documents": 1, "tokens": 64, "sha256": hashlib.sha256(ids.numpy().tobytes()).hexdigest()}
    expected = {"models": described(folders), "data": [str(folders / "text.txt")], "texts": {"a": text, "llama": text}}
    expected |= {"num_segments": 3, "segment_lengths": {"a": 8, "llama": 9}, "batch_size": 8, "attention": "auto"}
    assert settings_of("perplexity", options) == expected


def test_fold_cost(folders, models):
    options = FoldCostOptions(
        models=models, data=[str(folders / "text.txt")], num_tokens=64, segment_lengths=(8,), by_position=(0,)
    )
    ids = find_task("fold_cost").load_for(options, Path()).texts["a"][0]
    text = {"tokens": len(ids), "sha256": hashlib.sha256(ids.numpy().tobytes()).hexdigest()}
    expected = {"models": described(folders), "data": [str(folders / "text.txt")], "num_texts": 4}
    expected |= {"sink_token_id": None, "seed": 0, "texts": {"a": [text], "llama": [text]}}
    bos = LlamaForCausalLM.from_pretrained(folders / "llama").config.bos_token_id
    assert len(ids) > 64 and settings_of("fold_cost", options) == expected | {"sinks": {"a": bos, "llama": bos}}


def test_summarization(folders, models):
    data = str(folders / "documents.jsonl")
    options = SummarizationOptions(models=models, data=data, new_tokens=5, bad_documents="skip", longest=100)
    texts = [["the sky", "blue"], [TEXT, "green and blue"]]  # the shortest first
    expected = {"models": described(folders), "data": data, "chat": [], "temperature": 0.3, "new_tokens": 5}
    expected |= {"batch_size": 8, "seed": 0, "attention": "auto"}
    expected["scored_by"] = {"rouge-score": version("rouge-score"), "sentencex": version("sentencex")}
    expected["fingerprint"] = hashlib.sha256(repr(texts).encode()).hexdigest()[:16]
    assert settings_of("summarization", options) == expected


@pytest.mark.parametrize("layers", [None, [0, 1]])
def test_attention(folders, models, layers):
    text = str(folders / "text.txt")
    options = AttentionOptions(models=models, text=text, layers=layers, segments=(1, 2), heads=(1,), segment_length=9)
    task = find_task("attention").load(options)
    assert {name: len(ids) for name, ids in task.texts.items()} == {"a": 24, "llama": 27}
    digests = {name: hashlib.sha256(ids.numpy().tobytes()).hexdigest() for name, ids in task.texts.items()}
    expected = {"models": described(folders), "text": text, "summarize": False, "sha256": digests, "layers": layers}
    expected |= {"segments": [1, 2], "heads": [1], "segment_lengths": {"a": 8, "llama": 9}, "attention": "auto"}
    assert settings_of("attention", options) == expected


def test_probe(folders, models):
    task = PROBES["translation"].load(ProbeOptions(models=models))
    tokenizer = task.models[0].reader.tokenizer
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    own = {"position_anchor": "end", "tokenizer": hashlib.sha256(vocabulary.encode()).hexdigest()[:16]}
    folded, stock = described(folders)
    expected = {"probe": "translation", "data": "the package's own", "limit": None, "template": "sentence"}
    expected |= {"spans": "exact", "classes": "exact", "items": "6a2cf89372af97e4"}
    expected["models"] = [folded | own | {"attention": "auto"}, stock | own | {"attention": "sdpa"}]
    assert json.loads(json.dumps(task.settings())) == expected
