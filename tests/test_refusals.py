"""Requests that can't be met are refused before a model or a document is read."""

import re
from importlib.metadata import PackageNotFoundError, version

import pytest
from typer.testing import CliRunner

import condense.cli.main
from condense import extras
from condense.training.preflight import check_run
from condense.training.recipe import load_recipe
from condense.version import __version__

pytestmark = pytest.mark.unit


@pytest.fixture
def nothing_is_loaded(monkeypatch):
    for name in ("condense.eval.models.load_model", "condense.hub.loading.check_source"):
        monkeypatch.setattr(name, lambda *_, **__: pytest.fail("read a model"))
    monkeypatch.setattr("condense.training.preflight.check_prepared", lambda *_: pytest.fail("read documents"))


def refusal(*arguments) -> str:
    done = CliRunner().invoke(condense.cli.main.app, [str(argument) for argument in arguments])
    assert isinstance(done.exception, ValueError), done.output
    return str(done.exception)


@pytest.fixture
def are_missing(monkeypatch):
    """Makes packages look as if they were not installed."""

    def make(*missing):
        def found(name):
            if name in missing:
                raise PackageNotFoundError(name)
            return version(name)

        monkeypatch.setattr(extras, "version", found)

    return make


@pytest.mark.parametrize(
    ("missing", "extra", "arguments"),
    [
        ("deepspeed", "train", ["train", "passkey_quickstart"]),
        ("matplotlib", "eval", ["eval", "passkey", "--model", "m", "--output", "o"]),
        ("jinja2", "eval", ["report", "o"]),
        ("lm-eval", "harness", ["eval", "harness", "--tasks", "x"]),
    ],
)
def test_missing_packages(missing, extra, arguments, are_missing, nothing_is_loaded):
    are_missing(missing)
    said = refusal(*arguments)
    assert f"needs {missing} (missing): in a checkout pip install -e '.[{extra}]'" in said
    assert f"or from its wheel pip install 'condense_llama-{__version__}-py3-none-any.whl[{extra}]'" in said


def test_packages_that_a_use_goes_without_may_be_missing(are_missing):
    """A dry run plans without deepspeed, and retrieval counts without rouge-score."""
    are_missing("deepspeed", "tensorboard", "rouge-score")
    assert "there is no recipe 'nowhere'" in refusal("train", "nowhere", "--dry-run")
    assert "there is no folder './m'" in refusal("eval", "passkey", "--model", "./m", "--output", "o")
    assert "needs deepspeed (missing)" in refusal("train", "passkey_quickstart")
    summarization = ["eval", "summarization", "--model", "m", "--data", "d", "--output", "o"]
    assert "needs rouge-score (missing)" in refusal(*summarization)


def test_packages_of_another_version(monkeypatch):
    monkeypatch.setattr(extras, "version", lambda name: "0.1" if name == "deepspeed" else version(name))
    with pytest.raises(ValueError, match=r"condense train needs deepspeed>=0\.19\.2 \(found 0\.1\)"):
        extras.check_installed("condense train", "train")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["report_to=wandb"], "report_to=wandb needs a package: pip install wandb, or set report_to=none"),
        (["attention=flash_attention_2"], "needs a GPU and the package flash-attn"),
        (["model.schedule=graph", "gradient_checkpointing=true"], "replays CUDA graphs, and there is no GPU"),
        ([], "no folder 'runs/passkey_pretrain_1b', which the recipe passkey_pretrain_1b writes: run condense train"),
    ],
)
def test_runs_that_can_not_begin(overrides, words, tmp_path, monkeypatch, nothing_is_loaded):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("condense.training.preflight.find_spec", lambda name: None if name == "wandb" else name)
    with pytest.raises(ValueError, match=words):
        check_run(load_recipe("passkey_finetune_1b", overrides), 8, None)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["eval", "perplexity", "--data", "nowhere.txt", "--dtype", "int4"], "dtype='int4' is not known: choose"),
        (["eval", "passkey", "--attention", "fast"], "attn_implementation='fast' is not known"),
        (["probe", "counting", "--data", "wrong.json"], r"wrong\.json"),
    ],
)
def test_options(command, words, tmp_path, monkeypatch, nothing_is_loaded):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wrong.json").write_text('[{"no": "question"}]')
    assert re.search(words, refusal(*command, "--model", "m", "--output", tmp_path / "results"))
