"""Prompts in a JSONL file, and a JSONL file to which each answer is appended when it is complete."""

import fcntl
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..utils.fields import field_names, find_field
from ..utils.files import append_line, decode_text

START = b'{"line": '  # of every record


class Prompt(NamedTuple):
    """`line` is the number of the line in the file, from 1 on."""

    line: int
    text: str


def read_prompts(path: Path, field: str) -> list[Prompt]:
    """Reads the prompts of a JSONL file. Raises `ValueError` for a line without a prompt, and if there is none."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}. Pass a JSONL file.") from error
    prompts = [
        Prompt(number, _text(line, field, f"{path}:{number}")) for number, line in enumerate(lines, 1) if line.strip()
    ]
    if not prompts:
        raise ValueError(f"{path} holds no prompt: write one JSON object on each line.")
    return prompts


def _text(line: bytes, field: str, where: str) -> str:
    try:
        record = json.loads(decode_text(line))
        text = find_field(record, field)
        names = field_names(record)
    except (AttributeError, ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not a JSON object in UTF-8 ({error}). Write one on each line.") from error
    # Half of a surrogate pair can't be encoded.
    if not isinstance(text, str) or not text or text != text.encode("utf-8", "ignore").decode():
        raise ValueError(
            f"{where}: field {field!r} holds no text; the fields are {names}: name the right one with --prompt-field."
        )
    return text


class AnswerFile:
    """Records of answers, one on each line: `line` and `prompt` of the prompt, the answer, and the settings.

    If a run was stopped, the next run with the same settings continues its file. The file is locked until it is closed
    or its process ends.
    """

    def __init__(self, path: Path, prompts: Sequence[Prompt], settings: dict[str, Any]):
        """Raises `ValueError` if another process writes the file, or if it holds anything except answers to the first
        of these prompts."""
        self.path, self.prompts, self.settings = path, prompts, settings
        self._file = path.open("a+b")
        try:
            self._lock()
            self.num_answered = self._count()
        except ValueError:
            self._file.close()
            raise

    def __enter__(self) -> "AnswerFile":
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"{self.path} is being written by another process: wait until it ends, or pass another --answers."
            ) from None
        except OSError as error:
            warning = f"WARNING: {self.path} can't be locked ({error.strerror}): start nothing else that writes it."
            print(warning, file=sys.stderr)

    def _count(self) -> int:
        """Returns the number of answers in the file, after the end of one that was being written is cut off."""
        self._file.seek(0)
        data = self._file.read()
        complete = data[: data.rfind(b"\n") + 1]
        lines = complete.splitlines()
        torn = data[len(complete) :]  # of an answer that was being written when the run was killed
        known = len(lines) <= len(self.prompts) and all(map(self._answers, lines, self.prompts))
        if not known or not (torn.startswith(START) or START.startswith(torn)):
            raise ValueError(
                f"{self.path} holds something other than answers to these prompts under these options: pass another "
                "--answers. A model with changed files counts as another one."
            )
        self._file.truncate(len(complete))
        return len(lines)

    def append(self, prompt: Prompt, answer: dict[str, Any]) -> None:
        record = self._describe(prompt) | answer | {"settings": self.settings}
        append_line(self.path, json.dumps(record, ensure_ascii=False))

    def _describe(self, prompt: Prompt) -> dict[str, Any]:
        return {"line": prompt.line, "prompt": prompt.text}

    def _answers(self, line: bytes, prompt: Prompt) -> bool:
        try:
            record = json.loads(line)
        except ValueError:
            return False
        expected = self._describe(prompt) | {"settings": self.settings}
        return isinstance(record, dict) and record == record | expected
