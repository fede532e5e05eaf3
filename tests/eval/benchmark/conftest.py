"""Fixtures of the benchmark's tests."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest

from condense.eval.benchmark import grid


@pytest.fixture(scope="module")
def forked_cases():
    """Forks the processes of cases from one that has imported the libraries, because the imports take seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["condense.eval.benchmark.profile"])

    def call(function, *arguments):
        with ProcessPoolExecutor(1, context) as own:
            return own.submit(function, *arguments).result()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grid, "call", call)
        yield
