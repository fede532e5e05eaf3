"""Memory and speed of folded models beside stock ones.

- `condense profile`: a grid of cases, each in its own process (`profile`), the memory of a training step by module
  (`modules`), and a folded model's schedules and attentions in turn (`schedules`).
- `cases`, `models`, `workloads`, `memory` and `timing` also serve the GPU benchmark of a checkout
  (scripts/benchmarks), and need only torch and transformers.
"""
