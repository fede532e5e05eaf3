"""A process that asks for more memory than there is gets an error, which is told from others."""

import subprocess
import sys
from pathlib import Path

from condense.eval.benchmark.memory import is_out_of_memory

ROOT = Path(__file__).resolve().parents[3]


def test_an_allocation_that_does_not_fit_is_refused():
    code = (
        "import torch; from condense.eval.benchmark.memory import ResidentMemory, is_out_of_memory; ResidentMemory()\n"
        "try: torch.empty(2**45)\nexcept RuntimeError as error: print(is_out_of_memory(error))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "True\n", done.stderr
    assert is_out_of_memory(MemoryError()) and not is_out_of_memory(RuntimeError("shapes differ"))
