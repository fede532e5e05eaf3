import platform
import subprocess
import sys

import pytest

from condense.eval import heap

pytestmark = pytest.mark.process

FAULTS = """
import resource, runpy, sys

if sys.argv[2] == "reused":
    runpy.run_path(sys.argv[1])["reuse_freed_memory"]()
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(3):
    before, block = faults(), bytearray(64 * 2**20)
    print(faults() - before)
    del block
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's allocator has these settings")
def test_a_freed_block_is_used_again_without_new_pages():
    faults = {}
    for name in ("reused", "default"):
        command = [sys.executable, "-c", FAULTS, heap.__file__, name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        faults[name] = [int(line) for line in printed.split()]
    assert faults["reused"][0] > 0 and faults["reused"][1:] == [0, 0]
    assert min(faults["default"]) > 0
