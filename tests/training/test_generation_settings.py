"""A checkpoint's settings of `generate` with which transformers would refuse to save the trained model."""

import json
import subprocess

import pytest
from transformers import AutoTokenizer, GenerationConfig

import condense.cli.main
from condense.hub.generation_settings import remove_ineffective
from condense.training import train
from condense.training.recipe import load_recipe

from .runs import folded_recipe

pytestmark = pytest.mark.process


@pytest.fixture
def recipe(tmp_path):
    """Its model ends texts with another token than its tokenizer, and Trainer changes its settings of `generate`."""
    path = folded_recipe(tmp_path, (100, 2), global_batch=2, checkpoints={"every": 1})
    give(path, eos_token_id=0)
    return path


def give(recipe, **settings):
    path = recipe.parent / "start" / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def test_settings_without_effect_are_left_out_of_the_trained_model(recipe, tmp_path, capsys):
    """Trainer has changed the settings by then, so that transformers would refuse to save them."""
    give(recipe, temperature=0.6, top_p=0.9, repetition_penalty=1.2)
    train.train(load_recipe(recipe, [f"output={tmp_path / 'out'}"]))
    printed = capsys.readouterr().out
    assert "generation_config.json leaves out what has no effect there: temperature=0.6, top_p=0.9\n" in printed
    saved = GenerationConfig.from_pretrained(tmp_path / "out")
    assert (saved.temperature, saved.top_p, saved.repetition_penalty) == (None, None, 1.2)
    assert saved.eos_token_id == [AutoTokenizer.from_pretrained(tmp_path / "out").eos_token_id, 0]


def test_settings_with_an_effect_are_kept(recipe, tmp_path, capsys):
    give(recipe, do_sample=True, temperature=0.6)
    train.train(load_recipe(recipe, [f"output={tmp_path / 'out'}"]))
    saved = GenerationConfig.from_pretrained(tmp_path / "out")
    assert saved.do_sample is True and saved.temperature == 0.6 and "leaves out" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "removed"),
    [
        ({"do_sample": False, "top_k": 7, "num_beams": 1, "length_penalty": 0.5}, {"top_k", "length_penalty"}),
        ({"num_beams": 4, "early_stopping": True}, set()),
        ({"use_cache": False, "cache_implementation": "static"}, {"cache_implementation"}),
        ({"output_attentions": True, "max_new_tokens": 7}, {"output_attentions"}),
    ],
)
def test_what_has_no_effect_is_unset_and_nothing_else(settings, removed):
    """Afterwards transformers saves it, whatever has changed."""
    made = GenerationConfig(**settings)
    assert remove_ineffective(made) == {name: settings[name] for name in removed}
    made.validate(strict=True)
    kept = {name: value for name, value in settings.items() if name not in removed}
    assert {name: getattr(made, name) for name in kept} == kept


@pytest.mark.parametrize("settings", [{"num_return_sequences": 3}, {"max_new_tokens": 0}, {"early_stopping": "often"}])
@pytest.mark.parametrize("command", ["train", "convert"])
def test_impossible_settings_are_refused_at_the_start(recipe, tmp_path, monkeypatch, capsys, command, settings):
    give(recipe, **settings)

    def start(*args, **kwargs):
        raise AssertionError("ranks were started")

    monkeypatch.setattr(subprocess, "Popen", start)
    out = tmp_path / "out"
    given = {"train": [str(recipe), f"output={out}"], "convert": [str(tmp_path / "start"), str(out)]}[command]
    monkeypatch.setattr("sys.argv", ["condense", command, *given])
    with pytest.raises(SystemExit) as ended:
        condense.cli.main.main()
    (said,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("condense:")]
    assert ended.value.code == 1 and "start/generation_config.json can't be used (" in said
    assert next(iter(settings)) in said and "correct it, or delete it for the default settings" in said
    assert not out.exists()
