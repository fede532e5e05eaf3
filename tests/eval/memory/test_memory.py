"""The comparison of memories, with the real trainer on tiny models: what is alike, and what is measured."""

import json
from random import Random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, MistralForCausalLM

from condense import CondenseForCausalLM
from condense.eval.memory.options import MEMORIES, MemoryOptions
from condense.eval.memory.study import Memory, Trained
from condense.eval.runner import run
from condense.eval.study.training import train_alone
from condense.training.recipe import Recipe
from condense.training.sample_data import story

from ...refusals import assert_refused
from ..studies import run_study, stored_tables

SMALL = {"segment_length": 8, "total_length": 24, "segments_before": 3, "segments_held_out": 9, "width": 32}
SMALL |= {"layers": 1, "vocab_size": 300, "batch": 2, "steps": 2, "seeds": 1}


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("memory")
    for seed, name in enumerate(("train_1", "train_2", "held_out")):
        (folder / f"{name}.txt").write_text(" ".join(story(Random(seed * 100 + n), 200)[0] for n in range(4)))
    options = MemoryOptions(text=(f"{folder}/train_*.txt",), held_out=(f"{folder}/held_out.txt",), **SMALL)
    task = Memory(options, folder / "out")
    return task, folder / "out", run_study(task, folder / "out")


@pytest.fixture
def changed(compared):
    """Returns the options above, of which some are changed."""
    return lambda **fields: MemoryOptions(**vars(compared[0].options) | fields)


def test_models_begin_alike_and_differ_in_their_memory(compared):
    task, _, _ = compared
    recipes = {memory: task.recipe(Trained(memory, 0)) for memory in MEMORIES}
    starts = {memory: load_file(f"{recipe.model.source}/model.safetensors") for memory, recipe in recipes.items()}
    for weights in starts.values():
        assert set(weights) == set(starts["folded"])
        assert all(torch.equal(weights[name], starts["folded"][name]) for name in weights)
    tokens = {(r.stages[0].total_length * r.global_batch, r.steps, r.seed, r.optimizer) for r in recipes.values()}
    assert len(tokens) == 1
    assert [recipes[f"folded_{k}"].model.bptt_segments for k in (1, 2, 4)] == [1, 2, 4]
    assert recipes["folded"].model.bptt_segments is None and recipes["no_memory"].stages[0].total_length == 8
    models = {memory: AutoModelForCausalLM.from_pretrained(recipe.output) for memory, recipe in recipes.items()}
    assert models["transformer_xl"].config.memory_source == "layer_input"
    assert models["folded"].config.memory_source == "layer_output"
    window = models["sliding_window"]
    assert isinstance(window, MistralForCausalLM) and window.config.sliding_window == 16
    trained = {memory: load_file(recipe.output / "model.safetensors") for memory, recipe in recipes.items()}
    for one, other in (("folded", "folded_1"), ("folded", "transformer_xl"), ("sliding_window", "full_attention")):
        assert any(not torch.equal(trained[one][name], trained[other][name]) for name in trained[one])


@pytest.mark.parametrize("memory", ["folded", "sliding_window", "no_memory"])
def test_losses_are_those_of_a_naive_loop(compared, memory):
    """Returns the losses of every held-out segment that has three others before it, with 0 to 3 of them."""
    task, _, results = compared
    model = AutoModelForCausalLM.from_pretrained(task.recipe(Trained(memory, 0)).output).eval()
    text = task.held_out
    assert len(text) == 9 * 8 + 1
    expected = []
    for segment in range(3, 9):
        of_segment = []
        for before in range(1 if memory == "no_memory" else 4):
            part = text[(segment - before) * 8 : (segment + 1) * 8 + 1]
            with torch.no_grad():
                of_segment.append(F.cross_entropy(model(part[None, :-1]).logits[0, -8:], part[-8:]).item())
        expected.append(of_segment)
    found = next(one for one in results["models"] if one["memory"] == memory)
    assert found["loss_by_segments_before"] == pytest.approx(np.mean(expected, axis=0), abs=1e-4)
    assert found["segments_measured"] == 6


def test_differences_from_the_folded_model(compared):
    _, _, results = compared
    folded = results["models"][0]
    assert folded["memory"] == "folded" and folded["against_folded"] == [0, 0]
    for other in results["models"]:
        ends = other["loss_by_segments_before"]
        expected = [ends[min(before, len(ends) - 1)] - folded["loss_by_segments_before"][before] for before in (2, 3)]
        assert other["against_folded"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.usefixtures("without_pictures", "nothing_is_trained")
def test_files(compared):
    task, output, results = compared
    (table,) = stored_tables(Memory, output)
    assert table.columns[2:-2] == ["0 before", "1 before", "2 before", "3 before"]
    assert len(table.rows) == len(MEMORIES)
    assert run(Memory(task.options, output), output)["models"] == results["models"]


def test_models_may_begin_as_one_that_was_trained_without_memory(changed, tmp_path, monkeypatch):
    """A stock model, trained once a seed on texts of one segment; also where the run is stopped after it."""
    trained: list[Recipe] = []
    noted = lambda recipe: (trained.append(recipe), train_alone(recipe))  # noqa: E731
    monkeypatch.setattr("condense.eval.memory.study.train_alone", noted)
    task = Memory(changed(first_steps=3), tmp_path / "out")
    starts = {memory: load_file(task.start(Trained(memory, 0)) / "model.safetensors") for memory in MEMORIES}
    (recipe,) = trained
    assert (recipe.model.kind, recipe.steps, recipe.stages[0].total_length, recipe.global_batch) == ("stock", 3, 8, 6)
    result = load_file(recipe.output / "model.safetensors")
    random = load_file(f"{recipe.model.source}/model.safetensors")
    assert not torch.equal(random["model.embed_tokens.weight"], result["model.embed_tokens.weight"])
    for weights in starts.values():
        assert set(weights) == set(result) and all(torch.equal(weights[name], result[name]) for name in weights)
    random_start = Memory(changed(), tmp_path / "out").start(Trained("folded", 0))
    assert torch.equal(load_file(random_start / "model.safetensors")["model.norm.weight"], random["model.norm.weight"])
    assert task.recipe(Trained("folded", 0)).steps == 2 and not list(recipe.output.glob("checkpoint-*"))


def test_shares_are_memories_of_their_own(changed, tmp_path):
    """Models with shares begin with the weights of the others; a share of 1 is the fold."""
    some = {"memories": ("folded", "transformer_xl"), "layers": 2}
    results = run_study(Memory(changed(**some, shares=("1", "0", "0.5")), tmp_path), tmp_path)
    folded, transformer_xl, *shares = [model["loss_by_segments_before"] for model in results["models"]]
    assert shares[0] == folded and shares[1] == pytest.approx(transformer_xl, abs=1e-6)
    assert max(abs(np.subtract(shares[2], folded))) > 1e-6 and max(abs(np.subtract(shares[2], transformer_xl))) > 1e-6
    names = [row[0] for row in Memory.tables(results)[0].rows]
    assert names[2:] == ["folded, share 1", "folded, share 0", "folded, share 0.5"]
    assert_refused("'1:0:0' has 3 values for 2 layers", changed, **some, shares=("1:0:0",))


def test_the_fold_is_loaded_with_its_segments(compared):
    model = CondenseForCausalLM.from_pretrained(compared[0].recipe(Trained("folded_2", 0)).output)
    assert model.config.segment_length == 8 and model.num_parameters() < 40_000


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"memories": ("folded", "magic")}, r"\['magic'\] are not known: choose from folded"),
        ({"segments_held_out": 5, "segments_before": 5}, "no segment has segments_before=5 before it"),
        ({"width": 40}, "width=40: heads are 32 wide"),
        ({"memories": ("folded", "folded")}, "names folded twice"),
        ({"total_length": 20}, "total_length=20: pass a multiple of segment_length=8, at least twice as much"),
        ({"learning_rate": 0}, "a learning rate of 0"),
    ],
)
def test_refusals(fields, message):
    assert_refused(message, MemoryOptions, text=("a",), held_out=("b",), **SMALL | fields)


def test_text_to_evaluate_with_that_is_trained_on(changed, tmp_path):
    both = changed(held_out=(changed().text[0].replace("*", "1"),))
    assert_refused(r"train_1.txt: text to train on and to evaluate with", Memory, both, tmp_path / "out")


def test_other_settings_have_inputs_of_their_own(compared, changed):
    """A tokenizer and models of another size are not taken up again, also where the records were deleted."""
    one, other = (Memory(chosen, compared[1]).start(Trained("folded", 0)) for chosen in (changed(), changed(width=64)))
    assert [json.loads((path / "config.json").read_text())["hidden_size"] for path in (one, other)] == [32, 64]


def test_too_short_a_held_out_text(changed, tmp_path):
    with pytest.raises(ValueError, match="need 8,000,001: pass more text"):
        run(Memory(changed(segments_held_out=10**6), tmp_path / "out"), tmp_path / "out")
    assert not (tmp_path / "out" / "models").exists()  # before anything is trained


@pytest.mark.parametrize("which", ["text", "held_out"])
def test_documents_shorter_than_a_text_in_training(changed, tmp_path, which):
    (tmp_path / "short.txt").write_text("once upon a time")
    (tmp_path / "long.txt").write_text(" ".join(story(Random(n), 200)[0] for n in range(3)))
    files = {name: (f"{tmp_path}/{'short' if name == which else 'long'}.txt",) for name in ("text", "held_out")}
    task, flag = Memory(changed(**files), tmp_path / "out"), f"--{which.replace('_', '-')}"
    with pytest.raises(ValueError, match=f"the longest document of {flag} has [0-9]+ tokens, .* has 24: pass a longer"):
        task.recipe(Trained("folded", 0))


def test_few_held_out_texts_validate_what_there_are(changed, tmp_path):
    (tmp_path / "few.txt").write_text(story(Random(7), 60)[0])
    few = Memory(changed(held_out=(f"{tmp_path}/few.txt",)), tmp_path / "out")
    (ids,) = AutoTokenizer.from_pretrained(few.inputs / "tokenizer")([(tmp_path / "few.txt").read_text()])["input_ids"]
    found = [few.recipe(Trained(memory, 0)).evaluation.sequences for memory in ("folded", "no_memory")]
    whole = (len(ids) + 1) // 24  # with the token at its end
    assert found == [whole, whole * 3] and whole < 16
