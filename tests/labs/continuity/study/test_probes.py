"""Probes from the command line: their files, refusals, resumption, tables and curves."""

import csv
import json
import re
import shutil
import sys
from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

import condense.cli.main
from condense.labs.continuity.study import pictures, probes, space, sums, transformations
from condense.labs.continuity.study.aggregation import SET
from condense.labs.continuity.study.classes import DIGITS
from condense.labs.continuity.study.data import load
from condense.labs.continuity.study.items import SCALES, SHIFTS
from condense.labs.continuity.study.pictures import _looks, shown_curves
from condense.labs.continuity.study.probe import Probe
from condense.labs.continuity.study.probes import PROBES, probe_all
from condense.labs.continuity.study.prompts import counting_prompt
from condense.labs.continuity.study.questions import questions_tokenizer
from condense.training.small_llama import small_llama
from tests.eval.measuring import save_folded, stop_within

from .models import check_files, counts_and_adds_tokenizer, first_of, gpt2_reader, llama, probe, shrink_sets
from .models import options as probe_options

# From the command line


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models with random weights: `llama`, `folded` and `counting_gpt2` know the words of the questions, `stories` and
    `gpt2` the words of the sentences and of the first objects."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = counts_and_adds_tokenizer()
    small_llama(tokenizer, seed=0, width=16, layers=1).save_pretrained(folder / "llama")
    tokenizer.save_pretrained(folder / "llama")
    save_folded(folder / "llama", folder / "folded", 32)
    items = [*space.Space.prompts(probe_options(limit=2)), *transformations.Translation.prompts(probe_options())]
    known = questions_tokenizer([text for item in items for text in (item.text, item.other)])
    for name, model, own in (
        ("stories", llama(known, layers=1), known),
        ("gpt2", gpt2_reader(known).lm.model.float(), known),
        ("counting_gpt2", gpt2_reader(tokenizer, n_positions=512).lm.model.float(), tokenizer),
    ):
        model.save_pretrained(folder / name)
        own.save_pretrained(folder / name)
    return folder


NOT_DRAWN = (Probe, "draw", lambda *given: None)


@pytest.fixture
def undrawn(monkeypatch):
    monkeypatch.setattr(*NOT_DRAWN)


def asked(*arguments):
    return CliRunner().invoke(condense.cli.main.app, ["probe", *map(str, arguments)])


def probed(output, name, *models, options=()):
    """Returns the results that the command wrote, and its printed tables."""
    named = [word for model in models for word in ("--model", model)]
    done = asked(name, *named, "--output", output, *options)
    assert done.exit_code == 0, (done.output, done.exception)
    return json.loads((output / f"probe_{name}.json").read_text()), done.stdout


def cells_of(results):
    """Yields the lines of the CSV that belong to the JSON's records."""
    for model in results["models"]:
        for record in model["records"]:
            for n, factor in enumerate(record["factors"] if record["valid"] else []):
                cells = {"model": model["name"], "group": record["group"], "item": record["name"], "factor": factor}
                watched = dict(record.get("curves", {}))
                distance = watched.pop("distance", None)  # not a probability
                cells |= {} if distance is None else {"distance": distance[n]}
                cells |= {f"p({name})": curve[n] for name, curve in watched.items()}
                cells |= {f"token({name})": curve[n] for name, curve in record.get("likely", {}).items()}
                for name in ("distance", "nearest", "same_top", "recall", "found"):
                    cells |= {name: record[name][n]} if name in record else {}
                yield {name: str(value) for name, value in cells.items()}


WITH_LIMIT = {"counting", "wholes", "events", "sums", "space", "memory"}


@pytest.fixture(scope="module")
def measured(folder, tmp_path_factory):
    """Measures a probe on one model, once. Returns the results, the printed tables and the folder."""

    @cache
    def results(name, model):
        output = tmp_path_factory.mktemp(name)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(*NOT_DRAWN)
            options = ["--limit", 2] if name in WITH_LIMIT else []
            return *probed(output, name, folder / model, options=options), output

    return results


TITLES = {
    "counting": "normalised peak frequency, all peaks (table 2)",
    "wholes": "8 words of duration m / 8, for m of 1 to 7",
    "events": "normalised peak frequency, expected peaks only (table 5)",
    "sums": "of these, how many have each property (table 7)",
    "space": "from one object to the other (tables 8, 9 and 10)",
    "boolean": "truth values between operators",
    "translation": "shifted by 0 to 10 units",
    "scaling": "all durations scaled",
    "density": "straight lines between embeddings",
    "memory": "mean probability of the right answer with all memory keys at one duration",
}


@pytest.mark.parametrize("name", PROBES)
def test_figures_are_the_same_in_every_file(name, folder, measured):
    counts_or_adds = name in ("counting", "wholes", "events", "sums", "boolean")
    source = folder / ("folded" if name == "memory" else "llama" if counts_or_adds else "stories")
    results, shown, output = measured(name, source.name)
    (model,) = results["models"]
    assert results["kind"] == f"probe_{name}" and results["about"] == PROBES[name].about
    assert (model["name"], model["source"]) == (source.name, str(source))
    assert results["limit"] == (2 if name in WITH_LIMIT else None) and results["data"] == "the package's own"
    items = PROBES[name].prompts(probe_options(limit=2 if name in WITH_LIMIT else None))
    assert [(r["name"], r["group"]) for r in model["records"]] == [(item.name, item.group) for item in items]
    assert model["summary"] == json.loads(json.dumps(PROBES[name].summary(model["records"])))
    share = sum(record["valid"] for record in model["records"]) / len(items)
    assert share == 1 if name != "memory" else share > 0.5
    with (output / f"probe_{name}.csv").open(newline="") as file:
        rows = [{key: value for key, value in row.items() if value} for row in csv.DictReader(file)]
    assert rows == list(cells_of(results)) and rows
    assert TITLES[name] in shown and f"{output}/probe_{name}.json" in shown
    assert "\n\n".join(map(str, PROBES[name].tables(results))) == shown.split(f"\n\n{output}")[0]


@pytest.fixture(scope="module")
def whole(folder):
    """Returns the probability of each token after a text, by the token's text, from transformers' own models."""
    loaded = {}

    @torch.no_grad()
    def probabilities(name, text):
        if name not in loaded:
            model = AutoModelForCausalLM.from_pretrained(folder / name).eval()
            loaded[name] = model, AutoTokenizer.from_pretrained(folder / name)
        model, tokenizer = loaded[name]
        probabilities_V = model(**tokenizer(text, return_tensors="pt")).logits[0, -1].double().softmax(-1)
        return dict(zip(tokenizer.convert_ids_to_tokens(range(len(tokenizer))), probabilities_V.tolist(), strict=True))

    return probabilities


@pytest.mark.parametrize("name", ["counting", "events", "sums", "space", "boolean"])
def test_unchanged_sentences_get_the_models_own_answers(name, measured, whole):
    model = "stories" if name == "space" else "llama"
    results, *_ = measured(name, model)
    items = PROBES[name].prompts(probe_options(limit=2 if name in WITH_LIMIT else None))
    compared = 0
    for item, record in zip(items, results["models"][0]["records"], strict=True):
        first, last = (0, item.text), (-1, item.other or item.text)
        for index, text in {"interpolate": [first, last], "shift": [first], "densify": [first]}.get(item.vary, [last]):
            own = whole(model, text)
            for label, curve in record["curves"].items():
                expected = sum(value for word, value in own.items() if word.lower() == label)
                assert curve[index] == pytest.approx(expected, rel=1e-3), (item.name, label)
                compared += 1
            for label, curve in record["likely"].items():
                assert curve[index] == pytest.approx(own[label], rel=1e-3), (item.name, label)
    assert compared > 20


def test_what_moving_and_stretching_does(folder, tmp_path, undrawn, measured):
    """A rotary model does not see a translation, nor one of its layers copies at equal positions. GPT-2's positions
    move."""
    results, shown = probed(tmp_path, "translation", folder / "stories", f"two={folder / 'gpt2'}")
    rotary, learned = (model["summary"] for model in results["models"])
    assert [model["name"] for model in results["models"]] == ["stories", "two"] and "two" in shown
    assert rotary["valid"] == learned["valid"] == 4
    assert all(one["most"] < 1e-4 and one["same_top"] == 1 for one in rotary["sentences"].values())
    assert all(one["most"] > 1e-3 for one in learned["sentences"].values())
    for model in results["models"]:
        assert all(record["distance"][0] < 1e-6 for record in model["records"])  # unchanged
    scaled, *_ = measured("scaling", "stories")
    assert all(one["most"] > 1e-3 for one in scaled["models"][0]["summary"]["sentences"].values())
    dense, *_ = measured("density", "stories")
    for sentence, one in dense["models"][0]["summary"]["sentences"].items():
        assert one["most"] < 1e-5 if "equal" in sentence else one["most"] > 1e-4
    rules = dense["models"][0]["summary"]["rules"]
    for sentence in transformations.SENTENCES:
        trapezoids, rectangles = rules[f"{sentence}, trapezoids"], rules[f"{sentence}, rectangles"]
        assert trapezoids[5] < rectangles[5] < rectangles[2]


def test_positions_that_run_out_are_recorded(folder, tmp_path, undrawn):
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(folder / "gpt2")
    sizes = {"n_positions": 17, "n_embd": 16, "n_layer": 1, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    results, shown = probed(tmp_path / "out", "translation", tmp_path)
    furthest = {record["name"]: record["factors"][-1] for record in results["models"][0]["records"]}
    lengths = {name: len(tokenizer(text)["input_ids"]) for name, text in transformations.SENTENCES.items()}
    shifts = {name: max(shift for shift in SHIFTS if shift <= 17 - length) for name, length in lengths.items()}
    assert furthest == pytest.approx(shifts, rel=1e-5) and shifts["France"] == 10 and shifts["Lily"] < 6.1
    assert "factors that are left out" in shown and results["models"][0]["summary"]["valid"] == 4
    lasts = {name: found["last"] for name, found in results["models"][0]["summary"]["sentences"].items()}
    assert [lasts["France"] is None, lasts["Romeo"], lasts["Lily"]] == [False, None, None]


def test_words_that_are_not_known_are_counted(folder, tmp_path, undrawn):
    results, shown = probed(tmp_path, "translation", folder / "llama")
    model = results["models"][0]
    reasons = [record["reason"] for record in model["records"] if not record["valid"]]
    assert reasons and model["summary"]["valid"] == 4 - len(reasons)
    (line,) = [line for line in shown.splitlines() if "the tokenizer does not know" in line]
    assert line.split()[-1] == str(len(reasons))


def test_a_folded_models_own_limits(folder, tmp_path, undrawn):
    results, _ = probed(tmp_path, "density", folder / "folded")
    reasons = {record["reason"] for record in results["models"][0]["records"] if not record["valid"]}
    assert "a folded model supports rectangles only" in reasons
    assert "a folded model computes positions only from durations" in reasons
    assert set(results["models"][0]["summary"]["rules"]) == {"France, rectangles"}


def test_a_probe_that_no_model_can_take_is_named(folder, tmp_path, undrawn, monkeypatch, capsys):
    monkeypatch.setattr(probes, "PROBES", {name: PROBES[name] for name in ("translation", "memory")})
    found = probe_all(tmp_path, probe_options(models=[str(folder / "llama")], limit=1))
    assert set(found) == {"translation"}
    assert "probe memory is left out: it needs a folded model" in capsys.readouterr().out


def test_all_of_them_on_two_models_and_a_page(folder, tmp_path, monkeypatch):
    """All probes on small sets, with pictures."""
    shrink_sets(monkeypatch)
    named = ["--model", f"one={folder / 'llama'}", "--model", f"two={folder / 'folded'}"]
    done = asked("all", *named, "--output", tmp_path, "--limit", 1, "--template", "listed", "--speed")
    assert done.exit_code == 0, (done.output, done.exception)
    assert done.output.strip().endswith("report.html")
    assert "time for three items" in done.output and "speed-up" in done.output
    page = (tmp_path / "report.html").read_text()
    pictures = 0
    for name in PROBES:
        results = check_files(tmp_path, name, ["two"] if name == "memory" else ["one", "two"])
        assert results["template"] == ("listed" if name in ("counting", "wholes") else "sentence")
        assert results["limit"] == (1 if name in WITH_LIMIT else None)
        assert ("speed" in results["models"][0]) == (name == "counting")
        assert (tmp_path / f"probe_{name}.csv").stat().st_size > 1_000
        groups = {record["group"] for model in results["models"] for record in model["records"] if record["valid"]}
        for group in groups:
            path = tmp_path / f"probe_{name}-{''.join(c if c.isalnum() else '_' for c in group)}.png"
            assert path.stat().st_size > 5_000 and path.with_suffix(".svg").stat().st_size > 5_000, path
        assert len(list(tmp_path.glob(f"probe_{name}-*.png"))) == len(groups)
        pictures += len(groups)
        assert TITLES[name] in page and f"probe_{name}" in page
    assert page.count("data:image/png;base64,") == pictures


def test_what_lies_between_objects_is_drawn(folder, tmp_path, monkeypatch):
    for name in ("QUESTIONS", "SENTENCES", "STORIES"):
        monkeypatch.setattr(space, name, first_of(getattr(space, name)))
    results, _ = probed(tmp_path, "space", folder / "stories", options=["--limit", 1])
    summary = results["models"][0]["summary"]
    assert (summary["records"], summary["valid"], len(summary["m_max_of_each"])) == (4, 4, 4)
    drawn = {path.name for path in tmp_path.glob("*.png")}
    assert drawn == {f"probe_space-{group}.png" for group in ("set", "questions", "sentences", "stories")}


def test_all_of_them_on_stock_models_leave_memory_out(folder, tmp_path, undrawn, monkeypatch):
    monkeypatch.setattr(probes, "run", lambda task, output: task.kind)
    stock, folded = (probe_options(models=[str(folder / name)]) for name in ("llama", "folded"))
    assert list(probe_all(tmp_path, stock)) == [name for name in PROBES if name != "memory"]
    assert list(probe_all(tmp_path, folded)) == list(PROBES)


def test_own_data(folder, tmp_path, undrawn):
    records = load("words")[5:8]
    (tmp_path / "own.json").write_text(json.dumps(records))
    options = ["--data", tmp_path / "own.json", "--limit", 5]  # more than there are
    results, _ = probed(tmp_path / "out", "counting", folder / "llama", options=options)
    in_set = [record for record in results["models"][0]["records"] if record["group"] == SET]
    assert [record["name"] for record in in_set] == [f"{n} {record['word']}" for n, record in enumerate(records)]
    assert results["data"] == str(tmp_path / "own.json") and results["models"][0]["summary"]["records"] == 3


def test_files_that_are_not_written_are_not_named(folder, tmp_path):
    """The model does not know the words, so no record is valid and there is nothing to list or draw."""
    _, shown = probed(tmp_path, "counting", folder / "stories", options=["--limit", 1])
    assert shown.endswith(f"{tmp_path}/probe_counting.json only: nothing was measured\n")
    written = {path.name for path in tmp_path.glob("probe_*")}
    assert written == {"probe_counting.json", "probe_counting.records.jsonl"}


def test_the_axis_of_sums_says_what_varies(tmp_path, monkeypatch):
    labels = {}
    for name in ("_draw_curves", "_draw_set"):
        monkeypatch.setattr(pictures, name, lambda *given, **_: labels.update({given[-1].name: given[-2]}))
    said = {"embedding": "interpolation factor", "translation": "shift [units]", "scaling": "scale factor"}
    said |= {"density": "samples per token", "duration": "duration factor", SET: "duration factor"}
    records = [{"name": "1 + 1", "group": group, "valid": True, "curves": {}} for group in said]
    PROBES["sums"].draw({"models": [{"name": "m", "records": records}]}, tmp_path / "sums")
    assert labels == {f"sums-{group}": label for group, label in said.items()}


def test_templates_pose_other_prompts(folder, tmp_path, undrawn, whole):
    results, _ = probed(tmp_path, "counting", folder / "llama", options=["--limit", 1, "--template", "listed"])
    record = results["models"][0]["records"][0]
    own = whole("llama", counting_prompt("apple", 4, "fruit", "a fruit", "listed").text)
    assert results["template"] == "listed" and record["curves"]["4"][-1] == pytest.approx(own["4"], rel=1e-3)


def test_positions_at_the_start(folder, tmp_path, undrawn):
    """The default for GPT-2, which the command prints. With positions at the end, a short first token has no learned
    position: factors below 1 are left out and counted."""
    results, shown = probed(tmp_path, "scaling", folder / "gpt2")
    assert results["models"][0]["position_anchor"] == "start" and results["models"][0]["summary"]["valid"] == 4
    assert "gpt2 has learned positions" in shown and "left out" not in shown
    results, shown = probed(tmp_path / "end", "scaling", folder / "gpt2", options=["--position-anchor", "end"])
    assert results["models"][0]["position_anchor"] == "end" and results["models"][0]["summary"]["valid"] == 4
    below = sum(factor < 1 for factor in SCALES)
    assert [len(record["left_out"]) for record in results["models"][0]["records"]] == [below] * 4
    assert "has learned positions" not in shown and "factors that are left out" in shown


def test_speed_is_measured_once(folder, tmp_path, undrawn, monkeypatch):
    results, shown = probed(tmp_path, "events", folder / "llama", options=["--limit", 2, "--speed"])
    speed = results["models"][0]["speed"]
    assert speed["items"] == 2 and speed["one_by_one"] > 0 and speed["together"] > 0
    assert speed["speed_up"] == speed["one_by_one"] / speed["together"] and "time for three items" in shown
    monkeypatch.setattr("condense.labs.continuity.study.probe.speed", lambda *given: pytest.fail("measured again"))
    again, _ = probed(tmp_path, "events", folder / "llama", options=["--limit", 2, "--speed"])
    assert again["models"] == results["models"]
    (tmp_path / "own.json").write_text(json.dumps([load("words")[0] | {"word": "zebra crossing"}]))
    monkeypatch.undo()
    monkeypatch.setattr(Probe, "draw", lambda *given: None)
    options = ["--data", tmp_path / "own.json", "--speed"]
    nothing, shown = probed(tmp_path, "counting", folder / "llama", options=options)
    assert nothing["models"][0]["speed"] == {"items": 0} and "time for three items" not in shown


def test_a_stopped_probe_goes_on(folder, tmp_path, undrawn, noted):
    """It is stopped within the items of the second of two models."""
    models = folder / "llama", f"b={folder / 'folded'}"
    whole, _ = probed(tmp_path / "whole", "boolean", *models)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    lines = stop_within(tmp_path / "cut" / "probe_boolean.records.jsonl", 22, -1)
    assert len(lines) == 1 + 2 * 16
    measured = noted(Probe, "measure")
    again, _ = probed(tmp_path / "cut", "boolean", *models)
    names = [call.arguments[1].item.name for call in measured]
    assert names == [item.name for item in PROBES["boolean"].prompts(probe_options())][5:]
    assert again["models"] == whole["models"]
    same = [(tmp_path / name / "probe_boolean.csv").read_text() for name in ("whole", "cut")]
    assert same[0] == same[1]


def test_a_stopped_count_goes_on(folder, tmp_path, undrawn, noted):
    before, _ = probed(tmp_path, "counting", folder / "llama", options=["--limit", 4])
    path = tmp_path / "probe_counting.records.jsonl"
    stop_within(path, len(path.read_text().splitlines()) - 2)
    measured = noted(Probe, "measure")
    again, _ = probed(tmp_path, "counting", folder / "llama", options=["--limit", 4])
    assert len(measured) == 2 and again["models"] == before["models"]
    done = asked("counting", "--model", folder / "llama", "--output", tmp_path, "--limit", 3)
    assert "limit was 4 and is 3" in str(done.exception)


@pytest.mark.parametrize("name", ["counting", "translation", "density"])
def test_models_side_by_side(name, folder, tmp_path, monkeypatch):
    shrink_sets(monkeypatch)
    options = ["--limit", 2] if name in WITH_LIMIT else []
    gpt2 = f"gpt2={folder / 'counting_gpt2'}"
    results, shown = probed(tmp_path, name, folder / "llama", gpt2, options=options)
    assert check_files(tmp_path, name, ["llama", "gpt2"]) == results
    assert any(record["valid"] for record in results["models"][1]["records"])
    reasons = [record.get("reason", "") for model in results["models"] for record in model["records"]]
    assert not any("position_anchor='start'" in reason for reason in reasons)
    told = "gpt2 has learned positions: tokens are at the start of their intervals"
    assert told in shown and "llama" in shown and "llama has learned" not in shown


def test_another_measurement_is_not_gone_on_with(folder, tmp_path, undrawn):
    (tmp_path / "own.json").write_text(json.dumps(load("tutorials")[:1]))
    first = ("events", "--model", folder / "llama", "--output", tmp_path)
    assert asked(*first, "--limit", 1).exit_code == 0
    for options, changed in (
        (["--limit", 2], "limit was 1 and is 2"),
        (["--limit", 1, "--data", tmp_path / "own.json"], "data was"),
        (["--limit", 1, "--position-anchor", "start"], "models.0.position_anchor was 'end' and is 'start'. Pass"),
    ):
        done = asked(*first, *options)
        assert isinstance(done.exception, ValueError) and "comes from another measurement" in str(done.exception)
        assert changed in str(done.exception)
    assert asked(*first, "--limit", 1).exit_code == 0
    assert asked(*first, "--limit", 1, "--model", folder / "folded").exit_code == 0  # a model may be added
    models = json.loads((tmp_path / "probe_events.json").read_text())["models"]
    assert [model["name"] for model in models] == ["llama", "folded"]


def test_changed_data_in_the_same_file_are_another_measurement(folder, tmp_path, undrawn):
    path, asked_for = tmp_path / "own.json", ("counting", "--model", folder / "llama", "--output", tmp_path / "out")
    path.write_text(json.dumps(load("words")[:1]))
    assert asked(*asked_for, "--data", path).exit_code == 0
    path.write_text(json.dumps(load("words")[1:2]))
    done = asked(*asked_for, "--data", path)
    assert "items was" in str(done.exception)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["weight", "--model", "llama"], "no probe 'weight': choose one of counting, .*memory, or all"),
        (
            ["counting", "--model", "llama", "--template", "apart"],
            "template='apart' is unknown to counting: choose sentence or listed",
        ),
        (
            ["counting", "--model", "llama", "--template", "x"],
            "template='x' is unknown to counting: choose sentence or",
        ),
        (
            ["sums", "--model", "llama", "--template", "listed"],
            "'listed' is unknown to sums: choose sentence or spaced",
        ),
        (["events", "--model", "llama", "--template", "listed"], "unknown to events: choose sentence\\."),
        (["boolean", "--model", "llama", "--data", "x.json"], "boolean has no data set: leave out --data"),
        (["boolean", "--model", "llama", "--limit", "3"], "leave out --data and --limit"),
        (["translation", "--model", "llama", "--limit", "3"], "translation has no data set"),
        (["density", "--model", "llama", "--speed"], "density has no data set to time"),
        (["memory", "--model", "folded", "--speed"], "memory has no data set to time"),
        (["memory", "--model", "llama"], "llama is a stock model and has no memory"),
        (["memory", "--model", "folded", "--model", "llama"], "llama is a stock model and has no memory"),
        (["all", "--model", "llama", "--data", "x.json"], "--data belongs to one probe"),
        (["all", "--model", "llama", "--template", "x"], "template='x' is unknown to all probes"),
        (["counting", "--model", "llama", "--dtype", "foo"], "dtype='foo' is not known: choose one of"),
        (["counting", "--model", "llama", "--attention", "foo"], "attn_implementation='foo' is not known"),
        (["counting", "--model", "llama", "--attention", "flash_attention_2"], "'flash_attention_2' needs a GPU and"),
        (["counting", "--model", "m=runs/none/trained"], "there is no folder 'runs/none/trained': pass the folder of"),
        (["counting", "--model", "nowhere"], "there is no folder '.*nowhere'"),
        (["counting", "--model", "llama", "--model", "llama"], "two models are called"),
        (["counting", "--model", "llama", "--data", "nowhere.json"], r"nowhere\.json cannot be read"),
        (["counting", "--model", "llama", "--position-anchor", "middle"], "position_anchor='middle'"),
        (["counting", "--model", "folded", "--position-anchor", "start"], "the folded model's is 'end'"),
    ],
)
def test_what_is_refused(arguments, message, folder, tmp_path, undrawn):
    folders = {"llama": folder / "llama", "folded": folder / "folded", "nowhere": folder / "nowhere"}
    done = asked(*(folders.get(word, word) for word in arguments), "--output", tmp_path / "out")
    assert isinstance(done.exception, ValueError) and re.search(message, str(done.exception)), done.exception
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[{"word": 3}]', ", record 0: 'word' is 3"),
        ("{", " cannot be read as JSON"),
        ("{}", " is not a list of records"),
        ('[{"word": "a"}]', ", record 0: 'category' is None"),
        ('[{"word": "a", "category": "b", "category_with_article": "a b", "repetitions": 0}]', ".*should be 1 to 9"),
    ],
)
def test_wrong_data_are_found_before_a_model_is_loaded(text, words, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "condense.labs.continuity.study.probe.load_probed", lambda options: pytest.fail("a model was loaded")
    )
    (tmp_path / "own.json").write_text(text)
    with pytest.raises(ValueError, match=rf"own\.json{words}"):
        PROBES["counting"].load(probe_options(models=["m"], data=tmp_path / "own.json"))


def test_a_refusal_is_one_line(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["condense", "probe", "weight", "--model", "m", "--output", str(tmp_path)])
    with pytest.raises(SystemExit) as left:
        condense.cli.main.main()
    assert left.value.code == 1 and capsys.readouterr().err.startswith("condense: there is no probe 'weight'")
    assert asked("counting", "--model", "m", "--output", tmp_path, "--limit", 0).exit_code == 2


def test_from_python(folder, tmp_path, undrawn):
    results = probe("events", [str(folder / "llama")], tmp_path, limit=1)
    assert json.loads((tmp_path / "probe_events.json").read_text()) == results


# Tables and curves


def test_tables_by_hand():
    """Figures of each model, of all models weighted by valid records, and of the paper. Invalid records are listed by
    kinds of reasons."""
    figures = ("right_at_1", "counterfactual", "observed", "observed_expected", "ratio", "ratio_expected")
    first = dict(zip(figures, (0.5, 0.25, 0.5, 0.4, 2.0, 1.5), strict=True))
    first |= {"records": 4, "valid": 3, "mass": 0.6, "allowed_exact": 3, "allowed_published": 4}
    second = dict(zip(figures, (0.1, 0.21, 0.9, 0.8, 4.0, 3.5), strict=True))
    second |= {"records": 6, "valid": 1, "mass": 0.8, "allowed_exact": 1, "allowed_published": 1}
    nothing = {"records": 2, "valid": 0, "allowed_exact": 0, "allowed_published": 0} | dict.fromkeys(("mass", *figures))
    reasons = ["'cat' is 2 tokens, not one", "'catfish' is 3 tokens, not one", "3 and 4 tokens: nothing lies between"]
    records = [{"valid": False, "reason": reason} for reason in reasons] + [{"valid": True}]
    models = [
        {"name": "m", "summary": first, "records": records, "speed": {"items": 0}},
        {"name": "t", "summary": second, "records": [], "speed": {"one_by_one": 4.0, "together": 1.0, "speed_up": 4.0}},
        {"name": "none", "summary": nothing, "records": []},
    ]
    tables = PROBES["counting"].tables({"kind": "probe_counting", "models": models})
    rows, peaks = {table.title: table.rows for table in tables}, "normalised peak frequency,"
    titles = ("valid records (table 1)", f"{peaks} all peaks (table 2)", f"{peaks} expected peaks only (table 3)")
    right, every, expected = ({name: figures for name, *figures in rows[title]} for title in titles)
    assert list(right)[:4] == ["m", "t", "none", "Global"]
    assert right["m"] == ["75.00 %", "100.00 %", 4, "50.00 %", "-", "60.00 %"]
    assert right["Global"] == ["33.33 %", "41.67 %", 12, "40.00 %", "-", "65.00 %"]
    assert right["none"] == ["0.00 %", "0.00 %", 2, "-", "-", "-"]
    paper = " (paper, published spans and classes)"
    assert right[f"Llama 3 8b{paper}"] == ["", "93.50 %", "", "", "", ""]
    assert f"all six models{paper}" not in right and every[f"all six models{paper}"] == ["-", "-", "2.90", ""]
    assert every["m"] == ["0.2500", "0.5000", "2.00", "60.00 %"]
    assert expected["m"] == ["0.2500", "0.4000", "1.50", "60.00 %"]
    assert every["Global"] == ["0.2400", "0.6000", "2.50", "65.00 %"]
    assert expected["Global"] == ["0.2400", "0.5000", "2.00", "65.00 %"]
    assert every[f"Llama 2 13b{paper}"] == ["0.2599", "0.9174", "3.60", ""]
    assert expected[f"Gemma 1 7b{paper}"] == ["0.2610", "0.3503", "1.34", ""]
    assert rows["time for three items"] == [["t", "4.00", "1.00", "4.00"]]
    assert [row[::2] for row in rows["records that are not valid"]] == [["m", 2], ["m", 1]]
    alone = PROBES["counting"].tables({"kind": "probe_counting", "models": models[:1]})
    assert "Global" not in str(alone[0])


def test_papers_figures_in_the_tables():
    """The paper's figures of sums stand only under the published rule."""
    nothing = {"records": 0, "valid": 0, "mass": None, "P1": None, "P2": None, "P3": None}
    rates, shares = sums.Sums.summary_tables({"m": nothing | {"published": nothing}})
    assert rates.rows[0] == ["m", "-", "-", "-", "-", "-"]
    assert rates.rows[2] == ["Llama 2 13b (paper)", "", "", "19.50 %", "", ""]
    assert shares.rows[0] == ["m", *["-"] * 7]
    assert shares.rows[1] == ["Llama 3 8b (paper)", "", "", "", "29.17 %", "25.83 %", "25.83 %", ""]
    some = {"records": 4, "valid": 2, "mass": 0.9, "P1": 0.5, "P2": 0.4, "P3": 0.3}
    more = some | {"valid": 1, "P3": 0.9}
    summaries = {"m": some | {"published": more}, "n": more | {"published": more}}
    rates, shares = sums.Sums.summary_tables(summaries)
    assert rates.rows[2] == ["Global", "37.50 %", "3 of 8", "25.00 %", "2 of 8", "90.00 %"]
    assert shares.rows[2][1:] == ["50.00 %", "40.00 %", "50.00 %", "50.00 %", "40.00 %", "90.00 %", "90.00 %"]
    nothing = {"records": 0, "valid": 0, "mass": None, "derivative": None, "m_max": None, "far_outside": None}
    (table,) = space.Space.summary_tables({"m": nothing})
    assert table.rows[0] == ["m", "-", "0 of 0", "-", "-", "-", "-"]
    assert table.rows[4] == ["Gemma 2 9b (paper)", "84.00 %", "", "5.402", "0.0178", "9.52 %", ""]
    some = {"records": 4, "valid": 2, "mass": 0.8, "derivative": 5.0, "m_max": 0.1, "far_outside": 0.5}
    (table,) = space.Space.summary_tables({"m": some, "n": some | {"valid": 1, "m_max": 0.4}})
    assert table.rows[2] == ["Global", "37.50 %", "3 of 8", "5.000", "0.2000", "50.00 %", "80.00 %"]
    (table,) = space.Space.summary_tables({"m": some | {"mass": 0.3}})
    assert table.rows[0] == ["m", "50.00 %", "2 of 4", "-", "-", "-", "30.00 %"]


def test_curves_that_are_drawn():
    """Digits that reach 5 % and the other digits as one curve; other tokens that reach it, and the rest as one."""
    curves = {digit: [0.0, 0.0] for digit in DIGITS} | {"3": [0.5, 0.1], "4": [0.2, 0.6], "7": [0.04, 0.01]}
    likely = {"x": [0.1, 0.2], "3": curves["3"], "4": curves["4"]}
    shown = shown_curves({"factors": [0.5, 1.0], "curves": curves, "likely": likely, "unwatched": ["x"]})
    assert list(shown) == ["3", "4", "“x”", "other digits", "other tokens"]
    assert shown["other digits"] == pytest.approx([0.04, 0.01]) and shown["other tokens"] == pytest.approx([0.16, 0.09])
    likely = {"cat": [0.5, 0.1], "dog": [0.3, 0.7]}
    shown = shown_curves({"factors": [0.5, 1.0], "curves": {}, "likely": likely, "unwatched": list(likely)})
    assert list(shown) == ["cat", "dog", "other tokens"] and shown["other tokens"] == pytest.approx([0.2, 0.2])
    likely = {f"word {n}": [0.05 + 0.001 * n, 0.0] for n in range(12)}
    shown = shown_curves({"factors": [0.5, 1.0], "curves": {}, "likely": likely, "unwatched": list(likely)})
    assert list(shown) == [*likely, "other tokens"]
    assert shown["other tokens"] == pytest.approx([1 - sum(0.05 + 0.001 * n for n in range(12)), 1])


def test_curves_of_a_panel_look_different():
    """An answer has the same colour in every panel. Named tokens avoid these colours as long as there are others."""
    names = ["0", "1", "“yes”", "“no”", "other tokens"]
    looks = _looks(names)
    assert [look["color"] for look in looks] == ["C0", "C1", "C2", "C3", "grey"]
    assert _looks(["no", "“0”", "other tokens"])[0] == _looks(["yes", "no", "other tokens"])[1]
    many = _looks([*"0123456789", "other digits", *(f"“{name}”" for name in "abcdefghijklmnopqrst"), "other tokens"])
    assert len({tuple(look.values()) for look in many}) == len(many) == 32
