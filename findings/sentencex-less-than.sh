#!/usr/bin/env bash
# One less-than sign makes sentencex join every sentence up to the next closing bracket.
#
# Versions: sentencex 1.0.32, Python 3.11; seen on 28 November 2026.
# Seen:     "<" counts as an opening bracket, and any of ) ] } > closes it, however many sentences later in the
#           paragraph. Everything between is one sentence: "The p-value was < 0.05. We rejected it. The effect was
#           large (d = 0.8)." comes back whole, while with "below" in place of "<" it has three sentences.
# Expected: a bracket that no bracket of its kind closes doesn't hide the ends of sentences. The README says that
#           boundaries stay away where the context is ambiguous, and speaks of abbreviations, initials, quotes and
#           lists; nothing is ambiguous here, and an opening "(" that nothing closes does leave the sentences apart.
# Matters:  "<" is everyday in papers, reports and mathematics. Such a paragraph becomes one long "sentence", and
#           whatever works by sentence (translation, alignment, speech, statistics) gets it without any trace.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env
env/bin/pip install -q sentencex==1.0.32

env/bin/python - <<'PYTHON'
import sys

from sentencex import segment

middle = "We rejected it. Nobody was surprised. "
cases = [
    ("The p-value was below 0.05. " + middle + "The effect was large (d = 0.8).", 4),
    ("The p-value was < 0.05. " + middle + "The effect was large (d = 0.8).", 1),
    ("The p-value was < 0.05. " + middle + "The effect was large.", 4),
    ("Take any x < 3. " + middle + "The result is > 0.", 1),
    ("The p-value was (low. " + middle + "The effect was large.", 4),
    ("The p-value was < 0.05. " + middle * 20 + "See [1].", 1),
]
changed = False
for text, described in cases:
    sentences = list(segment("en", text))
    changed |= len(sentences) != described
    shown = text if len(text) < 120 else f"{text[:60]} ... {text[-20:]}"
    print(f"{len(sentences)} sentence(s): {shown}")
sys.exit("Changed: the numbers of sentences are not those described." if changed else 0)
PYTHON
