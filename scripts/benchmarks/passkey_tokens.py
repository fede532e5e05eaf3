"""Shows which token of a passkey's answer a model gets wrong, where the key stands directly before the question.

    python -m scripts.benchmarks.passkey_tokens stock=SmolLM2-135M-Instruct untrained=FOLDED

Every model reads the same prompts and their answers. Prints, for each length, how often the first token of the answer
is the most likely one, and how often those after it are, given the answer so far. A model that fails at the first alone
has not lost the key: it would have said something else.

Axes: B prompts, N tokens of a prompt, A tokens of an answer.
"""

import argparse
from typing import Any

import numpy as np
import torch

from condense.eval.models import EvaluatedModel, load_evaluated
from condense.eval.results import Table, hardware
from condense.training.data.passkey import Passkeys, PasskeyTask

LENGTHS, PROMPTS = (512, 1024, 2048), 8


@torch.no_grad()
def right_tokens(model: Any, passkeys: Passkeys) -> torch.Tensor:
    """Returns [B, A], true where the most likely token after the prompt and the answer so far is the answer's."""
    answer_BA, found = passkeys.answer_ids_BA, []
    for prompt_N, answer_A in zip(passkeys.prompt_ids_BN, answer_BA, strict=True):
        ids_1N = torch.cat([prompt_N, answer_A[:-1]])[None].to(model.device)
        logits_1AV = model(input_ids=ids_1N, logits_to_keep=answer_BA.shape[1]).logits
        found.append(logits_1AV[0].argmax(-1).cpu() == answer_A)
    return torch.stack(found)


def row(evaluated: EvaluatedModel, length: int, num_prompts: int) -> list[str]:
    generator = np.random.default_rng(0)
    passkeys = PasskeyTask(evaluated.tokenizer).batch(num_prompts, length, generator, depth=1.0)
    right_BA = right_tokens(evaluated.model, passkeys).double()
    shares = (right_BA[:, :1], right_BA[:, 1:])
    return [evaluated.name, f"{length:,}", *(f"{100 * share.mean():.0f}" for share in shares)]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Shows which token of a passkey's answer a model gets wrong.")
    parser.add_argument("models", nargs="+", help="NAME=SOURCE")
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--prompts", type=int, default=PROMPTS)
    options = parser.parse_args(arguments)
    rows = []
    for named in options.models:
        evaluated = load_evaluated(named, dtype="float32")
        rows += [row(evaluated, length, options.prompts) for length in options.lengths]
    columns = ["model", "tokens", "first token right [%]", "those after it right [%]"]
    print(hardware())
    print(Table(f"passkeys directly before the question, {options.prompts} prompts a length", columns, rows))


if __name__ == "__main__":
    main()
