"""The GPU benchmark (`scripts/gpu_bench`): a folded model's correctness on this device, and speed beside a stock Llama.

`command` runs the parts in their order. `sizes` names the size of every measurement, `session` holds the state of a
run, `comparison` times variants in turn. The parts are in `correctness`, `kernels`, `parts` and `longest`; `bars` holds
the ratios to reach and the last table.
"""
