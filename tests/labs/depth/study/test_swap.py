"""The swap of layers for a flow: its starts, its losses, its files."""

import copy
import hashlib

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM

from condense import CondenseForCausalLM, to_stock
from condense.eval.runner import run
from condense.labs.depth.model import convert_to_depth, missed_share
from condense.labs.depth.model.initialization import layer_states
from condense.labs.depth.study.options import DepthOptions
from condense.labs.depth.study.swap import ARMS, RANGES, Swap, shuffle, without


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    return tmp_path_factory.mktemp("swap")


@pytest.fixture(scope="module")
def swap(output):
    return Swap(DepthOptions(small=True, seeds=1), output)


@pytest.fixture(scope="module")
def results(swap, output):
    return run(swap, output)


def cross_entropy(llama: LlamaForCausalLM, ids: torch.Tensor) -> float:
    with torch.no_grad():
        return float(F.cross_entropy(llama(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))


def test_the_loss_is_the_stock_llamas(swap):
    model, ids = swap.evaluated.model, swap.texts.held_out_BN
    assert swap.loss(model) == pytest.approx(cross_entropy(to_stock(model), ids), abs=1e-5)
    llama = to_stock(copy.deepcopy(model))
    del llama.model.layers[1:3]
    assert swap.loss(without(model, 1, 3)) == pytest.approx(cross_entropy(llama, ids), abs=1e-5)


def test_starts(swap):
    """The first layer twice is a Llama with that layer in both places; the others differ only in their field."""
    model, ids = swap.evaluated.model, swap.texts.held_out_BN
    llama = to_stock(copy.deepcopy(model))
    llama.model.layers[2].load_state_dict(llama.model.layers[1].state_dict())
    assert swap.loss(swap.begin("layer", 1, 3, 0)) == pytest.approx(cross_entropy(llama, ids), abs=1e-5)
    start, _, end = layer_states(model, swap.texts.train_BN[: swap.scale.fit_rows], 1, 3)
    errors = {}
    for arm in ("left_out", "random", "shuffled", "fitted", "one_step"):
        begun = swap.begin(arm, 1, 3, 0)
        with torch.no_grad():
            reached = start if arm == "left_out" else begun.model.layers[1].flow(start, None).end_xD
        errors[arm] = float((reached - end).square().mean())
        if arm != "left_out":
            assert begun.config.depth["steps"] == (1 if arm == "one_step" else 4)
    for arm in ("fitted", "one_step"):
        assert errors[arm] < min(errors[other] for other in ("left_out", "random", "shuffled"))


def test_the_costliest_range(swap):
    model = swap.evaluated.model
    costs = {pair: swap.loss(without(model, *pair)) for pair in ((0, 2), (1, 3), (2, 4))}
    assert swap.ranges == {"middle": (1, 3), "next": (2, 4), "worst": max(costs, key=lambda pair: costs[pair])}


def test_finetuning_changes_the_block_alone(swap):
    model = swap.begin("random", 1, 3, 0)
    before = copy.deepcopy(model.state_dict())
    losses = swap.finetuned(model, model.model.layers[1], seed=0, everything=False)
    changed = {name for name, weight in model.state_dict().items() if not torch.equal(weight, before[name])}
    assert changed == {name for name in before if name.startswith("model.layers.1.")}
    assert len(losses) == 2 and losses[0] != losses[1] == swap.loss(model)


def test_shuffled_rows_have_the_same_tokens(swap):
    ids = swap.texts.train_BN
    mixed = shuffle(ids, 0)
    assert torch.equal(mixed[:, 0], ids[:, 0]) and not torch.equal(mixed, ids)
    assert torch.equal(mixed.sort().values, ids.sort().values)
    assert len({tuple(row.tolist()) for row in ids}) == len(ids)  # texts of their own


def test_records_and_files(results, swap, output):
    assert len(results["records"]) == len(RANGES) * len(ARMS)
    for record in results["records"]:
        assert (record["missed"] is None) == (record["arm"] in ("original", "left_out"))
        assert set(record["losses"]) == ({"all"} if record["arm"] == "left_out" else {"all", "block"})
        assert all(len(losses) == 2 and losses[0] == record["losses"]["all"][0] for losses in record["losses"].values())
    tables = Swap.tables(results)
    assert len(tables) == 4 and tables[0].rows[0][3] == "0.000" and tables[0].rows[1][4] == "-"
    assert all(len(row) == len(table.columns) for table in tables for row in table.rows)
    step, fitted = (
        next(r for r in results["records"] if (r["where"], r["arm"]) == ("middle", arm))
        for arm in ("one_step", "fitted")
    )
    assert tables[3].rows[1][3:] == [
        "everything",
        *(f"{a - b:.3f}" for a, b in zip(step["losses"]["all"], fitted["losses"]["all"], strict=True)),
    ]
    for ending in ("json", "csv", "png", "svg"):
        assert (output / f"depth_swap.{ending}").stat().st_size > 100
    assert len((output / "depth_swap.csv").read_text().splitlines()) == 1 + 3 * (8 * 2 - 1) * 2
    first, end = swap.ranges["next"]
    begun = swap.begin("fitted", first, end, 0)
    record = next(r for r in results["records"] if (r["where"], r["arm"]) == ("next", "fitted"))
    assert record["missed"] == missed_share(begun, swap.evaluated.model, swap.texts.held_out_BN)
    assert isinstance(swap.evaluated.model, CondenseForCausalLM)


def test_files_as_texts(stories, tmp_path):
    texts = [tmp_path / name for name in ("train.txt", "held_out.txt")]
    for path, word in zip(texts, ("lily ", "tom "), strict=True):
        path.write_text(f"{word} ran to the park and saw a big dog. " * 10_000)
    swap = Swap(DepthOptions(text=texts[0], held_out=texts[1], model=str(stories)), tmp_path)
    train, held_out = swap.texts
    assert train.shape == (768, 128) and held_out.shape == (64, 128)
    assert "tom" in swap.evaluated.tokenizer.decode(held_out[0]) and "lily" in swap.evaluated.tokenizer.decode(train[5])
    assert swap.settings()["text"] == ["train.txt", hashlib.sha256(texts[0].read_bytes()).hexdigest()]
    texts[1].write_text("short")
    with pytest.raises(ValueError, match="held_out.txt has .* tokens, but 8192 are needed: pass more text"):
        _ = Swap(DepthOptions(text=texts[0], held_out=texts[1], model=str(stories)), tmp_path).texts


def test_refused_before_any_work(swap, tmp_path):
    """A hybrid before its weights are read, and texts before the model."""
    hybrid = tmp_path / "hybrid"
    convert_to_depth(copy.deepcopy(swap.evaluated.model), 1, 3).save_pretrained(hybrid)
    (hybrid / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="hybrid already has a depth block: pass a Llama with all its layers"):
        run(Swap(DepthOptions(model=str(hybrid)), tmp_path), tmp_path)
    for missing in ({"text": tmp_path / "missing.txt", "held_out": hybrid / "config.json"},
                    {"text": hybrid / "config.json", "held_out": tmp_path / "missing.txt"}):  # fmt: skip
        with pytest.raises(ValueError, match="missing.txt can't be read .*No such file or directory"):
            run(Swap(DepthOptions(model=str(hybrid), **missing), tmp_path), tmp_path)
