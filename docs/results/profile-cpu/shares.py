"""Which operations take the time of a folded training step: the Table I shape, 8,192 token types, 4,096 tokens."""

import torch
from torch.profiler import ProfilerActivity, profile

from condense import CondenseConfig, CondenseForCausalLM
from eval.profile.shapes import table_1

print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
for dtype in (torch.float32, torch.bfloat16):
    torch.manual_seed(0)
    config = CondenseConfig(**table_1() | {"vocab_size": 8192}, segment_length=256)
    model = CondenseForCausalLM(config).to(dtype).train()
    ids_BN = torch.randint(0, 8192, (1, 4096))
    for measured in (False, True):
        model.zero_grad()
        with profile(activities=[ProfilerActivity.CPU]) if measured else torch.enable_grad() as trace:
            model(input_ids=ids_BN, labels=ids_BN).loss.backward()
    events = trace.key_averages()
    total = sum(event.self_cpu_time_total for event in events)
    largest = sorted(events, key=lambda event: -event.self_cpu_time_total)[:8]
    shares = [f"{event.key} {event.self_cpu_time_total / total:.1%}" for event in largest]
    print(f"{str(dtype).removeprefix('torch.')}: {', '.join(shares)}")
