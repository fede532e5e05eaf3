"""The objectives `multi_token` and `position_experts` through real training in one process, and on two ranks."""

import json

import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from condense import CondenseForCausalLM, to_stock
from condense.hub.loading import load_config, load_model
from condense.training.data.batches import StageBatches, ValidationBatches
from condense.training.data.tasks import make_examples
from condense.training.planning.dry_run import memory_by_ranks
from condense.training.preflight import check_run
from condense.training.recipe import load_recipe
from condense.training.train import train
from tests.training.runs import expected, folded_recipe, log_lines, logged, run

HEADS = "objective={kind: multi_token, tokens: %d}"
EXPERTS = "objective={kind: position_experts, experts: %d, split: %s}"
MODELS = pytest.mark.parametrize("model", ["folded", pytest.param("stock", marks=pytest.mark.slow)])
VALIDATED = "evaluation={sequences: 3}"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wrapped")
    fields = {"data": {"task": "passkey", "shortest": 0.4, "background": 30}, "checkpoints": {"every": 2, "keep": 1}}
    fields |= {"optimizer": {"learning_rate": 1e-2, "warmup_steps": 1}}
    path = folded_recipe(folder, (120, 2), global_batch=4, micro_batch=2, **fields)
    stock = to_stock(CondenseForCausalLM.from_pretrained(folder / "start"))
    stock.save_pretrained(folder / "stock")
    AutoTokenizer.from_pretrained(folder / "start").save_pretrained(folder / "stock")
    return path


def stock(recipe):
    return f"model={{kind: stock, source: {recipe.parent / 'stock'}}}"


def trained(recipe, output, *overrides):
    """The loaded recipe of a finished run."""
    loaded = load_recipe(recipe, [f"output={output}", *overrides])
    train(loaded)
    return loaded


@MODELS
def test_one_head_and_one_expert_are_the_ordinary_training_to_the_bit(recipe, tmp_path, model):
    chosen = [stock(recipe)] if model == "stock" else []
    trained(recipe, tmp_path / "plain", *chosen)
    weights, losses = load_file(tmp_path / "plain/model.safetensors"), log_lines(tmp_path / "plain")
    for name, objective in (("heads", HEADS % 1), ("experts", EXPERTS % (1, "interval"))):
        trained(recipe, tmp_path / name, *chosen, objective)
        same = load_file(tmp_path / name / "model.safetensors")
        assert same.keys() == weights.keys() and all(torch.equal(same[key], weights[key]) for key in weights)
        assert logged(tmp_path / name) == [line["loss"] for line in losses]
        own, other = (json.loads((tmp_path / folder / "config.json").read_text()) for folder in (name, "plain"))
        assert own == other


def first_step(loaded):
    """The micro-batches of the first step."""
    examples = make_examples(loaded, AutoTokenizer.from_pretrained(loaded.model.source))
    return [StageBatches(loaded, examples[0], 1)[n] for n in range(loaded.accumulation(1))], examples[1]


def start(loaded):
    base = loaded.model.load("auto", 0.0)
    return loaded.objective.prepare_model(base, loaded).eval()


@torch.no_grad()
def naive_losses(model, batch, k, pairs=lambda t, head: True):
    """Of each labelled token, by each head."""
    hidden_BND = model.base.model(batch["input_ids"], batch.get("attention_mask"), use_cache=False).last_hidden_state
    weights, losses = [model.base.lm_head.weight, *(head.weight for head in model.heads)], []
    logits_BNkV = torch.stack([hidden_BND @ weight.T for weight in weights], dim=2)
    for logits_NkV, labels_N in zip(logits_BNkV, batch["labels"], strict=True):
        for t in range(len(labels_N)):
            for head in range(k):
                label = labels_N[t + 1 + head] if t + 1 + head < len(labels_N) else torch.tensor(-100)
                if label != -100 and pairs(t, head):
                    losses.append(F.cross_entropy(logits_NkV[t, head], label).item())
    return losses


@MODELS
def test_the_loss_of_k_heads_is_a_mean_over_all_micro_batches(recipe, tmp_path, model):
    """Of unequal texts; in validation, next tokens by the first head, and each target by the head that writes it."""
    chosen = [HEADS % 3, VALIDATED, *([stock(recipe)] if model == "stock" else [])]
    loaded = trained(recipe, tmp_path / "two", *chosen, "micro_batch=2")
    started = start(loaded)
    micro_batches, held_out = first_step(loaded)
    losses = [loss for batch in micro_batches for loss in naive_losses(started, batch, 3)]
    assert len({len(naive_losses(started, batch, 3)) for batch in micro_batches}) > 1
    first = log_lines(tmp_path / "two")[0]
    assert first["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)

    validation, model = ValidationBatches(loaded, held_out), load_model(AutoModelForCausalLM, tmp_path / "two")
    evaluated = log_lines(tmp_path / "two", "eval_loss")[-1]
    for name, pairs in {"": lambda t, head: head == 0, "_as_generated": lambda t, head: t % 3 == 0}.items():
        losses = [loss for n in range(len(validation)) for loss in naive_losses(model, validation[n], 3, pairs)]
        assert evaluated[f"eval_loss{name}"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)

    trained(recipe, tmp_path / "one", *chosen, "micro_batch=1")
    trained(recipe, tmp_path / "four", *chosen, "micro_batch=4", "gradient_checkpointing=true")
    weights = load_file(tmp_path / "two/model.safetensors")
    for other in ("one", "four"):
        for name, tensor in load_file(tmp_path / other / "model.safetensors").items():
            torch.testing.assert_close(tensor, weights[name], atol=1e-4, rtol=1e-3)
    assert not torch.equal(weights["heads.0.weight"], weights["heads.1.weight"])


@pytest.mark.parametrize("split", ["interval", pytest.param("modulo", marks=pytest.mark.slow)])
def test_experts_begin_as_the_model_and_part_from_it(recipe, tmp_path, split):
    """The first loss is that of next-token prediction; a trained folder loads, and writes."""
    trained(recipe, tmp_path / "plain", VALIDATED)
    trained(recipe, tmp_path / "experts", VALIDATED, EXPERTS % (4, split), "model.schedule=sequential")
    plain, own = log_lines(tmp_path / "plain")[0], log_lines(tmp_path / "experts")[0]
    assert own["loss"] == pytest.approx(plain["loss"], rel=1e-5)
    before = log_lines(tmp_path / "plain", "eval_loss")[0]
    evaluated = log_lines(tmp_path / "experts", "eval_loss")
    for name in ("eval_loss", "eval_loss_segment_1", "eval_loss_segment_2", "eval_loss_segment_3"):
        assert evaluated[0][name] == pytest.approx(before[name], rel=1e-5)
    assert evaluated[-1]["eval_loss"] < evaluated[0]["eval_loss"]
    model = load_model(AutoModelForCausalLM, tmp_path / "experts")
    heads = [expert.lm_head.weight for expert in model.experts]
    assert len(heads) == 4 and not any(torch.equal(heads[0], head) for head in heads[1:])
    # What held for the run alone is not saved.
    assert model.config.base.schedule == "auto" and model.config.use_cache
    assert model.config.length == (120 if split == "interval" else None)
    assert model.generate(torch.arange(4, 9)[None], max_new_tokens=6, do_sample=False, eos_token_id=None).shape == (
        1,
        11,
    )


@pytest.mark.slow
def test_a_run_goes_on_from_its_checkpoint(recipe, tmp_path):
    options = [HEADS % 2, "stages=[{total_length: 120, steps: 4}]"]
    trained(recipe, tmp_path / "whole", *options)
    (tmp_path / "resumed").mkdir()
    trained(recipe, tmp_path / "resumed", *options, f"resume={tmp_path / 'whole' / 'checkpoint-4'}")
    weights, again = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "resumed"))
    assert all(torch.equal(weights[name], again[name]) for name in weights)


def refused(recipe, *overrides) -> str:
    with pytest.raises(ValueError, match=r".") as error:
        check_run(load_recipe(recipe, ["output=unused_folder", *overrides]), 1, None)
    return str(error.value)


def test_what_cannot_train_is_refused_before_it_begins(recipe, tmp_path):
    assert "objective.tokens" in refused(recipe, HEADS % 0)
    assert "objective.experts" in refused(recipe, EXPERTS % (0, "modulo"))
    assert "choose one of 'interval', 'modulo'" in refused(recipe, EXPERTS % (2, "thirds"))
    assert "choose at most 119 tokens" in refused(recipe, HEADS % 120)
    assert "experts=7 does not divide total_length=120" in refused(recipe, EXPERTS % (7, "modulo"))
    stages = "stages=[{total_length: 40, steps: 1}, {total_length: 120, steps: 1}]"
    assert "stages have [40, 120]: choose split=modulo" in refused(recipe, EXPERTS % (2, "interval"), stages)
    for objective in (HEADS % 2, EXPERTS % (2, "modulo")):
        zero_3 = {"zero_optimization": {"stage": 3}}
        with pytest.raises(ValueError, match="use ZeRO-2"):
            check_run(load_recipe(recipe, ["output=unused_folder", objective]), 1, zero_3)
        loaded = load_recipe(recipe, ["output=unused_folder", objective])
        (row,) = memory_by_ranks(loaded.model.load_config(), loaded, {"zero_optimization": {"stage": 2}}, [1])
        assert "is not estimated" in str(row)


def test_a_model_that_an_objective_has_made_is_refused(recipe, tmp_path):
    loaded = load_recipe(recipe, [f"output={tmp_path}", HEADS % 2])
    start(loaded).save_pretrained(tmp_path / "heads")
    for kind in ("condense", "stock"):
        message = refused(recipe, f"model={{kind: {kind}, source: {tmp_path / 'heads'}}}", HEADS % 2)
        assert "condense_multi_token" in message and "bases[0].save_pretrained" in message
    AutoModelForCausalLM.from_pretrained(tmp_path / "heads").bases[0].save_pretrained(tmp_path / "base")
    AutoTokenizer.from_pretrained(loaded.model.source).save_pretrained(tmp_path / "base")
    check_run(load_recipe(recipe, [f"output={tmp_path / 'o'}", f"model={tmp_path / 'base'}"]), 1, None)


@pytest.mark.slow
@pytest.mark.parametrize("objective", [HEADS % 4, EXPERTS % (4, "interval"), EXPERTS % (4, "modulo")])
def test_two_ranks_of_zero_2_train_as_one_plain_process(recipe, tmp_path, objective):
    options = [objective, "stages=[{total_length: 120, steps: 6}]", "global_batch=8"]
    heads = "multi_token" in objective  # by the launcher; the others by processes of this one
    run(recipe, tmp_path, *options, "gradient_checkpointing=true", VALIDATED, launcher=heads)
    losses, norms, weights = expected(recipe, *options)
    lines = log_lines(tmp_path)
    assert [line["loss"] for line in lines] == pytest.approx(losses, abs=1e-4) and losses[-1] < losses[0] - 0.3
    assert [line["grad_norm"] for line in lines] == pytest.approx(norms, rel=1e-3)
    model = load_model(AutoModelForCausalLM, tmp_path)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, weights[name], atol=2e-4, rtol=1e-3)
    evaluated = log_lines(tmp_path, "eval_loss")
    for name in ("eval_loss", *(["eval_loss_as_generated"] if heads else [])):
        assert evaluated[-1][name] < evaluated[0][name]


@pytest.mark.slow
@pytest.mark.parametrize("objective", [HEADS % 2, EXPERTS % (2, "modulo")])
def test_bfloat16_and_a_curriculum_train_too(recipe, tmp_path, objective):
    options = [objective, "dtype=bfloat16", "gradient_checkpointing=true"]
    losses, _ = run(recipe, tmp_path / "ranks", *options, "stages=[{total_length: 120, steps: 6}]", "global_batch=8")
    assert losses[-1] < losses[0] - 0.2
    trained(recipe, tmp_path / "alone", *options, VALIDATED, "attention_dropout=0.1")
    saved = load_config(AutoConfig, tmp_path / "alone")
    assert saved.base.attention_dropout == 0 and saved.use_cache  # these held for the run alone
    given = yaml.safe_load(recipe.read_text())
    for replaced in ("stages", "global_batch", "micro_batch"):
        del given[replaced]
    given["curriculum"] = {"steps": 6, "tokens_per_step": 320, "last_segments": 3}
    (tmp_path / "curriculum.yaml").write_text(yaml.safe_dump(given))
    trained(tmp_path / "curriculum.yaml", tmp_path / "grown", objective, "optimizer.decay_steps=4", "log_every=2")
    curve = logged(tmp_path / "grown")
    assert curve[-1] < curve[0]
