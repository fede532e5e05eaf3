"""PEFT's own tests of decoder models, run on a folded Llama: each that fails is listed here, with the reason.

They are those of the installed PEFT, from its source distribution, with the folded model in the place of theirs.
"""

import os
import re
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from condense import CondenseConfig, CondenseForCausalLM
from condense.training.small_llama import passkey_tokenizer

ROOT = Path(__file__).resolve().parents[2]
MODULES = ("test_decoder_models.py", "testing_common.py", "testing_utils.py")
MODEL = "tiny-LlamaForCausalLM"  # PEFT's tests decide by the name which of them suit a model
HUB_ID = re.compile(r'"[\w-]+-internal-testing/[\w.-]+"')
LIST_OF_MODELS = re.compile(r'^([A-Z_]+) = \[\n(?: +"[\w./-]+",\n)+\]', re.MULTILINE)
MINUTES = 90
CONFTEST = """
import condense

def pytest_make_parametrize_id(val):  # else the number of a configuration in PEFT's list
    if isinstance(val, dict):
        return ",".join(f"{name}={value}" for name, value in val.items())
"""

CALLS = "disable_adapter|generate|generate_pos_args|generate_half_prec|inference_safetensors|training_decoders"
TRAINING = "training_decoders_gradient_checkpointing|training_decoders_layer_indexing"
OF_ALORA = f"{CALLS}|{TRAINING}|mixed_adapter_batches|unload_adapter|weighted_combination_of_adapters"
OF_PREFIXES = f"{CALLS}|passing_input_embeds_works|training_prompt_learning_tasks"
DIFFERENCES = {  # patterns of the tests that fail: the reason
    rf"^test_({OF_ALORA})\[.*alora_invocation_tokens=": "activated LoRA counts tokens from the end: refused",
    rf"^test_({OF_PREFIXES})\[.*PrefixTuningConfig": "a prefix is a cache of keys, not a memory: refused",
    r"^test_prefix_tuning_(qwen|gemma4)": "the same",
    # On a stock Llama these fail too.
    r"^test_(prefix_tuning_mistral|prompt_learning_with_gradient_checkpointing\[(Prompt|CPT))": "a data set of the hub",
    r"^test_lora_embed_scale_is_applied": "for the scaled embedding of a Gemma",
    r"^test_prompt_tuning_trust_remote_code": "for the modules of an OPT",
}


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
    (folder / "tests" / "__init__.py").touch()
    with tarfile.open(archive) as files:
        for module in MODULES:
            text = files.extractfile(f"{name}/tests/{module}").read().decode()
            text = HUB_ID.sub(f'"{MODEL}"', LIST_OF_MODELS.sub(rf'\1 = ["{MODEL}"]', text))
            (folder / "tests" / module).write_text(text)
    (folder / "conftest.py").write_text(CONFTEST)
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = CondenseConfig(**shape, vocab_size=2000, bos_token_id=0, eos_token_id=1, segment_length=4)
    CondenseForCausalLM(config).save_pretrained(folder / MODEL)
    passkey_tokenizer().save_pretrained(folder / MODEL)
    return folder


def outcomes(report):
    """The outcome of each test by its name, and the messages of those that fail, from a JUnit report."""
    found, messages = {}, {}
    for case in ElementTree.parse(report).iter("testcase"):
        name, found[case.attrib["name"]] = case.attrib["name"], "passed"
        for child in case:
            if child.tag in ("failure", "error", "skipped"):
                found[name] = "skipped" if child.tag == "skipped" else "failed"
                messages[name] = child.attrib.get("message", "")
    return found, messages


@pytest.mark.slow
@pytest.mark.timeout(60 * MINUTES)
def test_peft_own_tests_of_decoder_models(suite):
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", ".", "-p", "no:cacheprovider"]
    command += ["--timeout", "300", "--tb", "short", "--junitxml", "report.xml", "tests/test_decoder_models.py"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=suite, env=environment, capture_output=True, text=True)
    assert (suite / "report.xml").exists(), done.stdout[-3000:] + done.stderr[-3000:]
    found, messages = outcomes(suite / "report.xml")
    assert len(found) > 1000
    listed = {name for name in found if any(re.search(pattern, name) for pattern in DIFFERENCES)}
    failed = {name for name, outcome in found.items() if outcome == "failed"}
    unlisted = [f"{name}: {messages[name][:200]}" for name in sorted(failed - listed)]
    assert not unlisted, "\n".join(unlisted)
    passed = sorted(name for name in listed if found[name] == "passed")
    assert not passed, "listed, and pass:\n" + "\n".join(passed)
    unused = [pattern for pattern in DIFFERENCES if not any(re.search(pattern, name) for name in failed)]
    assert not unused, f"listed, and nothing fails: {unused}"
