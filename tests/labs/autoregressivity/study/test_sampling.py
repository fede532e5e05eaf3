"""Beam search beside DDPM and DDIM, from end to end."""

import json

import pytest

from condense.labs.autoregressivity.study.experiments import ablate
from condense.labs.autoregressivity.study.options import AblationOptions
from condense.labs.autoregressivity.study.sampling import EVALUATIONS, SAMPLERS, SMALL_EVALUATIONS, Sampling


def test_all_samplers_take_the_same_evaluations():
    for evaluations in {*EVALUATIONS, *SMALL_EVALUATIONS}:
        assert 1000 % evaluations == 0
        assert all(sampler.steps(evaluations) > 1 for sampler in SAMPLERS)


@pytest.mark.slow
def test_sampling_from_end_to_end(tmp_path, monkeypatch):
    monkeypatch.setattr("condense.labs.autoregressivity.study.sampling.SMALL_EVALUATIONS", (5,))
    results = ablate("sampling", tmp_path, AblationOptions(small=True, seeds=1))
    found = {sample["sampler"]: sample for sample in results["samples"]}
    assert len(found) == len(results["samples"]) == len(SAMPLERS)
    assert {name: sample["steps"] for name, sample in found.items()} == {
        "DDPM": 5, "DDIM": 5, "likeliest, 1 of 2": 3, "likeliest, 1 of 4": 2, "likeliest, 2 of 4": 2,
        "random, 1 of 2": 3, "random, 1 of 4": 2,
    }  # fmt: skip
    assert found["likeliest, 1 of 4"]["error"] < found["random, 1 of 4"]["error"]
    (table,) = Sampling.tables(json.loads((tmp_path / "ablation_sampling.json").read_text()))
    assert [row[1] for row in table.rows] == ["held-out images", *found]
    ratio = found["likeliest, 1 of 2"]["frechet_distance"] / found["DDPM"]["frechet_distance"]
    assert float(table.rows[3][6]) == pytest.approx(ratio, abs=1e-3)
    assert (tmp_path / "ablation_sampling.png").exists() and not list((tmp_path / "runs").iterdir())
