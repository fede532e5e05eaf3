"""PEFT's own tests of decoder models, run on a folded Llama: what fails is listed here, with its reason.

They are those of the installed PEFT, from its source distribution, with the folded model in the place of theirs.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from condense import CondenseForCausalLM
from condense.training.small_llama import passkey_tokenizer

from .models import tiny_config

ROOT = Path(__file__).resolve().parents[2]
MODULES = ("__init__.py", "test_decoder_models.py", "testing_common.py", "testing_utils.py")
MODEL = "tiny-LlamaForCausalLM"  # PEFT's tests decide by the name which of them suit the model
HUB_ID = re.compile(r'"[\w-]+-internal-testing/[\w.-]+"')
SECONDS = 3 * 3600

DIFFERENCES: dict[str, str] = {}  # a pattern of tests that fail: the reason


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    """A folder with PEFT's tests, in which each model is a folded Llama."""
    name = f"peft-{version('peft')}"
    cache, folder = ROOT / "runs" / "peft-suite", tmp_path_factory.mktemp("peft")
    archive = cache / f"{name}.tar.gz"
    if not archive.exists():
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "--quiet"]
        command += ["--no-build-isolation", "--dest", str(cache), f"peft=={version('peft')}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode or not archive.exists():
            pytest.skip(f"the source distribution of {name} can't be downloaded: {done.stderr.strip()[-200:]}")
    (folder / "tests").mkdir()
    with tarfile.open(archive) as files:
        for module in MODULES:
            source = files.extractfile(f"{name}/tests/{module}")
            if source is not None:
                text = source.read().decode()
                (folder / "tests" / module).write_text(HUB_ID.sub(f'"{MODEL}"', with_one_model(text)))
    (folder / "conftest.py").write_text("import condense\n")
    save_model(folder / MODEL)
    return folder


def with_one_model(text):
    """A module of PEFT's tests whose lists of models have one."""
    return re.sub(r"^([A-Z_]+) = \[\n(?:    \"[\w./-]+\",\n)+\]", rf'\1 = ["{MODEL}"]', text, flags=re.MULTILINE)


def save_model(folder):
    torch.manual_seed(0)
    tokenizer = passkey_tokenizer()
    CondenseForCausalLM(tiny_config(vocab_size=2000)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def outcomes(report):
    """The outcome of each test by its name, from a JUnit report."""
    return {
        case.attrib["name"]: next(
            (child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed"
        )
        for case in ElementTree.parse(report).iter("testcase")
    }
