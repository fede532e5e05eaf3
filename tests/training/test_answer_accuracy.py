"""The share of answers that validation finds, by hand and against greedy decoding."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer

from condense import CondenseForCausalLM
from condense.training import train
from condense.training.answer_accuracy import num_right
from condense.training.data.tasks import make_examples
from condense.training.recipe import load_recipe

from .runs import folded_recipe, log_lines, run


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    fields = {"data": {"task": "passkey", "num_digits": 1, "background": 1}, "log_every": 10, "attention": "eager"}
    fields |= {"optimizer": {"learning_rate": 5e-3, "warmup_steps": 1}}
    fields |= {"evaluation": {"sequences": 21, "reference_loss": 0.25}}
    stages = (120, 4), (160, 8)
    return folded_recipe(tmp_path_factory.mktemp("recipe"), *stages, global_batch=16, micro_batch=8, **fields)


class Says:
    """A model that says given tokens, each in the column before its own."""

    def __init__(self, said_BN):
        self.logits_BNV = F.one_hot(torch.tensor(said_BN).roll(-1, dims=1), 10).float()

    def __call__(self, input_ids, logits_to_keep, **others):
        assert "labels" not in others
        return SimpleNamespace(logits=self.logits_BNV[:, -logits_to_keep:])


@pytest.mark.parametrize(
    ("said_N", "found"),
    [
        ([0, 0, 0, 0, 7, 8, 0], 1),
        ([0, 0, 3, 0, 7, 8, 9], 1),  # the background, and what comes after the answer, don't count
        ([0, 0, 0, 0, 7, 9, 0], 0),
        ([0, 0, 3, 0, 0, 8, 0], 0),
        ([0, 0, 3, 7, 8, 0, 0], 0),
    ],
)
def test_by_hand(said_N, found):
    """Tokens 3 (background, in column 2), then 7 and 8 (the answer, in columns 4 and 5), then padding."""
    labels = torch.tensor([[-100, -100, 3, -100, 7, 8, -100]])
    batch = {"input_ids": torch.tensor([[1, 2, 3, 4, 7, 8, 0]]), "labels": labels}
    assert num_right(Says([said_N]), batch, background=1) == (found, 1)


def test_rows_whose_answers_begin_apart():
    labels = torch.tensor([[-100, 5, 6, -100], [-100, -100, 7, 8], [-100, -100, 7, 8]])
    says = Says([[0, 5, 6, 0], [0, 1, 7, 8], [0, 1, 7, 1]])
    assert num_right(says, {"input_ids": labels, "labels": labels}, background=0) == (2, 3)


@pytest.mark.parametrize(
    ("said_N", "found"), [([7, 8, 1, 9], 2), ([7, 8, 1, 8], 1), ([7, 7, 1, 9], 1), ([8, 7, 1, 8], 0)]
)
def test_rows_with_several_answers(said_N, found):
    """7 and 8 are one answer, 9 is another."""
    labels = torch.tensor([[-100, 7, 8, -100, 9]])
    says = Says([[0, *said_N]])
    assert num_right(says, {"input_ids": labels, "labels": labels}, background=0) == (found, 2)


def test_answers_of_early_questions_are_only_labels():
    """In column 1: the text goes on with 4. Then 3 is background, and 7 is the answer."""
    batch = {"input_ids": torch.tensor([[1, 4, 3, 5, 7]]), "labels": torch.tensor([[-100, 9, 3, -100, 7]])}
    assert num_right(Says([[0, 0, 0, 0, 7]]), batch, background=1) == (1, 1)


def greedy_accuracy(recipe_path, output) -> float:
    """The keys that the trained model's own greedy decoding gives, of the validation sequences."""
    recipe = load_recipe(recipe_path)
    _, held_out = make_examples(recipe, AutoTokenizer.from_pretrained(output))
    model = CondenseForCausalLM.from_pretrained(output).eval()
    right = 0
    for number in range(21):
        (example,) = held_out.sequence(number, 160)
        prompt, key = torch.from_numpy(example.input_ids[None, :-1]), example.input_ids[-1]
        right += int(model.generate(prompt, max_new_tokens=1, do_sample=False)[0, -1] == key)
    return right / 21


def assert_accuracy(recipe, output) -> None:
    lines = log_lines(output, "eval_loss")
    assert [line["step"] for line in lines] == [0, 4, 12] and all("eval_passkey_accuracy" in line for line in lines)
    accuracy = greedy_accuracy(recipe, output)
    assert lines[-1]["eval_passkey_accuracy"] == pytest.approx(accuracy)
    assert 0 < accuracy < 1  # after a few steps it says digits, the right ones by chance


def test_the_logged_accuracy_is_that_of_greedy_decoding(recipe, tmp_path, capsys):
    train.train(load_recipe(recipe, [f"output={tmp_path}"]))
    assert_accuracy(recipe, tmp_path)
    last = log_lines(tmp_path, "eval_loss")[-1]
    line = f"validation loss {last['eval_loss']:.3f} (the paper's: 0.25), "
    assert line + f"passkey accuracy {last['eval_passkey_accuracy']:.1%}\n" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("config", ["zero2", "zero3"])
def test_the_same_on_two_ranks(recipe, tmp_path, config):
    """The first has one sequence more than the second."""
    run(recipe, tmp_path, f"deepspeed={config}", "micro_batch=4")
    assert_accuracy(recipe, tmp_path)
