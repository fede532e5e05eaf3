"""The front door, as a user's shell runs it."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from condense import CondenseForCausalLM
from condense.cli.sample import LlamaTask
from condense.training.small_llama import TASKS

from .commands import printed

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[1]


COMMAND = "import sys; from condense.cli.main import main; sys.argv[0] = 'condense'; main()"


def test_help_names_every_command(new_process):
    words = new_process(COMMAND, "--help").stdout.split()
    assert set(words) >= {"convert", "generate", "prepare", "train", "eval", "profile", "probe", "study", "report"}


def test_samples_are_of_every_task():
    """The command names them without importing torch."""
    assert {task.value for task in LlamaTask} == set(TASKS)


@pytest.mark.parametrize(("former", "now"), [("depth", ["study", "depth"]), ("ablate", ["study", "ablations"])])
def test_former_names_of_studies_still_work(former, now):
    helps = [printed(*names, "--help") for names in ([former], now)]
    options = [[line for line in text.splitlines() if "--" in line] for text in helps]
    assert options[0] == options[1] and len(options[0]) > 5


SCRIPT = """
import contextlib, io, json, sys, condense_llama, typer.main

def run(*arguments):
    sys.argv = ["condense", *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        condense_llama.main()
    return printed.getvalue()

def names(group, *before):
    for name, command in group.commands.items():
        yield from names(command, *before, name) if hasattr(command, "commands") else [((*before, name), command)]

said = {"--version": run("--version"), "--help": run("--help")}
from condense.cli.main import app
from condense.cli.command import Command
commands = dict(names(typer.main.get_command(app)))
assert all(isinstance(command, Command) for command in commands.values())
for name in commands.keys() - {("eval", "harness")}:  # whose help is lm-eval's
    said[" ".join(name)] = run(*name, "--help")
said["loaded"] = [name for name in ("torch", "transformers", "numpy") if name in sys.modules]
said["convert"] = run("convert", LLAMA, FOLDED, "--segment-length", "16")
from transformers import AutoModelForCausalLM
import condense
said["model"] = type(AutoModelForCausalLM.from_pretrained(FOLDED)).__name__
said["same"] = condense.CondenseForCausalLM.__name__
print(json.dumps(said))
"""


def test_the_script_explains_itself_without_torch(llama, tmp_path):
    """Each help and the version; then a command of the same process has the package, whose models are registered."""
    code = f"LLAMA, FOLDED = {str(llama)!r}, {str(tmp_path / 'folded')!r}\n{SCRIPT}"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    said = json.loads(run.stdout)
    assert said.pop("loaded") == []
    assert said.pop("--version") == f"condense {version('condense-llama')}\n"
    assert "102,208 parameters" in said.pop("convert")
    assert said.pop("model") == said.pop("same") == "CondenseForCausalLM"
    assert len(said) > 18
    assert all("Usage: condense" in text for text in said.values())


def test_the_version_is_that_of_the_package():
    assert printed("--version") == f"condense {version('condense-llama')}\n"


def test_train_lists_the_recipes():
    words = {word.strip(",.") for word in printed("train", "--help").split()}
    assert {path.stem for path in (ROOT / "training" / "recipes").glob("*.yaml")} <= words


def test_convert_there_and_back(llama, tmp_path):
    output = printed("convert", llama, tmp_path / "folded", "--segment-length", 16)
    assert "102,208 parameters" in output and "16 tokens" in output
    assert CondenseForCausalLM.from_pretrained(tmp_path / "folded").config.segment_length == 16
    source = ["--memory-share", 1, "--memory-source", "layer_input"]
    printed("convert", tmp_path / "folded", tmp_path / "again", *source)
    again = CondenseForCausalLM.from_pretrained(tmp_path / "again").config
    assert (again.segment_length, again.memory_source) == (16, "layer_input")  # other fields keep their values
    config = CondenseForCausalLM.from_pretrained(tmp_path / "folded").config
    assert (config.memory_shares, config.sink_token_id) == ((0.2, 0.2), 1)
    printed("convert", tmp_path / "folded", tmp_path / "share", "--memory-share", "1:0", "--sink-token-id", "none")
    config = CondenseForCausalLM.from_pretrained(tmp_path / "share").config
    assert (config.memory_shares, config.sink_token_id) == ((1, 0), None)
    printed("convert", tmp_path / "share", tmp_path / "sink", "--sink-token-id", 7)
    config = CondenseForCausalLM.from_pretrained(tmp_path / "sink").config
    assert (config.memory_shares, config.sink_token_id) == ((1, 0), 7)
    vocabulary = LlamaForCausalLM.from_pretrained(llama).config.vocab_size
    for sink, message in (
        ("bos", "sink 'bos': pass"),
        ("-1", "'-1': pass"),
        (vocabulary, "not a token of a vocabulary"),
    ):
        with pytest.raises(ValueError, match=message):
            printed("convert", llama, tmp_path / "none", f"--sink-token-id={sink}")
    with pytest.raises(ValueError, match="a stock model has no sink_token_id: leave the option out"):
        printed("convert", llama, tmp_path / "none", "--to", "stock", "--sink-token-id", "none")
    for share, message in (("half", "'half': pass a number"), ("2", "'2': pass a number"), ("0:1:0", "2 layers")):
        with pytest.raises(ValueError, match=message):
            printed("convert", llama, tmp_path / "none", "--memory-share", share)
    printed("convert", tmp_path / "folded", tmp_path / "back", "--to", "llama")
    back, stock = LlamaForCausalLM.from_pretrained(tmp_path / "back"), LlamaForCausalLM.from_pretrained(llama)
    torch.testing.assert_close(back.state_dict(), stock.state_dict(), atol=0, rtol=0)
    AutoTokenizer.from_pretrained(tmp_path / "back")


def test_generate_streams_what_the_model_answers(llama, new_process, tmp_path):
    text = "The grass is green. The sky is blue. " * 40
    (tmp_path / "book.txt").write_text(text)
    arguments = ["--model", llama, "--prompt-file", tmp_path / "book.txt", "--prompt", "What is the"]
    arguments += ["--segment-length", 16, "--max-new-tokens", 20, "--report", tmp_path / "report.json"]
    run = new_process(COMMAND, "generate", *arguments)
    assert run.returncode == 0, run.stderr
    report = json.loads((tmp_path / "report.json").read_text())

    model = CondenseForCausalLM.from_pretrained(llama, segment_length=16).eval()
    tokenizer = AutoTokenizer.from_pretrained(llama)
    # The tokenizer has a first token, and no template that would put it before a text.
    inputs = tokenizer("<s>" + text + "What is the", return_tensors="pt", return_token_type_ids=False)
    assert inputs["input_ids"][0, :2].tolist() == tokenizer.convert_tokens_to_ids(["<s>", "The"])
    length = inputs["input_ids"].shape[1]
    expected = tokenizer.decode(model.generate(**inputs, max_new_tokens=20, do_sample=False)[0, length:], True)
    assert run.stdout.strip() == report["text"].strip() == expected.strip()
    assert report["prompt_tokens"] == length and report["new_tokens"] <= 20
    assert "segment" in run.stderr and f"{report['state_bytes']:,} bytes" in run.stderr


def test_sampling_has_a_seed(llama):
    runs = [
        printed("generate", "--model", llama, "--prompt", "The", "--temperature", 1, "--seed", seed, *options)
        for seed, *options in ((1,), (1, "--fixed-decoding"), (2,))
    ]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "--model", "LLAMA"], "there is no prompt"),
        (["generate", "--model", "LLAMA", "--prompt", "a", "--segment-length", "0"], "segment_length=0"),
        (["generate", "--model", "LLAMA", "--prompt-file", "nowhere.txt"], "nowhere.txt"),
        (["convert", "LLAMA", "out", "--segment-length", "-1"], "segment_length=-1"),
        (["convert", "LLAMA", "out", "--segment-length", "8", "--to", "llama"], "a stock model has no segment_length"),
    ],
)
def test_errors_are_one_line(llama, arguments, words, monkeypatch, error_line):
    monkeypatch.chdir(llama)
    assert words in error_line(*[llama if part == "LLAMA" else part for part in arguments])


MODULE = "import runpy; runpy.run_module('condense', run_name='__main__', alter_sys=True)"


def test_an_error_of_a_process(new_process):
    run = new_process(MODULE, "generate", "--model", "nowhere/at/all", "--prompt", "a")
    assert run.returncode == 1 and run.stderr.splitlines()[-1].startswith("condense: there is no folder")
    assert "Traceback" not in run.stderr


@pytest.mark.slow
def test_a_book_takes_the_memory_of_a_page(llama, tmp_path):
    """Peak resident memory of the whole process, in KiB: 1,000,000 tokens within 10 % of 2,000."""
    peaks = {}
    for tokens in (2_000, 1_000_000):
        (tmp_path / "book.txt").write_text("The grass is green. The sky is blue. " * (tokens // 10))
        code = (
            "import resource, sys\nfrom condense.cli.main import app\n"
            "app(sys.argv[1:], standalone_mode=False)\n"
            "print('PEAK', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
        )
        command = [sys.executable, "-c", code, "generate", "--max-new-tokens", "2", "--model", llama, "--prompt-file"]
        run = subprocess.run([*command, tmp_path / "book.txt"], capture_output=True, text=True, check=True, cwd=ROOT)
        peaks[tokens] = int(run.stdout.split("PEAK")[1])
    assert peaks[1_000_000] < 1.1 * peaks[2_000], peaks
