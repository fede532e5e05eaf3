"""Memory and time against length, folded against stock Llama of the same shape, side by side.

    python -m eval.profile --config FOLDER --lengths 1024 2048 4096 --output DIR

Every point is measured in a process of its own: a training step (forward and backward; median of
repeats after a warm-up) with its peak memory, then reading the text and decoding behind it with the
bytes of state held. Writes DIR/profile.json, DIR/profile.csv and DIR/profile.png.
"""

import argparse
import csv
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

KINDS = ("folded", "stock")
NEW_TOKENS = 16


def measure_point(
    kind: str, config_folder: str, segment_length: int, length: int, repeats: int, checkpointing: bool
) -> dict:
    """One length of one model, in this process. Time in seconds, memory in bytes.

    `checkpointing` recomputes activations in the backward pass: a layer at a time in the stock model, a
    segment at a time in the folded one.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from condense import CondenseConfig, CondenseForCausalLM

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "folded":
        model = CondenseForCausalLM(CondenseConfig.from_pretrained(config_folder, segment_length=segment_length))
    else:
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(config_folder))
    model = model.to(device).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    input_ids = torch.randint(0, model.config.vocab_size, (1, length), device=device)
    memory = _cuda_memory(torch) if device == "cuda" else _resident_memory()

    def training_step() -> None:
        model.zero_grad(set_to_none=True)
        model(input_ids=input_ids, labels=input_ids).loss.backward()

    # Resident memory that a step has freed stays with the process, so the baseline is taken before any step.
    before = memory.now()
    memory.restart()
    training_step()  # warm-up
    seconds = [_timed(training_step, torch) for _ in range(repeats)]
    record = {
        "kind": kind,
        "length": length,
        "parameters": model.num_parameters(),
        "training_seconds": statistics.median(seconds),
        "training_seconds_spread": [min(seconds), max(seconds)],
        "training_bytes": memory.peak() - before,
        "memory_is": memory.description,
    }

    model.zero_grad(set_to_none=True)
    model.eval()
    with torch.no_grad():
        start = time.perf_counter()
        output = model(input_ids=input_ids, use_cache=True, logits_to_keep=1)
        _finish(torch)
        record["reading_seconds"] = time.perf_counter() - start
        cache = output.past_key_values
        step = output.logits[:, -1:].argmax(-1)
        seconds = [
            _timed(lambda: model(input_ids=step, past_key_values=cache, logits_to_keep=1), torch)
            for _ in range(NEW_TOKENS)
        ]
    record["decoding_seconds"] = statistics.median(seconds)
    if kind == "folded":
        record["state_bytes"] = cache.num_bytes
    else:
        record["state_bytes"] = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return record


def _timed(function: Callable[[], object], torch) -> float:
    _finish(torch)
    start = time.perf_counter()
    function()
    _finish(torch)
    return time.perf_counter() - start


def _finish(torch) -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class _cuda_memory:
    description = "peak of the CUDA allocator above the model, gradients included"

    def __init__(self, torch):
        self.now, self.peak = torch.cuda.memory_allocated, torch.cuda.max_memory_allocated
        self.restart = torch.cuda.reset_peak_memory_stats


class _resident_memory:
    """The process's resident memory, from Linux's own accounting; the peak can be restarted there."""

    description = "peak resident memory of the process above the model, gradients included"

    def _status(self, name: str) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
        raise OSError(f"/proc/self/status has no {name}: memory can be measured on Linux only.")

    def now(self) -> int:
        return self._status("VmRSS")

    def restart(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")

    def peak(self) -> int:
        return self._status("VmHWM")


def profile(
    config_folder: str, segment_length: int, lengths: Sequence[int], repeats: int = 3, checkpointing: bool = False
) -> list[dict]:
    """One record per length and kind, each from a fresh process."""
    from tqdm import tqdm

    records = []
    points = [(kind, length) for length in lengths for kind in KINDS]
    for kind, length in tqdm(points, unit="point", desc="profile"):
        command = [sys.executable, "-m", "eval.profile", "--point", kind, "--config", str(config_folder)]
        command += ["--segment-length", str(segment_length), "--lengths", str(length), "--repeats", str(repeats)]
        command += ["--gradient-checkpointing"] * checkpointing
        run = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
        if run.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{run.stderr}")
        records.append(json.loads(run.stdout.splitlines()[-1]))
    return records


def hardware() -> str:
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        model = names[0] if names else model
    return f"{model}, {os.cpu_count()} cores"


def write_results(folder: Path, results: dict) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "profile.json").write_text(json.dumps(results, indent=2), encoding="utf-8")
    with (folder / "profile.csv").open("w", newline="", encoding="utf-8") as file:
        names = [name for name in results["points"][0] if name != "training_seconds_spread"]
        writer = csv.DictWriter(file, fieldnames=names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(results["points"])
    draw(results["points"], folder / "profile.png")


PANELS = (
    ("training_bytes", "memory of a training step [MiB]", 2**-20),
    ("training_seconds", "time of a training step [s]", 1),
    ("state_bytes", "state held while decoding [MiB]", 2**-20),
    ("decoding_seconds", "time of a new token [ms]", 1000),
)


def draw(points: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(PANELS), figsize=(3.1 * len(PANELS), 2.9), layout="constrained")
    for axes, (name, label, unit) in zip(panels, PANELS, strict=True):
        for kind, marker in zip(KINDS, "os", strict=True):
            mine = [point for point in points if point["kind"] == kind]
            axes.plot([p["length"] for p in mine], [unit * p[name] for p in mine], marker=marker, label=kind)
        axes.set_xscale("log", base=2)
        ticks = sorted({point["length"] for point in points})
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], fontsize=8)
        axes.set_xlabel("tokens")
        axes.set_title(label, fontsize=9)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    panels[0].legend(title="Llama", fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True, help="folder or hub id of a Llama: its shape is profiled")
    parser.add_argument("--segment-length", type=int, default=512)
    parser.add_argument("--lengths", type=int, nargs="+", required=True)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--gradient-checkpointing", action="store_true", help="on both sides")
    parser.add_argument("--point", choices=KINDS, help="measure one point in this process and print it as JSON")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    if options.point:
        (length,) = options.lengths
        shape = options.config, options.segment_length
        print(json.dumps(measure_point(options.point, *shape, length, options.repeats, options.gradient_checkpointing)))
        return
    points = profile(
        options.config, options.segment_length, options.lengths, options.repeats, options.gradient_checkpointing
    )
    results = {
        "hardware": hardware(),
        "command": shlex.join(["python", "-m", "eval.profile", *(sys.argv[1:] if arguments is None else arguments)]),
        "segment_length": options.segment_length,
        "gradient_checkpointing": options.gradient_checkpointing,
        "points": points,
    }
    if options.output:
        write_results(options.output, results)
    for folded, stock in zip(points[::2], points[1::2], strict=True):
        ratios = [f"{name} {stock[name] / folded[name]:.2f}x" for name, _, _ in PANELS]
        print(f"{folded['length']:>7,} tokens, stock / folded: " + ", ".join(ratios))


if __name__ == "__main__":
    main()
