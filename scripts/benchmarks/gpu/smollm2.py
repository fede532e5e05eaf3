"""Trains folded models of SmolLM2-135M on one GPU within minutes: what the memory costs, and how far passkeys reach.

    python -m scripts.benchmarks.gpu.smollm2 --model FOLDER_OR_GGUF --train FILE ... --held-out FILE ... --output DIR
    python -m scripts.benchmarks.gpu.smollm2 --draw DIR    # the pictures again

- `correctness`: logits and gradients on the device beside float32 on the CPU; a wrong result ends the run.
- `steps`: training steps of next tokens beside the stock model's, and the share of the device's peak (MFU).
- `distill`: the arms learn from the stock model in turn, for equal times. A point has the cost above the stock model on
  held-out texts, from the second segment on, and what segments before the last one are worth.
- `passkeys`: each arm learns on texts that grow, and then answers longer ones; the first arms come first.

A part has a share of the time; what it leaves goes to the next. Results are written after each measurement. It needs
torch, transformers and scipy, the pictures matplotlib, and a GGUF file the package gguf.
"""

import argparse
import copy
import importlib.util
import json
import shlex
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from condense.eval.benchmark.models import cast_parameters
from condense.eval.benchmark.timing import free_memory
from condense.eval.results import run_metadata
from condense.hub.loading import load_model, load_tokenizer
from condense.utils.notices import without_notices

from .session import log
from .smollm2_models import parse_arm
from .smollm2_parts import NAME, Run, correctness, distill, passkeys, steps
from .smollm2_pictures import draw, tables

PARTS: dict[str, tuple[Callable[[Run], None], float]] = {  # with its share of the time
    "correctness": (correctness, 0.12),
    "steps": (steps, 0.06),
    "distill": (distill, 0.46),
    "passkeys": (passkeys, 0.36),
}


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 1 if a result is wrong or a part failed, else 0."""
    started = time.monotonic()
    options = _options(arguments)
    if options.draw:
        draw(json.loads((options.draw / f"{NAME}.json").read_text(encoding="utf-8")), options.draw)
        return 0
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(options.seed)
    disable_progress_bar()
    with without_notices():
        host = load_model(AutoModelForCausalLM, options.model, dtype=torch.float32, attn_implementation="sdpa")
    host.eval().requires_grad_(False)
    stock = cast_parameters(copy.deepcopy(host).to(device), dtype)
    tokenizer = load_tokenizer(options.model, stock.config)
    run = Run(options, started + 60 * options.minutes, device, dtype, host, stock, tokenizer)
    run.results = _metadata(run, arguments) | {
        "parts": {}, "correctness": {}, "held_out": {}, "references": [], "points": [], "steps": [], "passkeys": []
    }  # fmt: skip
    code = 0
    for number, name in enumerate(options.only):
        shares = [PARTS[one][1] for one in options.only[number:]]
        start = time.monotonic()
        run.part_end = start + (run.deadline - start) * shares[0] / sum(shares)
        log(f"[{name}] {run.seconds_left():.0f} s")
        status = "done"
        try:
            with without_notices():
                PARTS[name][0](run)
        except AssertionError as error:
            log(f"[{name}] {error}")
            status = f"wrong: {error}"
        except Exception as error:  # what was measured before is kept, and the next part may run
            traceback.print_exc()
            status = f"{type(error).__name__}: {error}"
        run.results["parts"][name] = {"seconds": round(time.monotonic() - start, 1), "status": status}
        run.write()
        free_memory()
        code = code or int(status != "done")
        if status.startswith("wrong"):
            break
    print("\n\n".join(str(table) for table in tables(run.results)))
    if importlib.util.find_spec("matplotlib") is None:
        log("There are no pictures, because matplotlib is not installed: --draw DIR makes them from the JSON.")
    else:
        draw(run.results, options.output)
    return code


def _metadata(run: Run, arguments: list[str] | None) -> dict[str, Any]:
    found, options = {"kind": f"gpu_{NAME}"} | run_metadata(), run.options
    given = sys.argv[1:] if arguments is None else arguments
    found["command"] = shlex.join(["python", "-m", f"scripts.benchmarks.gpu.{NAME}", *given])
    found["versions"] |= {"cuda": torch.version.cuda} | ({"commit": options.commit} if options.commit else {})
    with suppress(PackageNotFoundError):
        found["versions"]["triton"] = version("triton")
    names = ("arms", "segment_length", "batch", "train_tokens", "learning_rate", "turns", "passkey_learning_rate",
             "passkey_stages", "prompts", "seed", "minutes")  # fmt: skip
    return found | {
        "device": run.device.type,
        "dtype": str(run.dtype).removeprefix("torch."),
        "settings": {name: getattr(options, name) for name in names},
        "parameters": sum(weight.numel() for weight in run.stock.parameters()),
        "model": options.model.name,
        "train": [path.name for path in options.train],
        "held_out_files": [path.name for path in options.held_out],
    }


def _options(arguments: list[str] | None) -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    def arms(text: str) -> list[str]:
        try:
            return [parse_arm(part).name for part in text.split(",")]
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    def parts(text: str) -> list[str]:
        if unknown := set(text.split(",")) - PARTS.keys():
            raise argparse.ArgumentTypeError(f"{sorted(unknown)}: choose from {', '.join(PARTS)}.")
        return [name for name in PARTS if name in text.split(",")]

    parser = argparse.ArgumentParser(prog=f"python -m scripts.benchmarks.gpu.{NAME}")
    add = parser.add_argument
    add("--model", type=Path, help="folder or GGUF file of a stock checkpoint")
    add("--train", type=Path, nargs="+", help="text files to train on")
    add("--held-out", type=Path, nargs="+", help="text files to measure the cost on")
    add("--output", type=Path, help="folder of the results")
    add("--draw", type=Path, metavar="DIR", help="measure nothing: draw the results in this folder")
    add("--minutes", type=float, default=8.0, help="for everything, the loading included")
    add("--only", type=parts, default=list(PARTS), metavar="PART,PART", help="run only these parts")
    add("--arms", type=arms, default=arms("1,0.2,0.2+sink,0+sink"), help="to distil")
    add("--segment-length", type=int, default=256)
    add("--batch", type=int, default=8, help="texts of a step; passkey steps have as many tokens")
    add("--train-tokens", type=int, default=2048, help="of a text to train on")
    add("--learning-rate", type=float, default=1e-4, help="of distillation")
    add("--turns", type=int, default=5, help="of each arm")
    add("--held-tokens", type=int, default=4096, help="of a held-out text")
    add("--held-texts", type=int, default=64)
    add("--passkey-arms", type=arms, default=arms("0.2+sink,1,0+sink,stock"))
    add("--passkey-learning-rate", type=float, default=3e-4)
    add("--passkey-stages", type=numbers, default=numbers("512,1024,2048,4096"), help="lengths to train on")
    add("--passkey-lengths", type=numbers, default=[2**power for power in range(10, 18)], help="lengths to answer")
    add("--passkey-training", type=float, default=0.6, help="share of the part's time for training")
    add("--prompts", type=int, default=32, help="of each length")
    add("--stock-longest", type=int, default=8192, help="tokens of the stock model's longest passkey text")
    add("--seed", type=int, default=0)
    add("--commit", help="the commit of the code, if it is not a git checkout")
    options = parser.parse_args(arguments)
    if options.draw is None:
        if missing := [name for name in ("model", "train", "held_out", "output") if getattr(options, name) is None]:
            parser.error(f"--{missing[0].replace('_', '-')} is missing")
        if options.held_tokens % options.segment_length or options.held_tokens < 3 * options.segment_length:
            parser.error("--held-tokens needs three or more whole segments")
    return options


if __name__ == "__main__":
    sys.exit(main())
