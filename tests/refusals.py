"""How a user's mistakes are answered: by a ValueError that names the value and a remedy."""

from collections.abc import Callable

import pytest


def assert_refused(words: str, function: Callable, *arguments, **options) -> None:
    with pytest.raises(ValueError, match=words):
        function(*arguments, **options)
