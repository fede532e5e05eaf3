"""Who may import whom: floors in order, no circles, and a core that stands without its laboratories."""

import ast
import re
from pathlib import Path
from pkgutil import resolve_name

import pytest

from condense import laboratories

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[1]
# Nothing imports from a later one. In a checkout the three floors in the middle are links to top-level folders.
FLOORS = {
    "condense": 0,
    "condense.training": 1,
    "condense.eval": 2,
    "condense.labs": 3,
    "condense.cli": 4,
    "condense.cli.command": 0,  # the class of all commands, those of condense.eval.cli too
    "condense.__main__": 4,
}
# A laboratory may use those before it.
LABORATORIES = tuple(f"condense.labs.{name}" for name in ("depth", "autoregressivity", "continuity", "ingredients"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "condense" else ("condense", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {
    module_name(path): path
    for folder in ("condense", "training", "eval", "labs")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path.resolve() == path
}


def imports(name: str) -> set[str]:
    """The project's modules that a module imports anywhere in it, relative imports resolved."""
    path, found = SOURCES[name], set()
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found |= {f"{base}.{alias.name}" if f"{base}.{alias.name}" in SOURCES else base for alias in node.names}
    return found & SOURCES.keys() - {name}


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    return {name: imports(name) for name in SOURCES}


def floor(name: str) -> int:
    return FLOORS[max((prefix for prefix in FLOORS if f"{name}.".startswith(f"{prefix}.")), key=len)]


def test_the_graph_is_seen(graph):
    """The control: known imports of each form are in it."""
    assert "condense.attention.dispatch" in graph["condense.attention"]
    assert "condense.durations" in graph["condense.labs.continuity.model.sentence"]
    assert "condense.hub.loading" in graph["condense.training.recipe.models"] and len(graph) > 100


def test_nothing_imports_upwards(graph):
    assert [(name, other) for name in graph for other in graph[name] if floor(other) > floor(name)] == []


def laboratory_of(name: str) -> str | None:
    return next((lab for lab in LABORATORIES if f"{name}.".startswith(f"{lab}.")), None)


def test_the_core_imports_no_laboratory(graph):
    """Not within a function either: it knows the names in `condense.laboratories`, and resolves them."""
    imported = [(name, other) for name in graph for other in graph[name] if laboratory_of(other)]
    assert {laboratory_of(other) for _, other in imported} == set(LABORATORIES)
    outside = [(name, other) for name, other in imported if not name.startswith("condense.labs")]
    assert outside == []


def test_the_root_holds_the_model():
    modules = [name for name in SOURCES if name.count(".") == 1 and not (ROOT / name.replace(".", "/")).is_dir()]
    assert "condense.layers" in modules and len(modules) <= 30


def test_a_laboratory_imports_only_those_before_it(graph):
    order = {name: number for number, name in enumerate(LABORATORIES)}
    pairs = {(laboratory_of(name), laboratory_of(other)) for name in graph for other in graph[name]}
    assert [(one, other) for one, other in pairs if one and other and order[one] < order[other]] == []


@pytest.mark.parametrize(
    "table", ["DECODER_BLOCKS", "STOCK_MODELS", "MODEL_KINDS", "OBJECTIVES", "COMMANDS", "STUDIES", "SHOWN_BY"]
)
def test_what_laboratories_add_is_there(table):
    for name, path in getattr(laboratories, table).items():
        assert laboratory_of(path.partition(":")[0]) and callable(resolve_name(path)), name


def test_there_are_no_import_circles(graph):
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            for other in sorted(graph[name]):
                visit(other, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize("module", ["condense", "condense.training.recipe", "condense.training.train"])
def test_the_core_does_not_load_its_laboratories(module, new_process):
    loaded = new_process(f"import sys, {module}; print(*sys.modules)").stdout.split()
    assert module in loaded and "condense.modeling" in loaded
    assert [name for name in loaded if laboratory_of(name)] == []


def test_each_list_of_names_stands_in_one_place():
    """The configuration accepts the names that are implemented."""
    from condense.attention import IMPLEMENTATIONS
    from condense.configuration import ATTENTION_IMPLEMENTATIONS, SCHEDULES
    from condense.execution import EXECUTORS

    assert set(ATTENTION_IMPLEMENTATIONS) == {"auto", *IMPLEMENTATIONS}
    assert set(SCHEDULES) == {"auto", "graph", *EXECUTORS}


def test_a_layer_reads_itself(graph):
    """It names operations, and neither the memory for their results nor who computes several layers at once."""
    source, tree = SOURCES["condense.layers"].read_text(), ast.parse(SOURCES["condense.layers"].read_text())
    assert len(source.splitlines()) <= 180
    assert [name for name in graph["condense.layers"] if name.startswith("condense.execution")] == []
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert names >= {"rms_norm", "rotate", "silu_product", "apply_linear", "attend"}
    names |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert [name for name in names if re.search("kernel|buffer|place|stack|band|_mn", name)] == []


def test_results_stay_small():
    """Pages show a picture, its table and what it takes to make them again. Adapters are weights that users load."""
    files = [path for path in (ROOT / "docs" / "results").rglob("*") if path.is_file() and path.suffix != ".svg"]
    adapters = [path for path in files if path.parent.name == "adapters"]
    shown = [path for path in files if path not in adapters]
    assert 100 < len(shown) <= 150 and sum(path.stat().st_size for path in shown) <= 5e6
    assert sum(path.stat().st_size for path in adapters) <= 4e6


def test_modules_and_functions_can_be_read_in_one_sitting():
    modules = {name: len(path.read_text().splitlines()) for name, path in SOURCES.items()}
    assert {name: lines for name, lines in modules.items() if lines > 450} == {}
    functions = {
        f"{name}.{node.name}": node.end_lineno - node.lineno + 1
        for name, path in SOURCES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.end_lineno is not None
    }
    assert {name: lines for name, lines in functions.items() if lines > 80} == {}
