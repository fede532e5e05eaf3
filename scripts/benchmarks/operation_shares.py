"""Finds the operations that take most of a folded training step: Table I shape, vocabulary of 8,192, 4,096 tokens.

Prints a block of docs/results/profile-cpu/README.md.
"""

import torch
from torch.profiler import ProfilerActivity, profile

from condense.eval.benchmark.models import build_model, table_1
from condense.eval.benchmark.workloads import random_ids, training_step

from .timing import dtype_name

VOCABULARY, SEGMENT, TOKENS, LARGEST = 8192, 256, 4096, 8


def main() -> None:
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        model = build_model("folded", table_1() | {"vocab_size": VOCABULARY}, SEGMENT, "auto").to(dtype)
        step = training_step(model, random_ids(model, 1, TOKENS))
        step()
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            step()
        events = trace.key_averages()
        total = sum(event.self_cpu_time_total for event in events)
        largest = sorted(events, key=lambda event: -event.self_cpu_time_total)[:LARGEST]
        shares = [f"{event.key} {event.self_cpu_time_total / total:.1%}" for event in largest]
        print(f"{dtype_name(dtype)}: {', '.join(shares)}")


if __name__ == "__main__":
    main()
