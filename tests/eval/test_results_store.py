"""A measurement that was stopped resumes, and never mixes with another."""

import json

import pytest

from condense.eval.results_store import ResultsStore

from ..refusals import assert_refused

pytestmark = pytest.mark.unit

SETTINGS = {"model": "m", "depths": (0.0, 1.0)}


def test_what_was_measured_is_not_measured_again(tmp_path):
    path, calls = tmp_path / "new" / "x.jsonl", []

    def measure(value):
        calls.append(value)
        return {"value": value}

    records = ResultsStore(path, SETTINGS)
    assert records.get({"a": 1, "b": 2}, lambda: measure(1)) == {"value": 1}
    assert records.get({"b": 2, "a": 1}, lambda: measure(9)) == {"value": 1}
    records.get({"a": 2}, lambda: measure(2))
    with path.open("a") as file:
        file.write('{"key": {"a": 3}, "record": {"val')  # killed here
    again = ResultsStore(path, SETTINGS)
    assert {"a": 2} in again and {"a": 3} not in again
    assert again.get({"a": 3}, lambda: measure(3)) == {"value": 3}
    assert again.get({"a": 2}, lambda: measure(9)) == {"value": 2}
    assert calls == [1, 2, 3]
    assert [json.loads(line) for line in path.read_text().splitlines()][1:] == [
        {"key": {"a": 1, "b": 2}, "record": {"value": 1}},
        {"key": {"a": 2}, "record": {"value": 2}},
        {"key": {"a": 3}, "record": {"value": 3}},
    ]


def test_a_failed_measurement_leaves_nothing(tmp_path):
    records = ResultsStore(tmp_path / "x.jsonl", SETTINGS)
    with pytest.raises(ZeroDivisionError):
        records.get({"a": 1}, lambda: {"value": 1 / 0})
    assert {"a": 1} not in ResultsStore(tmp_path / "x.jsonl", SETTINGS)


def test_another_measurement_is_refused(tmp_path):
    ResultsStore(tmp_path / "x.jsonl", SETTINGS).get({"a": 1}, lambda: {})
    words = r"x.jsonl comes from another measurement: model was 'm' and is 'n'"
    assert_refused(words, ResultsStore, tmp_path / "x.jsonl", {**SETTINGS, "model": "n"})
    assert {"a": 1} in ResultsStore(tmp_path / "x.jsonl", SETTINGS)  # and is still there


def test_without_a_path_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert ResultsStore(None, {}).get({"a": 1}, lambda: {"value": 1}) == {"value": 1}
    assert not list(tmp_path.iterdir())


def test_a_refusal_names_the_fields_that_differ_alone(tmp_path):
    def models(dtype):
        return {"models": [{"name": "one", "dtype": dtype, "config": {"size": 3}}]}

    ResultsStore(tmp_path / "a.jsonl", models("float32"))
    with pytest.raises(ValueError, match=r"measurement: models\.0\.dtype was 'float32' and is 'float16'\. Pass"):
        ResultsStore(tmp_path / "a.jsonl", models("float16"))


def test_models_may_be_added_and_not_taken_away(tmp_path):
    def settings(*names, dtype="float32"):
        models = [{"name": name, "dtype": dtype} for name in names]
        return {"models": models, "sha256": {name: f"of {name}" for name in names}, "chat": list(names), "seed": 0}

    path = tmp_path / "a.jsonl"
    ResultsStore(path, settings("b")).get({"model": "b"}, lambda: {"value": 1})
    assert {"model": "b"} in ResultsStore(path, settings("a", "b"))
    assert json.loads(path.read_text().splitlines()[0])["settings"] == settings("a", "b")
    assert_refused("the length of models was 2 and is 1", ResultsStore, path, settings("b"))
    with pytest.raises(ValueError, match=r"models\.0\.dtype was 'float32' and is 'float16'"):
        ResultsStore(path, settings("a", "b", "c", dtype="float16"))
    changed = settings("a", "b", "c")
    changed["sha256"]["b"] = "another"
    assert_refused(r"measurement: sha256\.b was 'of b' and is 'another'\. Pass", ResultsStore, path, changed)


@pytest.mark.parametrize(
    "line", ['{"key": {"a": 1}, "record": 5}', '{"key": "a", "record": {}}', '{"key": {"a": 1}}', "[]", '"x"']
)
def test_lines_that_are_no_records_are_named(tmp_path, line):
    ResultsStore(tmp_path / "x.jsonl", SETTINGS)
    with (tmp_path / "x.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=r"x\.jsonl is damaged, its lines are not records: delete it, or pass"):
        ResultsStore(tmp_path / "x.jsonl", SETTINGS)
