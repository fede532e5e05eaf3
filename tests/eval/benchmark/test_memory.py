"""A process that asks for more memory than there is gets an error, which is told from others."""

import multiprocessing

import pytest
import torch

from condense.eval.benchmark.memory import ResidentMemory, is_out_of_memory

pytestmark = pytest.mark.unit


def ask_for_too_much(sender):
    ResidentMemory()
    try:
        torch.empty(2**45)
    except RuntimeError as error:
        sender.send(is_out_of_memory(error))


def hold_and_free(sender):
    """Frees 64 MiB in pieces that glibc keeps for the process, because the last one is still in use."""
    memory = ResidentMemory()
    del [torch.ones(2**14) for _ in range(1024)][:]  # a forked process has no pages of libraries until it uses them
    memory.restart()
    before = memory.now()
    held = [torch.ones(2**14) for _ in range(1024)]
    full = memory.now()
    last = held[-1]
    held.clear()
    memory.restart()
    sender.send((full - before, memory.now() - before, memory.peak() - before))
    del last


def test_what_is_freed_is_not_counted():
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=hold_and_free, args=(sender,))
    process.start()
    process.join()
    full, now, peak = receiver.recv()
    assert full > 60 * 2**20 and max(now, peak) < 6 * 2**20


def test_an_allocation_that_does_not_fit_is_refused():
    fork = multiprocessing.get_context("fork")  # `ResidentMemory` limits its process
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=ask_for_too_much, args=(sender,))
    process.start()
    process.join()
    assert receiver.poll() and receiver.recv() is True
    assert is_out_of_memory(MemoryError()) and not is_out_of_memory(RuntimeError("shapes differ"))
