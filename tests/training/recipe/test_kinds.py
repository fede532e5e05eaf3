"""Another kind of model and another objective train through a recipe once they are registered: nothing else changes."""

from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from condense.training.data.batches import StageBatches
from condense.training.data.tasks import make_examples
from condense.training.planning.dry_run import memory_by_ranks
from condense.training.recipe import MODELS, OBJECTIVES, Losses, ModelKind, ObjectiveKind, load_recipe
from condense.training.small_llama import passkey_tokenizer
from condense.training.train import train

from ..recipes import write_recipe
from ..runs import log_lines, logged

pytestmark = pytest.mark.unit


class BigramsConfig(PreTrainedConfig):
    model_type = "bigrams"
    vocab_size: int = 8
    width: int = 4


class Bigrams(PreTrainedModel):
    """Logits of the next token from the current one alone, and no loss of its own."""

    config_class = BigramsConfig

    def __init__(self, config):
        super().__init__(config)
        self.embedding = torch.nn.Embedding(config.vocab_size, config.width)
        self.head = torch.nn.Linear(config.width, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids):
        return CausalLMOutput(logits=self.head(self.embedding(input_ids)))


class BigramsModel(ModelKind):
    kind: Literal["bigrams"] = "bigrams"
    width: int

    def load_config(self) -> Any:
        return BigramsConfig.from_pretrained(self.source)

    def load(self, attention: str, attention_dropout: float, **options: Any) -> Any:
        model = Bigrams.from_pretrained(self.source)
        assert model.config.width == self.width
        return model


class Skip(ObjectiveKind):
    """Cross-entropy of the token that stands `ahead` places further on."""

    kind: Literal["skip"] = "skip"
    ahead: int

    def losses(self, model: Any, batch: dict[str, torch.Tensor], num_targets: torch.Tensor | int) -> Losses:
        logits = model(input_ids=batch["input_ids"]).logits[:, : -self.ahead]
        labels = batch["labels"][:, self.ahead :]
        total = F.cross_entropy(logits.transpose(1, 2), labels, reduction="sum")
        return Losses(total / num_targets, total.detach()[None], (labels != -100).sum()[None])


def recipe_in(folder):
    fields = {"objective": {"kind": "skip", "ahead": 3}, "data": {"task": "passkey", "background": 20}}
    fields |= {"optimizer": {"learning_rate": 0.1, "warmup_steps": 1}, "checkpoints": {"every": 1, "keep": 1}}
    bigrams = {"kind": "bigrams", "source": str(folder / "start"), "width": 8}
    return write_recipe(
        folder, bigrams, [(90, 2)], global_batch=4, micro_batch=2, evaluation={"sequences": 2}, **fields
    )


@pytest.fixture
def kinds():
    MODELS.register(BigramsModel)
    OBJECTIVES.register(Skip)
    yield
    del MODELS.kinds["bigrams"], OBJECTIVES.kinds["skip"]


@pytest.fixture
def recipe(kinds, tmp_path):
    tokenizer = passkey_tokenizer()
    torch.manual_seed(0)
    Bigrams(BigramsConfig(vocab_size=len(tokenizer), width=8)).save_pretrained(tmp_path / "start")
    tokenizer.save_pretrained(tmp_path / "start")
    return load_recipe(recipe_in(tmp_path))


def test_another_model_and_another_objective_train(recipe):
    """The logged losses are those of plain AdamW on the same batches."""
    model = Bigrams.from_pretrained(recipe.model.source)
    batches = StageBatches(recipe, make_examples(recipe, passkey_tokenizer())[0], ranks=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, betas=(0.9, 0.95), weight_decay=0.01)
    expected = []
    for rate, numbers in ((0.0, (0, 1)), (0.1, (2, 3))):  # the first of the warm-up's rates is 0
        parts = [batches[number] for number in numbers]
        num_targets = sum(int((part["labels"][:, 1:] != -100).sum()) for part in parts)
        loss = sum(recipe.objective.losses(model, part, num_targets).loss for part in parts)
        expected.append(loss.item())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()

    train(recipe)
    lines = log_lines(recipe.output)
    assert [line["loss"] for line in lines] == pytest.approx(expected, abs=1e-4)
    assert not any(name.startswith("loss_segment") for name in lines[0])  # this model has no segments
    assert np.isfinite(logged(recipe.output, "eval_loss")).all()
    trained = Bigrams.from_pretrained(recipe.output)
    torch.testing.assert_close(trained.head.weight, model.head.weight, atol=1e-4, rtol=1e-3)
    assert not torch.equal(trained.head.weight, Bigrams.from_pretrained(recipe.model.source).head.weight)


def test_the_last_step_is_logged_too(recipe):
    """The window of a line is the steps since the line before."""
    train(load_recipe(recipe.output.parent / "recipe.yaml", ["stages=[{total_length: 90, steps: 3}]"]))
    losses = [line["loss"] for line in log_lines(recipe.output)]
    overrides = [
        "stages=[{total_length: 90, steps: 3}]",
        "log_every=2",
        "checkpoints.every=2",
        f"output={recipe.output}-other",
    ]
    train(other := load_recipe(recipe.output.parent / "recipe.yaml", overrides))
    lines = log_lines(other.output)
    assert [line["step"] for line in lines] == [2, 3]
    assert [line["loss"] for line in lines] == pytest.approx([sum(losses[:2]) / 2, losses[2]], abs=1e-4)


def test_the_dry_run_says_that_it_does_not_count_them(recipe):
    shape = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=50)
    (row,) = memory_by_ranks(shape, recipe, {"zero_optimization": {"stage": 0}}, [1])
    assert "the memory of model.kind='bigrams' is not estimated" in row["error"]


def test_their_keys_are_checked(kinds, tmp_path):
    path = recipe_in(tmp_path)
    with pytest.raises(ValueError, match="model.segment_length is not a key of model.kind=bigrams, which has .*width"):
        load_recipe(path, ["model.segment_length=4"])
    with pytest.raises(ValueError, match="objective.ahead is missing"):
        load_recipe(path, ["objective={kind: skip}"])
    path.write_text(path.read_text().replace("objective:\n  ahead: 3\n  kind: skip\n", "objective: next_token\n"))
    for named in (["objective=skip", "objective.ahead=4"], ["objective.ahead=4", "objective=skip"]):
        assert load_recipe(path, named).objective.ahead == 4
    with pytest.raises(ValueError, match="objective.ahead is missing"):
        load_recipe(path, ["objective=skip"])
    with pytest.raises(ValueError, match="kind='skep' is unknown: choose one of .*'skip'"):
        load_recipe(path, ["objective=skep"])
    with pytest.raises(ValueError, match="objective.after is not a key of objective.kind=skip"):
        load_recipe(path, ["objective=skip", "objective.after=4"])
