"""Asks a model, folded or stock, for a number hidden in texts that grow, and prints how often it finds it.

    python examples/measure_passkey.py FOLDER [LENGTH,LENGTH ...]

The same as `condense eval passkey --model FOLDER --lengths ... --output passkey`, from Python.
"""

import sys
from pathlib import Path

from condense.eval.tasks import run_task
from condense.eval.tasks.options import PasskeyOptions

folder = sys.argv[1]
lengths = [int(part) for part in sys.argv[2].split(",")] if len(sys.argv) > 2 else [2048, 8192]

results = run_task("passkey", PasskeyOptions(models=[folder], lengths=lengths, num_prompts=4), Path("passkey"))
for cell in results["cells"]:
    print(f"{cell['length']:>8,} tokens, key at {cell['depth']:.0%}: {cell['accuracy']:.0%} right")
