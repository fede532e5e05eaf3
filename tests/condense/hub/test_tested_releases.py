"""Which releases of transformers are announced as untested, and where else their numbers stand."""

import tomllib
import warnings

import pytest
import yaml

from condense.hub.tested_releases import NEWEST, OLDEST, warn_if_untested

from ...conftest import ROOT

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("installed", "words"),
    [
        ("5.17.0", "older than 5.22.*reads text twice"),
        ("5.21.1", "older than 5.22"),
        ("5.22.0", None),
        ("5.24.3", None),
        ("5.25.0.dev0", "newer than 5.24"),
        ("6.0.0", "newer than 5.24"),
    ],
)
def test_untested_releases_are_announced(installed, words):
    if words is None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warn_if_untested(installed)
    else:
        with pytest.warns(UserWarning, match=f"transformers {installed} is {words}"):
            warn_if_untested(installed)


def test_the_oldest_release_is_the_required_and_the_tested_one():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"transformers>={OLDEST},<6" in project["dependencies"]
    jobs = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())["jobs"]
    oldest, _ = jobs["releases"]["strategy"]["matrix"]["include"]
    assert oldest["transformers"] == f"transformers=={OLDEST}.0"
    assert f"transformers {OLDEST}, " in (ROOT / "docs/tools.md").read_text()
    assert f"and {NEWEST} are tested" in (ROOT / "docs/tools.md").read_text()
