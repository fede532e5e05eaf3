"""Fused Triton kernels for operations that torch computes in several passes over memory.

Each module has a public function, which uses the kernel if `uses_kernels` allows it, and the plain torch form of the
same function. Its kernels are in the module of the same name with the prefix `triton_`. Nothing here requires Triton to
be installed: the kernel modules are imported when the first kernel runs.
"""
