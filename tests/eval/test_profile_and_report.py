"""Points are measured in fresh processes; the page holds every number."""

import json

import pytest

from eval import passkey, profile, report
from training.small_llama import save_small_llama


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    save_small_llama(folder / "llama")
    shape = ["--config", str(folder / "llama"), "--segment-length", "64", "--lengths", "128", "512", "--repeats", "2"]
    profile.main([*shape, "--gradient-checkpointing", "--output", str(folder / "profile" / "results")])
    passkey.main(
        ["--model", str(folder / "llama"), "--lengths", "80", "--prompts", "2", "--output", str(folder / "run" / "out")]
    )
    (folder / "run" / "trained").mkdir()
    lines = [{"step": 10 * i, "loss": 1 / i, "segments": i} for i in range(1, 5)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "run" / "trained" / "log.jsonl").write_text(text)
    return folder


def test_profile(results):
    points = json.loads((results / "profile" / "results" / "profile.json").read_text())["points"]
    by = {(point["kind"], point["length"]): point for point in points}
    assert len(by) == 4
    for point in points:
        assert point["parameters"] == 102_208 and point["training_seconds"] > 0 and point["training_bytes"] > 2**20
        low, high = point["training_seconds_spread"]
        assert low <= point["training_seconds"] <= high
    # What the state must be: 2 layers x (2L + L) places x keys and values x 64 numbers of 4 bytes, one hidden state.
    assert by["folded", 128]["state_bytes"] == by["folded", 512]["state_bytes"] == 2 * 3 * 64 * 2 * 64 * 4 + 64 * 4
    # A stock cache also holds the tokens decoded.
    assert by["stock", 512]["state_bytes"] == 2 * 2 * 64 * 4 * (512 + profile.NEW_TOKENS)


def test_a_failing_point_says_why(results):
    with pytest.raises(RuntimeError, match="segment_length=0"):
        profile.profile(str(results / "llama"), 0, [128])


def test_the_page_stands_alone(results):
    page = report.write_report(results, title="a <test>").read_text()
    assert "a &lt;test&gt;" in page and page.count("data:image/png;base64,") == 3
    assert "src=" in page and 'src="http' not in page and "href=" not in page
    assert "python -m eval.profile --config" in page and "python -m eval.passkey --model" in page
    assert "102,208 parameters" in page and "(0/10)" in page


def test_an_empty_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"holds no passkey.json"):
        report.write_report(tmp_path)
