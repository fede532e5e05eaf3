"""Checks and measures folded models on a GPU; see `eval.gpu_bench`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from eval.gpu_bench.run import main

if __name__ == "__main__":
    sys.exit(main())
