"""The benchmark of SmolLM2 at tiny size: its records, what its arms are, and its figures computed in another way."""

import json
import random
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from condense import CondenseForCausalLM
from condense.eval.benchmark.models import cast_parameters
from condense.training.data.passkey import FILLER
from condense.training.distillation import token_losses
from condense.training.planning.operations import text_flops as planned_flops
from condense.training.small_llama import save_small_llama
from condense.utils.text import encode
from scripts.benchmarks.gpu.smollm2 import main
from scripts.benchmarks.gpu.smollm2_models import (
    Learner,
    build_arm,
    distillation_loss,
    held_out_texts,
    label_loss,
    multiplied_weights,
    parse_arm,
    rate_at,
    segment_losses,
    text_flops,
    training_texts,
)
from scripts.benchmarks.gpu.smollm2_parts import passkey_length

from ....condense.execution.recording import recorded_graphs

SEGMENT, BATCH, TRAINED, HELD = 16, 2, 48, 64
ARMS = {"1": (1.0, None), "0.2": (0.2, None), "0.2+sink": (0.2, 1), "0+sink": (0.0, 1)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2")
    save_small_llama(folder / "model")
    sentences, choose = FILLER.strip().split(". "), random.Random(0)
    for name, count in (("train", 100), ("held", 100)):
        text = " ".join(choose.choice(sentences).rstrip(".") + "." for _ in range(count))
        (folder / f"{name}.txt").write_text(text)
    return folder


@pytest.fixture(scope="module")
def results(folder) -> dict:
    options = {
        "model": folder / "model", "train": folder / "train.txt", "held-out": folder / "held.txt",
        "output": folder / "results", "minutes": 0.15, "segment-length": SEGMENT, "batch": BATCH,
        "train-tokens": TRAINED, "held-tokens": HELD, "held-texts": 4, "turns": 1, "passkey-stages": "128,160",
        "passkey-lengths": "128,192", "stock-longest": 128, "prompts": 2, "commit": "abc",
    }  # fmt: skip
    code = main([part for name, value in options.items() for part in (f"--{name}", str(value))])
    found = json.loads((folder / "results" / "smollm2.json").read_text())
    assert code == 0, found["parts"]
    return found


def test_the_records_are_complete(results, folder):
    assert results["versions"]["commit"] == "abc" and "--segment-length 16" in results["command"]
    assert list(results["parts"]) == ["correctness", "steps", "distill", "passkeys"]
    assert len(results["correctness"]) == 4
    assert {one["name"] for one in results["references"]} == {"window", "two segments of text"}
    assert {(one["objective"], one["arm"]) for one in results["steps"]} >= {
        ("next tokens", "stock"),
        ("next tokens", "0.2+sink"),
    }
    assert all(one["seconds"] > 0 and one["mfu"] is None for one in results["steps"])
    for point in results["points"]:
        assert point["low"] <= point["cost"] <= point["high"] and point["worth"] is not None
        assert len(point["by_segment"]) == HELD // SEGMENT and len(point["by_text"]) == 4
        assert point["tokens"] or point["by_segment"][0] == pytest.approx(0, abs=1e-4)  # untrained
    drawn = ["cost"] + ["passkeys"] * any(one["lengths"] for one in results["passkeys"])  # none on a slow machine
    pictures = [folder / "results" / f"{name}.png" for name in drawn]
    for path in pictures:
        path.unlink()
    assert main(["--draw", str(folder / "results")]) == 0 and all(path.exists() for path in pictures)


def test_arms_are_what_their_names_say(results):
    found = {one["arm"]: (one["share"], one["sink_token_id"]) for one in results["points"]}
    assert found == ARMS
    learned = {one["arm"]: (one["share"], one["sink_token_id"]) for one in results["passkeys"]}
    assert learned == {name: ARMS[name] for name in ("0.2+sink", "1", "0+sink")} | {"stock": (None, None)}
    with pytest.raises(ValueError, match="between 0 and 1"):
        parse_arm("2+sink")


def test_tokens_are_counted(results):
    assert all(one["tokens"] == one["steps"] * BATCH * TRAINED for one in results["points"])
    assert [one["tokens"] for one in results["points"][: len(ARMS)]] == [0] * len(ARMS)
    for one in results["passkeys"]:
        assert one["tokens"] == sum(one["tokens_by_length"].values())
        assert all(cell["total"] == 2 and cell["correct"] <= 2 for cell in one["lengths"])
    held = {one["arm"]: [cell["state_bytes"] for cell in one["lengths"]] for one in results["passkeys"]}
    assert len(held["stock"]) <= 1 and len(set(held["0.2+sink"])) <= 1  # a folded state does not grow


@pytest.mark.parametrize("arm", ["0.2", "0.2+sink"])
def test_the_cost_of_an_untrained_arm_is_that_of_the_logits(results, folder, arm):
    share, sink = ARMS[arm]
    options = {"segment_length": SEGMENT, "memory_share": share, "sink_token_id": sink}
    models = [
        LlamaForCausalLM.from_pretrained(folder / "model"),
        CondenseForCausalLM.from_pretrained(folder / "model", **options),
    ]
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    ids_N = encode(tokenizer, (folder / "held.txt").read_text())[0]
    ids_BN, _ = held_out_texts([ids_N], HELD, 4)
    losses = []
    for model in models:
        with torch.no_grad():
            logits_BNV = model.eval()(ids_BN[:, :-1]).logits
        loss_BN = F.cross_entropy(logits_BNV.transpose(1, 2), ids_BN[:, 1:], reduction="none")
        losses.append(loss_BN[:, SEGMENT:].mean().item())
    point = next(one for one in results["points"] if one["arm"] == arm)
    assert point["cost"] == pytest.approx(losses[1] - losses[0], abs=1e-5)
    assert results["held_out"]["stock_loss"] == pytest.approx(losses[0], abs=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_distillation_has_the_gradients_of_the_recipes_objective(folder, monkeypatch, tied):
    monkeypatch.setitem(distillation_loss.__globals__["LOGITS_AT_ONCE"], "cpu", 2000)  # several blocks
    torch.manual_seed(0)
    config = LlamaConfig.from_pretrained(folder / "model", tie_word_embeddings=tied, initializer_range=0.1)
    stock = LlamaForCausalLM(config).eval().requires_grad_(False)
    ids_BN, found = torch.randint(10, 40, (2, TRAINED)), []
    for ours in (True, False):
        model = build_arm(stock, parse_arm("1"), SEGMENT)
        if ours:
            loss = distillation_loss(model, stock, ids_BN)
        else:
            hidden = [one.model(ids_BN, use_cache=False).last_hidden_state.flatten(0, 1) for one in (model, stock)]
            divergence_n, _ = token_losses((model.lm_head, stock.lm_head), hidden, ids_BN.flatten(), 1.0)
            loss = divergence_n.mean()
            loss.backward()
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        gradients = {name: weight.grad for name, weight in model.named_parameters()}
        found.append((loss.detach(), gradients))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_by_recorded_graphs_are_those_of_single_segments(folder, monkeypatch, dtype):
    """As on CUDA, with an evaluation between the steps; a text ends with a partial segment."""
    counts, found = recorded_graphs(monkeypatch), []
    config = LlamaConfig.from_pretrained(folder / "model", tie_word_embeddings=True)
    torch.manual_seed(0)
    stock = cast_parameters(LlamaForCausalLM(config).eval().requires_grad_(False), dtype)
    ids_BN = torch.randint(10, 40, (2, TRAINED + 5))
    for schedule in ("graph", "sequential"):
        learner = Learner(build_arm(stock, parse_arm("0.2+sink"), SEGMENT), learning_rate=1e-2)
        learner.model.config.schedule = schedule
        for number in range(4):
            learner.step(partial(distillation_loss, teacher=stock, ids_BN=ids_BN.roll(number, 1)), ids_BN.numel(), 0.5)
            segment_losses(learner.model, ids_BN[:, : 2 * SEGMENT + 1], SEGMENT)
            learner.step(partial(label_loss, ids_BN=ids_BN, labels_BN=ids_BN), ids_BN.numel(), 0.5)
        assert learner.tokens == 8 * ids_BN.numel() and not learner.skipped and learner.losses[-1] < learner.losses[1]
        assert all(torch.equal(one.to(dtype), own) for one, own in zip(learner.masters, learner.weights, strict=True))
        found.append(learner)
    assert counts["replay"]
    close = {torch.float32: 1e-3, torch.bfloat16: 5e-2}[dtype]
    torch.testing.assert_close(found[0].losses, found[1].losses, rtol=close, atol=close)


@pytest.mark.parametrize("tokens", [TRAINED, TRAINED + 5])
def test_operations_are_those_of_the_plan(folder, tokens):
    stock = LlamaForCausalLM.from_pretrained(folder / "model")
    for arm, segment in (("1", SEGMENT), ("stock", None)):
        model = build_arm(stock, parse_arm(arm), SEGMENT)
        own = text_flops(model.config, multiplied_weights(model), tokens, segment)
        assert own == pytest.approx(planned_flops(model.config, segment)(tokens), rel=1e-3)


@pytest.mark.unit
def test_texts_and_rates():
    files = [torch.arange(10), torch.arange(100, 105)]
    batches = training_texts(files, 64, 5, seed=0)
    assert {int(row[0]) for row in next(batches)} == {*range(6), 100}
    texts_BN, numbers = held_out_texts(files, 4, 3)
    assert numbers == [0, 0, 1] and texts_BN.tolist() == [[*range(5)], [*range(5, 10)], [*range(100, 105)]]
    with pytest.raises(ValueError, match="no held-out file"):
        held_out_texts(files, 20, 1)
    rates = [rate_at(progress) for progress in (0, 0.03, 0.5, 1, 1.5)]
    assert rates[0] < rates[2] < rates[1] <= 1 and rates[3] == rates[4] == pytest.approx(0.02)
    generator = np.random.default_rng(0)
    assert {passkey_length([1, 2, 4], 0.1, generator) for _ in range(50)} == {1}
    assert {passkey_length([1, 2, 4], 1.0, generator) for _ in range(50)} == {1, 2, 4}
