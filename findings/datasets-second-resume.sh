#!/usr/bin/env bash
# A stream of datasets 5.0.0 that is resumed for the second time starts at its first row again.
#
# Versions: datasets 5.0.0, and 5.2.0 for comparison (4.8.4 and 5.0.1 do as 5.2.0); Python 3.11; seen on 28 November
#           2026.
# Seen:     `state_dict()` of a stream that went on from `load_state_dict()` holds position 0, whatever was read
#           since. The first resume is right; a resume from a state saved after it begins with row 0. No warning, no
#           error.
# Expected: a state saved after a resume continues where it was saved, as the documentation of `load_state_dict` says
#           (its two exceptions, shuffle buffers and batched maps of Arrow tables, play no part here).
# Matters:  a training run that is stopped twice reads its first documents again and never reaches its last ones.
#           A requirement such as `datasets>=4` admits this release.
set -euo pipefail
unset PYTHONPATH
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv env

for version in 5.2.0 5.0.0; do
  env/bin/pip install -q "datasets==$version"
  HF_HOME="$folder/hub" HF_HUB_OFFLINE=1 env/bin/python - <<'PYTHON'
import sys

import datasets


def stream():
    return datasets.Dataset.from_dict({"row": list(range(24))}).to_iterable_dataset(num_shards=4)


def read(state):
    """Reads five rows from a new stream at a state; returns them and the state behind them."""
    rows = stream()
    if state is not None:
        rows.load_state_dict(state)
    iterator = iter(rows)
    values = [next(iterator)["row"] for _ in range(5)]
    return values, rows.state_dict()


start, state = read(None)
first, state = read(state)
second, state = read(state)
print(f"datasets {datasets.__version__}: start {start}, first resume {first}, second resume {second}")

described = [0, 1, 2, 3, 4] if datasets.__version__ == "5.0.0" else [10, 11, 12, 13, 14]
sys.exit(0 if (first, second) == ([5, 6, 7, 8, 9], described) else f"Changed: expected {described} at the end")
PYTHON
done
