"""The fold with its layers as a flow: what an arm is, and the experiment from training to files."""

import json

import pytest
import torch

from condense import CondenseForCausalLM
from condense.eval.runner import run
from condense.labs.depth.study import fold
from condense.labs.depth.study.fold import SEGMENT, Fold, _share
from condense.labs.depth.study.options import DepthOptions

ARMS = tuple(arm for arm in fold.ARMS if arm.name in ("discrete1", "repeated2"))


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    return tmp_path_factory.mktemp("fold")


@pytest.fixture(scope="module")
def results(output):
    """Measures only two arms, since each is trained."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fold, "ARMS", ARMS)
        yield run(Fold(DepthOptions(small=True, seeds=1), output), output)


def test_a_repeated_layer_is_the_flow_with_its_alpha(results, output):
    """Two Euler steps of alpha 2 are the layer twice, within a segment; its memory is the state at the end."""
    flow = CondenseForCausalLM.from_pretrained(output / "models" / "fold-repeated2-0" / "trained").eval()
    start = CondenseForCausalLM.from_pretrained(output / "models" / "fold-repeated2-0" / "start")
    (block,) = flow.model.layers
    assert block.alpha.item() == 2 and not block.alpha.requires_grad
    assert any(not torch.equal(a, b) for a, b in zip(flow.parameters(), start.parameters(), strict=True))
    layers = CondenseForCausalLM.from_pretrained(
        output / "models" / "fold-repeated2-0" / "llama", segment_length=SEGMENT
    )
    layers.eval().load_state_dict(
        {name: weight for name, weight in flow.state_dict().items() if not name.startswith("model.layers")},
        strict=False,
    )
    for layer in layers.model.layers:
        layer.load_state_dict(block.field.state_dict())
    ids = torch.arange(2 * SEGMENT)[None] % 40
    found, expected = flow(ids).logits, layers(ids).logits
    torch.testing.assert_close(found[:, :SEGMENT], expected[:, :SEGMENT], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(found[:, SEGMENT:], expected[:, SEGMENT:], atol=1e-3)  # the first layer's memory differs


def test_records(results):
    records = {record["arm"]: record for record in results["records"]}
    assert list(records) == [arm.name for arm in ARMS]
    for arm in ARMS:
        record = records[arm.name]
        assert [found["segments"] for found in record["found"]] == [2, 4]
        assert all(found["total"] == 2 for found in record["found"])
        assert record["milestones"] == [[0, 2]]
        assert (record["alpha"] is None) == (not arm.flow)
        assert list(record["found_with_steps"]) == (["1"] if arm.flow else [])
    assert records["repeated2"]["layer_parameters"] == records["discrete1"]["layer_parameters"]  # alpha is fixed


def test_tables_and_files(results, output):
    found, read_with = Fold.tables(results)
    assert [row[0] for row in found.rows] == [arm.described for arm in ARMS] and len(read_with.rows) == 1
    assert found.rows[1][2:4] == [2, f"{results['records'][1]['layer_parameters']:,}"]
    for ending in ("json", "csv", "png", "svg"):
        assert (output / f"depth_fold.{ending}").stat().st_size > 100
    assert len((output / "depth_fold.csv").read_text().splitlines()) == 1 + 2 * 2 + 1


@pytest.mark.usefixtures("without_pictures")
def test_more_seeds_resume(results, output, monkeypatch):
    more = Fold(DepthOptions(small=True, seeds=2), output)
    monkeypatch.setattr(Fold, "measure", lambda self, item: results["records"][0] | {"seed": item.seed, "new": True})
    again = run(more, output)
    assert [record.get("new", False) for record in again["records"]] == [False] * 2 + [True] * 2
    assert json.loads((output / "depth_fold.json").read_text())["seeds"] == 2


def test_what_is_not_used_is_said(tmp_path, capsys):
    Fold(DepthOptions(text=tmp_path / "text.txt", held_out=tmp_path / "held_out.txt"), tmp_path)
    assert "generates its passkey texts: text is not used" in capsys.readouterr().out


def test_shares_by_seed():
    """By hand: 41 of 50 have the Wilson interval 0.692 to 0.902."""
    assert _share([{"correct": 41, "total": 50}]) == "82 (69 to 90)"
    assert _share([{"correct": 41, "total": 50}, {"correct": 50, "total": 50}]) == "82, 100"
