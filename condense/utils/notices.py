"""Lines about how a checkpoint is folded: each is said once in a process, to the log, and only by the first rank."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

logger = logging.getLogger(__name__)
_silent = ContextVar("silent", default=False)


def say_once(line: str) -> None:
    if not _silent.get() and os.environ.get("RANK", "0") == "0":
        _say(line)


@cache
def _say(line: str) -> None:
    logger.warning("%s", line)


@contextmanager
def without_notices() -> Iterator[None]:
    """Says nothing meanwhile: for models that are about to be trained, whose memory is not used, or that are measured
    as they are."""
    token = _silent.set(True)
    try:
        yield
    finally:
        _silent.reset(token)
