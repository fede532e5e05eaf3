"""A run resumes under the recipe it began with: new keys, moved files, and what may change."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest

from condense.training.checkpoints.complete import MARKER
from condense.training.checkpoints.contents import contents
from condense.training.checkpoints.resume import check_zero_stage, find_checkpoint, make_universal, other_order
from condense.training.recipe import Recipe

pytestmark = pytest.mark.unit

DOCUMENTS = {
    "output": "o",
    "stages": [{"total_length": 64, "steps": 20}],
    "global_batch": 8,
    "optimizer": {"warmup_steps": 10},
}


@pytest.fixture
def files(tmp_path):
    """Two files of documents, one of them large, for validation a third, and the folder of a model."""
    for name, text in (("a", "one"), ("b", "two " * 500_000), ("held-out", "three")):
        (tmp_path / f"{name}.txt").write_text(text)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_bytes(bytes(2_000_000))
    return tmp_path


def recipe_of(files, own_validation=True, **others):
    sources = [{"files": str(files / "*[ab].txt")}, {"hub": "owner/name"}]
    evaluation = {"sequences": 4, "sources": [{"files": str(files / "held-out.txt")}] if own_validation else []}
    data = {"task": "text", "sources": sources, "prepared": str(files / "prepared")}
    given = {"model": str(files / "model"), "data": data, "evaluation": evaluation, **DOCUMENTS}
    return Recipe(**given | {"output": str(files / "out")} | others)


def write_checkpoint(recipe, with_contents=True):
    """One without weights, and without what former versions did not write."""
    folder = recipe.output / "checkpoint-4"
    folder.mkdir(parents=True)
    marker = {"step": 4, "ranks": 1, "zero_stage": None, "files": {}, "recipe": recipe.model_dump(mode="json")}
    marker |= {"digests": contents(recipe)} if with_contents else {}
    (folder / MARKER).write_text(json.dumps(marker))
    return folder


def test_moved_files_are_the_same_recipe(files):
    recipe = recipe_of(files)
    checkpoint = write_checkpoint(recipe)
    assert find_checkpoint(recipe) == checkpoint
    moved = files / "elsewhere"
    moved.mkdir()
    for name in ("a.txt", "b.txt", "model"):
        (files / name).rename(moved / name)
    (files / "held-out.txt").rename(moved / "held-out.txt")
    assert find_checkpoint(recipe_of(moved, output=str(files / "out"))) == checkpoint


def append(path):
    path.write_text(path.read_text() + ".")


def change_the_end(path):
    path.write_text(path.read_text()[:-1] + ".")


def change_a_word(path):
    """A long way from the ends and from all fractions of the length with small denominators."""
    text = path.read_text()
    place = int(len(text) * 0.2236)
    path.write_text(text[:place] + "." + text[place + 1 :])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda files: append(files / "a.txt"), r"data\.sources.* hold something else than when the run began"),
        (lambda files: change_the_end(files / "b.txt"), r"data\.sources.* hold something else"),
        (lambda files: change_a_word(files / "b.txt"), r"data\.sources.* hold something else"),
        (lambda files: change_a_word(files / "model" / "model.safetensors"), r"model\.source.* hold something else"),
        (lambda files: (files / "another-a.txt").write_text("four"), r"data\.sources.* hold something else"),
        (lambda files: (files / "model" / "model.safetensors").write_bytes(bytes(1_999_999) + b"."), r"model\.source"),
    ],
    ids=[
        "a document",
        "the end of a large file",
        "a word of a large file",
        "a large model",
        "one file more",
        "weights",
    ],
)
def test_changed_files_are_another_recipe(files, change, words):
    recipe = recipe_of(files)
    write_checkpoint(recipe)
    change(files)
    with pytest.raises(ValueError, match=words):
        find_checkpoint(recipe)


def test_a_gguf_file_may_move_and_not_change(files):
    path = files / "m.gguf"
    path.write_bytes(b"GGUF 1")
    checkpoint = write_checkpoint(recipe_of(files, model=str(path)))
    moved = path.rename(files / "other.gguf")
    assert find_checkpoint(recipe_of(files, model=str(moved))) == checkpoint
    moved.write_bytes(b"GGUF 2")
    with pytest.raises(ValueError, match=r"model\.source"):
        find_checkpoint(recipe_of(files, model=str(moved)))


def test_moved_and_changed_files_are_named(files):
    checkpoint = write_checkpoint(recipe_of(files))
    moved = files / "elsewhere"
    shutil.copytree(files, moved, ignore=shutil.ignore_patterns("out", "elsewhere"))
    append(moved / "a.txt")
    with pytest.raises(ValueError, match=r"data\.sources was .* and is .*elsewhere") as error:
        find_checkpoint(recipe_of(moved, output=str(files / "out")))
    assert "model.source" not in str(error.value) and str(checkpoint) in str(error.value)


def test_checkpoints_of_former_versions_have_their_paths_compared(files):
    checkpoint = write_checkpoint(recipe_of(files), with_contents=False)
    assert find_checkpoint(recipe_of(files)) == checkpoint
    moved = files / "elsewhere"
    shutil.copytree(files, moved, ignore=shutil.ignore_patterns("out", "elsewhere"))
    with pytest.raises(ValueError, match=r"model\.source was .*; data\.sources was "):
        find_checkpoint(recipe_of(moved, output=str(files / "out")))


def test_a_checkpoint_that_knows_parts_of_its_files_has_their_paths_compared(files):
    checkpoint = write_checkpoint(recipe_of(files), with_contents=False)
    marker = json.loads((checkpoint / MARKER).read_text())
    (checkpoint / MARKER).write_text(json.dumps(marker | {"contents": {"data.sources": [[".txt 2000000 0123"], None]}}))
    assert find_checkpoint(recipe_of(files)) == checkpoint


def test_a_former_version_drew_from_fewer_documents(files):
    local = {"data": {"task": "text", "sources": [{"files": str(files / "*.txt")}]}}
    recipe = recipe_of(files, **local)
    checkpoint = write_checkpoint(recipe, with_contents=False)
    assert "From here on the run draws from all documents of its files" in other_order(checkpoint, recipe)
    assert other_order(checkpoint, recipe_of(files)) is None  # a part is on the hub
    shutil.rmtree(checkpoint)
    assert other_order(write_checkpoint(recipe), recipe) is None


FORMER = json.loads((Path(__file__).parent / "former_markers.json").read_text())


def write_former(folder, name):
    """The marker as a former version wrote it, into the output of its recipe."""
    checkpoint = folder / "out" / "checkpoint-4"
    checkpoint.mkdir(parents=True)
    (checkpoint / MARKER).write_text(json.dumps(FORMER[name]["marker"]))
    return checkpoint.relative_to(folder)


@pytest.mark.parametrize("name", FORMER)
def test_keys_that_a_former_version_did_not_have_are_at_their_defaults(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    checkpoint = write_former(tmp_path, name)
    assert find_checkpoint(Recipe(**FORMER[name]["given"])) == checkpoint


@pytest.mark.parametrize(
    ("source", "given", "refused"),
    [
        ("folded", {}, None),
        ("folded", {"sink_token_id": 3}, r"model\.sink_token_id was 'auto' and is 3"),
        ("llama", {"memory_share": 1.0, "sink_token_id": None}, None),
        ("llama", {"memory_share": 1.0}, r"model\.sink_token_id was 'none' and is 'auto'"),
        ("llama", {"sink_token_id": None}, r"model\.memory_share was 1\.0 and is None"),
    ],
)
def test_a_run_of_a_former_version_keeps_its_memory(tmp_path, monkeypatch, request, source, given, refused):
    """It folded a stock checkpoint with share 1 and without a sink, where today's defaults are others."""
    monkeypatch.chdir(tmp_path)
    checkpoint, folder = write_former(tmp_path, "text"), str(request.getfixturevalue(source))
    marker = json.loads((checkpoint / MARKER).read_text())
    marker["recipe"]["model"]["source"] = folder
    (checkpoint / MARKER).write_text(json.dumps(marker))
    recipe = Recipe(**FORMER["text"]["given"] | {"model": {"source": folder, **given}})
    with pytest.raises(ValueError, match=refused) if refused else nullcontext():
        assert find_checkpoint(recipe) == checkpoint


def test_a_key_of_any_section_may_be_new(tmp_path, monkeypatch):
    """As if the former version had not had these keys either, none of which may change on resume."""
    monkeypatch.chdir(tmp_path)
    checkpoint = write_former(tmp_path, "text")
    marker = json.loads((checkpoint / MARKER).read_text())
    stored = marker["recipe"]
    del stored["seed"], stored["optimizer"]["eps"], stored["model"]["segment_length"], stored["checkpoints"]["every"]
    del stored["objective"]["kind"], stored["data"]["fit"], stored["data"]["sources"][1]["text"]
    (checkpoint / MARKER).write_text(json.dumps(marker))
    assert find_checkpoint(Recipe(**FORMER["text"]["given"])) == checkpoint
    with pytest.raises(ValueError, match=r"recipe: optimizer\.eps was 1e-08 and is 1e-06\. A run"):
        find_checkpoint(Recipe(**FORMER["text"]["given"] | {"optimizer": {"warmup_steps": 10, "eps": 1e-6}}))


@pytest.mark.parametrize("name", ["text", "summarization"])
def test_a_new_key_with_another_value_is_another_recipe(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    write_former(tmp_path, name)
    given = json.loads(json.dumps(FORMER[name]["given"]))
    given["data"]["sources"][0]["at_least"] = {"score": 3}
    with pytest.raises(ValueError, match=r"data\.sources was .*'at_least': \{\}.* and is .*'at_least': \{'score': 3"):
        find_checkpoint(Recipe(**given))


@pytest.mark.parametrize(
    ("before", "now", "refused"),
    [
        ({}, {"evaluation": {"sequences": 9, "sources": [{"hub": "another/one"}]}}, None),
        ({}, {"evaluation": None}, None),
        ({"evaluation": None}, {}, None),
        ({"evaluation": {"every": 5}}, {"evaluation": {"every": 7, "reference_loss": 2.0}}, None),
        ({"evaluation": {}}, {"evaluation": {"sequences": 9}}, r"evaluation\.sequences was 64 and is 9"),
        ({"evaluation": None}, {"evaluation": {}}, r"evaluation\.sources was None and is \[\]"),
        ({}, {"evaluation": {"sequences": 4}}, r"evaluation\.sources was .*held-out.* and is \[\]"),
        ({}, {"log_every": 5}, None),
        ({}, {"data": {"task": "passkey"}, "evaluation": None}, r"data\.task was 'text' and is 'passkey'"),
    ],
)
def test_validation_and_logging_may_change_unless_they_change_what_is_trained_on(files, before, now, refused):
    checkpoint = write_checkpoint(recipe_of(files, **before))
    if refused is None:
        assert find_checkpoint(recipe_of(files, **now)) == checkpoint
    else:
        with pytest.raises(ValueError, match=refused):
            find_checkpoint(recipe_of(files, **now))


def test_a_curriculum_grows_with_its_log_lines(files):
    curriculum = {"stages": None, "global_batch": None, "evaluation": None, "data": {"task": "passkey"}}
    curriculum["curriculum"] = {"steps": 60, "tokens_per_step": 4096}
    write_checkpoint(recipe_of(files, **curriculum))
    with pytest.raises(ValueError, match="log_every was 10 and is 5"):
        find_checkpoint(recipe_of(files, **curriculum, log_every=5))


@pytest.mark.parametrize(
    ("written", "stage", "words"),
    [
        *((stage, stage, None) for stage in (None, 0, 1, 2, 3)),
        (1, 2, None),
        (2, 1, None),
        (0, 1, "under ZeRO-0, and deepspeed says ZeRO-1: only ZeRO-1 and ZeRO-2 can read each other's"),
        (2, 0, "under ZeRO-2, and deepspeed says ZeRO-0"),
        (3, 2, "under ZeRO-3, and deepspeed says ZeRO-2"),
        (0, 3, "under ZeRO-0, and deepspeed says ZeRO-3"),
        (None, 0, "was written without DeepSpeed: resume it in the same way"),
        (2, None, "was written with DeepSpeed: resume it in the same way"),
    ],
)
def test_zero_stages_that_can_read_each_others_checkpoints(tmp_path, written, stage, words):
    marker = {"step": 4, "ranks": 2, "zero_stage": written, "recipe": {}, "files": {}}
    (tmp_path / "complete.json").write_text(json.dumps(marker))
    if words is None:
        check_zero_stage(tmp_path, stage)
        return
    with pytest.raises(ValueError, match=words):
        check_zero_stage(tmp_path, stage)


def test_zero_0_needs_no_universal_form(tmp_path):
    marker = {"step": 4, "ranks": 2, "zero_stage": 0, "recipe": {}, "files": {}}
    (tmp_path / "complete.json").write_text(json.dumps(marker))
    assert not make_universal(tmp_path, 1, 0) and not make_universal(tmp_path, 4, 0)
