"""Memory and speed of folded models beside stock ones.

- `condense profile`: a grid of cases, each in a process of its own (`profile`), the memory of a
  training step by module (`modules`), and the schedules and attentions of a folded model in turn (`schedules`).
- `cases`, `models`, `workloads`, `memory` and `timing` serve the GPU benchmark of a checkout (scripts/benchmarks) too,
  and need torch and transformers only.
"""
