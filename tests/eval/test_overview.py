"""A report begins with the models against their tasks; what is not in this table is named."""

import csv
import json
import math
import re
import shutil
from pathlib import Path

import pytest

from condense.eval.overview import Figure, Overview, own_tables, read_harness
from condense.eval.report import write_report
from condense.eval.results import run_metadata, write_csv
from condense.eval.runner import run
from condense.eval.tasks import evaluate
from condense.eval.tasks.facts import Facts
from condense.eval.tasks.passkey import Passkey
from condense.eval.tasks.perplexity import Perplexity
from condense.training.data.fact_kinds import KINDS

from ..refusals import assert_refused
from .rivals import rival_tokenizer, save_rival
from .test_runner import Rows

RESULTS = Path(__file__).parents[2] / "docs" / "results"


class Own(Rows):
    """An evaluation as users write them."""

    kind, columns = "own", ["model", "size"]

    def settings(self):
        return {"models": [{"name": "llama"}]}

    def items(self):
        return ["llama", "other"]

    def key(self, item):
        return {"model": item}

    def measure(self, item):
        return {"size": len(item)}

    @classmethod
    def overview(cls, results):
        return [Figure(one["model"], "size [letters]", one["size"], digits=0) for one in results["own"]]


def write_scores(path, scores, source="m", **more):
    """As the harness writes them, without what is not read."""
    config = {"model": "stock", "model_args": {"pretrained": str(source)}, "batch_size": 1}
    fields = {"results": scores, "configs": {}, "versions": {}, "n-shot": {}, "config": config, **more}
    path.write_text(json.dumps(fields))
    return path


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    root, folder, tokenizer = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("results"), rival_tokenizer()
    for name in ("llama", "mamba"):
        save_rival(root / name, name, tokenizer)
    models = [str(root / "llama"), f"rival={root / 'mamba'}"]
    given = {"lengths": [80, 120], "depths": (0.0,), "num_prompts": 2}
    found = {"passkey": evaluate("passkey", folder / "passkey", models=models, **given)}
    found["recall"] = evaluate("recall", folder / "recall", models=models[1:], lengths=[64], pairs=[1], num_prompts=2)
    # Another model that has the name of one above.
    save_rival(root / "again" / "llama", "llama", tokenizer, hidden_size=64)
    evaluate("passkey", folder / "again", models=[str(root / "again" / "llama")], **given)
    run(Own(), folder / "mine")
    scores = {
        "choice": {"alias": "choice", "acc,none": 0.25, "acc_stderr,none": 0.125, "sample_len": 12},
        "group": {"alias": "group", "f1,none": 0.5, "f1_stderr,none": "N/A"},
        "one_of_it": {"alias": " - one_of_it", "f1,none": 0.5},
        "niah": {"alias": "niah", "4096,none": 0.75, "8192,none": -1},
    }
    (folder / "lm_eval").mkdir()
    groups = {"group": ["one_of_it"], "choice": []}
    path = folder / "lm_eval" / "results_2026-01-01T00-00-00.json"
    write_scores(path, scores, root / "mamba", group_subtasks=groups)
    (folder / "lm_eval" / "results_2026-01-02T00-00-00.json").write_text('{"results": {}}')
    shutil.copy(RESULTS / "autoregressivity" / "ablation.json", folder)
    (folder / "broken").mkdir()
    broken = {"kind": "passkey", **run_metadata(), "models": [{"name": "llama"}]}  # a right kind without its fields
    (folder / "broken" / "passkey.json").write_text(json.dumps(broken))
    assert_refused(r"written, without files .*broken/passkey\.json \(KeyError: 'lengths'\)", write_report, folder)
    return folder, found


def table(page, title):
    part = page.split(f"<h3>{title}</h3>")[1].split("</table>")[0]
    columns = re.findall("<th(?: [^>]*)?>([^<]*)", part)
    rows = [re.findall("<td[^>]*>([^<]*)", row) for row in part.split("<tr>")[2:]]
    return {row[0]: dict(zip(columns, row, strict=True)) for row in rows}


def test_models_and_tasks_stand_first(measured):
    folder, found = measured
    page = (folder / "report.html").read_text()
    assert re.findall('<h2 id="1">([^<]*)', page) == ["overview"]
    by_task = table(page, "models and tasks (95 % interval)")
    models = [name for name in next(iter(by_task.values())) if name != "task"]
    rows = {model: {task: cells[model] for task, cells in by_task.items()} for model in models}
    again, first = "llama (again/passkey.json)", "llama (passkey/passkey.json)"
    assert list(rows) == [again, first, "rival", "llama", "other"]  # the evaluation of one's own knows no weights
    column = "passkey, 80 to 120 tokens [% correct]"
    for name, row in {"llama": first, "rival": "rival"}.items():
        cells = [cell for cell in found["passkey"]["cells"] if cell["model"] == name]
        share = 100 * sum(cell["correct"] for cell in cells) / 4
        assert rows[row][column].startswith(f"{share:.1f} (")
    assert rows["other"][column] == "-" and rows["llama"]["size [letters]"] == "5"
    assert rows["rival"]["recall, single, 64 tokens [pairs]"] == "&lt; 1.0"
    # The harness knows the folder of the rival.
    assert rows["rival"]["choice, acc (lm-eval)"] == "0.250, standard error 0.125"
    assert rows["rival"]["group, f1 (lm-eval)"] == "0.500" and "one_of_it, f1 (lm-eval)" not in by_task
    assert rows["rival"]["niah, 4096 (lm-eval)"] == "0.750" and "niah, 8192 (lm-eval)" not in by_task


def test_different_tasks_are_not_compared():
    """Other keys, kinds or data than by default are named, so their figures have rows of their own."""
    cell = {"model": "m", "correct": 1, "total": 2}
    results = {"models": [{"name": "m", "memory_source": None}], "lengths": [64], "kinds": list(KINDS), "cells": [cell]}
    results["curves"] = [{"model": "m", "curve": "full_attention", "segment_length": 8, "points": [
        {"segments_before": 3, "loss": 1.5, "low": 1.0, "high": 2.0}
    ]}]  # fmt: skip
    tasks = {
        "passkey, 64 tokens [% correct]": (Passkey, {}),
        "passkey of 4 keys of 7 digits, 64 tokens [% correct]": (Passkey, {"num_keys": 4, "num_digits": 7}),
        "facts, 64 tokens [% correct]": (Facts, {}),
        "facts (one fact), 64 tokens [% correct]": (Facts, {"kinds": ["one_fact"]}),
        "loss on a.txt, b.txt with 3 segments of 8 tokens before [nats per own token]":
            (Perplexity, {"data": ["texts/a.txt", "b.txt"]}),
    }  # fmt: skip
    for measure, (task, given) in tasks.items():
        assert [figure.measure for figure in task.overview(results | given)] == [measure]


def test_what_is_not_in_it_is_named(measured):
    folder, _ = measured
    left_out = table((folder / "report.html").read_text(), "not in the overview")
    assert {name: row["why"] for name, row in left_out.items()} == {
        "lm_eval/results_2026-01-01T00-00-00.json: one_of_it": "are shown only in the section",
        "lm_eval/results_2026-01-02T00-00-00.json": "not a result of lm-evaluation-harness",
        "broken/passkey.json": "KeyError: &#39;lengths&#39;",
    }


def test_the_figures_are_in_files_too(measured):
    folder, found = measured
    results = json.loads((folder / "overview.json").read_text())
    lines = list(csv.DictReader((folder / "overview.csv").open()))
    assert len(lines) == len(results["figures"]) == 3 + 1 + 2 + 3
    share = next(one for one in results["figures"] if (one["model"], one["measure"][:7]) == ("rival", "passkey"))
    assert share["low"] < 100 * found["passkey"]["cells"][-1]["accuracy"] + 60 and share["digits"] == 1
    assert "broken/passkey.json" in results["left_out"]
    assert "ablation.json" not in results["left_out"]  # which has no figure by its kind, and its own section


def test_an_evaluation_of_ones_own_has_a_section(measured):
    folder, _ = measured
    page = (folder / "report.html").read_text()
    assert "An evaluation of your own." in page and table(page, "own")["other"]["size"] == "5"
    assert table(page, "rival: scores")["choice"]["standard error"] == "0.1250"


def test_a_report_without_models_begins_with_its_results(tmp_path):
    shutil.copy(RESULTS / "autoregressivity" / "ablation.json", tmp_path)
    page = write_report(tmp_path).read_text()
    assert re.findall('<h2 id="1">([^<]*)', page) == ["ablation"] and not (tmp_path / "overview.json").exists()


def test_numbers_that_are_not_finite(tmp_path):
    scores = {"hellaswag": {"acc,none": 0.5, "mcc,none": float("nan"), "word_perplexity,none": float("inf")}}
    write_scores(tmp_path / "results_1.json", scores)
    page = write_report(tmp_path).read_text()
    results = json.loads((tmp_path / "overview.json").read_text())
    assert [figure["value"] for figure in results["figures"]] == [0.5]
    assert results["left_out"] == {"results_1.json: hellaswag, mcc; hellaswag, word_perplexity": "not a finite number"}
    scores_of = re.findall("<td[^>]*>([^<]*)", page.split("<h3>m: scores</h3>")[1].split("</table>")[0])
    assert scores_of[2::4] == ["0.5000", "nan", "inf"]


def test_a_group_whose_score_is_not_finite(tmp_path):
    """Its tasks have figures, like the tasks of a group without a score."""
    scores = {"group": {"acc,none": float("nan")}, "one": {"acc,none": 0.5}}
    run = read_harness(write_scores(tmp_path / "results_1.json", scores, group_subtasks={"group": ["one"]}))
    assert [figure.value for figure in run.figures("m")] == [0.5] and run.not_finite() == ["group, acc"]


@pytest.mark.parametrize(
    "wrong", [{"value": "0.5"}, {"value": math.nan}, {"low": math.nan, "high": 2.0}, {"low": 0.0, "high": "2"}]
)
def test_a_figure_of_ones_own_that_is_not_a_number(wrong, tmp_path):
    """The report is written, without the file, which the error names."""
    write_scores(tmp_path / "results_1.json", {"hellaswag": {"acc,none": 0.5}})
    run(Own(), tmp_path / "mine")
    path = tmp_path / "mine" / "own.json"
    results = json.loads(path.read_text())
    results["overview"][0] |= wrong
    path.write_text(json.dumps(results))
    assert_refused(r"without files .*mine/own\.json \('size \[letters\]' of 'llama' .*finite", write_report, tmp_path)
    results = json.loads((tmp_path / "overview.json").read_text())
    assert [figure["value"] for figure in results["figures"]] == [0.5] and "mine/own.json" in results["left_out"]
    assert "An evaluation of your own." not in (tmp_path / "report.html").read_text()


def test_a_task_with_a_figure_that_is_not_a_number(tmp_path):
    """Results of the package's own tasks are guarded alike."""
    write_scores(tmp_path / "results_1.json", {"hellaswag": {"acc,none": 0.5}})
    cell = {"model": "m", "accuracy": math.nan, "low": 0.0, "high": 1.0, "total": 1}
    results = {"kind": "answers", **run_metadata(), "data": ["a.jsonl"], "match": "contains", "left_out": {}}
    results["cells"] = [cell | {"longest_prompt": 1, "state_bytes": 1}]
    (tmp_path / "answers.json").write_text(json.dumps(results))
    assert_refused(r"without files .*answers\.json \('answers to a.jsonl .*nan, not a finite", write_report, tmp_path)
    assert len(json.loads((tmp_path / "overview.json").read_text())["figures"]) == 1


def test_tasks_of_a_group_without_a_score(tmp_path):
    """They have figures; tasks of a group with a score are part of its figure."""
    scores = {task: {"acc,none": value} for task, value in {"mmlu": 0.4, "mmlu_law": 0.3, "arc": 0.2}.items()}
    groups = {"mmlu": ["mmlu_law"], "openllm": ["arc"]}
    figures = read_harness(write_scores(tmp_path / "results_1.json", scores, group_subtasks=groups)).figures("m")
    assert {figure.measure.partition(",")[0] for figure in figures} == {"mmlu", "arc"}


def test_a_measure_that_a_model_has_three_times():
    overview = Overview()
    for value in (1.0, 2.0, 3.0):
        overview.figures.append((Figure("m", "size", value), "own"))
    assert [figure.value for found in overview.rows().values() for figure in found.values()] == [1.0, 2.0, 3.0]


def test_cells_with_line_breaks_of_their_own(tmp_path):
    write_csv(tmp_path / "own.csv", [{"answer": "one\u2028two"}, {"answer": "line one\nline two"}])
    (table,) = own_tables(tmp_path / "own.json")
    assert table.rows == [["one\u2028two"], ["line one\nline two"]]
    (tmp_path / "own.csv").write_text("")
    assert own_tables(tmp_path / "own.json") == []
