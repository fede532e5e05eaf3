"""The page holds every number, and needs no other file."""

import json
import re
import shutil
from pathlib import Path

import pytest
from PIL import Image

from condense.eval.report import write_report
from condense.eval.results import run_metadata
from condense.eval.tasks.passkey import Passkey

from ..refusals import assert_refused
from .test_training_report import write_log

RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Writes results as the commands do, by hand."""
    folder = tmp_path_factory.mktemp("results")
    cells = [
        {"model": "a <b>", "length": length, "depth": depth, "correct": 3, "total": 4, "accuracy": 0.75, "low": 0.3,
         "high": 0.95, "state_bytes": 2048} for length in (80, 1000) for depth in (0.0, 1.0)
    ]  # fmt: skip
    results = {"kind": "passkey", **run_metadata(), "models": [{"name": "a <b>"}], "depths": [0.0, 1.0]}
    results |= {"lengths": [80, 1000], "cells": cells, "longest_trained": {"a <b>": 80}}
    (folder / "one" / "passkey").mkdir(parents=True)
    (folder / "one" / "passkey" / "passkey.json").write_text(json.dumps(results))
    Passkey.draw(results, folder / "one" / "passkey" / "passkey")
    lines = [{"step": 10 * i, "loss": 1 / i, "segments": i} for i in range(1, 5)] + [{"step": 40, "eval_loss": 0.25}]
    write_log(folder / "run" / "trained", lines)
    lines = [{"step": 5000, "loss": 2.0, "learning_rate": 1e-4}]
    write_log(folder / "staged", [*lines, {"step": 5000, "eval_loss": 2.5, "eval_passkey_accuracy": 0.875}])
    (folder / "staged" / "recipe.json").write_text(json.dumps({"evaluation": {"reference_loss": 2.323}}))
    return folder


def test_the_page_stands_alone(folder):
    page = write_report(folder, title="a <test>").read_text()
    assert "a &lt;test&gt;" in page and "a &lt;b&gt;: % correct" in page and page.count("data:image/png;base64,") == 4
    assert "src=" in page and 'src="http' not in page and re.findall('href="([^#][^"]*)"', page) == []
    cells = re.findall("<td[^>]*>([^<]*)", page)
    assert cells[cells.index("staged") :][:7] == ["staged", "5,000", "", "2.0000", "2.5000", "2.323", "87.5%"]
    for cell in ("1,000", "75.0", "2.0", "run/trained", "0.5208", "0.2500"):
        assert cell in cells, cell
    assert run_metadata()["hardware"] in page and f"torch {run_metadata()['versions']['torch']}" in page


def test_each_result_has_its_own_pictures(tmp_path):
    """`ablation` has one picture, without the pictures of `ablation_blocks`."""
    for name in ("ablation", "ablation_blocks"):
        for suffix in (".json", ".png"):
            shutil.copy(RESULTS / "autoregressivity" / f"{name}{suffix}", tmp_path)
    shutil.copy(tmp_path / "ablation_blocks.png", tmp_path / "ablation_blocks-again.png")
    _, *sections = write_report(tmp_path).read_text().split("<h2")
    assert [section.count("data:image/png;base64,") for section in sections] == [1, 2]


def test_words_stand_at_the_left_and_numbers_at_the_right(folder):
    page = write_report(folder).read_text()
    table = page.split("<h3>passkey retrieval, all depths together</h3>")[1].split("</table>")[0]
    assert "words" not in table  # tokens, shares, intervals and sizes
    runs = page.split("<h3>runs</h3>")[1].split("</table>")[0]
    assert re.findall('class="words">([^<]*)', runs)[:3] == ["run", "run/trained", "staged"]
    assert "<td>2.0000" in runs and "<th>steps" in runs


def test_pictures_have_the_width_of_their_letters(folder, tmp_path):
    """A picture of twice the width is shown twice as wide, whatever room there is: letters have one size."""
    widths = [int(found) for found in re.findall(r"--width: (\d+)px", write_report(folder).read_text())]
    pixels = [Image.open(path).width for path in sorted((folder / "one").rglob("*.png"))]
    pixels += [Image.open(folder / f"training{suffix}.png").width for suffix in ("", "-validation")]
    assert widths == [round(0.72 * width) for width in pixels]


def test_a_picture_that_is_none_is_left_out(folder, tmp_path):
    results = tmp_path / "results"
    shutil.copytree(folder, results)
    (results / "one" / "passkey" / "passkey.png").write_text("no picture")
    assert_refused(r"one/passkey/passkey\.png \(not a PNG\)", write_report, results)
    page = (results / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 3 and "75.0" in page


@pytest.mark.parametrize(("number", "expected"), [(1, (1, 1)), (2, (1, 2)), (3, (1, 3)), (4, (2, 2)), (7, (3, 3))])
def test_heat_maps_stand_side_by_side(number, expected, tmp_path, monkeypatch):
    """As many as fit on a page, so no half of it is empty."""
    drawn = []
    monkeypatch.setattr("condense.eval.results._save", lambda figure, _: drawn.append(figure))
    models = [f"m{n}" for n in range(number)]
    cell = {"length": 80, "depth": 0.0, "correct": 3, "total": 4, "accuracy": 0.75, "low": 0.3, "high": 0.95}
    results = {"models": [{"name": name} for name in models], "depths": [0.0], "lengths": [80]}
    results |= {"cells": [{"model": name, "state_bytes": 1, **cell} for name in models]}
    Passkey.draw(results | {"longest_trained": dict.fromkeys(models)}, tmp_path / "passkey")
    (figure,) = drawn
    panels = [axes for axes in figure.axes if axes.get_title()]
    grid = panels[0].get_subplotspec().get_gridspec()
    assert [axes.get_title() for axes in panels] == models and (grid.nrows, grid.ncols) == expected
    assert figure.get_size_inches()[0] <= 11


def test_a_page_sorts_signed_and_tiny_numbers_by_their_value(folder):
    (number,) = re.findall(r"match\(/(.+?)/\)", write_report(folder).read_text())
    cells = {
        "+0.0588": 0.0588,
        "-0.0030": -0.003,
        "1.2e-05 [1e-05, 2e-05]": 1.2e-5,
        "75.0": 75,
        "4.47x": 4.47,
        "1024+": 1024,
    }
    assert {cell: float(re.match(number, cell)[0]) for cell in cells} == cells


def test_an_empty_folder_is_named(tmp_path):
    assert_refused(r"holds no passkey.json, .*log.jsonl", write_report, tmp_path)


@pytest.mark.parametrize("linked", ["passkey.png", "passkey.json", "log.jsonl", "recipe.json"])
def test_links_are_not_read_into_the_page(folder, tmp_path, linked):
    """A picture, a result, a log and a recipe that lead out of the folder; the page names them."""
    results = tmp_path / "results"
    shutil.copytree(folder, results)
    (results / "report.html").unlink(missing_ok=True)
    outside = tmp_path / "outside"
    outside.mkdir()
    for path in results.rglob(linked):
        path.rename(outside / path.parent.name)
        path.symlink_to(outside / path.parent.name)
    names = [str(path.relative_to(results)) for path in results.rglob(linked)]
    with pytest.raises(ValueError, match=r"a link\)") as refused:
        write_report(results)
    page = (results / "report.html").read_text()
    for name in names:
        named = name.replace("recipe.json", "log.jsonl")  # the run that it belongs to is left out
        assert named in str(refused.value) and f"<code>{named}</code>" in page
    assert page.count("data:image/png;base64,") == {"passkey.png": 3, "passkey.json": 2, "log.jsonl": 2}.get(linked, 4)
    assert ("87.5%" in page) is (linked not in ("log.jsonl", "recipe.json"))
    assert ("75.0" in page) is (linked != "passkey.json")


@pytest.mark.parametrize("linked", ["report.html", "training.png", "training.svg"])
def test_links_are_not_written_through(folder, tmp_path, linked):
    results = tmp_path / "results"
    shutil.copytree(folder, results)
    secret = tmp_path / "secret"
    secret.write_bytes(b"the key of another account")
    (results / linked).unlink(missing_ok=True)
    (results / linked).symlink_to(secret)
    assert_refused(rf"{linked} is a link, and results are not written through links: delete it", write_report, results)
    assert secret.read_bytes() == b"the key of another account" and (results / linked).is_symlink()


def test_a_linked_folder_is_not_searched(folder, tmp_path):
    results = tmp_path / "results"
    results.mkdir()
    shutil.copytree(folder / "run", results / "run")
    (results / "one").symlink_to(folder / "one")
    page = write_report(results).read_text()
    assert "run/trained" in page and "% correct" not in page
    through = tmp_path / "link"
    through.symlink_to(results)  # the folder that the user names may be one
    assert "run/trained" in write_report(through).read_text()
