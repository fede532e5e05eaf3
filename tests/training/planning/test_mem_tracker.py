"""The plan against torch's MemTracker, in training steps of a small model with AdamW."""

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker

from condense import CondenseConfig, CondenseForCausalLM
from condense.families import FAMILIES
from condense.training.planning.memory import estimate

from ...products import half_of
from .shapes import PLAIN, recipe

SHAPE = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 2, "num_attention_heads": 16}
SHAPE |= {"num_key_value_heads": 8, "head_dim": 16, "vocab_size": 600, "tie_word_embeddings": True}
ROWS, LENGTH, SEGMENT = 4, 192, 64


def config_of(kind, family):
    if kind == "condense":
        return CondenseConfig(**SHAPE, segment_length=SEGMENT, schedule="sequential", family=family)
    return FAMILIES[family].config_class(**SHAPE)


def track(kind, family, checkpointing) -> dict[str, dict[str, int]]:
    """Bytes by kind of tensor after the forward and the backward pass of the second step, and at its peak."""
    model_class = CondenseForCausalLM if kind == "condense" else FAMILIES[family].model_class
    model = model_class._from_config(config_of(kind, family), attn_implementation="sdpa")
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.train().parameters())
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    tracker, bytes_by = MemTracker(), {}

    def snapshot(kind):
        (found,) = tracker.get_tracker_snapshot(kind).values()
        return {str(getattr(name, "value", name)): size for name, size in found.items()}

    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()  # which makes the moments
    optimizer.zero_grad()
    tracker.track_external(model, optimizer, ids)
    with tracker:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        bytes_by["forward"] = snapshot("current")
        loss.backward()
        bytes_by["backward"] = snapshot("current")
        optimizer.step()
    return bytes_by | {"peak": snapshot("peak")}


@half_of(family=("llama", "qwen2", "qwen3"), kind=("condense", "stock"), checkpointing=(False, True))
def test_a_step_holds_what_is_planned(family, kind, checkpointing, monkeypatch):
    """Weights and gradients exactly, moments except for AdamW's own counts of steps, and the peak within 2 %.

    The tracker has hooks on all modules, for which a model would embed the whole text at once.
    """
    monkeypatch.setattr("condense.ops.transforms._has_any_global_hook", lambda: False)
    fields = {"segment_length": SEGMENT, "schedule": "sequential"} if kind == "condense" else {}
    trained = recipe(LENGTH, ROWS, "float32", "sdpa", checkpointing, kind=kind, **fields)
    parts = estimate(config_of(kind, family), trained, PLAIN, 1, "cpu")
    measured = track(kind, family, checkpointing)
    assert measured["forward"]["Parameter"] == parts.weights
    assert measured["backward"]["Gradient"] == parts.step
    assert 0 <= measured["backward"]["Optstate"] - parts.moments < 1000
    held = parts.total - parts.process - parts.heap
    assert held == pytest.approx(measured["peak"]["Total"], rel=0.02)
