"""The passkey task: a number hidden in irrelevant text, asked for at the end (appendix C of the paper).

Axes: B rows, N tokens.
"""

from dataclasses import dataclass

import numpy as np
import torch

PREAMBLE = (
    "There is a critical piece of information hidden within a large amount of irrelevant text. Your task is to locate "
    "it and remember it carefully. I will test your ability to recall this information.\n"
)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
FIRST_MENTION = "The passkey is {key}"
KEY = FIRST_MENTION + ". Remember it carefully. {key} is the passkey.\n"
QUESTION = "What is the passkey? The passkey is"
ANSWER = " {key}"
KEY_DIGITS = 4


@dataclass(frozen=True)
class Passkeys:
    """A batch of prompts of one length. `prompt_ids_BN` ends where the answer begins."""

    prompt_ids_BN: torch.Tensor
    answer_ids_BA: torch.Tensor
    keys: list[str]
    sentence_at_B: list[int]  # where the sentence with the key begins


class PasskeyTask:
    """Makes prompts of a wanted length by repeating the filler before and behind the key sentence."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        self.preamble = start + self._encode(PREAMBLE)
        self.filler = self._encode(FILLER)
        self.question = self._encode(QUESTION)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def batch(
        self, num_rows: int, num_tokens: int, generator: np.random.Generator, depth: float | None = None
    ) -> Passkeys:
        """Prompts with answers of at most `num_tokens`, as long as whole fillers allow.

        `depth` 0 puts the key right behind the preamble, 1 right before the question, None anywhere with
        equal probability. Raises `ValueError` where not even the frame fits.
        """
        if depth is not None and not 0 <= depth <= 1:
            raise ValueError(f"depth={depth} is outside 0 to 1: 0 is right behind the preamble, 1 before the question.")
        rows = []
        for _ in range(num_rows):
            key = "".join(map(str, generator.integers(0, 10, KEY_DIGITS)))
            sentence, answer = self._encode(KEY.format(key=key)), self._encode(ANSWER.format(key=key))
            frame = len(self.preamble) + len(sentence) + len(self.question) + len(answer)
            fillers = (num_tokens - frame) // len(self.filler)
            if fillers < 0:
                raise ValueError(f"a passkey prompt needs {frame} tokens and {num_tokens} are allowed: allow more.")
            before = int(generator.integers(0, fillers + 1)) if depth is None else round(depth * fillers)
            ids = self.preamble + self.filler * before + sentence + self.filler * (fillers - before) + self.question
            rows.append((ids, answer, key, len(self.preamble) + len(self.filler) * before))
        shortest = min(len(ids) + len(answer) for ids, answer, _, _ in rows)
        if any(len(ids) + len(answer) != shortest for ids, answer, _, _ in rows):
            raise ValueError(
                "this tokenizer splits keys of equal length into unequal numbers of tokens: not supported."
            )
        return Passkeys(
            torch.tensor([ids for ids, _, _, _ in rows]),
            torch.tensor([answer for _, answer, _, _ in rows]),
            [key for _, _, key, _ in rows],
            [at for _, _, _, at in rows],
        )

    def training_batch(
        self, num_rows: int, num_tokens: int, background: int, generator: np.random.Generator
    ) -> dict[str, torch.Tensor]:
        """`input_ids` and `labels` [B, N]: the answer's tokens, and `background` other tokens a row.

        The background keeps the model reading the text between; the key's first mention, which nothing
        could predict, is not part of it.
        """
        passkeys = self.batch(num_rows, num_tokens, generator)
        input_ids = torch.cat([passkeys.prompt_ids_BN, passkeys.answer_ids_BA], dim=1)
        labels = torch.full_like(input_ids, -100)
        prompt_tokens = passkeys.prompt_ids_BN.shape[1]
        labels[:, prompt_tokens:] = passkeys.answer_ids_BA
        mention = len(self._encode(FIRST_MENTION.format(key="0" * KEY_DIGITS)))
        for row, start in enumerate(passkeys.sentence_at_B):
            predictable = np.r_[1:start, start + mention : prompt_tokens]
            positions = generator.choice(predictable, background, replace=False)
            labels[row, positions] = input_ids[row, positions]
        return {"input_ids": input_ids, "labels": labels}
