"""Recipes from YAML files, with overrides from the command line."""

import json
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from condense import CondenseConfig
from condense.utils.files import read_text

from ..presets import find_recipe
from .errors import explain
from .schema import Recipe
from .section import number

KEY_OF_TEXT = {"model": "source", "objective": "kind"}  # the key that a text in place of a section stands for
FILES = "sources"  # the key of `data` that the name of a file, or a pattern of names, stands for
NULL, MERGE, TEXT = (f"tag:yaml.org,2002:{name}" for name in ("null", "merge", "str"))


class _Loader(yaml.SafeLoader):
    """Reads all values but null as the text that was written, since YAML takes 2026-11-28 for a date, 12:30 for 750 and
    010 for 8: a field reads its own numbers and booleans.

    Refuses a key that a section has twice. An alias is a copy, so an override changes only the place it names.
    """

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in found if tag in (NULL, MERGE)]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_node(self, parent: Any, index: Any) -> Any:
        is_alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        return deepcopy(node) if is_alias else node

    def compose_mapping_node(self, anchor: Any) -> Any:
        node, found = super().compose_mapping_node(anchor), set[tuple[str, str]]()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.tag != MERGE):
            if (key.tag, key.value) in found:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} occurs twice", problem_mark=key.start_mark)
            found.add((key.tag, key.value))
        return node


def load_recipe(named: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a YAML file, or a recipe of this package by name, and applies overrides such as `stages.0.steps=10`.

    `steps=10` changes the last stage, or the curriculum, so there are 10 steps in all. `data=BOOK.txt` replaces the
    sources. A DeepSpeed configuration beside the recipe is found from any folder. Raises `ValueError` with all unknown
    or impossible keys, and if an override names a folded model whose segments the recipe would change.
    """
    path = find_recipe(named)
    try:
        fields = yaml.load(read_text(path), _Loader) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"recipe {path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"recipe {path} holds a {type(fields).__name__}, not keys and values.")
    for section, key in KEY_OF_TEXT.items():
        if isinstance(fields.get(section), str):
            fields[section] = {key: fields[section]}
    if isinstance(fields.get("data"), str):
        fields["data"] = {"task": "text", FILES: _source_of(fields["data"])}
    deepspeed = fields.get("deepspeed")
    if isinstance(deepspeed, str) and (path.parent / deepspeed).is_file():
        fields["deepspeed"] = str(path.parent / deepspeed)
    for override in overrides:
        _apply(fields, override)
    _check_segment_length(fields, overrides)
    try:
        return Recipe.model_validate(fields)
    except ValidationError as error:
        problems = "\n".join(explain(problem, Recipe, fields) for problem in error.errors())
        raise ValueError(f"recipe {named}:\n{problems}") from error


def _check_segment_length(fields: dict[str, Any], overrides: Sequence[str]) -> None:
    """Raises `ValueError` if overrides name a folded model and the recipe's segment length differs from its own."""
    model, given = fields.get("model"), dict(override.split("=", 1) for override in overrides)
    names_source = "model.source" in given or isinstance(_parse(given.get("model", "{}")), str)
    if not isinstance(model, dict) or not names_source or "model.segment_length" in given:
        return
    try:
        config = json.loads(read_text(Path(model["source"]) / "config.json"))
        own = config["segment_length"] if config["model_type"] == CondenseConfig.model_type else None
    except (KeyError, TypeError, ValueError):  # a hub id, or a damaged folder, which loading refuses
        return
    length = number(model.get("segment_length"))
    if own is not None and length not in (None, own):
        raise ValueError(
            f"model={model['source']} is folded with segments of {own} tokens, and the recipe has "
            f"model.segment_length={length} for another model: add model.segment_length=null to keep {own}, or "
            f"model.segment_length={length} to change it."
        )


def _apply(fields: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    if not equals:
        raise ValueError(f"{override!r} is not an override: write key=value.")
    if name == "data" and not text.lstrip().startswith("{"):  # a pattern such as *.txt is not YAML
        name, value = f"data.{FILES}", _source_of(text)
    else:
        value = _parse(text)
    if name in KEY_OF_TEXT and isinstance(value, str):  # the section's other keys stay
        name = f"{name}.{KEY_OF_TEXT[name]}"
    if name == "steps":
        name, value = _last_steps(fields, value)
    *sections, last = name.split(".")
    section: Any = fields
    for key in sections:
        if isinstance(section, dict) and section.get(key) is None:
            section[key] = {}
        section = section[key] if isinstance(section, dict) else _item(section, key)
    if isinstance(section, dict):
        section[last] = value
    elif _item(section, last) is not None:
        section[int(last)] = value
    else:
        raise ValueError(f"{override!r}: {'.'.join(sections) or 'the recipe'} holds no keys.")


def _source_of(files: str) -> list[dict[str, str]]:
    return [{"files": files}]


def _last_steps(fields: dict[str, Any], steps: Any) -> tuple[str, Any]:
    """Returns the key and the value that give a recipe `steps` steps: the curriculum's, or the last stage's."""
    stages = fields.get("stages")
    if not stages:
        return "curriculum.steps", steps
    try:
        before = sum(number(stage["steps"]) for stage in stages[:-1])
    except (TypeError, KeyError):
        raise ValueError(
            f"steps={steps} changes the last stage, and stages={stages!r} is not a list of stages with steps: correct "
            "the stages first."
        ) from None
    steps = number(steps)
    if not isinstance(steps, int | float) or steps <= before:
        raise ValueError(f"steps={steps}: the stages before the last one have {before} steps; give a larger number.")
    return f"stages.{len(stages) - 1}.steps", steps - before


def _item(section: Any, key: str) -> Any:
    fits = isinstance(section, list) and key.isdecimal() and int(key) < len(section)
    return section[int(key)] if fits else None


def _parse(text: str) -> Any:
    """Returns YAML's value: a text without quotes is taken whole, `#` included, as the shell has passed it on."""
    try:
        node = yaml.compose(text, _Loader)
        is_plain = node is None or (isinstance(node, yaml.ScalarNode) and node.style is None and node.tag == TEXT)
        return text.strip() or None if is_plain else yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ValueError(f"the override's value {text!r} is not YAML: {' '.join(str(error).split())}") from error
