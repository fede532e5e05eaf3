"""Evaluations say once that a memory is untrained, when they read more than one segment."""

import pytest

from condense.eval.harness import CondenseLM

from .measuring import command

pytestmark = pytest.mark.usefixtures("without_pictures")


def passkey(folder, tmp_path, length):
    command(
        "eval", "passkey", "--model", folder, "--lengths", length, "--depths", "0,1", "--prompts", 1,
        "--output", tmp_path / str(length),
    )  # fmt: skip


@pytest.fixture
def untrained(llama, tmp_path):
    command("convert", llama, tmp_path / "folded", "--segment-length", 80)
    return tmp_path / "folded"


def test_passkeys(untrained, said, tmp_path):
    said.clear()
    passkey(untrained, tmp_path, 80)
    assert not said()
    passkey(untrained, tmp_path, 160)
    (line,) = said()
    assert f"'{untrained}' is folded and its memory is not trained: text beyond a segment of 80 tokens costs" in line


def test_perplexity(untrained, said, tmp_path):
    (tmp_path / "text.txt").write_text("The grass is green. The sky is blue. " * 200)
    said.clear()
    command(
        "eval", "perplexity", "--model", untrained, "--data", tmp_path / "text.txt", "--tokens", 1024,
        "--output", tmp_path / "out",
    )  # fmt: skip
    assert len(said()) == 1


def test_the_harness(untrained, said):
    instance = pytest.importorskip("lm_eval.api.instance").Instance
    lm = CondenseLM(str(untrained), batch_size=1)
    for repeats, lines in ((2, 0), (40, 1)):
        said.clear()
        context = "The grass is green. " * repeats
        lm.loglikelihood([instance("loglikelihood", {}, (context, " blue"), 0)], disable_tqdm=True)
        assert len(said()) == lines
