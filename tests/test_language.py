"""Phrases that the project's prose avoids, in docstrings, comments, messages and pages."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[1]
PYTHON = [
    path
    for folder in ("condense", "training", "eval", "labs", "scripts", "examples")
    for path in (ROOT / folder).rglob("*.py")
    if not any(parent.is_symlink() for parent in path.parents)
]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]

# A phrase, and what to write instead.
PHRASES = {
    r"(?<![Tt]here )\b(?:is|are|was|were) no (?!longer|more\b|less\b|better|worse|slower|faster)": "is not a",
    r"\bbut for\b": "except",
    r"\banother than\b": "different from",
    r"\ba half of\b": "half",
    r"\bin the place of\b": "in place of",
    r'"""(?:Of|Those|What)\b': "Begin a docstring with a verb.",
    r"(?:^|[.:;] )Those (?:of|that|with|which)\b": "Name the things.",
    r"""pip install ['"]?condense[-_]llama(?!-)""": "how_to_install() of condense.extras: PyPI has no such package.",
}


def found(pattern: str, path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [
        f"{path.relative_to(ROOT)}:{n}: {line.strip()}" for n, line in enumerate(lines, 1) if re.search(pattern, line)
    ]


@pytest.mark.parametrize("pattern", PHRASES)
def test_avoided_phrases(pattern):
    lines = [line for path in (*PYTHON, *PAGES) for line in found(pattern, path)]
    assert not lines, f"write {PHRASES[pattern]!r} instead:\n" + "\n".join(lines)


def test_avoided_phrases_are_found(tmp_path, monkeypatch):
    path = tmp_path / "page.md"
    path.write_text(
        'It is no map.\nIt is no longer.\nAll but for one.\n"""Of a map."""\nNo. Those of maps.\nThere is no map.\n'
        "All in the place of one.\npip install 'condense-llama[eval]'\npip install condense_llama-1.whl\n"
    )
    monkeypatch.setattr("tests.test_language.ROOT", tmp_path)
    assert [len(found(pattern, path)) for pattern in PHRASES] == [1, 1, 0, 0, 1, 1, 1, 1]
