"""Trains only the hybrid's block to steer the next word with its control, and trains the block's competitors.

An example is a prompt, a control and a word; the loss is -log P(word | prompt). The control 0 is never trained.
"""

import hashlib
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from condense.eval.study.training import make_once
from condense.utils.progress import ProgressBar

from .interventions import Intervention, difference_of_means, intervene
from .lexicon import DIMENSIONS, PAPER_PAIR, PAPER_PROMPT, Lexicon, Parts, Signs, lexicon, split_values
from .models import SMALL, block_in
from .pretraining import Setup, model_folder, pretrain
from .words import Ids, encode_prompt, encode_word, paired_log_probs

Labels = Literal["own", "swapped"]
Prompts = Literal["paper", "many"]
METHODS = ("flow", "step", "bias", "film", "activation")
# The frozen part if more than the block is trained, to see if the paper's figures need that: all except embeddings and
# head, as the paper's "Hybrid Unfreeze" can be read, or everything. Only the paper's prompt is trained.
UNFROZEN = {"unfrozen": ("transformer.wte.", "transformer.wpe.", "lm_head."), "everything": ()}
PROMPTS_OF = {"paper": (*METHODS, *UNFROZEN), "many": METHODS}
TRAINED_ON = {"paper": "one prompt", "many": "many prompts"}

STEPS, BATCH = 300, 32
# Few parameters need larger steps: a flow has matrices, and a bias a vector.
LEARNING_RATE = {"flow": 3e-3, "step": 3e-3, "bias": 1e-1, "film": 1e-1, "unfrozen": 1e-3, "everything": 1e-3}
CONTROL_STD = 0.02  # as GPT-2 initialises
COEFFICIENTS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)  # of activation steering


class Example(NamedTuple):
    prompt: Ids
    word: Ids
    control: Signs


def sentiment_examples(
    prompts: Sequence[str], pairs: Sequence[tuple[str, str]], tokenizer: Any, labels: Labels = "own"
) -> list[Example]:
    """Pairs each prompt with both words of each pair: the positive word at u = +1, or at -1 if labels are swapped."""
    signs = (1.0, -1.0) if labels == "own" else (-1.0, 1.0)
    return [
        Example(encode_prompt(tokenizer, prompt), encode_word(tokenizer, word), (sign,))
        for prompt, pair in product(prompts, pairs)
        for word, sign in zip(pair, signs, strict=True)
    ]


def joint_examples(prompts: Sequence[str], words: Mapping[Signs, Sequence[str]], tokenizer: Any) -> list[Example]:
    """Pairs each prompt with each word, at the signs of the word's dimensions."""
    return [
        Example(encode_prompt(tokenizer, prompt), encode_word(tokenizer, word), signs)
        for prompt, (signs, own) in product(prompts, words.items())
        for word in own
    ]


def lexicon_of(setup: Setup) -> Lexicon:
    return lexicon().small() if setup.size == SMALL else lexicon()


def parts_of(prompts: Prompts, seed: int, setup: Setup) -> Parts:
    """Returns the trained and held-out parts. If only the paper's prompt is trained, all others are new."""
    parts = lexicon_of(setup).split(seed)
    if prompts == "many":
        return parts
    every, pairs = (*parts.train_prompts, *parts.test_prompts), (*parts.train_pairs, *parts.test_pairs)
    (others, own), (other_pairs, own_pairs) = split_values(every, [PAPER_PROMPT]), split_values(pairs, [PAPER_PAIR])
    return Parts(own, others, own_pairs, other_pairs)


def train_steered(seed: int, setup: Setup, folder: Path, labels: Labels = "own", prompts: Prompts = "paper") -> Any:
    """Returns the trained hybrid after training only its block on the paper's prompt and pair, or on many.

    The block is trained once and stored in `folder`. Raises `ValueError` if the block there was trained in a different
    model or on different examples.
    """
    parts, steps = parts_of(prompts, seed, setup), num_steps(setup)
    examples = sentiment_examples(parts.train_prompts, parts.train_pairs, setup.corpus.tokenizer, labels)
    model, name = pretrain("hybrid", seed, setup, folder), f"steered-{prompts}-{labels}"
    block, trained_on = block_in(model), _fingerprint(model, setup, examples, steps)

    def write(made: Path) -> None:
        fit(model, block.parameters(), examples, steps, LEARNING_RATE["flow"], seed, f"{name}-{seed}")
        save_file(block.state_dict(), made / "block.safetensors")
        (made / "examples.txt").write_text(trained_on)

    path = make_once(model_folder(name, seed, folder), write)
    if (path / "examples.txt").read_text() != trained_on:
        raise ValueError(
            f"{path} was trained in another model or with other prompts or steps: pass another --output, or delete it."
        )
    block.load_state_dict(load_file(path / "block.safetensors"))
    return model.requires_grad_(False).eval()


def _fingerprint(model: Any, setup: Setup, examples: Sequence[Example], steps: int) -> str:
    """Fingerprints everything that a steered block depends on: original model, size, text, examples and training."""
    settings = (setup.describe(), list(map(tuple, examples)), steps, BATCH, LEARNING_RATE["flow"])
    digest = hashlib.sha256(repr(settings).encode())
    for weight in model.state_dict().values():
        digest.update(weight.numpy())
    return digest.hexdigest()


def steered_by(method: str, seed: int, setup: Setup, folder: Path, prompts: Prompts) -> Any:
    """Steers like `steered` by one of `METHODS`, or by one of `UNFROZEN`, which trains more than the block.

    step: the block as one discrete step. bias: u times a vector added to the block's output. film: scale and shift
    after the last layer of the baseline that a hybrid replaces. activation: the difference of mean activations added to
    the block's output, with the best coefficient on the examples.
    """
    if method == "flow":
        return train_steered(seed, setup, folder, prompts=prompts)
    parts, tokenizer = parts_of(prompts, seed, setup), setup.corpus.tokenizer
    examples = sentiment_examples(parts.train_prompts, parts.train_pairs, tokenizer)
    model = pretrain("baseline" if method == "film" else "hybrid", seed, setup, folder)
    if method == "activation":
        return activation_steered(model, parts, examples, tokenizer)
    return _fit(method, model, 1, examples, seed, setup, f"{method} {prompts} {seed}")


def jointly_steered(method: str, seed: int, setup: Setup, folder: Path, examples: Sequence[Example]) -> Any:
    """Trains the hybrid, or the baseline for film, with a control for all `DIMENSIONS`, on the examples."""
    model = pretrain("baseline" if method == "film" else "hybrid", seed, setup, folder)
    if method == "flow":
        widen_control(block_in(model), len(DIMENSIONS), seed)
    return _fit(method, model, len(DIMENSIONS), examples, seed, setup, f"{method} joint {seed}")


def _fit(method: str, model: Any, control_size: int, examples, seed: int, setup: Setup, description: str) -> Any:
    first, end = setup.size.replaced
    learned: Any
    if method in UNFROZEN:
        learned = [parameter for name, parameter in model.named_parameters() if not name.startswith(UNFROZEN[method])]
    elif method in ("bias", "film"):
        intervention = Intervention(setup.size.width, control_size, scales=method == "film")
        intervene(model, end - 1 if method == "film" else first, intervention)
        learned = intervention.parameters()
    else:
        block = block_in(model)
        learned = block.parameters()
        if method == "step":
            block.settings = replace(block.settings, solver="euler", steps=1)
    fit(model, learned, examples, num_steps(setup), LEARNING_RATE[method], seed, description)
    return model


def activation_steered(model: Any, parts: Parts, examples: Sequence[Example], tokenizer: Any) -> Any:
    """Adds coefficient x u x the difference of means; the coefficient has the lowest loss on the examples."""
    position = block_in(model).settings.position
    texts = [
        [encode_prompt(tokenizer, prompt) + encode_word(tokenizer, word) for word in pair]
        for prompt, pair in product(parts.train_prompts, parts.train_pairs)
    ]
    direction_D = difference_of_means(model, position, *zip(*texts, strict=True))
    intervention = Intervention(len(direction_D))
    intervene(model, position, intervention).requires_grad_(False).eval()

    def loss(coefficient: float) -> float:
        intervention.shift_CD.copy_(coefficient * direction_D)
        return example_loss(model, examples)

    intervention.shift_CD.copy_(min(COEFFICIENTS, key=loss) * direction_D)
    return model


def widen_control(block: Any, control_size: int, seed: int) -> None:
    """Changes a block's number of controls, with random weights: its own were untrained, because u was 0."""
    generator = torch.Generator().manual_seed(seed)
    block.field.control_proj = nn.Linear(control_size, block.field.up_proj.out_features, bias=False)
    nn.init.normal_(block.field.control_proj.weight, std=CONTROL_STD, generator=generator)
    block.settings = replace(block.settings, control_size=control_size)


def fit(
    model: Any,
    learned: Iterable[nn.Parameter],
    examples: Sequence[Example],
    steps: int,
    rate: float,
    seed: int,
    description: str,
) -> list[float]:
    """Trains only the parameters `learned` with Adam, on batches drawn without repetition until all were seen.

    Returns the loss of each step. Afterwards the model is in eval mode and frozen.
    """
    model.requires_grad_(False).eval()
    trainable = list(learned)
    for parameter in trainable:
        parameter.requires_grad_(True)
    optimizer, losses = torch.optim.Adam(trainable, lr=rate), list[float]()
    batches = _batches(examples, random.Random(seed))
    for _ in ProgressBar(range(steps), desc=description, unit="step", leave=False):
        batch = next(batches)
        loss = -_log_probs(model, batch).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    model.requires_grad_(False)
    return losses


@torch.no_grad()
def example_loss(model: Any, examples: Sequence[Example]) -> float:
    """Returns the mean of -log P(word | prompt)."""
    chunks = [examples[at : at + BATCH] for at in range(0, len(examples), BATCH)]
    return float(-torch.cat([_log_probs(model, chunk) for chunk in chunks]).mean())


def _log_probs(model: Any, examples: Sequence[Example]) -> torch.Tensor:
    control = torch.tensor([example.control for example in examples], device=next(model.parameters()).device)
    return paired_log_probs(model, [e.prompt for e in examples], [e.word for e in examples], control)


def _batches(examples: Sequence[Example], draw: random.Random):
    while True:
        order = draw.sample(examples, len(examples))
        yield from (order[at : at + BATCH] for at in range(0, len(order), BATCH))


def num_steps(setup: Setup) -> int:
    """Returns the number of steering steps: fewer if the model itself was trained for fewer."""
    return min(STEPS, setup.size.steps)
