"""The parts of `scripts.benchmarks.gpu.smollm2`: correctness, step times, distillation and passkeys.

Axes: B rows or texts, N tokens, S segments, A tokens of an answer.
"""

import argparse
import statistics
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from condense.eval.benchmark.models import cast_parameters
from condense.eval.benchmark.timing import free_memory
from condense.eval.models import PREFILL_TOKENS, TOKENS_PER_BATCH, generate
from condense.eval.results import write_results
from condense.eval.statistics import wilson
from condense.training.data.passkey import PasskeyTask
from condense.training.planning.devices import peak_flops

from .session import log
from .smollm2_models import (
    STOCK,
    Learner,
    above,
    build_arm,
    distillation_loss,
    finite,
    held_out_texts,
    label_loss,
    last_two_losses,
    made_ahead,
    multiplied_weights,
    parse_arm,
    read_tokens,
    segment_losses,
    text_flops,
    training_texts,
    window_losses,
)

NAME = "smollm2"
EARLY_QUESTIONS = 16
SHORTER = 0.3  # of passkey steps: texts of a length from before
TIMED_STEPS, WARM_UPS = 12, 4  # a shape is captured at its second use
LIMITS = {  # of relative distances; bfloat16's gradients only have to be of the right kind
    "float32 logits": 1e-3,
    "bfloat16 logits": 0.1,
    "float32 gradients": 1e-3,
    "bfloat16 gradients": 0.5,
}


@dataclass
class Run:
    """The state of a run: what was asked for, the stock model, and the results so far."""

    options: argparse.Namespace
    deadline: float
    device: torch.device
    dtype: torch.dtype
    host: Any  # the stock model on the CPU, in float32
    stock: Any  # the same on the device
    tokenizer: Any
    results: dict[str, Any] = field(default_factory=dict)
    part_end: float = 0.0
    tokens: dict[Path, torch.Tensor] = field(default_factory=dict)  # of the files that were read

    def seconds_left(self) -> float:
        """Returns the seconds that the present part has left."""
        return min(self.deadline, self.part_end) - time.monotonic()

    def write(self) -> None:
        points = [
            {name: value for name, value in point.items() if not isinstance(value, list)}
            for point in self.results["points"]
        ]
        write_results(self.options.output / NAME, self.results, points)

    def read(self, paths: Sequence[Path]) -> list[torch.Tensor]:
        """Returns the token ids [N] of each file."""
        self.tokens |= {path: read_tokens(self.tokenizer, path) for path in paths if path not in self.tokens}
        return [self.tokens[path] for path in paths]

    def training_texts(self) -> Iterator[torch.Tensor]:
        """Yields batches [B, N], the same at each call."""
        options, files = self.options, self.read(self.options.train)
        self.results["training_tokens"] = sum(map(len, files))
        return training_texts(files, options.batch, options.train_tokens, options.seed)

    def checked_arm(self) -> str:
        """Returns the arm that is checked and timed: the first with a sink, or the first folded one."""
        folded = [name for name in self.options.arms if name != STOCK]
        return next((name for name in folded if parse_arm(name).has_sink), folded[0])

    def arm(self, name: str) -> Any:
        return build_arm(self.stock, parse_arm(name), self.options.segment_length)


def correctness(run: Run) -> None:
    """Compares logits and gradients of a folded model on the device with the CPU's in float32.

    Gradients are the third ones of the same shape, which a captured graph makes on a GPU. Raises `AssertionError` if a
    distance is above its limit.
    """
    options, found = run.options, run.results["correctness"]
    ids_1N = run.read(options.held_out[:1])[0][None, : 2 * options.segment_length]
    name = run.checked_arm()
    reference = build_arm(run.host, parse_arm(name), options.segment_length)
    with torch.no_grad():
        known = reference(ids_1N, use_cache=False).logits
    label_loss(reference, ids_1N, ids_1N)
    gradients = _gradients(reference)
    for dtype in (torch.float32, torch.bfloat16):
        moved = cast_parameters(build_arm(run.host, parse_arm(name), options.segment_length).to(run.device), dtype)
        ids = ids_1N.to(run.device)
        with torch.no_grad():
            logits = moved(ids, use_cache=False).logits
        for _ in range(3):
            moved.zero_grad(set_to_none=True)
            label_loss(moved, ids, ids)
        for what, ours, theirs in (("logits", logits, known), ("gradients", _gradients(moved), gradients)):
            key = f"{str(dtype).removeprefix('torch.')} {what}"
            distance = float((ours.float().cpu() - theirs).norm() / theirs.norm())
            found[key] = finite(distance)
            log(f"  {name}, {ids_1N.shape[1]} tokens, {key}: distance {distance:.1e}, limit {LIMITS[key]:.0e}")
        del moved
        free_memory()
    run.write()
    wrong = {key: value for key, value in found.items() if value is None or value > LIMITS[key]}
    assert not wrong, f"distances above their limits: {wrong}"


def _gradients(model: Any) -> torch.Tensor:
    return torch.cat([weight.grad.flatten().float().cpu() for weight in model.parameters()])


def steps(run: Run) -> None:
    """Times training steps of next tokens, with the optimizer's, of the stock model and the checked arm."""
    options = run.options
    ids_BN = next(run.training_texts()).to(run.device)
    for name in (STOCK, run.checked_arm()):
        learner = Learner(run.arm(name), options.learning_rate)
        loss_of = partial(label_loss, ids_BN=ids_BN, labels_BN=ids_BN)
        while len(learner.step_seconds) < WARM_UPS + TIMED_STEPS and (
            run.seconds_left() > 0 or len(learner.step_seconds) <= WARM_UPS
        ):
            learner.step(loss_of, ids_BN.numel(), progress=0.0)
        run.results["steps"].append(_speed(run, learner, name, "next tokens", ids_BN.shape, WARM_UPS))
        run.write()
        del learner, loss_of
        free_memory()


def _speed(run: Run, learner: Learner, name: str, objective: str, shape: Any, skip: int) -> dict[str, Any]:
    """Returns the median step and its MFU; distillation counts the teacher's forward pass."""
    rows, tokens = shape
    weights, timed = multiplied_weights(learner.model), learner.step_seconds[skip:] or learner.step_seconds
    segment = None if name == STOCK else run.options.segment_length
    flops = rows * text_flops(learner.model.config, weights, tokens, segment)
    if objective == "distillation":
        flops += rows * text_flops(run.stock.config, weights, tokens, None) / 3
    seconds, peak = statistics.median(timed), None
    if run.device.type == "cuda":
        peak = peak_flops(torch.cuda.get_device_name())
    found = {
        "arm": name, "objective": objective, "batch": rows, "length": tokens, "seconds": seconds, "timed": len(timed),
        "flops": flops, "flops_per_second": flops / seconds, "mfu": None if peak is None else flops / seconds / peak,
    }  # fmt: skip
    if run.device.type == "cuda":
        found["reserved_bytes"] = torch.cuda.memory_reserved()
    log(f"  {objective}, {name}, {rows} x {tokens:,}: {1000 * seconds:,.1f} ms, {flops / seconds / 1e12:,.1f} TFLOP/s")
    return found


def distill(run: Run) -> None:
    """Trains the arms by distillation in turn, and evaluates each after its turn."""
    options, segment = run.options, run.options.segment_length
    files = run.read(options.held_out)
    ids_BN, sources = held_out_texts(files, options.held_tokens, options.held_texts)
    stock_BS = segment_losses(run.stock, ids_BN, segment)
    run.results["held_out"] = {"texts": len(ids_BN), "tokens": options.held_tokens, "files": sources,
                               "stock_loss": float(stock_BS[:, 1:].mean())}  # fmt: skip
    two_BS = np.concatenate([stock_BS[:, :1], last_two_losses(run.stock, ids_BN, segment)], axis=1)
    window_BS = window_losses(run.stock, ids_BN, segment)
    for name, losses_BS in (("two segments of text", two_BS), ("window", window_BS)):
        run.results["references"].append({"name": name} | above(losses_BS, stock_BS, 1))
    run.write()
    learners = {name: Learner(run.arm(name), options.learning_rate) for name in options.arms}
    texts, evaluations = {name: run.training_texts() for name in learners}, []  # the same texts for all
    for name, learner in learners.items():
        start = time.monotonic()
        _add_point(run, name, learner, ids_BN, stock_BS)
        evaluations.append(time.monotonic() - start)
    evaluating = statistics.median(evaluations) * len(learners) * options.turns  # the first one also compiles kernels
    budget = max(run.seconds_left() - evaluating, 0.25 * run.seconds_left()) / len(learners)
    log(f"  {budget:.1f} s of training for each arm, in {options.turns} turns")
    for turn in range(options.turns):
        for name, learner in learners.items():
            until = budget * (turn + 1) / options.turns
            while learner.seconds < until and run.seconds_left() > 0:
                batch_BN = next(texts[name]).to(run.device)
                loss_of = partial(distillation_loss, teacher=run.stock, ids_BN=batch_BN)
                learner.step(loss_of, batch_BN.numel(), learner.seconds / budget)
            if run.deadline > time.monotonic():
                _add_point(run, name, learner, ids_BN, stock_BS)
    shape = options.batch, options.train_tokens
    trained = [(name, one) for name, one in learners.items() if one.step_seconds]
    run.results["steps"] += [_speed(run, one, name, "distillation", shape, WARM_UPS) for name, one in trained]
    run.write()


def _add_point(run: Run, name: str, learner: Learner, ids_BN: torch.Tensor, stock_BS: np.ndarray) -> None:
    """Measures an arm's cost, and what segments before the last are worth: the loss without them minus the loss."""
    segment = run.options.segment_length
    own_BS = segment_losses(learner.model, ids_BN, segment)
    recent_BS = last_two_losses(learner.model, ids_BN, segment)
    found = above(own_BS, stock_BS, 1)
    worth = above(recent_BS, own_BS[:, 1:], 1)
    bounds = ("mean", "low", "high")
    run.results["points"].append(
        {"arm": name, **_of_arm(name, learner.model), **learner.record()}
        | dict(zip(("cost", "low", "high"), map(found.get, bounds), strict=True))
        | dict(zip(("worth", "worth_low", "worth_high"), map(worth.get, bounds), strict=True))
        | {"by_segment": found["by_segment"], "by_text": found["by_text"], "worth_by_segment": worth["by_segment"]}
    )
    run.write()
    log(f"  {name}, {learner.tokens:,} tokens: cost {_shown(found['mean'])}, worth {_shown(worth['mean'])}")


def _shown(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"


def passkeys(run: Run) -> None:
    """Trains each arm on passkeys for the same time, and lets it answer texts of growing length while time is left."""
    options, failed = run.options, []
    task = PasskeyTask(run.tokenizer, early_questions=EARLY_QUESTIONS)
    seconds = options.passkey_training * run.seconds_left() / len(options.passkey_arms)
    for number, name in enumerate(options.passkey_arms):
        end = time.monotonic() + run.seconds_left() / (len(options.passkey_arms) - number)
        try:
            model, found = _learn_passkeys(run, name, task, seconds)
            _answer(run, name, model, task, found["lengths"], end)
        except Exception:  # the next arm may fit, and this one's answers so far are kept
            traceback.print_exc()
            failed.append(name)
        model = None
        free_memory()
    if failed:
        raise RuntimeError(f"arms that failed: {', '.join(failed)}")


def _learn_passkeys(run: Run, name: str, task: PasskeyTask, seconds: float) -> tuple[Any, dict[str, Any]]:
    """Returns a trained model and its record, to which lengths are to be added."""
    options, model = run.options, run.arm(name)
    learner = Learner(model, options.passkey_learning_rate)
    generator, by_length, start = np.random.default_rng([options.seed, 1]), dict[int, int](), time.monotonic()

    def progress() -> float:
        return (time.monotonic() - start) / seconds if seconds else 1.0

    def make() -> tuple[int, dict[str, torch.Tensor]]:
        length = passkey_length(options.passkey_stages, progress(), generator)
        rows = max(1, options.batch * options.train_tokens // length)
        return length, task.training_batch(rows, length, 0, generator)

    batches = made_ahead(make)
    while progress() < 1 and run.deadline > time.monotonic():
        length, batch = next(batches)
        ids_BN, labels_BN = (batch[key].to(run.device) for key in ("input_ids", "labels"))
        learner.step(partial(label_loss, ids_BN=ids_BN, labels_BN=labels_BN), ids_BN.numel(), progress())
        by_length[length] = by_length.get(length, 0) + ids_BN.numel()
    batches.close()
    record = {"arm": name, **_of_arm(name, model), "tokens_by_length": by_length, **learner.record(), "lengths": []}
    run.results["passkeys"].append(record)
    log(f"  {name}: {learner.tokens:,} tokens in {learner.seconds:.1f} s, loss {_shown(learner.recent_loss())}")
    return model, record


def _of_arm(name: str, model: Any) -> dict[str, Any]:
    return {"share": parse_arm(name).share, "sink_token_id": getattr(model.config, "sink_token_id", None)}


def passkey_length(stages: list[int], progress: float, generator: np.random.Generator) -> int:
    """Returns a text's length: the present stage's, or sometimes one from before. The stages share the training."""
    stage = min(int(progress * len(stages)), len(stages) - 1)
    if stage and generator.random() < SHORTER:
        stage = int(generator.integers(stage))
    return stages[stage]


def _answer(run: Run, name: str, model: Any, task: PasskeyTask, found: list[dict[str, Any]], end: float) -> None:
    """Counts exact answers by length. Prompts are the same for all arms. A length starts if the one before suggests
    that it ends in time."""
    options, before = run.options, 0.0
    longest = options.stock_longest if name == STOCK else max(options.passkey_lengths)
    for length in [one for one in options.passkey_lengths if one <= longest]:
        if time.monotonic() + 2 * before > (min(end, run.deadline) if found else run.deadline):
            log(f"  {name}: no time is left for {length:,} tokens")
            break
        start, generator = time.monotonic(), np.random.default_rng([options.seed, length])
        rows = max(1, min(options.prompts, TOKENS_PER_BATCH // min(length, PREFILL_TOKENS)))
        correct, total, state = 0, 0, 0
        while total < options.prompts:
            prompts = task.batch(min(rows, options.prompts - total), length, generator)
            answer_BA = prompts.answer_ids_BA
            new = answer_BA.shape[1]
            sequence_BN, num_bytes = generate(
                model, prompts.prompt_ids_BN, torch.ones_like(prompts.prompt_ids_BN), do_sample=False,
                max_new_tokens=new, min_new_tokens=new, pad_token_id=task.tokenizer.pad_token_id,
            )  # fmt: skip
            right_B = (sequence_BN[:, -new:].cpu() == answer_BA).all(1)
            correct, total = correct + int(right_B.sum()), total + len(answer_BA)
            state = num_bytes // len(answer_BA)
        low, high = wilson(correct, total)
        before = time.monotonic() - start
        found.append({"length": length, "correct": correct, "total": total, "accuracy": correct / total,
                      "low": low, "high": high, "state_bytes": state, "seconds": before})  # fmt: skip
        run.write()
        log(f"  {name}, {length:,} tokens: {correct} of {total}, state {state / 2**20:,.2f} MiB, {before:.1f} s")
