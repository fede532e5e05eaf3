"""The GPU bench (`scripts/gpu_bench`): is a folded model right on this device, and how does it stand to a stock Llama?

`run` is the command; `sizes` is what is measured at which size, `race` how. The parts are in `correctness`,
`synchronisation`, `measurements` and `longest`; `bars` holds the figures to reach and the last table.
"""
