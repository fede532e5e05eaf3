"""Turns the errors of a full disk or quota into one sentence."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# How safetensors and torch say it, whose errors have no number; torch's writer only sees that it wrote too little.
SAID = (*map(os.strerror, ERRORS), "unexpected pos")


@contextmanager
def room_for(folder: Path, remedy: str) -> Iterator[None]:
    """Raises `ValueError` with the folder, the error and a remedy if a disk or quota is full."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        number, said = getattr(error, "errno", None), str(error)
        if number not in ERRORS and not any(one in said for one in SAID):
            raise
        why = os.strerror(number) if number in ERRORS else said.splitlines()[0]
        raise ValueError(f"{folder} can't be written: {why}. {remedy}") from error
