"""Options and small models for the tests of the probes."""

import csv
import json
from random import Random

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from condense.labs.continuity.model import ContinuousLM
from condense.labs.continuity.study import counts, memory, probes, space, sums, transformations
from condense.labs.continuity.study.engine import Reader
from condense.labs.continuity.study.options import ProbeOptions
from condense.labs.continuity.study.questions import Adding, Counting, questions_tokenizer
from tests.condense.models import tiny_model

TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}


def options(**given) -> ProbeOptions:
    return ProbeOptions(**{"models": [], **given})


def probe(name, models, output, **given):
    return probes.probe(name, output, options(models=models, **given))


def llama(tokenizer, layers=2, **fields):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), num_hidden_layers=layers, initializer_range=0.3, **TOKENS, **SIZES, **fields
    )
    return LlamaForCausalLM(config).eval()


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


def counts_and_adds_tokenizer():
    """Returns a tokenizer that knows the words of questions to count and to add, and of the boolean prompts."""
    boolean = [text for item in space.Boolean.prompts(options()) for text in (item.text, item.other)]
    return questions_tokenizer([*Counting(Random(0)).texts(), *Adding(Random(0)).texts(), *boolean])


def first_of(prompts):
    """Returns the first pair of words with its first prompt."""
    words, (first, *_) = next(iter(prompts.items()))
    return {words: (first,)}


def shrink_sets(monkeypatch):
    """Leaves one item of each kind in the fixed sets of the probes, so all of them run in seconds."""
    for module, name, few in (
        (sums, "PAIRS", ()),
        (counts, "WORDS", counts.WORDS[:1]),
        (memory, "WORDS", counts.WORDS[:1]),
        (memory, "DISTANCES", (0, 1, 2)),
        (counts, "PASSAGES", {"shop": counts.PASSAGES["shop"]}),
        (space, "OPERATORS", space.OPERATORS[:1]),
        *((space, name, first_of(getattr(space, name))) for name in ("QUESTIONS", "SENTENCES", "STORIES")),
        (transformations, "SENTENCES", {"France": transformations.SENTENCES["France"]}),
    ):
        monkeypatch.setattr(module, name, few)


def parts(text, char_spans):
    return [text[start:end] for start, end in char_spans]


def check_files(folder, name, names):
    """Checks that the JSON, a CSV with the same figures, and pictures exist. Returns the JSON's contents."""
    results = json.loads((folder / f"probe_{name}.json").read_text())
    assert [model["name"] for model in results["models"]] == names
    lines = list(csv.DictReader((folder / f"probe_{name}.csv").open()))
    first = next(record for record in results["models"][0]["records"] if record["valid"])
    line = next(line for line in lines if (line["item"], line["group"]) == (first["name"], first["group"]))
    assert float(line["factor"]) == first["factors"][0]
    for label, curve in first.get("curves", {}).items():
        assert float(line[f"p({label})"]) == curve[0]
    pictures = list(folder.glob(f"probe_{name}-*.png"))
    assert pictures and all(path.with_suffix(".svg").exists() for path in pictures)
    return results
