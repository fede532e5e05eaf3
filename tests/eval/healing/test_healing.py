"""The study of healing, with the real trainer on a tiny Llama: its runs, what it wins back, and the worth of memory."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from condense import CondenseForCausalLM
from condense.eval.healing.options import HealingOptions
from condense.eval.healing.study import Healing, Run, memory_worth, tokens_to_bar
from condense.eval.runner import run
from condense.training.small_llama import save_small_llama

from ...condense.models import PAPERS_MEMORY, tiny_model
from ...refusals import assert_refused
from ..studies import run_study, stored_tables

SMALL = {
    "segment_lengths": (4,), "total_length": 17, "batch": 4, "steps": 4, "sequences": 4, "rank": 2, "seeds": 2,
    "sink_token_id": "none",
}  # fmt: skip


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Writes a Llama whose distributions are far from uniform, so folding costs something."""
    folder = tmp_path_factory.mktemp("start")
    model = save_small_llama(folder, width=16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(8)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", autouse=True)
def few_at_once():
    """Draws few texts at once: the drawn texts depend on how many are drawn together."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("condense.training.data.samples.TOKENS_AT_ONCE", 2**9)
        yield


@pytest.fixture(scope="module")
def studied(start, tmp_path_factory):
    output = tmp_path_factory.mktemp("study")
    task = Healing(HealingOptions(model=str(start), **SMALL), output)
    return task, output, run_study(task, output)


@torch.no_grad()
def loss_of(model, texts) -> float:
    losses = []
    for text in map(torch.as_tensor, texts):
        losses.append(F.cross_entropy(model(text[None]).logits[0, :-1], text[1:]).item())
    return float(np.mean(losses))


def test_every_method_is_trained_from_the_same_checkpoint(start, studied):
    task, _, results = studied
    assert [tuple(run.values()) for run in map(task.key, task.items())] == [
        ("stock", 0, 0), ("full", 4, 0), ("distill", 4, 0), ("lora", 4, 0), ("transformer_xl", 4, 0),
        ("stock", 0, 1), ("full", 4, 1), ("distill", 4, 1), ("lora", 4, 1),
    ]  # fmt: skip
    stock_loss = loss_of(LlamaForCausalLM.from_pretrained(start), task.held_out)
    folded = CondenseForCausalLM.from_pretrained(start, segment_length=4, **PAPERS_MEMORY)
    cost = loss_of(folded, task.held_out) - stock_loss
    assert len(results["runs"]) == 9 and results["stock_loss"] == pytest.approx(stock_loss, rel=1e-4)
    assert cost > 0.01
    for found in results["runs"]:
        if found["method"] not in ("stock", "transformer_xl"):
            assert found["cost"] == pytest.approx(cost, rel=1e-2)
            control = next(run for run in results["runs"] if (run["method"], run["seed"]) == ("stock", found["seed"]))
            least = min(results["stock_loss"], control["losses"][-1])  # of what learns from the stock model, as it was
            left = found["losses"][-1] - (least if found["method"] == "full" else results["stock_loss"])
            assert found["won_back"][-1] == pytest.approx(1 - left / found["cost"])
            assert found["won_back"][0] == 0
    assert results["tokens"] == [0, 68, 136, 204, 272]


def test_the_last_losses_are_those_of_the_saved_models(studied):
    task, _, results = studied
    for method in ("stock", "full", "distill", "lora"):
        item = Run(method, 0 if method == "stock" else 4, 1)
        found = next(one for one in results["runs"] if (one["method"], one["seed"]) == (method, 1))
        recipe = task.recipe(item)
        is_stock = method == "stock"
        model = LlamaForCausalLM.from_pretrained(recipe.output) if is_stock else task._load_trained(item, recipe)
        assert loss_of(model, task.held_out) == pytest.approx(found["losses"][-1], rel=1e-3)
    assert (task.recipe(Run("lora", 4, 0)).output / "adapter_model.safetensors").exists()
    weights = [load_file(task.recipe(Run("distill", 4, seed)).output / "model.safetensors") for seed in (0, 1)]
    assert any(not torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_the_memory_of_transformer_xl_is_not_trained(start, studied):
    """The reference: the stock model, that sees the segment before through a mask in each layer."""
    task, _, results = studied
    (found,) = [run for run in results["runs"] if run["method"] == "transformer_xl"]
    stock = LlamaForCausalLM.from_pretrained(start, attn_implementation="eager")
    place_N = torch.arange(17)
    behind_NN = place_N[:, None] // 4 - place_N // 4
    sees_NN = (place_N <= place_N[:, None]) & (behind_NN <= 1)
    mask = torch.zeros(1, 1, 17, 17).masked_fill(~sees_NN, float("-inf"))
    loss = loss_of(lambda text_1N: stock(text_1N, attention_mask=mask), task.held_out)
    assert found["losses"] == [pytest.approx(loss, rel=1e-5)]
    assert found["cost"] == pytest.approx(found["losses"][0] - results["stock_loss"]) and len(found["by_before"]) == 3


def test_shares_of_the_output_in_the_memory(start, tmp_path):
    """Each is an arm of its own, whose cost before training is its own; what is won back is of the fold's."""
    shares = ("1", "0", "1:0")
    few = SMALL | {"steps": 2, "seeds": 1, "methods": ("distill",), "shares": shares}
    task = Healing(HealingOptions(model=str(start), **few), tmp_path)
    results = run_study(task, tmp_path)
    found = [one for one in results["runs"] if one["method"] == "distill"]
    assert [one.get("share") for one in found] == [None, "0", "1:0"]
    stock = loss_of(LlamaForCausalLM.from_pretrained(start), task.held_out)
    # Distillation needs no control that is trained: the stock model is measured as it is.
    assert [one["method"] for one in results["runs"] if one not in found] == ["teacher"]
    assert results["runs"][0]["losses"] == [pytest.approx(stock, rel=1e-5)] and len(results["tokens"]) > 1
    costs = []
    for share in (1.0, 0.0, [1.0, 0.0]):
        model = CondenseForCausalLM.from_pretrained(start, segment_length=4, memory_share=share, sink_token_id=None)
        costs.append(loss_of(model, task.held_out) - stock)
    assert [one["cost"] for one in found] == pytest.approx(costs, abs=1e-4)
    assert [one["won_back"][0] for one in found] == pytest.approx([1 - cost / costs[0] for cost in costs], abs=1e-3)
    trained = [CondenseForCausalLM.from_pretrained(path) for path in sorted((tmp_path / "runs").glob("distill*"))]
    assert [model.config.memory_shares for model in trained] == [(1, 1), (0, 0), (1, 0)]
    assert {row[1] for row in Healing.tables(results)[0].rows} >= {
        "folded model, distillation, share 1", "folded model, distillation, share 1:0",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        (("1", "2"), "from 0 to 1"),
        (("1", "half"), "'half': pass a number"),
        (("0.2",), "add 1, the fold"),
        (("1", "1.0"), "name each once"),
    ],
)
def test_shares_that_are_refused(shares, message, start):
    assert_refused(message, HealingOptions, model=str(start), **SMALL, shares=shares)


@pytest.mark.usefixtures("without_pictures", "nothing_is_trained")
def test_files(studied):
    task, output, results = studied
    assert [len(table.rows) for table in stored_tables(Healing, output)] == [5, 4]
    assert run(Healing(task.options, output), output)["runs"] == results["runs"]


def test_folding_that_costs_nothing(studied):
    """Nothing can be won back: no shares of nothing."""
    task, _, _ = studied
    curve = [{"step": step, "loss": 2.0} for step in range(5)]
    memory = {"by_before": [2.0, 2.0, 2.0], "further": 0.0, "further_low": 0.0, "further_high": 0.0, "segments": 4}
    results = task.summarise([(item, {"curve": curve, "memory": memory}) for item in task.items()]) | {"seeds": 2}
    assert results["runs"][1]["won_back"] is None
    assert Healing.tables(results)[0].rows[1][4:] == ["0.0000", "folding costs nothing", "-", "-", "-"]


def test_folds_take_the_sink_of_their_checkpoint(start, tmp_path):
    options = HealingOptions(**{"model": str(start), **SMALL, "sink_token_id": HealingOptions(model="").sink_token_id})
    study = Healing(options, tmp_path)
    first = json.loads((start / "config.json").read_text())["bos_token_id"]
    assert study.settings()["sink_token_id"] == first
    models = [study.recipe(item).model for item in study.items()]
    assert {model.sink_token_id for model in models if model.kind == "condense"} == {first}
    assert "sink_token_id" not in Healing(HealingOptions(model=str(start), **SMALL), tmp_path).settings()


def test_what_further_segments_are_worth():
    """By a naive loop: every segment from the S-th on, with each number of segments before it."""
    model = tiny_model(torch.float64, segment_length=4).eval()
    texts = list(torch.randint(1, model.config.vocab_size, (3, 29), generator=torch.Generator().manual_seed(0)))
    found = memory_worth(model, texts, 4)  # 7 whole segments and a token: S = 4
    by_before = [[] for _ in range(4)]
    for text in texts:
        for segment in range(3, 7):
            for before in range(4):
                part = text[(segment - before) * 4 : (segment + 1) * 4 + 1]
                with torch.no_grad():
                    logits = model(part[None, :-1]).logits[0]
                by_before[before].append(F.cross_entropy(logits[-4:], part[-4:]).item())
    assert found["by_before"] == pytest.approx([np.mean(losses) for losses in by_before], rel=1e-6)
    further = np.array(by_before[1]) - np.array(by_before[3])
    assert found["further"] == pytest.approx(further.mean(), rel=1e-5) and found["segments"] == 12
    by_text = further.reshape(3, 4).mean(1)
    assert (
        by_text.min() - 1e-12
        <= found["further_low"]
        < found["further"]
        < found["further_high"]
        <= by_text.max() + 1e-12
    )


def test_tokens_to_the_bar():
    assert tokens_to_bar([0, 100, 200], [0.0, 0.6, 1.0]) == pytest.approx(150)
    assert tokens_to_bar([0, 100], [0.0, 0.7]) is None


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"methods": ("full", "magic")}, r"\['magic'\] are not known: .* stock, full, distill, lora, transformer_xl"),
        ({"segment_lengths": (4, 6)}, "segments of 6 tokens: texts of 17 tokens have fewer than four"),
        ({"text": "a.txt"}, "--text and --held-out belong together"),
        ({"steps": 1}, "steps=1: pass 2 or more"),
        ({"methods": ("stock", "transformer_xl")}, "name one that trains a folded model"),
        ({"methods": ("full", "full")}, "names full twice"),
        ({"learning_rate": 0}, "a learning rate of 0: pass a number above 0"),
        ({"lora_learning_rate": -1}, "a learning rate of -1: pass a number above 0"),
    ],
)
def test_refusals(changed, message):
    assert_refused(message, HealingOptions, **{"model": "m", **SMALL, **changed})


def test_refusals_before_anything_is_trained(start, tmp_path):
    for name in ("one.txt", "two.txt"):
        (tmp_path / name).write_text(name)
    one, two, both = (f"{tmp_path}/{name}.txt" for name in ("one", "two", "*"))
    long = {"total_length": 2**21}
    for changed, message in (
        ({"text": both, "held_out": two}, r"two.txt: text to train on and to evaluate with"),
        (
            {"text": one, "held_out": two, **long},
            "the stock model beside .*max_position_embeddings=.*: set --length [0-9]+, or",
        ),
    ):
        options = HealingOptions(**{"model": str(start), **SMALL, **changed})
        assert_refused(message, Healing, options, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_several_gpus(start, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="this process sees 2 GPUs, .*: set CUDA_VISIBLE_DEVICES=0"):
        Healing(HealingOptions(model=str(start), **SMALL), tmp_path)


def test_a_run_that_diverges_is_named(start, tmp_path):
    options = HealingOptions(**{"model": str(start), **SMALL, "learning_rate": 1e30})
    with pytest.raises(ValueError, match=r"runs/stock-0: step \d.* is not finite.* A lower learning rate may help"):
        run(Healing(options, tmp_path), tmp_path)
