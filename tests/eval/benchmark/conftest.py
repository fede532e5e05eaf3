"""Fixtures of the benchmark's tests."""

from contextlib import ExitStack, nullcontext

import pytest

from condense.eval.benchmark import grid
from condense.eval.benchmark.process import ForkServer


@pytest.fixture(scope="module")
def one_server():
    """Lets the grids of a module of tests share one server, because its imports take seconds."""
    servers: dict[object, ForkServer] = {}
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:

        def shared(function):
            if function not in servers:
                servers[function] = stack.enter_context(ForkServer(function))
            return nullcontext(servers[function])

        patch.setattr(grid, "ForkServer", shared)
        yield
