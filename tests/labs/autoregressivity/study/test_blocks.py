"""Block diffusion beside the autoregressive model, from end to end."""

import json

import pytest

from condense.labs.autoregressivity.study.blocks import Blocks
from condense.labs.autoregressivity.study.experiments import ablate
from condense.labs.autoregressivity.study.options import AblationOptions


def test_blocks_from_end_to_end(tmp_path):
    results = ablate("blocks", tmp_path, AblationOptions(small=True, seeds=1))
    records = {record["block_length"]: record for record in results["records"]}
    assert sorted(records) == [0, 1, 4, 8]
    # With blocks of one token it is the autoregressive model: the bound has no error, and training is the same.
    assert records[1]["bound"]["monte_carlo_error"] == pytest.approx(0, abs=1e-9)
    assert records[1]["bound"]["mean"] == pytest.approx(records[0]["bound"]["mean"], rel=1e-4)
    assert records[4]["bound"]["monte_carlo_error"] > 0
    assert [quality["evaluations"] for quality in records[8]["quality"]] == [1, 0.5, 0.25, 0.125]
    bound, quality = Blocks.tables(json.loads((tmp_path / "ablation_blocks.json").read_text()))
    assert [row[0] for row in bound.rows] == ["autoregressive", "block of 1", "block of 4", "block of 8"]
    assert len(quality.rows) == 1 + 1 + 1 + 3 + 4
    assert (tmp_path / "ablation_blocks.png").exists()
