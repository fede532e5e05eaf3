"""Pages of the site that are written from the code."""

import dataclasses
import re
from types import SimpleNamespace

import pytest
from transformers import TrainingArguments

pytest.importorskip("mkdocs")
from scripts import site_pages

pytestmark = pytest.mark.unit


def test_every_command_and_option_is_on_the_page():
    from condense.cli.main import app

    page = site_pages.command_line()
    for name in ("convert", "generate", "eval passkey", "study healing", "sample", "train"):
        assert re.search(rf"^##+ condense {name}\b", page, re.MULTILINE), name
    assert "| `--segment-length` |" in page
    commands = [info.name or info.callback.__name__ for info in app.registered_commands if not info.hidden]
    assert all(f"condense {name.replace('_', '-')}" in page for name in commands)


def test_every_key_of_a_recipe_is_on_the_page():
    from condense.training.recipe.models import MODELS
    from condense.training.recipe.schema import Optimizer, Recipe

    sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", site_pages.recipes(), re.MULTILINE | re.DOTALL))
    expected = {"A recipe": Recipe, "optimizer": Optimizer}
    expected |= {f"model, kind: {kind.model_fields['kind'].default}": kind for kind in MODELS.all()}
    for title, section in expected.items():
        assert re.findall(r"^\| `(\w+)` \|", sections[title], re.MULTILINE) == list(section.model_fields)
    assert (
        "| `learning_rate` | `float` | `0.001` | from here on | (Trainer: `learning_rate`) |" in sections["optimizer"]
    )


def test_names_of_the_trainer_exist():
    names = {field.name for field in dataclasses.fields(TrainingArguments)} | {"resume_from_checkpoint"}
    assert {name.split(":")[0] for name in site_pages.TRAINER_NAMES.values()} <= names


def test_a_link_that_leaves_the_documentation_becomes_text():
    page = SimpleNamespace(file=SimpleNamespace(src_uri="fold.md"))
    text = "[a](limits.md#the-memory) [b](../condense/layers.py) [c](https://a.b) ![d](results/x.png)"
    assert site_pages.on_page_markdown(text, page, None, None) == (
        "[a](limits.md#the-memory) b [c](https://a.b) ![d](results/x.png)"
    )
    with pytest.raises(AssertionError, match="missing"):
        site_pages.on_page_markdown("[b](../condense/missing.py)", page, None, None)


def test_a_link_by_file_name_shows_the_title_of_the_page():
    page = SimpleNamespace(file=SimpleNamespace(src_uri="results/depth/README.md"))
    titles = {"depth.md": SimpleNamespace(page=SimpleNamespace(title="Continuous depth"))}
    files = SimpleNamespace(get_file_from_path=titles.__getitem__)
    text = "[depth.md](../../depth.md#solvers) and [the solvers](../../depth.md)"
    assert site_pages.on_page_markdown(text, page, None, files) == (
        "[Continuous depth](../../depth.md#solvers) and [the solvers](../../depth.md)"
    )


def test_a_plot_opens_its_file():
    page = SimpleNamespace(file=SimpleNamespace(src_uri="depth.md"))
    assert site_pages.on_page_markdown("Text.\n\n![a plot](results/x.png)\n", page, None, None) == (
        "Text.\n\n[![a plot](results/x.png)](results/x.png)\n"
    )


def test_links_between_pages_work_in_the_repository_too():
    """Pages that the site writes from code have a page there to be linked to."""
    pages = [site_pages.ROOT / "README.md", *(site_pages.ROOT / "docs").rglob("*.md")]
    links = [(page, target) for page in pages for target in re.findall(r"\]\(([^)#\s]+)", page.read_text())]
    assert len(links) > 200
    assert not [(page, target) for page, target in links if "://" not in target and not (page.parent / target).exists()]
