"""Fused Triton kernels for operations that torch computes in several passes over memory.

Each module has a public function, which takes the kernel where `uses_kernels` allows it, and the plain torch form of
the same function; its kernels are in the module of the same name that begins with `triton_`. Nothing here needs Triton
to be installed: those modules are imported where the first kernel runs.
"""
