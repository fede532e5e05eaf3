"""Fractions of words beside whole words."""

import pytest
import torch

from condense.labs.continuity.study.prompts import counting_prompt
from condense.labs.continuity.study.wholes import CHANGES, DISTANCE, MOST, SHARE, Wholes

from .models import counts_and_adds_tokenizer, folded_reader, options, stock_reader


@pytest.fixture(scope="module")
def tokenizer():
    return counts_and_adds_tokenizer()


def items():
    return {item.facts["changed"]: item for item in Wholes.prompts(options(limit=1))}


@torch.no_grad()
@pytest.mark.parametrize("change", CHANGES)
def test_distances_by_the_stock_model_itself(change, tokenizer):
    """Whole words by the model's own forward pass, and fractions by its mask and positions."""
    reader, item = stock_reader(tokenizer), items()[change]
    found = Wholes.record(reader, item)
    word, category, article, template = item.facts["prompt"]
    model, ids_N = reader.lm.model, reader.sentence(item.text).ids_N
    wholes = []
    for amount in range(1, MOST + 1):
        ids = reader.sentence(counting_prompt(word, amount, category, article, template).text).ids_N
        wholes.append(model(ids[None]).logits[0, -1].softmax(-1))
    shrunk = reader.tokens(item)
    for at, factor in enumerate(item.factors):
        durations_N = torch.ones(len(ids_N), dtype=torch.float64)
        durations_N[shrunk] = factor
        ones_N = torch.ones_like(durations_N)
        weights_N = ones_N if change == "only their positions" else durations_N
        positions_N = (ones_N if change == "only their weights" else durations_N).cumsum(0) - 1
        mask_NN = torch.where(torch.ones(len(ids_N), len(ids_N)).tril().bool(), weights_N.log(), -torch.inf)
        logits = model(ids_N[None], position_ids=positions_N[None].float(), attention_mask=mask_NN[None, None]).logits
        fraction_V = logits[0, -1].softmax(-1)
        by_hand = [float((fraction_V - whole_V).abs().sum() / 2) for whole_V in wholes]
        assert found["distances"][at] == pytest.approx(by_hand, abs=1e-5)
        assert found["nearest"][at] == 1 + by_hand.index(min(by_hand))
        assert found["distance"][at] == pytest.approx(by_hand[at], abs=1e-5)
    assert found["nearest"][-1] == MOST and found["distance"][-1] < 1e-9  # durations of one


def test_a_folded_model_changes_both_together(tokenizer):
    reader, found = folded_reader(tokenizer, segment_length=256), items()
    assert Wholes.record(reader, found["durations"])["valid"]
    for change in CHANGES[1:]:
        assert "stock models" in Wholes.record(reader, found[change])["reason"]


def test_figures_by_hand():
    """One word is read as its amounts except for one; for another, each token counts as one."""

    def read(change, nearest):
        wholes = {"distance": [0.1] * 7 + [0.0], "distances": [[0.2] * 8] * 7 + [[0.3] * 7 + [0.0]]}
        return {"valid": True, "changed": change, "nearest": nearest} | wholes

    records = [read("durations", [1, 2, 3, 4, 5, 6, 8, 8]), read("durations", [8] * 8)]
    summary = Wholes.summary(records)
    found = summary["changes"]["durations"]
    assert found["control"][SHARE]["own"]["mean"] == pytest.approx((6 / 7 + 0) / 2)
    assert found["control"][SHARE]["others"]["mean"] == pytest.approx((1 / 49 + 7 / 49) / 2)
    assert found["control"][DISTANCE]["own"]["mean"] == pytest.approx((1 / 7 + 4) / 2)
    assert found["discrete"] == pytest.approx(8 / 14) and found["nearest"][:2] == [4.5, 5]
    (table,) = Wholes.summary_tables({"m": summary})
    assert [row[1:3] for row in table.rows] == [
        ["durations", 2],
        ["only their weights", 0],
        ["only their positions", 0],
    ]
    assert table.rows[0][-3:] == ["57.14 %", "0.1000", "0.3000"] and table.rows[1][3:] == ["-"] * 7
