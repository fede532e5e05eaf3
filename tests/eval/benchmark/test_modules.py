"""The memory of a training step by kind and module, against sizes worked out by hand."""

import csv
import json

import pytest
import torch

from condense.eval.benchmark.module_tables import tables
from condense.eval.benchmark.modules import modules
from condense.eval.benchmark.options import ProfileOptions
from condense.eval.report import write_report

from ..measuring import command

pytestmark = [
    pytest.mark.usefixtures("forked_cases"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="sizes are of float32 on a CPU"),
    pytest.mark.process,
]
TOKENS, PARAMETERS, FLOAT32 = 256, 102_208, 4
KINDS = ("folded", "stock")


@pytest.fixture(scope="module")
def output(llama, forked_cases, tmp_path_factory):
    output = tmp_path_factory.mktemp("modules")
    arguments = ["--segment-length", 64, "--lengths", TOKENS, "--optimizer", "off,on", "--output", output]
    shown = command("profile", "--modules", "--config", llama, *arguments)
    for words in ("with AdamW, batch 1, attention auto: tensors at the peak", "kept by the forward pass", "embedding"):
        assert words in shown
    return output


@pytest.fixture(scope="module")
def points(output):
    return {(p["kind"], p["optimizer"]): p for p in json.loads((output / "modules.json").read_text())["points"]}


def test_kinds_of_tensors(points):
    size = FLOAT32 * PARAMETERS
    assert len(points) == 4
    for (_, optimizer), point in points.items():
        assert point["peak"]["parameters"] == point["after"]["gradients"] == size
        assert 0 <= point["peak"]["optimizer"] - optimizer * 2 * size < 1024  # and its count of steps
        assert point["peak"]["total"] == sum(size for kind, size in point["peak"].items() if kind != "total")
        assert point["peak"]["inputs"] == 8 * TOKENS and point["peak"]["activations"] > 0


def test_modules(points):
    """A Llama's MLP keeps gate, its SiLU, up and their product, and gives its output."""
    by_name = {module["module"]: module for module in points["stock", False]["modules"]}
    for layer in (0, 1):
        mlp = by_name[f"model.layers.{layer}.mlp"]
        assert mlp["kept"] == TOKENS * FLOAT32 * (4 * 160 + 64)
        assert mlp["parameters"] == FLOAT32 * 3 * 64 * 160
        assert mlp["kept"] < by_name[f"model.layers.{layer}"]["kept"] < by_name[""]["kept"]
    assert by_name[""]["backward_peak"] == points["stock", False]["peak"]["total"]
    assert by_name["model.embed_tokens"]["kept"] == TOKENS * FLOAT32 * 64
    folded = {module["module"]: module for module in points["folded", False]["modules"]}
    assert folded["model.layers.0.mlp"]["kept"] == by_name["model.layers.0.mlp"]["kept"]  # over all segments


def test_the_head_with_its_loss(points, llama):
    """In blocks it keeps the gradients of its hidden states and of its weights, and frees the last segment's output. In
    stock models it keeps the logits."""
    vocabulary = json.loads((llama / "config.json").read_text())["vocab_size"]
    heads = {kind: [m for m in points[kind, False]["modules"] if m["module"] == "lm_head"] for kind in KINDS}
    for (head,) in heads.values():
        assert head["parameters"] == FLOAT32 * vocabulary * 64
    assert heads["stock"][0]["kept"] == FLOAT32 * TOKENS * vocabulary
    kept = FLOAT32 * 64 * ((TOKENS - 1) + vocabulary - 64)
    assert kept <= heads["folded"][0]["kept"] < kept + 1024  # and numbers
    assert heads["folded"][0]["backward_peak"] is None  # all of it has been done in the forward pass
    *_, by_module = tables({"points": [points["folded", False]]})
    assert [row[-1] for row in by_module.rows if row[2] == "head"] == ["-"]


def test_files(output):
    """A column has one meaning and names its unit: parameters are counted, weights have bytes."""
    lines = list(csv.DictReader((output / "modules.csv").open()))
    assert {line["parameters"] for line in lines} == {str(PARAMETERS)}
    with_frequencies = FLOAT32 * (PARAMETERS + 2 * 8)
    assert {line["weight_bytes"] for line in lines} == {str(with_frequencies)}
    whole = [line for line in lines if line["module"] == ""]
    assert len(whole) == 4 and all(line["activations_at_peak_bytes"] for line in whole)
    assert {line["module_weight_bytes"] for line in whole} == {str(FLOAT32 * PARAMETERS)}
    (attention,) = {line["module_weight_bytes"] for line in lines if line["module"].endswith("layers.1.self_attn")}
    assert int(attention) == FLOAT32 * 4 * 64 * 64
    sizes = [name for name in lines[0] if name.endswith("_bytes")]
    assert len(sizes) == 1 + 4 + 8 and not any(name.startswith("peak_") or name == "kept" for name in lines[0])
    page = write_report(output).read_text()
    assert "by module, peaks of all memory while it runs" in page and page.count("data:image/png") == 1


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"modes": ["prefill"]}, "a table by module shows a training step"),
        ({"kinds": ["mamba"]}, r"kinds=\['mamba'\]"),
        ({"schedules": True}, "leave out --schedules"),
    ],
)
def test_mistakes_are_named(llama, tmp_path, changed, words):
    with pytest.raises(ValueError, match=words):
        modules(tmp_path, ProfileOptions(configs=[str(llama)], modules=True, **{"lengths": [64], **changed}))
