"""The examples run as their first lines say, from an empty folder."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from condense.training.small_llama import save_small_llama

pytestmark = pytest.mark.process

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("examples") / "llama"
    save_small_llama(folder, seed=0)
    return folder


def run(name: str | Path, folder: Path, *arguments: object) -> str:
    command = [sys.executable, EXAMPLES / name, *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_lines_of_the_readme(llama, tmp_path):
    readme = (EXAMPLES.parent / "README.md").read_text()
    (lines,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert len(lines.strip().splitlines()) <= 10 and lines.count("HuggingFaceTB/SmolLM2-135M") == 1
    (tmp_path / "lines.py").write_text(lines.replace("HuggingFaceTB/SmolLM2-135M", str(llama)))
    assert run(tmp_path / "lines.py", tmp_path).strip()


def test_the_readme_is_short():
    assert len((EXAMPLES.parent / "README.md").read_text().split()) <= 900


def test_fold_and_generate(llama, tmp_path):
    printed = run("fold_and_generate.py", tmp_path, llama).splitlines()
    first, second = (line.rpartition(" state has ")[2] for line in printed[:2])
    assert printed[0].startswith("after 512 tokens") and first == second
    assert "import condense" in (tmp_path / "folded" / "README.md").read_text()


def test_finetune_with_trainer(llama, tmp_path):
    (tmp_path / "text.txt").write_text("The pass key is 1 2 3 4 5 . Remember it . " * 1000)
    printed = run("finetune_with_trainer.py", tmp_path, "text.txt", llama)
    assert "'train_loss'" in printed and (tmp_path / "finetuned" / "model.safetensors").exists()


def test_measure_passkey(llama, tmp_path):
    printed = run("measure_passkey.py", tmp_path, llama, "128,256")
    assert printed.count("% right") == 10 and (tmp_path / "passkey" / "passkey.json").exists()
