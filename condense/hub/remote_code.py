"""Lets a saved model be loaded where nothing has imported this package, as in `transformers serve`.

transformers learns of our models when their package is imported. A saved configuration therefore names a module beside
it, `condense_remote.py`, which imports the installed package. transformers calls this remote code, and runs it if the
caller passes `trust_remote_code=True`; where the package has been imported, it doesn't run it.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from ..extras import DISTRIBUTION, how_to_install
from ..laboratories import REGISTERED_BY

MODULE = "condense_remote"


class RemoteCodeConfig:
    """A configuration that is saved with the module that loads its model."""

    model_type: ClassVar[str]
    # The names in the module by Auto class, set by `register`. TRL reads it of any configuration.
    auto_map: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def __post_init__(self, **kwargs):
        kwargs.pop("auto_map", None)  # of a file; the class has its own
        super().__post_init__(**kwargs)  # type: ignore[misc]

    def to_diff_dict(self) -> dict[str, Any]:
        """Extends transformers' method: the fields of a `config.json` include `auto_map`."""
        return {**super().to_diff_dict(), "auto_map": dict(self.auto_map)}  # type: ignore[misc]

    def save_pretrained(self, save_directory, *arguments, **options) -> None:
        """Extends transformers' method: writes the module, too."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{MODULE}.py").write_text(_source(self.model_type, self.auto_map), encoding="utf-8")
        super().save_pretrained(save_directory, *arguments, **options)  # type: ignore[misc]

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Does nothing: after it, transformers would copy the package's modules into each saved folder."""


def auto_map(**classes: type) -> Mapping[str, str]:
    """Returns the names in the module of `classes`, which are given by the name of their Auto class."""
    return MappingProxyType({auto: f"{MODULE}.{one.__name__}" for auto, one in classes.items()})


def _source(model_type: str, names: Mapping[str, str]) -> str:
    """Returns the module's text. transformers looks through a module's imports, except within `try`, and tells users to
    `pip install` what is missing: a name on PyPI that isn't ours.
    """
    package = REGISTERED_BY.get(model_type, "condense")
    imported = ", ".join(sorted(name.rpartition(".")[2] for name in names.values()))
    return f'''"""Loads this model with the installed package {DISTRIBUTION}: the code of trust_remote_code=True."""

try:
    from {package} import {imported}  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"this model needs the package {DISTRIBUTION}, which is not on PyPI ({{error}}): "
        "{how_to_install()}."
    ) from error
'''
