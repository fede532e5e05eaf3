"""A measurement does not go on with a model whose configuration or tokenizer was changed: a table would mix two."""

import json
import shutil

import pytest

from condense.eval.healing.options import HealingOptions
from condense.eval.healing.study import Healing
from condense.eval.report import write_report
from condense.eval.tasks import evaluate
from condense.hub.fingerprint import fingerprint

from .measuring import stop_within
from .rivals import rival_tokenizer, save_rival
from .tasks.documents import TEXT, write_lines

pytestmark = pytest.mark.usefixtures("without_pictures")

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_rival(tmp_path_factory.mktemp("models") / "llama", "llama", rival_tokenizer(), num_hidden_layers=1)


@pytest.fixture
def changed(llama, tmp_path):
    """Returns a copy of the model to change."""
    return shutil.copytree(llama, tmp_path / "llama")


def set_field(name, value):
    def change(folder):
        path = folder / "config.json"
        config = json.loads(path.read_text())
        assert config[name] != value
        path.write_text(json.dumps(config | {name: value}))

    return change


def swap_two_words(folder):
    path = folder / "tokenizer.json"
    text = path.read_text()
    assert '"cat"' in text and '"dogs"' in text
    path.write_text(text.replace('"cat"', '"_"').replace('"dogs"', '"cat"').replace('"_"', '"dogs"'))


CHANGES = {
    "rope": set_field("rope_parameters", {"rope_type": "default", "rope_theta": 77.0}),
    "eps": set_field("rms_norm_eps", 0.1),
    "activation": set_field("hidden_act", "gelu"),
    "tokenizer": swap_two_words,
}


def measure(folder, output):
    data = write_lines(output.parent / "mine.jsonl", [{"prompt": text, "answer": "x"} for text in TEXT.split(" and ")])
    return evaluate("answers", output, models=[str(folder)], data=[str(data)], new_tokens=2, batch_size=1)


@pytest.mark.parametrize("change", CHANGES)
def test_a_stopped_measurement_of_another_model_is_refused(change, changed, tmp_path):
    """Weights stay as they are, so their hash does not tell."""
    records = tmp_path / "out" / "answers.records.jsonl"
    whole = measure(changed, tmp_path / "out")
    stop_within(records, 2)
    stored = records.read_text()
    CHANGES[change](changed)
    with pytest.raises(ValueError, match=r"another measurement: models\.0\.config_and_tokenizer was '\w{16}' and is"):
        measure(changed, tmp_path / "out")
    assert records.read_text() == stored
    assert measure(changed, tmp_path / "new")["models"][0]["weights"] == whole["models"][0]["weights"]


def test_notes_beside_a_model_are_no_part_of_it(changed, tmp_path):
    whole = measure(changed, tmp_path / "out")
    stop_within(tmp_path / "out" / "answers.records.jsonl", 2)
    for name in ("README.md", "log.jsonl", "trainer_state.json"):
        (changed / name).write_text("{}")
    assert measure(changed, tmp_path / "out")["prompts"] == whole["prompts"]


def test_results_from_before_this_was_recorded(llama, tmp_path):
    """They are shown in a report; whether the model has changed since can't be told, so they are not continued."""
    results, output = measure(llama, tmp_path / "out"), tmp_path / "out"
    path, records = output / "answers.json", output / "answers.records.jsonl"
    for model in results["models"]:
        del model["config_and_tokenizer"]
    path.write_text(json.dumps(results))
    first, *others = records.read_text().splitlines(keepends=True)
    settings = json.loads(first)
    settings["settings"]["models"] = results["models"]
    records.write_text("".join([json.dumps(settings) + "\n", *others]))
    assert "answers to mine.jsonl" in write_report(output).read_text()
    words = r"models\.0\.config_and_tokenizer was not recorded and is '\w{16}'\. Pass another --output"
    with pytest.raises(ValueError, match=words):
        measure(llama, output)


def test_a_study_of_another_model_is_refused(changed, tmp_path):
    options = HealingOptions(model=str(changed), total_length=64, segment_lengths=[8], batch=2, steps=2, sequences=2)
    before = Healing(options, tmp_path).settings()
    CHANGES["rope"](changed)
    after = Healing(options, tmp_path).settings()
    assert before["model"]["weights"] == after["model"]["weights"] and before != after


def test_a_model_on_the_hub_is_named_with_its_commit(llama, tmp_path, monkeypatch):
    """The cache of the hub's library, as a download leaves it: the same id is another model after a commit."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--owner--name"
    for commit in (COMMIT, COMMIT[::-1]):
        shutil.copytree(llama, repository / "snapshots" / commit)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / "main").write_text(commit)
        assert fingerprint("owner/name") == fingerprint("owner/name", weights=False) == f"owner/name@{commit}"
