"""Hours from a rate: a number, a log, or the assumption."""

import json

import pytest
from transformers import LlamaConfig

from condense.training.planning.operations import count_operations
from condense.training.planning.speed import FLOPS_PER_SECOND, hours, parse_rate

from .shapes import SMALL, recipe

pytestmark = pytest.mark.unit


def write_log(path, rates, ranks=2):
    lines = [{"step": 0, "eval_loss": 3.0}]
    lines += [{"step": n, "loss": 1.0, "tokens_per_second": rate, "ranks": ranks} for n, rate in enumerate(rates, 1)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_number_is_the_rate_of_the_whole_run():
    trained = recipe(128, 2, segment_length=32, global_batch=8)
    operations = count_operations(LlamaConfig(**SMALL), trained, 4)
    figures, words = hours(trained, operations, 4, parse_rate("2.5", 4))
    assert figures["hours"] == pytest.approx(100 * 8 * 128 / 2.5 / 3600)
    assert words == "11.4 hours at 2 tokens a second (as given)" and "assum" not in json.dumps(figures)
    fast, words = hours(trained, operations, 4, parse_rate("1e3", 4))
    assert fast["hours"] == pytest.approx(102400 / 1e3 / 3600) and words.startswith("2 minutes")


def test_a_log_gives_its_median_after_the_first_line_scaled_to_the_ranks(tmp_path):
    rate = parse_rate(str(write_log(tmp_path / "log.jsonl", [3.0, 100.0, 900.0, 110.0])), 8)
    assert rate.tokens_per_second == 110.0 / 2 * 8
    assert "log.jsonl" in rate.source and "8 ranks" in rate.source


def test_without_a_rate_the_assumption_is_named():
    plain, checkpointed = (recipe(128, 2, segment_length=32, checkpointing=on) for on in (False, True))
    operations = count_operations(LlamaConfig(**SMALL), plain, 1)
    figures, words = hours(plain, operations, 1, None)
    assert figures["assumed_hours"] == pytest.approx(operations["flops"] / FLOPS_PER_SECOND / 3600)
    assert "assumption" in words and "--tokens-per-second" in words
    with_checkpoints, _ = hours(checkpointed, operations, 1, None)
    assert with_checkpoints["assumed_hours"] == pytest.approx(4 / 3 * figures["assumed_hours"])


@pytest.mark.parametrize("given", ["0", "-3", "nan", "inf"])
def test_numbers_that_are_no_rate(given):
    with pytest.raises(ValueError, match=f"{given}: a rate is a finite number above 0"):
        parse_rate(given, 8)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "neither a number nor the log.jsonl"),
        ("", "has 0 training lines"),
        ('{"step": 1, "tokens_per_second": 5.0, "ranks": 2}\n', "has 1 training lines"),
        ('{"step": 1, "tokens_per_second": 5.0, "ranks": 2}\n{"st', "line 2 is not a logged line"),
        ('{"step": 1, "tokens_per_second": 5.0}\n', "line 1 is not a logged line .*KeyError: 'ranks'"),
        ('{"step": 1, "tokens_per_second": NaN, "ranks": 2}\n', "line 1 is not a logged line .*nan tokens a second"),
        ('{"step": 1, "tokens_per_second": 5, "ranks": 0}\n', "line 1 is not a logged line"),
        ("7\n", "line 1 is not a logged line"),
        (b"\xff\xfe", "can't be read"),
    ],
)
def test_logs_without_a_rate(content, words, tmp_path):
    path = tmp_path / "log.jsonl"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=words) as error:
        parse_rate(str(path), 8)
    assert "give the rate as a number" in str(error.value)
