"""The recipes and DeepSpeed configurations of this package, found by name; a user's own are files."""

import difflib
from pathlib import Path

import condense

RECIPES = Path(__file__).with_name("recipes")
DEEPSPEED_CONFIGS = Path(condense.__file__).with_name("deepspeed_configs")


def recipe_names() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def find_recipe(named: str | Path) -> Path:
    """Finds a file, or this package's recipe of that name. Raises `ValueError` if there is neither."""
    return _find("recipe", named, RECIPES, ".yaml")


def find_deepspeed_config(named: str | Path) -> Path:
    """Finds a file, or this package's DeepSpeed configuration. Raises `ValueError` like `find_recipe`."""
    return _find("DeepSpeed configuration", named, DEEPSPEED_CONFIGS, ".json")


def _find(kind: str, named: str | Path, folder: Path, ending: str) -> Path:
    path, names = Path(named), sorted(path.stem for path in folder.glob(f"*{ending}"))
    if path.is_file():
        return path
    if str(path) in names:
        return folder / f"{path}{ending}"
    (nearest,) = difflib.get_close_matches(path.stem, names, n=1, cutoff=0)
    raise ValueError(
        f"there is no {kind} {str(named)!r}: pass the path of a file, or a name of this package, such as {nearest} "
        f"(all: {', '.join(names)})."
    )
