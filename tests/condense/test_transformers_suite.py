"""transformers' own tests of causal language models, on a folded one.

They are not in its wheel. Its sdist has those of models and of training; those of `generate` are in its repository
only. TRANSFORMERS_CHECKOUT=FOLDER names a checkout of the installed version, whose tests then all run:

    git clone --depth 1 --branch v5.23.0 https://github.com/huggingface/transformers
    TRANSFORMERS_CHECKOUT=transformers pytest -m slow tests/condense/test_transformers_suite.py
"""

import os
import shutil
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

import pytest
import transformers

# Modules of the repository that the sdist lacks and its tests import, with the names that they import.
ABSENT = {"generation/test_utils.py": "GenerationTesterMixin", "exporters/test_export.py": "ExportTesterMixin"}
CACHE_SIZE = "a FoldedCache has a constant size, and the test expects the number of tokens"
SEGMENTS = "segments are checkpointed, and the test looks for layers that are"
# The tests that a stock Llama passes and a folded one doesn't.
DIFFERENCES = {
    "test_gradient_checkpointing_enable_disable": SEGMENTS,
    "test_training_gradient_checkpointing": SEGMENTS,
    "test_training_gradient_checkpointing_use_reentrant_false": SEGMENTS,
    "test_training_gradient_checkpointing_use_reentrant_true": SEGMENTS,
    "test_causal_lm_loss_honors_shift_labels": "shift_labels come from sequence parallelism, which is refused",
    "test_model_rope_scaling_frequencies": "frequencies never follow a text, nor those of the type dynamic",
    "test_model_rope_scaling_from_config_1_dynamic": "positions end after two segments, so that no text is long",
    "test_retain_grad_hidden_states_attentions": "the output is not computed from the hidden states that are collected",
    "test_sdpa_can_dispatch_non_composite_models": "the default implementation is 'auto', and the test expects 'sdpa'",
}
DIFFERENCES_OF_GENERATION = {
    "test_assisted_decoding_matches_greedy_search_0_random": CACHE_SIZE,
    "test_assisted_decoding_matches_greedy_search_1_same": CACHE_SIZE,
    "test_assisted_decoding_sample": CACHE_SIZE,
    "test_beam_search_generate_dict_outputs_use_cache": CACHE_SIZE,
    "test_greedy_generate_dict_outputs_use_cache": CACHE_SIZE,
    "test_past_key_values_format": CACHE_SIZE,
}


class Suite(NamedTuple):
    folder: Path  # with the package `tests`, and the packages that it needs beside those of the environment
    with_generation: bool


class Outcome(NamedTuple):
    passed: set[str]
    failed: set[str]
    log: str


@pytest.fixture(scope="module")
def suite(tmp_path_factory) -> Suite:
    """transformers' tests, of a checkout or of the sdist."""
    folder = tmp_path_factory.mktemp("suite")
    _pip("install", "--no-deps", "--target", str(folder), "parameterized")
    checkout = os.environ.get("TRANSFORMERS_CHECKOUT")
    if checkout:
        shutil.copytree(Path(checkout) / "tests", folder / "tests")
    else:
        name = f"transformers=={transformers.__version__}"
        _pip("download", "--no-deps", "--no-binary", ":all:", "--dest", str(folder), name)
        with tarfile.open(next(folder.glob("transformers-*.tar.gz"))) as archive:
            archive.extractall(folder, filter="data")
        next(folder.glob("transformers-*/tests")).rename(folder / "tests")
        (folder / "tests" / "__init__.py").touch()
        for path, mixin in ABSENT.items():
            (folder / "tests" / path).parent.mkdir()
            (folder / "tests" / path).write_text(f"class {mixin}: pass\n")
    shutil.copy(Path(__file__).with_name("transformers_suite.py"), folder)
    return Suite(folder, with_generation=bool(checkout))


def _pip(*arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", "--quiet", *arguments], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"transformers' tests can't be had: {done.stderr.strip().splitlines()[-1]}")


def run(suite: Suite, segment_length: int) -> Outcome:
    """The outcome of the tests by name, those of subtests included; 0 is a stock Llama."""
    report, root = suite.folder / "report.xml", Path(__file__).resolve().parents[2]
    command = "-m pytest -c /dev/null --import-mode=importlib -p no:cacheprovider -q --tb=short transformers_suite.py"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(suite.folder), str(root)]), "SUITE_SEGMENT_LENGTH": str(segment_length),
        "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, *command.split(), f"--junitxml={report}"], cwd=suite.folder, env=environment,
        capture_output=True, text=True,
    )  # fmt: skip
    assert report.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    passed, failed = set(), set()
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.get("name", "").split()[0]
        if case.find("failure") is not None or case.find("error") is not None:
            failed.add(name)
        elif case.find("skipped") is None:
            passed.add(name)
    return Outcome(passed - failed, failed, done.stdout)


@pytest.mark.slow
def test_a_stock_llama_passes(suite):
    """The control: the harness fails no test by itself, and most of them run."""
    outcome = run(suite, 0)
    assert outcome.failed == set(), outcome.log[-8000:]
    assert len(outcome.passed) > (130 if suite.with_generation else 60)


@pytest.mark.slow
@pytest.mark.parametrize("segment_length", [64, 3])
def test_a_folded_llama_fails_what_is_listed(segment_length, suite):
    """With segments longer than the tests' texts, and with several segments in each."""
    outcome = run(suite, segment_length)
    listed = set(DIFFERENCES) | (set(DIFFERENCES_OF_GENERATION) if suite.with_generation else set())
    assert outcome.failed - listed == set(), outcome.log[-12000:]
    assert listed & outcome.passed == set()  # remove them from the list
    assert len(outcome.passed) > (110 if suite.with_generation else 50)
