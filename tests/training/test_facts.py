"""Facts in recipes: the model that knows their words, the curriculum and validation in the real Trainer."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from condense.cli.main import app
from condense.training import train, trainer
from condense.training.checkpoints.resume import find_checkpoint
from condense.training.data.curriculum import CurriculumBatches, CurriculumState
from condense.training.data.generated import make_generated_task
from condense.training.data.tasks import make_examples
from condense.training.facts_data import write_facts_llama
from condense.training.recipe import load_recipe

from ..facts_world import answer_to, plain
from .recipes import write_recipe
from .runs import log_lines

TEXT = "The old man sat. The man was the old one of men. He ran to the sea."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("facts")
    (folder / "text.txt").write_text(TEXT)
    write_facts_llama(folder, [str(folder / "*.txt")], width=32, layers=2, words=5)
    data = {"task": "facts", "kinds": ["one_fact", "two_facts"], "facts": 3, "background": 1}
    data |= {"sources": [{"files": str(folder / "text.txt")}]}
    fields = {"data": data, "attention": "eager", "log_every": 10}
    fields |= {"optimizer": {"learning_rate": 2e-3, "warmup_steps": 1}}
    llama = {"source": str(folder / "llama"), "segment_length": 40}
    write_recipe(folder, llama, None, global_batch=None, **fields)
    return folder


def test_the_llama_knows_the_facts_and_common_words(folder, tmp_path, capsys):
    tokenizer = AutoTokenizer.from_pretrained(folder / "llama")
    # The, the, man, old and the full stop are the commonest; "sat" is met once.
    assert tokenizer.unk_token_id not in tokenizer("The old man.")["input_ids"]
    assert tokenizer("sat")["input_ids"] == [tokenizer.unk_token_id]
    assert AutoModelForCausalLM.from_pretrained(folder / "llama").config.hidden_size == 32
    write_facts_llama(tmp_path, width=32, layers=1)
    assert "parameters" in capsys.readouterr().out
    with pytest.raises(ValueError, match="exists with different content"):
        write_facts_llama(tmp_path, width=16, layers=1)
    with pytest.raises(ValueError, match="names no file"):
        write_facts_llama(tmp_path, ["nowhere/*.txt"])
    for changed, message in (
        ({"width": 30}, "width=30, .*four heads"),
        ({"layers": 0}, "layers=0:"),
        ({"words": -1}, "=-1"),
    ):
        with pytest.raises(ValueError, match=message):
            write_facts_llama(tmp_path / "none", **changed)
    assert not (tmp_path / "none").exists()


def test_the_share_of_common_words_is_printed(folder, tmp_path):
    arguments = ["sample", "facts", str(tmp_path), "--text", str(folder / "text.txt"), "--width", "16", "--words", "3"]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    words = TEXT.replace(".", " .").split()
    share = sum(words.count(word) for word in ("the", "The", "man", ".", "old")) / len(words)
    printed = done.stdout
    assert "3 commonest words" in printed and 0.2 < float(printed.split(";")[1].split("%")[0]) / 100 < share


def test_the_curriculum_trains_on_facts(folder, tmp_path):
    curriculum = "{steps: 12, tokens_per_step: 640, first_segments: 2, last_segments: 4, loss_below: 100, patience: 2}"
    recipe = load_recipe(
        folder / "recipe.yaml", [f"output={tmp_path}", f"curriculum={curriculum}", "log_every=2", "checkpoints.every=6"]
    )
    train.train(recipe)
    state = json.loads((tmp_path / "curriculum.json").read_text())
    assert [segments for _, segments in state["milestones"]] == [2, 3, 4]
    assert len(log_lines(tmp_path)) == 6 and log_lines(tmp_path)[-1]["loss"] < log_lines(tmp_path)[0]["loss"]
    assert AutoTokenizer.from_pretrained(tmp_path).unk_token == "<unk>"
    # The batches that it was trained on: exact lengths, answers that the facts give, and as many rows as fit.
    tokenizer = AutoTokenizer.from_pretrained(folder / "llama")
    task = make_generated_task(recipe.data, tokenizer)
    batches = CurriculumBatches(recipe, CurriculumState(recipe.curriculum), task, 40, 1)
    ids = batches[3]["input_ids"]
    assert ids.shape == (8, 80)
    texts = [plain(tokenizer.decode(row)) for row in ids]
    assert all(text.rpartition("Answer: ")[2] == answer_to(text) for text in texts)
    # Another text under the same name is another recipe.
    assert find_checkpoint(recipe) is not None
    (folder / "text.txt").write_text(TEXT + " So it was.")
    with pytest.raises(ValueError, match=r"the files of data.sources .* hold something else"):
        find_checkpoint(recipe)
    (folder / "text.txt").write_text(TEXT)


def test_validation_counts_answers(folder, tmp_path, capsys):
    recipe = load_recipe(
        folder / "recipe.yaml",
        [f"output={tmp_path}", "stages=[{total_length: 60, steps: 8}]", "global_batch=8", "evaluation={sequences: 48}"],
    )
    train.train(recipe)
    line = log_lines(tmp_path, "eval_loss")[-1]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    _, held_out = make_examples(recipe, tokenizer)
    right = 0
    for number in range(48):
        (example,) = held_out.sequence(number, 60)
        ids = torch.from_numpy(example.input_ids)
        right += int(model.generate(ids[None, :-1], max_new_tokens=1, do_sample=False)[0, -1] == ids[-1])
    assert 0 < right < 48 and line["eval_facts_accuracy"] == right / 48  # a constant place is right now and then
    assert f"facts accuracy {right / 48:.1%}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("objective", "counted"),
    [("kind: distill", True), ("kind: duration_jitter", True), ("kind: multi_token, tokens: 2", False)],
)
def test_which_objectives_answers_are_counted_for(folder, objective, counted):
    """Where the trained model predicts next tokens."""
    recipe = load_recipe(
        folder / "recipe.yaml",
        ["stages=[{total_length: 60, steps: 8}]", "global_batch=8", f"objective={{{objective}}}"],
    )
    assert trainer.counted_answers(recipe) == (recipe.data if counted else None)


def test_recipes_that_do_not_fit_are_refused(folder, tmp_path):
    curriculum = "{steps: 60, tokens_per_step: 640, first_segments: 1, last_segments: 4}"
    with pytest.raises(ValueError, match="3 facts .* and 40 are allowed"):
        train.train(load_recipe(folder / "recipe.yaml", [f"output={tmp_path / 'o'}", f"curriculum={curriculum}"]))
    overrides = [f"output={tmp_path / 'o'}", f"curriculum={curriculum}", "data.sources.0.files=nowhere.txt"]
    recipe = load_recipe(folder / "recipe.yaml", overrides)
    with pytest.raises(ValueError, match="names no file"):
        train.train(recipe)
