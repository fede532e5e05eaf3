"""Retrieval is counted on what the model itself decodes."""

import csv
import json

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from condense import CondenseForCausalLM
from condense.eval.models import EvaluatedModel, load_evaluated
from condense.eval.runner import measure
from condense.eval.statistics import wilson
from condense.eval.tasks import evaluate
from condense.eval.tasks.options import PasskeyOptions
from condense.eval.tasks.passkey import Passkey, first_number, stated_number
from condense.training.data.passkey import PASSKEY_TEXTS, PasskeyTask
from condense.training.small_llama import passkey_tokenizer, save_small_llama, small_llama

from ...chat_models import chat_tokenizer
from ...refusals import assert_refused
from ..measuring import Writer, command, save_folded


def key_in(tokenizer, ids):
    return [word for word in tokenizer.decode(ids).split() if word.isdigit()][:4]


class Oracle(Writer):
    """Answers with the key of the prompt, except for prompts whose key holds a 7: then its last digit is wrong."""

    def answer(self, ids):
        key = key_in(self.tokenizer, ids)
        return [*key[:3], str((int(key[3]) + 1) % 10)] if "7" in key else key


@pytest.fixture
def oracle():
    tokenizer = passkey_tokenizer()
    return EvaluatedModel("oracle", "", Oracle(tokenizer), tokenizer)


def small_model(folder, kind=CondenseForCausalLM, seed=0):
    save_small_llama(folder / "model", seed)
    return save_folded(folder / "model", folder / "model", 40) if kind is CondenseForCausalLM else folder / "model"


def cells_of(evaluated, lengths, depths, **options):
    task = Passkey(PasskeyOptions(models=[], lengths=lengths, depths=depths, **options), [evaluated])
    return task.summarise(measure(task))["cells"]


def test_counts(oracle):
    cells = cells_of(oracle, [100, 300], (0.0, 0.5), num_prompts=400, seed=1)
    assert [(cell["length"], cell["depth"]) for cell in cells] == [(100, 0), (100, 0.5), (300, 0), (300, 0.5)]
    for cell in cells:
        assert cell["total"] == 400 and cell["accuracy"] == cell["correct"] / 400
        assert abs(cell["accuracy"] - 0.9**4) < 0.1  # four standard deviations
        assert (cell["low"], cell["high"]) == wilson(cell["correct"], 400)
    assert len({cell["correct"] for cell in cells}) > 1  # fresh prompts in each cell


def test_cells_of_long_texts_may_have_fewer_prompts(oracle):
    cells = cells_of(oracle, [100, 300, 900], (0.0, 0.5), num_prompts=8, cell_tokens=900)
    assert [cell["total"] for cell in cells] == [8, 8, 3, 3, 1, 1]
    whole = cells_of(oracle, [300], (0.0,), num_prompts=3)
    assert whole[0]["correct"] == cells[2]["correct"]  # the first of the same prompts
    assert cells_of(oracle, [300], (0.0,), num_prompts=3, cell_tokens=200)[0]["total"] == 1


@pytest.mark.parametrize("kind", [CondenseForCausalLM, LlamaForCausalLM])
def test_prompts_of_a_folded_model_are_batched_by_their_state(kind, tmp_path, monkeypatch, noted):
    """A longer prompt needs more memory in a stock model, and more calls in a folded one: a batch holds as many."""
    evaluated = load_evaluated(str(small_model(tmp_path, kind)))
    calls = noted(evaluated.model, "generate")
    monkeypatch.setattr("condense.eval.models.PREFILL_TOKENS", 100)
    monkeypatch.setattr("condense.eval.models.TOKENS_PER_BATCH", 800)
    cells_of(evaluated, [400], (0.0,), num_prompts=8)
    assert [len(call.arguments[0]) for call in calls] == ([8] if kind is CondenseForCausalLM else [2] * 4)


class Talker(Writer):
    """Answers in sentences, and ends its turn: the key, except for prompts whose key holds a 7."""

    def answer(self, ids):
        key = key_in(self.tokenizer, ids)
        return ["The", "passkey", "is", *(["0"] * 4 if "7" in key else key), ".", "<|eot|>", "1"]


def test_a_chat_model_is_asked_in_its_template_and_answers_in_a_sentence():
    """Token by token: the prompts of the same seed without a chat, as the message of a user."""
    tokenizer, plain = chat_tokenizer(PASSKEY_TEXTS), PasskeyTask(passkey_tokenizer())
    tokenizer_of_plain, talker = plain.tokenizer, Talker(tokenizer)
    evaluated, length = EvaluatedModel("talker", "", talker, tokenizer), 200
    cells = cells_of(evaluated, [length], (0.5,), num_prompts=40, seed=2, chat=("talker",))
    ids_of = tokenizer.convert_tokens_to_ids
    before = ids_of(["<s>", "<|start|>", "user", "<|stop|>"])
    after = ids_of(["<|eot|>", "<|start|>", "assistant", "<|stop|>"])
    room = length - len(before) - len(after) + 1  # without a chat there is one token more, the first
    passkeys = plain.batch(40, room, np.random.default_rng([2, length, 0]), 0.5)
    for ids, wanted in zip(talker.asked, passkeys.prompt_ids_BN.tolist(), strict=True):
        message = ids_of(tokenizer_of_plain.convert_ids_to_tokens(wanted[1:]))
        assert ids == [*before, *message, *after]
        text = [{"role": "user", "content": tokenizer.decode(message)}]
        assert ids == tokenizer.apply_chat_template(text, add_generation_prompt=True, return_dict=False)
    right = sum("7" not in key for key in passkeys.keys)
    assert 0 < right < 40 and [(cell["chat"], cell["correct"], cell["total"]) for cell in cells] == [(True, right, 40)]
    assert talker.options["eos_token_id"] == sorted(ids_of(["</s>", "<|eot|>"]))


def test_stated_number():
    texts = ("The passkey is 90 54.", "9054", "It is 12, not 34.", "none")
    assert [stated_number(text) for text in texts] == ["9054", "9054", "12", ""]


def test_first_number():
    texts = {" 1 2 34.": "1234", "12345": "12345", "x12": "", "": "", "12 is 3": "12"}
    assert {text: first_number(text) for text in texts} == texts


@pytest.mark.parametrize("kind", [CondenseForCausalLM, LlamaForCausalLM])
def test_command_on_folded_and_stock_models(kind, tmp_path):
    model, out = small_model(tmp_path, kind), tmp_path / "out"
    (model / "recipe.json").write_text(json.dumps({"stages": [{"total_length": 80}, {"total_length": 60}]}))
    arguments = ["eval", "passkey", "--model", f"small={model}", "--lengths", "80,200", "--prompts", "3"]
    shown = command(*arguments, "--output", out)
    results = json.loads((out / "passkey.json").read_text())
    assert len(results["cells"]) == 10 and results["longest_trained"] == {"small": 80}
    assert results["models"][0]["parameters"] == 102_208
    rows = list(csv.DictReader((out / "passkey.csv").open()))
    assert [int(row["correct"]) for row in rows] == [cell["correct"] for cell in results["cells"]]
    assert all((out / f"passkey.{ending}").stat().st_size > 5_000 for ending in ("png", "svg"))
    assert "small: % correct" in shown and "passkey.json" in shown
    held = {cell["length"]: cell["state_bytes"] for cell in results["cells"]}
    assert held[80] == held[200] if kind is CondenseForCausalLM else held[80] < held[200]
    assert (out / "passkey-length.png").exists()
    command("eval", "passkey", "--model", f"small={model}", "--lengths", "80", "--prompts", "3", "--output", out)
    assert sorted(path.name for path in out.glob("passkey*.[ps][nv]g")) == ["passkey.png", "passkey.svg"]


def test_the_papers_column_stands_beside_keys_of_its_kind():
    """Figure 8 of the paper."""
    lengths = [4096, 5000, 65536]
    cell = {"model": "ours", "depth": 0.5, "correct": 3, "total": 4, "state_bytes": 1024}
    results = {
        "models": [{"name": "ours"}], "lengths": lengths, "num_keys": 1, "num_digits": 4,
        "cells": [cell | {"length": length} for length in lengths],
    }  # fmt: skip
    (table,) = Passkey.tables(results)
    assert table.columns[-1] == "paper: % correct" and [row[-1] for row in table.rows] == ["100", "", "below 100"]
    for other in ({"num_keys": 2}, {"num_digits": 6}, {"lengths": [5000]}):
        assert "paper: % correct" not in Passkey.tables(results | other)[0].columns


def test_a_folded_model_answers_as_with_teacher_forcing(tmp_path):
    """Decoding from the state gives what one pass over prompt and answer gives, token by token."""
    tokenizer = passkey_tokenizer()
    small_llama(tokenizer, seed=3).save_pretrained(tmp_path)
    model = CondenseForCausalLM.from_pretrained(tmp_path, segment_length=40).eval()
    model.generation_config.eos_token_id = None
    passkeys = PasskeyTask(tokenizer).batch(4, 333, np.random.default_rng(0))
    output = model.generate(passkeys.prompt_ids_BN, max_new_tokens=4, do_sample=False, pad_token_id=0)
    with torch.no_grad():
        logits = model(output, use_cache=False).logits
    assert torch.equal(logits[:, -5:-1].argmax(-1), output[:, -4:])


def test_prompts_in_chunks_are_read_as_in_one_call(tmp_path, monkeypatch, noted):
    evaluated = load_evaluated(str(small_model(tmp_path, seed=2)), dtype="float32")
    whole = cells_of(evaluated, [700], (0.5,), num_prompts=8)
    calls = noted(evaluated.model, "generate")
    monkeypatch.setattr("condense.eval.models.PREFILL_TOKENS", 100)
    assert cells_of(evaluated, [700], (0.5,), num_prompts=8) == whole
    assert calls[-1].options["prefill_chunk_size"] == 80  # whole segments


def test_mistakes_are_named(tmp_path, oracle):
    words = f"--lengths 50, in tokens of {oracle.name}: a passkey prompt needs 70 tokens"
    assert_refused(words, cells_of, oracle, [200, 50], (0.0,), num_prompts=1)
    assert not oracle.model.asked  # before anything runs
    assert_refused("there is no folder 'nowhere'", evaluate, "passkey", tmp_path, models=["nowhere"], lengths=[80])
    assert_refused("two models are called", evaluate, "passkey", tmp_path, models=["a/x", "b/x"], lengths=[80])
    (tmp_path / "config.json").write_text('{"model_type": "unheard"}')
    assert_refused("lacks model.safetensors", evaluate, "passkey", tmp_path, models=[str(tmp_path)], lengths=[80])


@pytest.mark.parametrize(
    ("lengths", "texts", "lines"),
    [((40, 80), [], 0), ((40, 160), ["never trained", "trained"], 1), ((160, 320), ["never trained"], 0)],
)
def test_a_picture_says_which_lengths_were_trained(lengths, texts, lines):
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    cells = [{"model": "small", "length": length, "depth": 0.0, "accuracy": 1.0} for length in lengths]
    results = {"cells": cells, "lengths": lengths, "depths": [0.0], "longest_trained": {"small": 80}}
    Passkey._heat_map(axes, "small", results, "% correct")
    assert [text.get_text() for text in axes.texts if "trained" in text.get_text()] == texts
    assert len(axes.lines) == lines


def test_lengths_are_shown_in_their_order(oracle):
    """A picture's curves and its border of trained lengths go from shorter to longer ones."""
    task = Passkey(PasskeyOptions(models=[], lengths=[300, 100, 200], depths=[0.5], num_prompts=1), [oracle])
    results = task.summarise(measure(task))
    assert results["lengths"] == [100, 200, 300] and [cell["length"] for cell in results["cells"]] == [300, 100, 200]


def test_a_picture_tells_depths_apart():
    shown = {0.0: "0 %", 0.07: "7 %", 0.12: "12 %", 0.125: "12.5 %", 1 / 3: "33.33 %", 1.0: "100 %"}
    assert {depth: Passkey.label(depth) for depth in shown} == shown


def test_a_picture_by_length_pools_the_depths_and_shows_the_state():
    from matplotlib.figure import Figure

    accuracy, state = Figure().subplots(1, 2)
    right = {(100, 0.0): 1, (100, 1.0): 3, (1000, 0.0): 4, (1000, 1.0): 4}
    cells = [
        {"model": "small", "length": length, "depth": depth, "correct": correct, "total": 4, "state_bytes": 2048}
        for (length, depth), correct in right.items()
    ]
    results = {"cells": cells, "lengths": [100, 1000], "models": [{"name": "small"}], "longest_trained": {"small": 80}}
    Passkey._lines(accuracy, state, results | {"num_keys": 1})
    line, border = accuracy.lines
    assert line.get_xydata().tolist() == [[100, 50], [1000, 100]]
    assert border.get_xdata() == [80, 80] and border.get_color() == line.get_color()
    (band,) = accuracy.collections
    bounds = [100 * bound for bound in wilson(4, 8)]
    assert {y for x, y in band.get_paths()[0].vertices if x == 100} == set(bounds)
    assert state.lines[0].get_ydata().tolist() == [2, 2]
    assert (state.get_yscale(), state.get_ylim()[0]) == ("linear", 0)
    assert state.get_xlim() == accuracy.get_xlim()


def test_a_single_length_has_no_picture_by_length(tmp_path):
    cells = [{"model": "small", "length": 100, "depth": 0.0, "correct": 1, "total": 4, "accuracy": 0.25}]
    results = {"cells": cells, "lengths": [100], "depths": [0.0], "models": [{"name": "small"}]}
    Passkey.draw(results | {"longest_trained": {"small": 80}}, tmp_path / "passkey")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["passkey.png", "passkey.svg"]
