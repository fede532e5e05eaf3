"""Checks and measures folded models on a GPU; see `condense.eval.benchmark.gpu`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from condense.eval.benchmark.gpu.command import main

if __name__ == "__main__":
    sys.exit(main())
