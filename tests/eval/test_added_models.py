"""A measurement goes on where it was stopped, and a model may be added to it: only what is missing is measured."""

import json
import shutil

import pytest

from condense.eval.tasks import evaluate, find_task
from condense.training.data.passkey import PASSKEY_TEXTS

from ..chat_models import save_chat_model
from .measuring import save_folded, stop_within
from .rivals import rival_tokenizer, save_rival
from .tasks.documents import TEXT, write_lines
from .test_neutral_decoding import MEASUREMENTS, options_of

pytestmark = pytest.mark.usefixtures("without_pictures")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root, tokenizer = tmp_path_factory.mktemp("models"), rival_tokenizer()
    save_folded(save_rival(root / "llama", "llama", tokenizer, num_hidden_layers=1), root / "folded", 16)
    save_rival(root / "gpt2", "gpt2", tokenizer, n_layer=1)
    return root


@pytest.mark.parametrize("kind", MEASUREMENTS)
def test_one_after_another_gives_what_all_at_once_give(kind, folders, tmp_path, noted):
    options, task = options_of(kind, tmp_path), find_task(kind)
    names = [f"a={folders / 'folded'}", str(folders / "llama"), str(folders / "gpt2")]
    if kind == "fold_cost":  # of Llamas
        names.pop()
    whole = evaluate(kind, tmp_path / "whole", models=names, **options)
    calls = noted(task, "measure")
    for models in (names[:1], names[1:2], [*names[2:], *names[:2]]):  # the new one is named without or with the others
        found = evaluate(kind, tmp_path / "added", models=models, **options)
    measured = [own.key(item)["model"] for (own, item), *_ in calls]
    assert list(dict.fromkeys(measured)) == ["a", "llama", "gpt2"][: len(names)]
    for results in (whole, found):
        for field in ("command", "date"):
            del results[field]
    assert found == whole
    files = [(tmp_path / name / f"{kind}.records.jsonl").read_text().splitlines()[1:] for name in ("whole", "added")]
    assert sorted(files[0]) == sorted(files[1])


@pytest.mark.parametrize("kind", [*MEASUREMENTS, "attention"])
def test_a_stopped_measurement_goes_on(kind, folders, tmp_path, noted):
    if kind == "attention":
        text = write_lines(tmp_path / "text.jsonl", [{"text": f"{TEXT} " * 4}])
        options = {"text": str(text), "segments": (1,), "segment_length": 16}
    else:
        options = options_of(kind, tmp_path)
    options |= {"models": [str(folders / "folded"), str(folders / "llama")]}
    whole, records = evaluate(kind, tmp_path, **options), tmp_path / f"{kind}.records.jsonl"
    stored, calls = records.read_text(), noted(find_task(kind), "measure")
    # Cut off between two lines, within a line, and within the settings.
    for number, characters in ((2, 0), (2, 20), (0, 40)):
        calls.clear()
        missing = stop_within(records, number, characters)[max(number, 1) :]
        assert evaluate(kind, tmp_path, **options) == whole
        assert len(calls) == len(missing) and records.read_text() == stored


def test_a_chat_model_stays_one(folders, tmp_path):
    save_chat_model(tmp_path / "talker", PASSKEY_TEXTS)
    given = {"lengths": [100], "depths": (0.0,), "num_prompts": 2}
    before = evaluate("passkey", tmp_path / "out", models=[str(tmp_path / "talker")], chat=["talker"], **given)
    found = evaluate("passkey", tmp_path / "out", models=[str(folders / "llama")], **given)
    assert found["chat"] == ["talker"] and found["cells"][:1] == before["cells"]
    assert [cell["chat"] for cell in found["cells"]] == [True, False]


def test_chat_models_may_be_named_singly_and_in_any_order(folders, tmp_path):
    save_chat_model(tmp_path / "talker", PASSKEY_TEXTS)
    models = [f"{name}={tmp_path / 'talker'}" for name in "ab"]
    given = {"lengths": [100], "depths": [0.5], "num_prompts": 1}
    evaluate("passkey", tmp_path / "out", models=models, chat=["a", "b"], **given)
    for named, chat in ((models[:1], ["a"]), (models[1:], ["b"]), (models, ["b", "a"])):
        found = evaluate("passkey", tmp_path / "out", models=named, chat=chat, **given)
        assert found["chat"] == ["a", "b"] and [cell["chat"] for cell in found["cells"]] == [True, True]


def test_other_weights_under_the_same_name_are_refused(folders, tmp_path):
    model = shutil.copytree(folders / "llama", tmp_path / "model")
    given = {"lengths": [80], "depths": (0.0,), "num_prompts": 1}
    evaluate("passkey", tmp_path / "out", models=[str(model)], **given)
    shutil.copy(folders / "gpt2" / "config.json", model)
    shutil.copy(folders / "gpt2" / "model.safetensors", model)
    with pytest.raises(ValueError, match=r"another measurement: models\.0\.model_type was 'llama' and is 'gpt2'"):
        evaluate("passkey", tmp_path / "out", models=[str(folders / "folded")], **given)
    shutil.rmtree(model)
    with pytest.raises(ValueError, match=r"holds records of model, and its folder .*model is gone: put it back"):
        evaluate("passkey", tmp_path / "out", models=[str(folders / "folded")], **given)
    assert len((tmp_path / "out" / "passkey.records.jsonl").read_text().splitlines()) == 2  # nothing is lost


@pytest.mark.parametrize(
    "text", ["", "[]", '{"stages": [{}]}', '{"stages": [{"total_length": "long"}]}', '{"stages": 3}']
)
def test_a_damaged_recipe_is_named_before_anything_is_measured(text, folders, tmp_path):
    model = shutil.copytree(folders / "llama", tmp_path / "model")
    (model / "recipe.json").write_text(text)
    with pytest.raises(
        ValueError,
        match=r"recipe\.json is damaged: the longest text in training can't be read .* delete it and pass --longest",
    ):
        evaluate("passkey", tmp_path / "out", models=[str(model)], lengths=[80], depths=(0.0,), num_prompts=1)


@pytest.mark.parametrize(
    "record", [{"correct": 1}, {"chat": False, "correct": "all", "total": 1, "state_bytes": 1}, {}]
)
def test_records_with_other_fields_are_named(record, folders, tmp_path):
    given = {"models": [str(folders / "llama")], "lengths": [80], "depths": (0.0,), "num_prompts": 1}
    evaluate("passkey", tmp_path, **given)
    path = tmp_path / "passkey.records.jsonl"
    settings, line = path.read_text().splitlines()
    path.write_text(settings + "\n" + json.dumps(json.loads(line) | {"record": record}) + "\n")
    with pytest.raises(ValueError, match=r"passkey\.records\.jsonl holds records of another form .*: delete it to"):
        evaluate("passkey", tmp_path, **given)
