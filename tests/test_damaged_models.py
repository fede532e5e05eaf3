"""Every kind of damage through every command: one sentence, no traceback, nothing written, in seconds.

A command runs in this process, through the door that a shell uses; `test_cli.py` and `test_signals.py` start real
processes. `condense train` may start none: what it refuses, it refuses before there are ranks.
"""

import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import condense.cli.main
from condense import CondenseForCausalLM
from condense.eval.tasks import evaluate
from condense.training.recipe import load_recipe
from condense.utils.files import atomic_folder

pytestmark = pytest.mark.process

SECONDS = 10
ONE_PROMPT = ["--lengths", "120", "--prompts", "1", "--depths", "50"]
RECIPE = """
model: {model}
output: {output}
data: {{task: passkey, shortest: 0.4}}
stages: [{{total_length: 120, steps: 3}}]
global_batch: 8
optimizer: {{learning_rate: 1.0e-3, warmup_steps: 1}}
log_every: 1
checkpoints: {{every: 1}}
"""


@pytest.fixture
def models(llama, folded) -> dict[str, Path]:
    return {"llama": llama, "folded": folded}


@pytest.fixture
def recipe(llama, tmp_path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(model=llama, output=tmp_path / "out"))
    return path


@pytest.fixture
def run(capsys):
    """Exit code and standard error of the front door; nothing may have been raised past it."""

    def run(*arguments) -> tuple[int, str]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.argv", ["condense", *map(str, arguments)])
            with pytest.raises(SystemExit) as ended:
                condense.cli.main.main()
        captured, code = capsys.readouterr(), ended.value.code
        return (code if isinstance(code, int) else 0 if code is None else 1), captured.err + captured.out

    return run


@pytest.fixture
def refused(run, tmp_path):
    """The message of a command that fails as it should. `writable` is the only folder that it can write to."""

    def refused(*arguments, writable: Path = tmp_path) -> str:
        before, start = _everything_in(writable), time.perf_counter()
        code, said = run(*arguments)
        assert code != 0, said
        assert time.perf_counter() - start < SECONDS
        assert said.startswith("condense: ") and said.count("\n") == 1 and "Traceback" not in said, said
        assert _everything_in(writable) == before
        return said

    return refused


def _everything_in(folder: Path) -> dict[str, bytes | None]:
    paths = [path for path in sorted(folder.rglob("*")) if ".lock" not in path.name]
    return {str(path): path.read_bytes() if path.is_file() else None for path in paths}


def config(**fields):
    def damage(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return damage


def weights(change):
    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        save_file(change(tensors), folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def content(name: str, data: bytes):
    def damage(folder: Path) -> None:
        (folder / name).write_bytes(data)

    return damage


def cut(name: str, share: float):
    def damage(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(len(data) * share)])

    return damage


def without(pattern: str):
    def damage(folder: Path) -> None:
        for path in folder.glob(pattern):
            path.unlink()

    return damage


def dropped(tensors: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in tensors.items() if key != name}


def smaller_vocabulary(folder: Path) -> None:
    config(vocab_size=8)(folder)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    weights(lambda t: t | {name: t[name][:8].clone() for name in names})(folder)


def one_shard_of_two(folder: Path) -> None:
    first, second = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    index = {name: second if name == "lm_head.weight" else first for name in load_file(folder / "model.safetensors")}
    (folder / "model.safetensors").rename(folder / first)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


NORM = "model.layers.1.input_layernorm.weight"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 410968\n"
# The damage to a model's folder, and a word that the message must have.
DAMAGE = {
    "a weight is missing": (weights(lambda t: dropped(t, NORM)), NORM),
    "an untied head is missing": (weights(lambda t: dropped(t, "lm_head.weight")), "lm_head.weight"),
    "all weights are renamed": (weights(lambda t: {f"a.{name}": tensor for name, tensor in t.items()}), "a.model"),
    "a weight too many": (weights(lambda t: t | {"model.extra.weight": torch.ones(2)}), "model.extra.weight"),
    "a layer too few in the weights": (config(num_hidden_layers=3), "model.layers.2."),
    "a layer too many in the weights": (config(num_hidden_layers=1), NORM[:14]),
    "another width": (config(intermediate_size=128), "down_proj.weight [64, 160]"),
    "weights are not finite": (weights(lambda t: t | {NORM: t[NORM] * float("nan")}), NORM),
    "truncated weights": (cut("model.safetensors", 0.5), "model.safetensors"),
    "weights cut off in their header": (cut("model.safetensors", 0.001), "model.safetensors"),
    "empty weights": (content("model.safetensors", b""), "model.safetensors"),
    "weights are an LFS pointer": (content("model.safetensors", POINTER), "git lfs pull"),
    "no weights": (without("*.safetensors"), "model.safetensors"),
    "a shard is missing": (one_shard_of_two, "model-00002-of-00002.safetensors"),
    "no config": (without("config.json"), "config.json"),
    "an empty config": (content("config.json", b""), "config.json"),
    "a config of braces": (content("config.json", b"{}"), "model_type"),
    "a config that is a list": (content("config.json", b"[]"), "config.json"),
    "a config in UTF-16": (content("config.json", '{"model_type": "llama"}'.encode("utf-16")), "config.json"),
    "a config that is a pointer": (content("config.json", POINTER), "git lfs pull"),
    "a width in quotes": (config(hidden_size="64"), "hidden_size"),
    "heads that do not divide": (config(num_key_value_heads=3), "num_key_value_heads=3"),
    "no heads": (config(num_attention_heads=0), "num_attention_heads=0"),
    "an unknown activation": (config(hidden_act="sigmoyd"), "hidden_act='sigmoyd'"),
    "an unknown rope": (config(rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}), "rope_type='spiral'"),
    "an unknown kind": (config(model_type="lama"), "lama"),
    "no tokenizer": (without("tokenizer*"), "tokenizer"),
    "a truncated tokenizer": (cut("tokenizer.json", 0.5), "tokenizer.json"),
    "a tokenizer that is a list": (content("tokenizer.json", b"[]"), "tokenizer.json"),
    "a tokenizer of another model": (smaller_vocabulary, "vocabulary of 8"),
    "a damaged generation config": (content("generation_config.json", b"[1"), "generation_config.json"),
}

WEIGHTS_ARE_NOT_READ = {"weights are not finite"}  # by what looks at names and shapes alone
ONLY_CONFIG = {
    "no config", "an empty config", "a config of braces", "a config that is a list", "a config in UTF-16",
    "a config that is a pointer", "a width in quotes", "heads that do not divide", "no heads",
    "an unknown activation", "an unknown rope", "an unknown kind",
}  # fmt: skip


def commands(model: Path | str, folder: Path) -> dict[str, list]:
    """Every command that takes a model; the commands write below `folder`."""
    (folder / "in").mkdir()
    book, records = folder / "in" / "book.txt", folder / "in" / "records.jsonl"
    book.write_text("The grass is green. The sky is blue. " * 60)
    records.write_text(json.dumps({"text": "The sky is blue.", "summary": "blue sky"}) + "\n")
    recipe = folder / "in" / "recipe.yaml"
    recipe.write_text(RECIPE.format(model=model, output=folder / "out"))
    measured = ["--model", model, "--output", folder / "out"]
    return {
        "convert": ["convert", model, folder / "out"],
        "convert to llama": ["convert", model, folder / "out", "--to", "llama"],
        "generate": ["generate", "--model", model, "--prompt", "The sky", "--report", folder / "report.json"],
        "train": ["train", recipe],
        "dry run": ["train", recipe, "--dry-run", "--report", folder / "report.json"],
        "passkey": ["eval", "passkey", *measured, "--lengths", "120", "--prompts", "1"],
        "perplexity": ["eval", "perplexity", *measured, "--data", book, "--segment-length", "16"],
        "fold cost": [
            "eval",
            "fold-cost",
            *measured,
            "--data",
            book,
            "--segment-lengths",
            "16",
            "--tokens",
            "64",
            "--by-position",
            "0",
            "--shares",
            "0.2",
        ],
        "summarization": ["eval", "summarization", *measured, "--data", records],
        "attention": ["attention", *measured, "--data", book, "--segment-length", "16"],
        "probe": ["probe", "sums", *measured, "--limit", "1"],
        "profile": ["profile", "--config", model, "--output", folder / "out"],
    }


@pytest.fixture
def no_processes(monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", lambda *arguments, **options: pytest.fail(f"started {arguments}"))


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


COMMANDS = [
    "convert", "convert to llama", "generate", "train", "dry run", "passkey", "perplexity", "fold cost",
    "summarization",
    "attention", "probe", "profile",
]  # fmt: skip


@pytest.mark.parametrize(
    ("command", "kind"),
    [(command, "llama") for command in COMMANDS]
    + [(command, "folded") for command in ("convert to llama", "generate", "train", "passkey")],
)
def test_every_damage_is_refused_by_every_command(command, kind, models, tmp_path, refused, no_processes):
    for number, (what, (damage, word)) in enumerate(DAMAGE.items()):
        if command in ("dry run", "profile") and what not in ONLY_CONFIG:
            continue  # which load a configuration alone
        if command == "train" and what in WEIGHTS_ARE_NOT_READ:
            continue
        folder = tmp_path / str(number)
        model = folder / "model"
        shutil.copytree(models[kind], model)
        damage(model)
        said = refused(*commands(model, folder)[command], writable=folder)
        assert word in said and str(model) in said, (what, said)


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize("kind", ["llama", "folded"])
def test_the_same_commands_accept_what_is_whole(kind, models, tmp_path, run):
    """The control: it is the damage that is refused. Training and profiles take long and have tests of their own."""
    for command in COMMANDS:
        if command in ("train", "profile"):
            continue
        folder = tmp_path / command
        folder.mkdir()
        assert run(*commands(models[kind], folder)[command])[0] == 0, command


@pytest.mark.parametrize("command", COMMANDS)
def test_a_model_that_is_not_there(command, tmp_path, refused, no_processes, offline):
    """What looks like a path is said to be no folder; what could be a hub id also that the hub was not asked."""
    for number, name in enumerate(("no/such/model", "./nowhere", "/nowhere/at/all", "nobody/nothing", "nothing")):
        folder = tmp_path / str(number)
        folder.mkdir()
        said = refused(*commands(name, folder)[command], writable=folder)
        assert "there is no folder" in said, said
        assert ("hub" in said.split("there is no folder")[1].split(":")[0]) == (number > 2), said


def test_a_file_is_no_model(models, tmp_path, refused):
    assert "is a file" in refused("generate", "--model", models["llama"] / "config.json", "--prompt", "a")


def test_weights_in_pytorchs_own_format(models, tmp_path, run, refused):
    """Whole they load; damaged, or with code in them, they do not."""
    folder = tmp_path / "model"
    shutil.copytree(models["llama"], folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    assert run("generate", "--model", folder, "--prompt", "a", "--max-new-tokens", "1")[0] == 0
    torch.save(dropped(tensors, NORM), folder / "pytorch_model.bin")
    assert NORM in refused("generate", "--model", folder, "--prompt", "a")
    data = (folder / "pytorch_model.bin").read_bytes()
    (folder / "pytorch_model.bin").write_bytes(data[: len(data) // 2])
    refused("generate", "--model", folder, "--prompt", "a")
    torch.save(_RunsCode(tmp_path / "ran"), folder / "pytorch_model.bin")
    refused("generate", "--model", folder, "--prompt", "a")


class _RunsCode:
    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


# Outputs


def test_outputs_are_checked_before_any_work(models, tmp_path, refused, monkeypatch, no_processes):
    """`load_model` fails the test: no command may get as far as that."""
    monkeypatch.setattr("condense.hub.loading.load_model", lambda *_, **__: pytest.fail("loaded a model"))
    file = tmp_path / "file"
    file.write_text("mine")
    prompt = ["generate", "--model", models["llama"], "--prompt", "a"]
    assert "Not a directory" in refused("convert", models["llama"], file)
    assert "not empty" in refused("convert", models["llama"], models["folded"])
    assert "no folder" in refused(*prompt, "--report", tmp_path / "no" / "such" / "x.json")
    assert "is a folder" in refused(*prompt, "--report", tmp_path)
    (tmp_path / "folder").mkdir()
    for command, arguments in commands(models["llama"], tmp_path / "folder").items():
        if "--output" in arguments:
            arguments[arguments.index("--output") + 1] = file / "below"
            assert "Not a directory" in refused(*arguments), command
    train = ["train", tmp_path / "folder" / "in" / "recipe.yaml", f"output={file}"]
    assert "Not a directory" in refused(*train)


def test_a_full_disk_leaves_no_half_model(models, new_process, tmp_path):
    """A limit on the size of files stands for the disk: writing fails in the middle of the weights."""
    code = (
        "import resource, signal, sys\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "import condense.cli.main\ncondense.cli.main.main()"
    )
    done = new_process(code, "convert", models["llama"], tmp_path / "out")
    assert done.returncode == 1 and "can't be written" in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_outputs_that_are_right(models, tmp_path, run, monkeypatch):
    """An empty folder, a link to one, the current one; a report into a device."""
    for name in ("empty", "current"):
        (tmp_path / name).mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    monkeypatch.chdir(tmp_path / "current")
    for target in (tmp_path / "link", ".", tmp_path / "new" / "below"):
        said = (
            f"{target}: 102,208 parameters, segments of 512 tokens\n"
            "Its memory is untrained: `condense train heal` trains one (docs/healing.md).\n"
        )
        assert run("convert", models["llama"], target) == (0, said)
        CondenseForCausalLM.from_pretrained(target)
    names = {path.name for path in (tmp_path / "empty").iterdir()}
    assert names == {path.name for path in (tmp_path / "new" / "below").iterdir()} and (tmp_path / "link").is_symlink()
    arguments = ["--prompt", "a", "--max-new-tokens", "1", "--report", "/dev/null"]
    assert run("generate", "--model", models["llama"], *arguments)[0] == 0


def test_two_that_write_one_folder_do_not_mix(tmp_path, monkeypatch):
    """The second to end is refused, and the folder is the first one's."""
    first = atomic_folder(tmp_path / "out")
    (first.__enter__() / "a").write_text("first")
    monkeypatch.setattr(os, "getpid", lambda: 1)
    with atomic_folder(tmp_path / "out") as second:
        (second / "b").write_text("second")
    with pytest.raises(ValueError, match="can't be written"):
        first.__exit__(None, None, None)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["b"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_others_may_read_weights_as_the_umask_says(umask, models, tmp_path):
    before = os.umask(umask)
    try:
        CondenseForCausalLM.from_pretrained(models["folded"]).save_pretrained(tmp_path / "saved")
    finally:
        os.umask(before)
    assert (tmp_path / "saved" / "model.safetensors").stat().st_mode & 0o777 == 0o666 & ~umask


@pytest.mark.parametrize("to", ["condense", "llama"])
def test_converted_weights_can_be_read_by_others(to, models, tmp_path, run):
    assert run("convert", models["llama"], tmp_path / "out", "--to", to)[0] == 0
    assert (tmp_path / "out" / "model.safetensors").stat().st_mode & 0o777 == 0o644


# Arguments and files


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["eval", "passkey", "--depths", "50,50,50,50"], "names 50 twice"),
        (["eval", "passkey", "--depths", "0,101"], "'101' is not a percentage"),
        (["eval", "passkey", "--depths", "half"], "'half' is not a percentage"),
        (["eval", "passkey", "--lengths", "120,2k,120"], "names 120 twice"),
        (["eval", "passkey", "--dtype", "flaot32"], "dtype='flaot32'"),
        (["eval", "passkey", "--attention", "sdpq"], "attn_implementation='sdpq'"),
        (["eval", "passkey", "--attention", "flash_attention_2"], "flash-attn"),
        (["eval", "passkey", "--attention", "varlen"], "needs a CUDA GPU"),
        (["probe", "sums", "--dtype", "float31"], "dtype='float31'"),
        (["probe", "sums", "--attention", "eagre"], "attn_implementation='eagre'"),
    ],
)
def test_arguments_are_refused_before_models_are_loaded(arguments, word, models, tmp_path, refused, monkeypatch):
    monkeypatch.setattr("condense.eval.models.load_model", lambda *_, **__: pytest.fail("loaded a model"))
    assert word in refused(*arguments, "--model", models["llama"], "--output", tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--dtype", "bf16"], "dtype='bf16'"),
        (["--attention", "auto,egaer"], "attn_implementation='egaer'"),
        (["--attention", "flash_attention_2"], "flash-attn"),
        (["--attention", "blocked"], "only kind folded has it"),
        (["--dtype", "bf16", "--schedules"], "dtype='bf16'"),
        (["--attention", "egaer", "--schedules"], "attn_implementation='egaer'"),
    ],
)
def test_profiles_refuse_before_they_start_a_process(options, word, models, tmp_path, refused, no_processes):
    output = ["--output", tmp_path / "out", "--lengths", "32", "--segment-length", "16"]
    assert word in refused("profile", "--config", models["llama"], *output, *options)


@pytest.mark.parametrize("name", ["a prompt", "a recipe"])
@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
def test_files_in_another_encoding_are_named(name, encoding, models, tmp_path, refused, no_processes):
    path = tmp_path / "née.txt"
    path.write_bytes("model: née\noutput: x".encode(encoding))
    arguments = ["generate", "--model", models["llama"], "--prompt-file"] if name == "a prompt" else ["train"]
    assert f"{path} can't be read ('utf-8' codec" in refused(*arguments, path)


@pytest.mark.parametrize(
    ("text", "word"),
    [("", "model is missing"), ("[1, 2]", "holds a list"), ("model: [", "is not YAML"), ("7", "holds a str")],
)
def test_recipes_that_are_none(text, word, tmp_path, run, no_processes):
    (tmp_path / "recipe.yaml").write_text(text)
    code, said = run("train", tmp_path / "recipe.yaml")  # which lists every missing key in a line of its own
    assert code == 1 and word in said and "Traceback" not in said


def test_documents_that_are_not_there(recipe, refused, no_processes):
    text = recipe.read_text().replace("{task: passkey, shortest: 0.4}", "{task: text, sources: [{files: nowhere.txt}]}")
    recipe.write_text(text)
    assert "nowhere.txt" in refused("train", recipe)


@pytest.mark.parametrize("text", ["{}", "[]", "[", '{"step": 4}', ""])
def test_markers_of_checkpoints_that_are_none(text, recipe, tmp_path, refused, no_processes):
    checkpoint = tmp_path / "out" / "checkpoint-4"
    checkpoint.mkdir(parents=True)
    (checkpoint / "complete.json").write_text(text)
    assert f"checkpoint {checkpoint} was never completed, or its complete.json is damaged" in refused("train", recipe)


def test_a_checkpoint_with_code_is_not_resumed(recipe, tmp_path, refused, no_processes):
    """A checkpoint of another output, complete and of the same recipe, in which DeepSpeed would run code."""
    checkpoint = tmp_path / "other" / "checkpoint-4"
    (checkpoint / "global_step4").mkdir(parents=True)
    (checkpoint / "latest").write_text("global_step4")
    torch.save({"module": _RunsCode(tmp_path / "ran")}, checkpoint / "global_step4" / "mp_rank_00_model_states.pt")
    whole = load_recipe(recipe).model_dump(mode="json")
    marker = {"step": 3, "ranks": 2, "zero_stage": 2, "recipe": whole, "files": {}}  # of 3 steps
    (checkpoint / "complete.json").write_text(json.dumps(marker))
    assert "could run code" in refused("train", recipe, f"resume={checkpoint}") and not (tmp_path / "ran").exists()


@pytest.mark.parametrize("text", ["{}", "[]", "{", '{"zero_optimization": 2}'])
def test_deepspeed_configurations_that_are_none(text, recipe, tmp_path, refused, no_processes):
    (tmp_path / "zero.json").write_text(text)
    assert "zero.json" in refused("train", recipe, f"deepspeed={tmp_path / 'zero.json'}")


# Results


@pytest.fixture(scope="module")
def measured(folded, tmp_path_factory) -> Path:
    """A folder with one result."""
    folder = tmp_path_factory.mktemp("results")
    evaluate("passkey", folder / "passkey", models=[str(folded)], lengths=[120], num_prompts=1, depths=[0.5])
    return folder


@pytest.fixture
def results(measured, tmp_path) -> Path:
    """A copy of it, to be damaged."""
    return shutil.copytree(measured, tmp_path / "results")


@pytest.mark.parametrize(
    ("name", "text", "word"),
    [
        ("passkey.json", "", "Expecting value"),
        ("passkey.json", '{"kind": "pass', "Unterminated"),
        ("passkey.json", "[1]", "not a result of a condense command"),
        ("profile.json", '{"name": "of another program"}', "not a result of a condense command"),
        ("perplexity.json", '{"kind": "perplexity", "command": "", "hardware": "", "versions": {}, "date": ""}', "Key"),
        ("log.jsonl", "not json\n", "Expecting value"),
        ("log.jsonl", '{"loss": 1.0}\n', "step"),
        ("log.jsonl", '{"loss": 1.0, "step": 3}\n', "no number learning_rate"),
        ("log.jsonl", '{"loss": 1.0, "step": 3, "learning_rate": {}}\n', "no number learning_rate"),
        ("log.jsonl", '{"eval_loss": 1}\n{"loss": 1.0, "step": 3, "learning_rate": 0.1}\n', "no number step"),
        (
            "passkey.json",
            '{"kind": "passkey", "command": "", "hardware": "", "versions": ["a"], "date": ""}',
            "versions are not an object",
        ),
    ],
)
def test_a_report_leaves_out_what_it_cannot_read(name, text, word, results, run):
    (results / "foreign").mkdir()
    (results / "foreign" / name).write_text(text)
    code, said = run("report", results)
    assert code != 0 and "Traceback" not in said and f"foreign/{name} (" in said and word in said, said
    assert "report.html is written, without" in said
    page = (results / "report.html").read_text()
    assert "folded: % correct" in page and f"<code>foreign/{name}</code>" in page


def test_a_temperature_that_divides_to_infinity(models, tmp_path, refused):
    arguments = ["--prompt", "a", "--temperature", "1e-40"]
    assert "--temperature 1e-40: pass 0" in refused("generate", "--model", models["llama"], *arguments)


def test_training_on_weights_that_are_not_finite_writes_nothing(models, new_process, tmp_path):
    """The front process has read no weights; the ranks refuse before they touch what an earlier run has left."""
    shutil.copytree(models["llama"], tmp_path / "model")
    DAMAGE["weights are not finite"][0](tmp_path / "model")
    (tmp_path / "out" / "checkpoint-7").mkdir(parents=True)
    (tmp_path / "out" / "recipe.json").write_text('{"model": {}, "output": "out", "data": {}}')
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(model=tmp_path / "model", output=tmp_path / "out"))
    code = "import runpy; runpy.run_path('training/train.py', run_name='__main__')"
    done = new_process(code, "--recipe", tmp_path / "recipe.yaml")
    assert done.returncode == 1 and NORM in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [".run.lock", "checkpoint-7", "recipe.json"]


def test_a_report_on_nothing_that_can_be_read(tmp_path, refused):
    (tmp_path / "passkey.json").write_text("{")
    assert "that can be read: passkey.json" in refused("report", tmp_path)
    assert "there is no folder" in refused("report", tmp_path / "nowhere")


def test_records_that_are_damaged(results, models, refused):
    records = results / "passkey" / "passkey.records.jsonl"
    arguments = [*ONE_PROMPT, "--output", results / "passkey"]
    for text in ("[]\n", "7\n", "{}\n", "x\n", records.read_text() + "{}\n"):
        records.write_text(text)
        said = refused("eval", "passkey", "--model", models["folded"], *arguments, writable=results)
        assert "passkey.records.jsonl is damaged" in said


# Names of models


def test_a_path_with_an_equals_sign(models, tmp_path, monkeypatch):
    from condense.eval.models import split_name

    monkeypatch.chdir(tmp_path)
    shutil.copytree(models["folded"], tmp_path / "runs" / "lr=3e-4")
    shutil.copytree(models["folded"], tmp_path / "seed=1")
    assert split_name("runs/lr=3e-4") == ("lr=3e-4", "runs/lr=3e-4")
    assert split_name("small=runs/lr=3e-4") == ("small", "runs/lr=3e-4")
    assert split_name("seed=1") == ("seed=1", "seed=1")
    assert split_name("one=seed=1") == ("one", "seed=1")
    assert split_name("runs=runs/lr=3e-4") == ("runs", "runs/lr=3e-4")  # although there is a folder runs
    monkeypatch.chdir("runs/lr=3e-4")
    assert (split_name("."), split_name("../..")) == (("lr=3e-4", "."), (tmp_path.name, "../.."))
    assert split_name("a/b=c") == ("b=c", "a/b=c")  # nothing there: said of the path as it was written


def test_a_path_with_an_equals_sign_is_measured(models, tmp_path, run):
    folder = tmp_path / "lr=3e-4"
    shutil.copytree(models["folded"], folder)
    code, said = run("eval", "passkey", "--model", folder, *ONE_PROMPT, "--output", tmp_path / "out")
    assert code == 0 and "lr=3e-4: % correct" in said


def test_a_name_with_dollars_is_drawn_as_it_is(models, tmp_path, run):
    arguments = [*ONE_PROMPT, "--output", tmp_path / "out"]
    code, said = run("eval", "passkey", "--model", f"a$_^$={models['folded']}", *arguments)
    assert code == 0, said
    assert (tmp_path / "out" / "passkey.png").stat().st_size > 0
