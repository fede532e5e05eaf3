"""Losses of models on the same texts: each reading against the models' own logits, then means, texts and refusals."""

import csv
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from condense import CondenseForCausalLM
from condense.eval.tasks import evaluate
from condense.eval.tasks.fold_arms import arm_losses
from condense.training.small_llama import save_small_llama
from condense.utils.text import encode

from ...refusals import assert_refused
from ..measuring import command

TOKENS, LENGTH, WINDOW, LONGER = 40, 8, 12, 200
ROUNDING = 2e-5  # of a stored loss


@pytest.fixture(scope="module")
def words(folders):
    named = ("--model", f"stock={folders / 'llama'}", "--model", f"folded={folders / 'folded'}")
    data = ("--data", folders / "text.txt", "--data", folders / "texts.jsonl")
    shape = ("--texts", 3, "--tokens", TOKENS, "--position-tokens", LONGER, "--window", WINDOW)
    return ("eval", "loss", *named, *data, *shape)


@pytest.fixture(scope="module")
def output(words, tmp_path_factory):
    folder = tmp_path_factory.mktemp("loss")
    return folder, command(*words, "--output", folder)


@pytest.fixture(scope="module")
def models(folders):
    found = {"stock": AutoModelForCausalLM.from_pretrained(folders / "llama")}
    return found | {"folded": CondenseForCausalLM.from_pretrained(folders / "folded")}


def records(folder):
    lines = (folder / "loss.records.jsonl").read_text().splitlines()[1:]
    return [json.loads(line) for line in lines]


def pieces_of(folders):
    """The three texts of each source: every third of the whole pieces, in order."""
    tokenizer, found = AutoTokenizer.from_pretrained(folders / "llama"), {}
    text = (folders / "text.txt").read_text()
    lines = [json.loads(line)["text"] for line in (folders / "texts.jsonl").read_text().splitlines()]
    for name, documents in {"text.txt": [text], "texts.jsonl": lines}.items():
        ids = [encode(tokenizer, document)[0] for document in documents]
        whole = [one[at : at + TOKENS] for one in ids for at in range(0, len(one) - TOKENS + 1, TOKENS)]
        places = [0, len(whole) // 3, 2 * len(whole) // 3] if len(whole) >= 3 else range(len(whole))
        found[name] = [whole[place] for place in places], max(ids, key=len)[:LONGER]
    return found


@torch.no_grad()
def expected(models, name, way, ids):
    if way == "window":
        return arm_losses(models["stock"], "window", 0, ids, WINDOW // 2)
    return F.cross_entropy(models[name](ids[None, :-1]).logits[0], ids[1:], reduction="none")


def test_each_reading_is_the_models_own_loss(output, models, folders):
    texts, seen = pieces_of(folders), set()
    found = records(output[0])
    for record in found:
        key, source = record["key"], record["key"]["source"].rsplit("/", 1)[-1]
        pieces, longer = texts[source]
        ids = longer if key["text"] is None else pieces[key["text"]]
        loss = expected(models, key["model"], key["way"], ids)
        np.testing.assert_allclose(record["record"]["losses"], loss, atol=ROUNDING)
        seen.add((key["model"], key["way"], source, key["text"]))
    ways = [("stock", "own"), ("stock", "window"), ("folded", "own")]
    assert seen == {
        (*way, name, text) for way in ways for name in texts for text in [*range(len(texts[name][0])), None]
    }


def test_costs_are_means_from_the_second_segment_on(output, models, folders):
    results, texts = json.loads((output[0] / "loss.json").read_text()), pieces_of(folders)
    for cost in results["costs"]:
        pieces, _ = texts[cost["source"].rsplit("/", 1)[-1]]
        own, stock, window = (
            [float(expected(models, name, way, ids)[LENGTH - 1 :].mean()) for ids in pieces]
            for name, way in ((cost["model"], cost["way"]), ("stock", "own"), ("stock", "window"))
        )
        assert cost["above_window"]["cost"] == pytest.approx(np.mean(own) - np.mean(window), abs=ROUNDING)
        assert cost["loss"] == pytest.approx(np.mean(own), abs=ROUNDING)
        assert cost["cost"] == pytest.approx(np.mean(own) - np.mean(stock), abs=ROUNDING)
        differences = np.subtract(own, stock)
        if len(pieces) == 3:  # Student's t with two degrees of freedom: 4.3027
            half = 4.3027 * differences.std(ddof=1) / 3**0.5
            assert cost["high"] - cost["cost"] == pytest.approx(half, abs=ROUNDING)
    assert sum(cost["way"] == "window" for cost in results["costs"]) == 2


def test_losses_by_position_are_means_of_blocks(output, models, folders):
    results, texts = json.loads((output[0] / "loss.json").read_text()), pieces_of(folders)
    assert len(results["by_position"]) == 6
    for curve in results["by_position"]:
        _, longer = texts[curve["source"].rsplit("/", 1)[-1]]
        loss = expected(models, curve["model"], curve["way"], longer)
        assert curve["tokens"] == len(longer) - 1
        parts = [float(part.mean()) for part in loss.split(curve["block"])]
        np.testing.assert_allclose(curve["losses"], parts, atol=ROUNDING)


def test_table_picture_and_rows(output):
    folder, printed = output
    assert "stock, window of 12 keys, 4 of them sinks" in printed and "above the window" in printed
    assert (folder / "loss.png").stat().st_size > 1000
    rows = list(csv.DictReader((folder / "loss.csv").open()))
    assert {row["model"] for row in rows} == {"stock", "folded"} and rows[0]["cost_above_window"]


def test_a_stock_model_ends_at_its_positions(folders, tmp_path):
    """The longer text is read up to the positions that the stock model has, and by the folded one whole."""
    config = json.loads((folders / "llama" / "config.json").read_text()) | {"max_position_embeddings": 64}
    short = tmp_path / "short"
    short.mkdir()
    for file in (folders / "llama").iterdir():
        (short / file.name).write_bytes(file.read_bytes())
    (short / "config.json").write_text(json.dumps(config))
    models = [f"short={short}", f"folded={folders / 'folded'}"]
    results = evaluate(
        "loss", tmp_path / "out", models=models, data=[str(folders / "text.txt")], num_texts=1, num_tokens=32,
        position_tokens=LONGER,
    )  # fmt: skip
    assert [curve["tokens"] for curve in results["by_position"]] == [63, LONGER - 1]


def test_refusals(folders, tmp_path):
    stock, folded = f"stock={folders / 'llama'}", f"folded={folders / 'folded'}"

    def refused(words, **options):
        given = {"models": [stock], "data": [str(folders / "text.txt")], "num_tokens": TOKENS} | options
        assert_refused(words, evaluate, "loss", tmp_path / "out", **given)

    refused("--window 4 has 4 sinks: give it more keys", window=4)
    refused("--window 16 is of a stock model, and all are folded: add --model STOCK", window=16, models=[folded])
    refused("the longest document has .* a lower --tokens", num_tokens=100_000)
    refused("--tokens 9 end in the first segment of 8", models=[stock, folded], num_tokens=9)
    save_small_llama(tmp_path / "other", layers=1, task="recall")
    refused("other has another tokenizer than stock", models=[stock, f"other={tmp_path / 'other'}"])
