"""The examples run as their first lines say, from an empty folder."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

EXAMPLES = Path(__file__).parents[1] / "examples"


SCRIPT = """
import os, runpy, sys
path, folder, *arguments = sys.argv[1:]
os.chdir(folder)
sys.argv = [path, *arguments]
runpy.run_path(path, run_name="__main__")
"""


@pytest.fixture
def run(new_process, tmp_path):
    """Runs a script in an empty folder, and returns what it prints."""

    def run_script(name: str | Path, *arguments: object) -> str:
        done = new_process(SCRIPT, EXAMPLES / name, tmp_path, *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run_script


def test_the_lines_of_the_readme(llama, run, tmp_path):
    readme = (EXAMPLES.parent / "README.md").read_text()
    (lines,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert len(lines.strip().splitlines()) <= 10 and lines.count("HuggingFaceTB/SmolLM2-135M") == 1
    (tmp_path / "lines.py").write_text(lines.replace("HuggingFaceTB/SmolLM2-135M", str(llama)))
    assert run(tmp_path / "lines.py").strip()


def test_the_readme_is_short():
    assert len((EXAMPLES.parent / "README.md").read_text().split()) <= 900


def test_fold_and_generate(llama, run, tmp_path):
    printed = run("fold_and_generate.py", llama).splitlines()
    first, second = (line.rpartition(" state has ")[2] for line in printed[:2])
    assert printed[0].startswith("after 512 tokens") and first == second
    assert "import condense" in (tmp_path / "folded" / "README.md").read_text()


def test_finetune_with_trainer(llama, run, tmp_path):
    (tmp_path / "text.txt").write_text("The pass key is 1 2 3 4 5 . Remember it . " * 1000)
    printed = run("finetune_with_trainer.py", "text.txt", llama)
    assert "'train_loss'" in printed and (tmp_path / "finetuned" / "model.safetensors").exists()


def test_measure_passkey(llama, run, tmp_path):
    printed = run("measure_passkey.py", llama, "128,256")
    assert printed.count("% right") == 10 and (tmp_path / "passkey" / "passkey.json").exists()
