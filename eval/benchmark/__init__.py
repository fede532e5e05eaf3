"""Memory and speed of folded models beside stock ones.

- `condense profile`: a grid of cases, each in a process of its own (`profile`), the memory of a
  training step by module (`modules`), and the schedules and attentions of a folded model in turn (`schedules`).
- `scripts/gpu_bench`: correctness and speed on one GPU in one process (`gpu`). It needs torch and transformers alone,
  as do the modules that it shares with the profile: `cases`, `models`, `workloads`, `memory`, `timing`.
- `studies`: the programs that made single pages of docs/results.
"""
