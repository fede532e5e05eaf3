"""Makes a small Llama, folds it, trains it on the passkey task, measures it, and writes one page.

`scripts/quickstart` runs it. If it is killed at any point, the next start resumes: finished stages are kept, and
training continues from its last complete checkpoint.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from condense.cli.main import convert  # noqa: E402
from condense.eval.report import write_report  # noqa: E402
from condense.training.launch import launch, load_local_recipe, num_ranks  # noqa: E402
from condense.training.output_lock import check_unlocked, output_lock  # noqa: E402
from condense.training.recipe import load_recipe  # noqa: E402
from condense.training.small_llama import save_small_llama  # noqa: E402
from condense.training.subprocesses import run_all_to_end, run_to_end  # noqa: E402
from condense.utils.notices import without_notices  # noqa: E402

RECIPE = Path("passkey_quickstart")
SEGMENT = 40
MEMORIES = {"folded": "layer_output", "transformer-xl": "layer_input"}
PROMPTS_PER_CELL = 20  # times five depths: 100 prompts a length
# The key stands directly after the preamble, 26,213 segments before the question. Three prompts take longer than the
# grid.
MILLION, MILLION_DEPTH, MILLION_PROMPTS = 2**20, 0, 3
PROFILE_SHAPE = {"width": 256, "layers": 2}
PROFILE_SEGMENT = 256
PROFILE_LENGTHS = "2k,4k,8k"


def fold(llama: Path, folder: Path, source: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # left by a start that was killed
    with without_notices():  # it is to be trained
        memory = {"memory_source": source, "memory_share": "1", "sink_token_id": "none"}
        convert(str(llama), folder, segment_length=SEGMENT, **memory)


def condense(*arguments) -> None:
    command = condense_command(*arguments)
    if exit_code := run_to_end(command, environment(), cwd=ROOT):
        raise subprocess.CalledProcessError(exit_code, command)


def at_once(*commands: Sequence[object]) -> None:
    """Runs commands in parallel, each with its part of the cores and its own line for a progress bar."""
    threads = str(max(1, (os.cpu_count() or 1) // len(commands)))
    running = [
        (condense_command(*command), {"OMP_NUM_THREADS": threads} | environment() | {"TQDM_POSITION": str(line)})
        for line, command in enumerate(commands)
    ]
    if exit_code := run_all_to_end(running, cwd=ROOT):
        raise subprocess.CalledProcessError(exit_code, running[0][0])


def condense_command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "condense", *map(str, arguments)]


def environment() -> dict[str, str]:
    return dict(os.environ) if torch.cuda.is_available() else os.environ | {"DS_ACCELERATOR": "cpu"}


def stage(folder: Path, name: str, work: Callable[[], object]) -> None:
    """Runs a stage unless an earlier start has finished it."""
    done = folder / "stages" / name
    if done.exists():
        print(f"[{name}] done before", flush=True)
        return
    print(f"[{name}]", flush=True)
    start = time.perf_counter()
    work()
    done.parent.mkdir(exist_ok=True)
    done.write_text(f"{time.perf_counter() - start:.1f} s\n")
    print(f"[{name}] {time.perf_counter() - start:.0f} s", flush=True)


def claim(folder: Path, settings: dict) -> None:
    """Writes the settings of a run. Raises `ValueError` if the folder has the results of another one."""
    path = folder / "settings.json"
    folder.mkdir(parents=True, exist_ok=True)
    if path.exists() and (found := json.loads(path.read_text())) != settings:
        raise ValueError(f"{folder} belongs to a run with {found}: pass another --output, or --fresh to start over.")
    path.write_text(json.dumps(settings))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "quickstart")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fresh", action="store_true", help="first delete the results of an earlier run")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the recipe")
    options = parser.parse_args()
    # Relative, so the commands on the page can be run in any checkout.
    folder, start = Path(os.path.relpath(options.output.resolve(), ROOT)), time.perf_counter()
    os.chdir(ROOT)
    check_unlocked(folder, "quickstart")
    if options.fresh:
        shutil.rmtree(folder, ignore_errors=True)
    with output_lock(folder, "quickstart"):
        quickstart(folder, options, start)


def quickstart(folder: Path, options: argparse.Namespace, start: float) -> None:
    claim(folder, {"seed": options.seed, "overrides": options.overrides})
    recipe = load_recipe(RECIPE, options.overrides)
    last = recipe.curriculum.last_segments
    lengths = [SEGMENT * segments for segments in (*recipe.curriculum.lengths, 4 * last, 16 * last)]

    llama = folder / "llama"
    stage(folder, "make a small Llama", lambda: save_small_llama(llama, options.seed))
    for name, source in MEMORIES.items():
        run = folder / name
        stage(folder, f"fold it ({name})", lambda run=run, source=source: fold(llama, run / "start", source))
        overrides = [f"model={run / 'start'}", f"output={run / 'trained'}", f"seed={options.seed}"]
        if (room := num_ranks() * last * SEGMENT) > recipe.curriculum.tokens_per_step:
            print(
                f"curriculum.tokens_per_step={room}: room for a text of the last length on each of {num_ranks()} ranks"
            )
            overrides += [f"curriculum.tokens_per_step={room}"]
        stage(
            folder,
            f"train ({name})",
            lambda overrides=overrides: launch(load_local_recipe(RECIPE, [*overrides, *options.overrides])),
        )
    models = [item for name in MEMORIES for item in ("--model", f"{name}={folder / name / 'trained'}")]
    grid = [
        "eval", "passkey", *models, "--lengths", ",".join(map(str, lengths)), "--prompts", PROMPTS_PER_CELL,
        "--seed", options.seed, "--output", folder / "passkey",
    ]  # fmt: skip
    million = [
        "eval", "passkey", "--model", f"folded={folder / 'folded' / 'trained'}", "--lengths", MILLION,
        "--depths", MILLION_DEPTH, "--prompts", MILLION_PROMPTS, "--seed", options.seed,
        "--output", folder / "million-tokens",
    ]  # fmt: skip
    # Models this small gain nothing from a second core.
    stage(folder, "retrieve passkeys, also from a million tokens", lambda: at_once(grid, million))
    shape = folder / "shape"
    stage(
        folder,
        "profile",
        lambda: (
            save_small_llama(shape, **PROFILE_SHAPE),
            condense(
                "profile", "--config", shape, "--segment-length", PROFILE_SEGMENT, "--lengths", PROFILE_LENGTHS,
                "--modes", "training,decoding", "--checkpointing", "on", "--output", folder / "profile",
            ),
        ),
    )  # fmt: skip
    page = write_report(folder, title=f"condense quickstart, seed {options.seed}")
    print(f"{time.perf_counter() - start:.0f} s in all; the page: {page.resolve()}")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:  # written for the user, who needs no traceback
        sys.exit(f"quickstart: {error}")
    except subprocess.CalledProcessError as error:
        sys.exit(f"quickstart: exit code {error.returncode} of {error.cmd[1:4]}, whose messages are above")
