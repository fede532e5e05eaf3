"""The package as users install it: a wheel, run from a folder where packages of the user have our folders' names."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from condense.extras import WHEEL

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[1]
SOURCES = (
    "condense", "condense_llama.py", "training", "eval", "labs", "deepspeed_configs", "pyproject.toml", "README.md",
    "LICENSE",
)  # fmt: skip


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy: a build in the checkout leaves files there, and takes up those of earlier builds."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", built, source)
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def run(wheel, tmp_path_factory):
    """Runs `python -m`, or code, from an empty folder with the wheel installed, and returns what is printed."""
    site, folder = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("empty")
    pip("install", "--no-deps", "--target", site, wheel)
    for name in ("eval", "training", "condense_cli"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise ImportError('a package of the user')")
    environment = os.environ | {"PYTHONPATH": str(site), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}

    def run_module(*arguments, option="-m") -> str:
        command = [sys.executable, option, *map(str, arguments)]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    run_module.site, run_module.folder = site, folder
    return run_module


def pip(*arguments) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_one_package_and_its_script_are_installed_with_all_their_files(wheel):
    """The script has the name of the distribution, which no other one can have. Messages name the wheel's file."""
    assert wheel.name == WHEEL
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"condense", "condense_llama", "condense_llama.py"}
    for folder in ("training", "eval", "deepspeed_configs"):
        kept = {path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.is_file()}
        kept = {path for path in kept if "__pycache__" not in path.parts}
        assert {f"condense/{path}" for path in kept} <= set(names)


# The commands share a process, which imports the package once; training starts its own.
COMMANDS = """
import runpy, sys
from condense.training.launch import TRAIN

def run(module, command):
    sys.argv[1:] = command.split()
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code:
            raise

print(TRAIN, flush=True)
run("condense", "sample data runs/sample")
changes = "stages.0.steps=2 optimizer.warmup_steps=1 global_batch=2 micro_batch=1 evaluation.sequences=2 report_to=none"
run("condense", "train passkey_pretrain_1b_tiny --ranks 1 " + changes)
with open("BOOK.txt", "w") as book:
    book.write("the sea is red and the sky is blue. " * 500)
run("condense", f"{OWN_TEXT} model=runs/sample/llama --ranks 1 steps=11 global_batch=1 report_to=none")
evaluation = "--lengths 256 --depths 0 --prompts 1 --output results"
run("condense", "eval passkey --model runs/passkey_pretrain_1b_tiny " + evaluation)
"""


def test_training_and_evaluation_from_an_empty_folder(run):
    """And on a text file, by the README's command for the user's own, with another model."""
    (own_text,) = re.findall(r"^condense (train text data=BOOK.txt)", (ROOT / "README.md").read_text(), re.MULTILINE)
    printed = run(f"OWN_TEXT = {own_text!r}\n{COMMANDS}", option="-c")
    assert "BOOK.txt: " in printed and "all 11 steps are done: the model is in runs/text" in printed
    assert printed.startswith(str(run.site))
    assert "% correct" in printed and (run.folder / "results" / "passkey.json").is_file()


def test_the_script_prints_the_version(run):
    assert run(run.site / "bin" / "condense", "--version", option="-u").startswith("condense ")


@pytest.mark.slow
def test_every_other_command_from_an_empty_folder(run):
    run("condense", "sample", "llama", "llama")
    run("condense", "convert", "llama", "folded", "--segment-length", "40")
    run("condense", "generate", "--model", "folded", "--prompt", "The sky is", "--max-new-tokens", "4")
    run("condense", "profile", "--config", "llama", "--segment-length", "64", "--lengths", "128", "--output", "results")
    run("condense", "sample", "questions", "questions", "--questions", "1000")
    run("condense", "train", "passkey_quickstart", "model=folded", "output=trained", "--dry-run")
    run("condense", "probe", "memory", "--model", "passkey=folded", "--output", "results")
    run("condense", "report", "results")
    assert "profile" in (run.folder / "results" / "report.html").read_text()
