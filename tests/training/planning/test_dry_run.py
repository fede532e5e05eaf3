"""The table of a dry run."""

import json

from transformers import LlamaConfig

from condense.training.planning.dry_run import GIB, memory_by_ranks, table

from .shapes import PLAIN, SMALL, recipe


def test_the_table_says_where_a_batch_does_not_divide():
    config = LlamaConfig(**SMALL)
    rows = memory_by_ranks(config, recipe(128, 2, segment_length=32, global_batch=8), PLAIN, [1, 2, 3, 4])
    assert [row["ranks"] for row in rows] == [1, 2, 3, 4] and "total" in rows[3]
    assert "global_batch=8" in rows[2]["error"]
    text = table(json.loads(json.dumps(rows))).splitlines()
    assert len(text) == 5 and "does not divide" in text[3] and "host" not in text[0]
    assert f"{rows[0]['total'] / GIB:.2f}" in text[1]
