"""The studies of docs/results: their counted output is that of the stored files, the timed ones run at small sizes."""

from pathlib import Path

import pytest
import torch

from condense.attention import blocked
from condense.eval.benchmark.studies import (
    attention,
    attention_alternatives,
    costs,
    decoding,
    products,
    schedule_rule,
    short_texts,
    training_floor,
)
from condense.execution import static_decoding

RESULTS = Path(__file__).resolve().parents[3] / "docs" / "results"


def test_the_rule_of_auto_gives_the_stored_table(capsys):
    schedule_rule.main()
    assert capsys.readouterr().out == (RESULTS / "schedules" / "rule.txt").read_text()


def test_counted_costs_are_the_stored_ones(capsys):
    stored = (RESULTS / "costs" / "costs.txt").read_text()
    costs.print_texts()
    costs.print_borders()
    printed = capsys.readouterr().out
    assert stored.startswith(printed)
    assert len(printed.splitlines()) > 20
    model = costs.meta_model()
    counts = [costs.count_launches(model, 2048, schedule) for schedule in ("sequential", "wavefront")]
    assert f"  2,048 tokens: sequential {counts[0]:,}, wavefront {counts[1]:,};" in stored


@pytest.mark.parametrize("mode", ["training", "durations", "reading", "decoding"])
def test_implementations_of_a_case_agree(mode):
    tensors, visibility = attention.case_of("stories", 32, mode, torch.float64)
    sdpa, blocked, eager = (attention.attend(name, tensors, visibility) for name in attention.NAMES)
    torch.testing.assert_close(sdpa, eager)
    torch.testing.assert_close(blocked, eager)
    attention.run("sdpa", tensors, visibility)
    assert all(tensor.requires_grad == (mode in ("training", "durations")) for tensor in tensors)


def test_alternatives_are_one_attention(monkeypatch):
    monkeypatch.setattr(blocked, "BLOCK_BYTES", blocked.BLOCK_BYTES)  # the variants set it
    query, key, value = (torch.randn(1, 2, length, 8, dtype=torch.float64) for length in (16, 32, 32))
    expected = attention_alternatives.ALTERNATIVES["one call with a mask"](query, key, value)
    for variant in (*attention_alternatives.ALTERNATIVES.values(), *attention_alternatives.SIZES.values()):
        torch.testing.assert_close(variant(query, key, value), expected)


def test_floors_are_timed():
    assert all(rate > 0 for rate in training_floor.product_rates(4, torch.float32).values())
    for kind, tokens in (("folded", 256), ("stock", 16)):
        assert training_floor.attention_seconds(kind, tokens, 2 * tokens, torch.float32) > 0


def test_products_are_timed(monkeypatch):
    monkeypatch.setattr(products, "SHAPES", [(4, 8, 6)])
    shape, size, *figures = products.times((4, 8, 6), repeats=1)
    assert (shape, size) == ("4 x 8 x 6", "2^7.6") and len(figures) == 6 and all(float(one) >= 0 for one in figures)


def test_short_and_padded_texts_are_timed():
    """Both models compute the same within one segment."""
    shape = "5 layers of width 64, segments of 32"
    stock, folded = short_texts.models(short_texts.SHAPES[shape])
    ids_BN = torch.arange(32)[None]
    torch.testing.assert_close(short_texts.read(folded, "auto", ids_BN), short_texts.read(stock, None, ids_BN))
    assert len(short_texts.one_text(shape, 64, 1)) == 7
    assert len(short_texts.padded(shape, [40, 70], 1)) == 6


def test_steps_of_decoding_are_timed(monkeypatch):
    """All but the compiled ones, which take long to compile; within a segment they are the same computation."""
    monkeypatch.setattr(decoding, "TOKENS", 20)
    logits = {}
    for kind in ("stock", "stock, static", "folded", "folded, fixed"):
        torch.manual_seed(0)
        stock, folded = decoding.models(decoding.SHAPES["5 layers of width 64"])
        logits[kind] = decoding.stepper(kind, stock, folded, 2, repeats=1)()
    for kind, found in logits.items():
        torch.testing.assert_close(found, logits["stock"], atol=1e-5, rtol=1e-4, msg=kind)
    monkeypatch.setattr(decoding, "KINDS", ["stock", "folded, compiled"])
    monkeypatch.setattr(static_decoding, "_compiled_step", lambda: static_decoding.static_step)
    name, rows, *rates, ratio = decoding.line("5 layers of width 64", 1, repeats=1)
    assert (name, rows) == ("5 layers of width 64", "1") and len(rates) == 2 and float(ratio) > 0
