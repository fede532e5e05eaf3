"""The names of transformers that stand without a promise: all that the code uses are listed, and all listed exist."""

import ast
import importlib
import inspect
import pkgutil
import sys

import pytest
import transformers
from torch import nn

import condense
from condense.hub.transformers_private import PRIVATE_NAMES

from .conftest import ROOT

pytestmark = pytest.mark.unit

FOLDERS = ("condense", "training", "eval", "labs")
OTHERS = {"_hf_hook"}  # accelerate's
LISTED = {name for names in PRIVATE_NAMES.values() for name in names}
HOME = "condense/hub/transformers_private.py"


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def of_transformers(cls):
    return [base for base in cls.__mro__ if base.__module__.startswith("transformers.")]


def sources():
    folders = [(ROOT / folder).rglob("*.py") for folder in FOLDERS]
    links = {ROOT / "condense" / folder for folder in ("training", "eval", "labs")}
    paths = {path for found in folders for path in found if not links & set(path.parents)}
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in sorted(paths)}


SOURCES = sources()


def names_of_transformers():
    """Private names of the classes in the list, from their attributes and from what their methods set."""
    owners = [base for owner in PRIVATE_NAMES for base in of_transformers(getattr(transformers, owner))]
    attributes = {name for owner in owners for name in vars(owner)}
    trees = [ast.parse(inspect.getsource(module)) for module in {sys.modules[owner.__module__] for owner in owners}]
    used = {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return {name for name in attributes | used if is_private(name)} - set(dir(nn.Module())) - OTHERS


def read_attributes():
    """Private attributes, and names as strings, in our code, except those that the same file defines itself."""
    found = {}
    for path, tree in SOURCES.items():
        nodes = list(ast.walk(tree))
        own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        own |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
        names = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
        names |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        found |= {name: path for name in names - own if is_private(name) and path != HOME}
    return found


def overridden():
    """Private methods and attributes of transformers that our classes define."""
    found = {}
    for module in pkgutil.walk_packages(condense.__path__, "condense."):
        if module.name.endswith("__main__"):
            continue
        try:
            members = vars(importlib.import_module(module.name)).values()
        except ImportError:  # an extra that is not installed
            continue
        for cls in (one for one in members if isinstance(one, type) and one.__module__ == module.name):
            theirs = {name for base in of_transformers(cls) for name in vars(base)}
            found |= {name: cls.__qualname__ for name in set(vars(cls)) & theirs if is_private(name)}
    return found


def test_all_private_names_in_use_are_listed():
    theirs = names_of_transformers()
    used = overridden() | {name: path for name, path in read_attributes().items() if name in theirs}
    used = {name: place for name, place in used.items() if not name.startswith("_abc_")}
    assert {name: place for name, place in used.items() if name not in LISTED} == {}
    assert LISTED - set(used) == set(), "listed, and used no more"


@pytest.mark.parametrize("owner", PRIVATE_NAMES)
def test_all_listed_names_exist(owner):
    cls = getattr(transformers, owner)
    text = "".join(inspect.getsource(sys.modules[base.__module__]) for base in of_transformers(cls))
    missing = [name for name in PRIVATE_NAMES[owner] if not hasattr(cls, name) and f".{name} " not in text]
    assert missing == [], f"transformers {transformers.__version__} has no such names"


def test_private_modules_are_imported_in_one_place():
    """Files of models, whose contents change with each release, and names with an underscore."""
    found = {}
    for path, tree in SOURCES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers"):
                names = [alias.name for alias in node.names if is_private(alias.name)]
                if node.module.startswith("transformers.models.") or names:
                    found.setdefault(path, []).append(node.module)
    assert set(found) == {HOME}
