"""Weights in one half precision under autocast in the other, as when a float16 checkpoint is trained with bf16=True."""

import pytest
import torch
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

from condense import CondenseForCausalLM, FoldedCache

from .models import gradients, random_durations, random_ids, reference_gradients, tiny_model, weights

PAIRS = [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)]
pairs = pytest.mark.parametrize(("of_weights", "of_products"), PAIRS, ids=["bf16 autocast", "fp16 autocast"])


def distance(found, expected) -> float:
    """The relative distance of two losses with gradients."""
    found, expected = ([one[0].double()[None], *one[1].values()] for one in (found, expected))
    found, expected = (torch.cat([tensor.double().flatten() for tensor in one]) for one in (found, expected))
    return float((found - expected).norm() / expected.norm())


def under_autocast(model, ids, dtype, inside=False, **inputs):
    """The loss and the gradients; the backward pass is outside of autocast, as in Trainer, or `inside`."""
    model.train().zero_grad()
    with torch.autocast("cpu", dtype):
        loss = model(ids, labels=ids, **inputs).loss
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def stock_twin(model):
    """The stock Llama with the same weights, in float64."""
    config = {**model.config.to_dict(), "model_type": "llama", "attn_implementation": "sdpa"}
    stock = LlamaForCausalLM(LlamaForCausalLM.config_class(**config)).double()
    stock.load_state_dict(model.state_dict())
    return stock


@pairs
@pytest.mark.parametrize("attention", ["eager", "sdpa", "blocked"])
@pytest.mark.parametrize("schedule", ["sequential", "wavefront"])
def test_it_trains_as_accurately_as_a_stock_llama(of_weights, of_products, attention, schedule):
    """Within a segment: both against the stock Llama in float64."""
    model = tiny_model(of_weights, segment_length=12, attn_implementation=attention, schedule=schedule)
    ids, stock = random_ids(2, 12), stock_twin(model)
    exact = gradients(stock, ids)
    stock_error = distance(under_autocast(stock.to(of_weights), ids, of_products), exact)
    assert distance(under_autocast(model, ids, of_products), exact) < 1.5 * stock_error < 0.1


@pairs
@pytest.mark.parametrize("attention", ["eager", "sdpa", "blocked"])
@pytest.mark.parametrize(
    ("schedule", "segments"), [("sequential", None), ("sequential", 1), ("wavefront", None), ("wavefront", 2)]
)
@pytest.mark.parametrize("inside", [False, True])
def test_over_segments_it_trains_after_the_equations(of_weights, of_products, attention, schedule, segments, inside):
    model = tiny_model(of_weights, attn_implementation=attention, schedule=schedule, initializer_range=0.1)
    if segments is not None:
        model.gradient_checkpointing_enable({"use_reentrant": False, "checkpoint_segments": segments})
    ids = random_ids(2, 23)
    exact = reference_gradients(model, ids)
    error = distance(under_autocast(model, ids, of_products, inside), exact)
    alone = tiny_model(torch.float32, attn_implementation=attention, schedule=schedule)  # of equal precision
    alone.load_state_dict(model.state_dict())
    assert error < 1.5 * distance(under_autocast(alone, ids, of_products), exact) + 0.01 < 0.1


@pairs
@pytest.mark.parametrize(
    ("attention", "schedule"),
    [("eager", "wavefront"), ("sdpa", "sequential"), ("sdpa", "wavefront"), ("blocked", "sequential"),
     ("flex_attention", "wavefront")],
)  # fmt: skip
@torch.no_grad()
def test_logits_durations_and_caches(of_weights, of_products, attention, schedule):
    model = tiny_model(of_weights, attn_implementation=attention, schedule=schedule, initializer_range=0.1)
    ids = random_ids(2, 23)
    exact = tiny_model(schedule="sequential")
    exact.load_state_dict(weights(model))
    for inputs in ({}, {"durations": random_durations(2, 23)}):
        expected = exact(ids, **inputs).logits
        bound = 0.03 * expected.abs().max()
        cache, parts = FoldedCache(model.config), []
        for first, last in ((0, 8), (8, 9), (9, 23)):
            given = {name: value[:, first:last] for name, value in inputs.items()}
            with torch.autocast("cpu", of_products, enabled=first > 0):  # autocast begins within the text
                parts.append(model(ids[:, first:last], cache=cache, **given).logits)
        for found in (torch.cat(parts, dim=1), model(ids, use_cache=False, **inputs).logits):
            assert (found - expected).abs().max() < bound
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    with torch.autocast("cpu", of_products):
        found = model(ids, attention_mask=mask).logits
    assert (found - exact(ids, attention_mask=mask).logits)[mask.bool()].abs().max() < bound


def test_trainer_with_a_float16_checkpoint(llama, tmp_path):
    """Its losses are those of a stock Llama; the text is within a segment."""
    LlamaForCausalLM.from_pretrained(llama, dtype=torch.float16).save_pretrained(tmp_path / "half")
    ids = random_ids(8, 30) // 2 + 4
    losses = []
    for model in (
        LlamaForCausalLM.from_pretrained(tmp_path / "half"),
        CondenseForCausalLM.from_pretrained(tmp_path / "half", segment_length=64),
    ):
        assert model.dtype == torch.float16
        options = {"use_cpu": True, "bf16": True, "max_steps": 3, "logging_steps": 1, "report_to": [], "seed": 0}
        trainer = Trainer(
            model,
            TrainingArguments(tmp_path / "run", disable_tqdm=True, save_strategy="no", **options),
            train_dataset=[{"input_ids": row, "labels": row} for row in ids],
        )
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(losses[0]) == 3 and losses[1] == pytest.approx(losses[0], rel=0.01)
