"""Passkey retrieval on a grid of length x depth, by the model's own decoding.

    python -m eval.passkey --model FOLDER --lengths 2048 4096 --output DIR

Writes DIR/passkey.json, DIR/passkey.csv and the heat map DIR/passkey.png. Folded and stock models take
the same path.
"""

import argparse
import csv
import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from condense.checks import check_tokenizer
from training.data.passkey import PasskeyTask

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
TOKENS_PER_BATCH = 2**18


@torch.no_grad()
def measure_passkey(
    model, tokenizer, lengths: Sequence[int], depths: Sequence[float] = DEPTHS, num_prompts: int = 20, seed: int = 0
) -> list[dict]:
    """Accuracy in every cell of the grid: the decoded answer must begin with the key, digit by digit.

    Returns one record per cell, with `length` in tokens (answer included), `depth`, `correct`, `total`
    and `accuracy`. Prompts are fresh: they depend on `seed`, `length` and the depth alone.
    """
    task, cells = PasskeyTask(tokenizer), []
    with tqdm(total=len(lengths) * len(depths) * num_prompts, unit="prompt", desc="passkey") as bar:
        for length in lengths:
            for place, depth in enumerate(depths):
                generator = np.random.default_rng([seed, length, place])
                correct = done = 0
                while done < num_prompts:
                    num_rows = min(num_prompts - done, max(1, TOKENS_PER_BATCH // length))
                    passkeys = task.batch(num_rows, length, generator, depth)
                    correct += _count_correct(model, tokenizer, passkeys)
                    done += num_rows
                    bar.update(num_rows)
                cells.append(
                    {
                        "length": length,
                        "depth": depth,
                        "correct": correct,
                        "total": num_prompts,
                        "accuracy": correct / num_prompts,
                    }
                )
    return cells


def _count_correct(model, tokenizer, passkeys) -> int:
    prompt_BN = passkeys.prompt_ids_BN.to(model.device)
    output = model.generate(
        prompt_BN,
        attention_mask=torch.ones_like(prompt_BN),
        max_new_tokens=passkeys.answer_ids_BA.shape[1],
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
    )
    answers = tokenizer.batch_decode(output[:, prompt_BN.shape[1] :])
    return sum("".join(answer.split()).startswith(key) for answer, key in zip(answers, passkeys.keys, strict=True))


def write_results(folder: Path, results: dict) -> None:
    """The figures as JSON and CSV, and the grid as a heat map."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "passkey.json").write_text(json.dumps(results, indent=2), encoding="utf-8")
    with (folder / "passkey.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(results["cells"][0]))
        writer.writeheader()
        writer.writerows(results["cells"])
    draw_heat_map(results, folder / "passkey.png")


def draw_heat_map(results: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lengths = sorted({cell["length"] for cell in results["cells"]})
    depths = sorted({cell["depth"] for cell in results["cells"]})
    grid = np.full((len(depths), len(lengths)), np.nan)
    for cell in results["cells"]:
        grid[depths.index(cell["depth"]), lengths.index(cell["length"])] = 100 * cell["accuracy"]
    figure, axes = plt.subplots(figsize=(1.2 + 0.62 * len(lengths), 1.6 + 0.42 * len(depths)), layout="constrained")
    image = axes.imshow(grid, vmin=0, vmax=100, cmap="RdYlGn", aspect="auto")
    for (row, column), value in np.ndenumerate(grid):
        axes.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=8)
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=45, ha="right", fontsize=8)
    axes.set_yticks(range(len(depths)), [f"{100 * depth:.0f} %" for depth in depths], fontsize=8)
    axes.set_xlabel("tokens")
    axes.set_ylabel("depth of the key")
    axes.set_title(results.get("title", "passkey retrieval"), fontsize=10)
    trained = results.get("longest_trained")
    if trained and trained < lengths[-1]:
        border = sum(length <= trained for length in lengths) - 0.5
        axes.axvline(border, color="black", linewidth=2)
        axes.text(border + 0.05, -0.62, "never trained", fontsize=8, ha="left")
        axes.text(border - 0.05, -0.62, "trained", fontsize=8, ha="right")
        axes.set_title(results.get("title", "passkey retrieval"), fontsize=10, pad=18)
    figure.colorbar(image, ax=axes, label="% correct")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder or hub id of a folded or a stock model")
    parser.add_argument("--lengths", type=int, nargs="+", required=True, help="tokens, answer included")
    parser.add_argument("--depths", type=float, nargs="+", default=DEPTHS)
    parser.add_argument("--prompts", type=int, default=20, help="per cell of the grid")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest-trained", type=int, help="tokens; drawn as a border")
    parser.add_argument("--title", default="passkey retrieval")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    check_tokenizer(model.config, tokenizer)
    start = time.perf_counter()
    cells = measure_passkey(model, tokenizer, options.lengths, options.depths, options.prompts, options.seed)
    results = {
        "title": options.title,
        "command": shlex.join(["python", "-m", "eval.passkey", *(sys.argv[1:] if arguments is None else arguments)]),
        "segment_length": getattr(model.config, "segment_length", None),
        "memory_source": getattr(model.config, "memory_source", None),
        "longest_trained": options.longest_trained,
        "seed": options.seed,
        "seconds": time.perf_counter() - start,
        "cells": cells,
    }
    write_results(options.output, results)
    for length in options.lengths:
        row = [cell for cell in cells if cell["length"] == length]
        shown = " ".join(f"{100 * cell['accuracy']:4.0f}" for cell in row)
        mean = sum(cell["correct"] for cell in row) / sum(cell["total"] for cell in row)
        print(f"{length:>9,} tokens  {100 * mean:5.1f} %   by depth: {shown}")


if __name__ == "__main__":
    main()
