import pytest

from ..recipes import text_data, write_recipe, write_texts

WORDS = "zero one two three four five six seven eight nine"


@pytest.fixture
def recipe(tmp_path):
    """A recipe on 60 documents of two sequences of 8 tokens; other.jsonl has 12 of them."""
    for name, count in (("train", 60), ("other", 12)):
        digits = (" ".join(WORDS.split()[int(digit)] for digit in f"{n:02d}") for n in range(count))
        write_texts(tmp_path / f"{name}.jsonl", (f"{words} " + "nine " * 14 for words in digits))
    return write_recipe(tmp_path, "m", [(8, 20)], global_batch=4, data=text_data(tmp_path, files="train.jsonl"))
