"""Documents with summaries, made of a few words, for the tests of summaries."""

import json

import numpy as np

TEXT = "a cat sat on the mat and saw two dogs run far away from one old red house by the sea"
WORDS = TEXT.split()


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def made_documents(number, seed=0):
    """Returns sentences of random length as lists, with two summaries each."""
    generator = np.random.default_rng(seed)

    def sentence(longest):
        return " ".join(generator.choice(WORDS, generator.integers(2, longest)))

    return [
        {"source": [sentence(40) for _ in range(3)], "target": [sentence(12), "not the first"]} for _ in range(number)
    ]
