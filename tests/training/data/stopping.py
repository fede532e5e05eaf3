"""Preparations that are stopped."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from condense.training.data import preparation


@contextmanager
def stopped_before_part(number: int) -> Iterator[None]:
    """Stops the preparation in the block when it is about to write this part."""
    write = preparation.write_part_file

    def stop(path, kept, notes):
        if path.name == f"part-{number:05d}.arrow":
            raise KeyboardInterrupt
        write(path, kept, notes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, "write_part_file", stop)
        with pytest.raises(KeyboardInterrupt):
            yield
