"""The whole path on a real Llama and real novels: pretrain, then passkeys in two stages, then evaluation."""

import json

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer

from condense import CondenseForCausalLM
from condense.eval.models import EvaluatedModel
from condense.eval.runner import measure
from condense.eval.tasks.options import PasskeyOptions
from condense.eval.tasks.passkey import Passkey
from condense.training.data.tasks import make_examples
from condense.training.recipe import load_recipe

from .runs import ROOT, logged, run

RECIPES = ROOT / "training" / "recipes"
SEGMENT, LENGTH = 64, 512


def validation_losses(output):
    return logged(output, "eval_loss")


@torch.no_grad()
def nats_by_segment(model, ids_BN, with_memory: bool):
    """Mean loss of each segment's predictions; without memory every segment is read as a text of its own."""
    parts = [ids_BN] if with_memory else list(ids_BN.split(SEGMENT, dim=1))
    logits_BNV = torch.cat([model(part).logits for part in parts], dim=1)[:, :-1]
    losses = F.cross_entropy(logits_BNV.transpose(1, 2), ids_BN[:, 1:], reduction="none")
    return torch.stack([part.mean() for part in losses.split(SEGMENT, dim=1)])


@pytest.mark.parametrize(
    ("novels", "held_out", "batch", "pretraining", "passkeys", "lengths", "sequences", "gain_above"),
    [
        # One short novel each: they are tokenised whole.
        pytest.param("Austen", "Trollope", 4, 20, 8, [256, 512], 8, 0.0, id="short"),
        pytest.param("[ADFT]", "Eliot", 16, 400, 60, [384, 768], 24, 0.05, id="long", marks=pytest.mark.slow),
    ],
)
def test_pretrain_then_passkeys(
    stories, novel, tmp_path, novels, held_out, batch, pretraining, passkeys, lengths, sequences, gain_above
):
    pretrained, finetuned = tmp_path / "pretrained", tmp_path / "finetuned"
    text = [
        f"model={stories}",
        f"model.segment_length={SEGMENT}",
        f"data.sources=[{{files: '{novel.parent}/{novels}*.txt'}}]",
        f"data.prepared={tmp_path / 'prepared'}",
        f"evaluation={{sequences: {sequences}, sources: [{{files: '{novel.parent}/{held_out}_*.txt'}}]}}",
        f"stages=[{{total_length: {LENGTH}, steps: {pretraining}}}]",
        f"global_batch={batch}",
        f"micro_batch={batch // 2}",
    ]
    run(RECIPES / "passkey_pretrain_1b_tiny.yaml", pretrained, *text)
    before, *_, after = validation_losses(pretrained)
    assert after < before - 0.5

    tokenizer = AutoTokenizer.from_pretrained(pretrained)
    recipe = load_recipe(RECIPES / "passkey_pretrain_1b_tiny.yaml", [*text, "output=o"])
    _, validation = make_examples(recipe, tokenizer)
    ids_BN = torch.stack([torch.as_tensor(validation.sequence(n, LENGTH)[0].input_ids) for n in range(sequences)])
    model = CondenseForCausalLM.from_pretrained(pretrained, dtype=torch.float32)
    with_memory, without = (nats_by_segment(model, ids_BN, memory) for memory in (True, False))
    gain = (without - with_memory)[1:].mean().item()
    print(
        f"later segments: {with_memory[1:].mean():.3f} nats with memory, {without[1:].mean():.3f} without: {gain:.3f}"
    )
    assert torch.equal(with_memory[0], without[0]) and gain > gain_above

    stages = [
        f"model={pretrained}",
        f"stages={[{'total_length': length, 'steps': passkeys} for length in lengths]}",
        f"evaluation.sequences={sequences}",
        f"global_batch={batch}",
        f"micro_batch={batch // 2}",
    ]
    run(RECIPES / "passkey_finetune_1b_tiny.yaml", finetuned, *stages)
    losses = validation_losses(finetuned)
    assert len(losses) == 3 and losses[0] > losses[1] > losses[2]
    model = CondenseForCausalLM.from_pretrained(finetuned, dtype=torch.float32)
    options = PasskeyOptions(models=[], lengths=lengths, depths=[0.0, 1.0], num_prompts=4)
    task = Passkey(options, [EvaluatedModel("finetuned", str(finetuned), model.eval(), tokenizer)])
    cells = task.summarise(measure(task))["cells"]
    assert len(cells) == 4 and all(cell["total"] == 4 for cell in cells)
    print(json.dumps({"pretraining": [before, after], "passkeys": losses, "cells": cells}))
