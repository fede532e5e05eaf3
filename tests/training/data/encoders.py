"""The encoders of worker processes in tests: each process imports this light module."""

import os
import signal
import time
from pathlib import Path

from condense.training.data.text import text_encoder
from condense.training.small_llama import word_tokenizer

WORDS = [f"w{n}" for n in range(50)]


def encoder(calls: Path | None = None, at: str | None = None, action=None):
    """Returns an encoder that writes each document's place into a folder, and acts when it reads the one at `at`."""
    encode = text_encoder(word_tokenizer(WORDS), 3)

    def recording(documents):
        for document in documents:
            if calls is not None:
                with (calls / str(os.getpid())).open("a") as file:
                    file.write(f"{document.where}\n")
            if at is not None and document.where.endswith(at):
                action()
        return encode(documents)

    return recording


def wait_for(path):
    while not path.exists():
        time.sleep(0.01)


def failing_first(failed: Path):
    """Returns an encoder that fails in the second file; in others it waits until then."""
    encode = encoder()

    def failing(documents):
        if "1.jsonl" in documents[0].where:
            failed.touch()
            fail()
        wait_for(failed)
        return encode(documents)

    return failing


def fail():
    raise RuntimeError("too deep")


def die():
    os.kill(os.getpid(), signal.SIGKILL)
