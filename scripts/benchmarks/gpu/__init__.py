"""The GPU benchmark (`scripts/gpu_bench`): a folded model's correctness on this device, and speed beside a stock Llama.

`command` runs the parts in order. `sizes` has the sizes of all measurements, `session` the state of a run, and
`comparison` times variants in turn. `bars` has the ratios to reach and the last table. The other modules are parts.
"""
