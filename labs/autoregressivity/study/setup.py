"""Inputs that all ablations share: sizes, texts, a tokenizer, models that training starts from, the reference model.

They are made once for an output folder, in its folder `inputs`.

Axes: B texts, N tokens of a text, P tokens of a prompt, W windows of a text.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

import torch
from filelock import FileLock
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from condense.eval.study.training import PAPERS_MEMORY, make_once, study_recipe, train_alone
from condense.eval.texts import HUB, hub_text, train_tokenizer
from condense.hub import loading
from condense.hub.fingerprint import fingerprint
from condense.training.recipe import Recipe
from condense.training.sample_data import story
from condense.utils.files import read_text

from .options import AblationOptions
from .text_quality import generate, text_quality

OFFLINE = "pass --text FILE --held-out FILE to work without the hub"


@dataclass(frozen=True)
class Size:
    """The models and their training; lengths in tokens. The learning rate is constant after the warm-up, so the loss at
    any step equals the final loss of a shorter training."""

    vocab_size: int = 512
    hidden_size: int = 64
    layers: int = 3
    heads: int = 4
    length: int = 128
    segment_length: int = 32
    batch: int = 16
    steps: int = 320
    learning_rate: float = 2e-3
    warmup_steps: int = 20
    validations: int = 8
    sequences: int = 64
    reference_hidden_size: int = 160
    reference_layers: int = 4
    reference_steps: int = 1200
    prompts: int = 64
    prompt_length: int = 32
    channels: tuple[int, int] = (16, 32)
    image_batch: int = 64
    image_steps: int = 600
    image_sequences: int = 80
    images: int = 256
    sampling_steps: int = 40  # of 1,000, so they are 25 apart: with an odd number, all experts modulo k write


SMALL = Size(
    vocab_size=300, hidden_size=16, layers=1, heads=2, length=32, segment_length=8, batch=4, steps=4, warmup_steps=1,
    validations=2, sequences=4, reference_hidden_size=16, reference_layers=1, reference_steps=4, prompts=4,
    prompt_length=8, channels=(16, 16), image_batch=8, image_steps=4, image_sequences=8, images=32, sampling_steps=8,
)  # fmt: skip


class Setup:
    """The inputs of the ablations in an output folder. Raises `ValueError` for texts that can't be read."""

    def __init__(self, options: AblationOptions, output: Path, size: Size | None = None):
        self.options, self.output = options, output
        self.size = size or (SMALL if options.small else Size())
        self.inputs, self.runs = output / "inputs", output / "runs"

    @cached_property
    def texts(self) -> tuple[str, str]:
        """Returns the text to train on and the text to validate with."""
        if self.options.small:
            return _generate(0, 30), _generate(1, 8)
        if self.options.text is not None and self.options.held_out is not None:
            return read_text(self.options.text), read_text(self.options.held_out)
        return hub_text("train", OFFLINE), hub_text("test", OFFLINE)

    @property
    def text_names(self) -> str:
        """Returns the texts' names, to be shown; measurements are compared by the texts themselves."""
        if self.options.text is not None and self.options.held_out is not None:
            return f"{self.options.text.name}, {self.options.held_out.name}"
        return "generated" if self.options.small else f"{HUB[0]} train, test"

    def described(self) -> dict[str, Any]:
        """Returns everything that trained models depend on."""
        texts = hashlib.sha256("\0".join(self.texts).encode()).hexdigest()
        return json.loads(json.dumps({"size": asdict(self.size), "fingerprint": texts}))

    def described_with_judge(self) -> dict[str, Any]:
        """Returns everything that measurements of samples depend on: also the reference model."""
        settings = fingerprint(self._reference_source, weights=False)
        return self.described() | {
            "reference_fingerprint": self._reference_fingerprint, "reference_config_and_tokenizer": settings,
        }  # fmt: skip

    @cached_property
    def _reference_fingerprint(self) -> str:
        weights = hashlib.sha256()
        for name, tensor in sorted(self.reference().state_dict().items()):
            weights.update(name.encode())
            weights.update(tensor.contiguous().view(torch.uint8).numpy())
        return weights.hexdigest()

    def make(self, with_reference: bool = True) -> None:
        """Writes the texts, and trains the tokenizer and the reference model, unless they exist.

        Raises `ValueError` if the folder has models of other texts or sizes, or the reference has another tokenizer.
        """

        def write(folder: Path) -> None:
            for name, text in zip(("train", "held_out"), self.texts, strict=True):
                (folder / f"{name}.txt").write_text(text, encoding="utf-8")
            train_tokenizer(self.texts[0], self.size.vocab_size).save_pretrained(folder / "tokenizer")
            (folder / "described.json").write_text(json.dumps(self.described()), encoding="utf-8")

        described = make_once(self.inputs / "texts", write) / "described.json"
        if json.loads(described.read_text(encoding="utf-8")) != self.described():
            raise ValueError(f"{self.output} has models of other texts or sizes: pass another --output.")
        if with_reference and self.options.reference is not None:
            self._check_reference(self.options.reference)
        elif with_reference:
            with FileLock(self.inputs / ".lock"):
                if not (self.inputs / "reference/model.safetensors").exists():
                    self._train_reference()

    @cached_property
    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self.inputs / "texts/tokenizer")

    def start(self, seed: int, reference: bool = False, hidden_size: int | None = None) -> Path:
        """Writes a Llama with random weights and the tokenizer, from which folded and stock models start."""
        name = "reference" if reference else f"{seed}"
        path = self.inputs / ("start-" + (name if hidden_size is None else f"{hidden_size}-{name}"))

        def write(folder: Path) -> None:
            torch.manual_seed(seed)
            LlamaForCausalLM(self._llama_config(reference, hidden_size)).save_pretrained(folder)
            self.tokenizer.save_pretrained(folder)

        return make_once(path, write)

    def _llama_config(self, reference: bool, hidden_size: int | None) -> LlamaConfig:
        size = self.size
        hidden_size = hidden_size or (size.reference_hidden_size if reference else size.hidden_size)
        return LlamaConfig(
            vocab_size=len(self.tokenizer),
            hidden_size=hidden_size,
            intermediate_size=8 * hidden_size // 3 // 8 * 8,
            num_hidden_layers=size.reference_layers if reference else size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.heads,
            max_position_embeddings=4 * size.length,
            bos_token_id=None,
            eos_token_id=self.tokenizer.eos_token_id,
            pad_token_id=self.tokenizer.pad_token_id,
        )

    def language_recipe(self, name: str, objective: dict[str, Any], seed: int, output: Path, **fields: Any) -> Recipe:
        """Returns the recipe of a language model, `folded` or `stock`."""
        size, texts = self.size, self.inputs / "texts"
        steps = fields.pop("steps", size.steps)
        kind: dict[str, Any] = {"kind": "stock"}
        if name == "folded":
            kind = {"kind": "condense", "segment_length": size.segment_length, **PAPERS_MEMORY}
        common: dict[str, Any] = {
            "model": {"source": str(self.start(seed)), **kind},
            "data": {
                "task": "text", "sources": [{"files": str(texts / "train.txt")}], "fit": "cut",
                "prepared": self.inputs / "prepared",
            },
            "evaluation": {
                "every": max(1, steps // size.validations), "sequences": size.sequences,
                "sources": [{"files": str(texts / "held_out.txt")}],
            },
        }  # fmt: skip
        common |= {"objective": objective, "output": output, "stage": (size.length, steps), "batch": size.batch}
        return study_recipe(**common | self._common(seed) | fields)

    def image_recipe(self, objective: dict[str, Any], seed: int, output: Path) -> Recipe:
        """Returns the recipe of the diffusion model."""
        size = self.size
        return study_recipe(
            model={"kind": "denoiser", "channels": list(size.channels), "layers": 1},
            objective=objective,
            data={"task": "digits"},
            output=output,
            stage=(64, size.image_steps),
            batch=size.image_batch,
            evaluation={"every": max(1, size.image_steps // size.validations), "sequences": size.image_sequences},
            **self._common(seed),
        )

    def _common(self, seed: int) -> dict[str, Any]:
        size = self.size
        optimizer = {
            "learning_rate": size.learning_rate, "final_learning_rate": size.learning_rate,
            "warmup_steps": size.warmup_steps,
        }  # fmt: skip
        return {"optimizer": optimizer, "dtype": "float32", "parts": 1, "seed": seed}

    def reference(self) -> Any:
        """Loads the model that judges generated texts."""
        return loading.load_model(LlamaForCausalLM, self._reference_source).eval()

    @property
    def _reference_source(self) -> str:
        return self.options.reference or str(self.inputs / "reference")

    def _check_reference(self, source: str) -> None:
        tokenizer = loading.load_tokenizer(source, loading.load_config(LlamaConfig, source))
        if tokenizer.get_vocab() != self.tokenizer.get_vocab():
            raise ValueError(
                f"--reference {source} has another tokenizer than the ablated models, whose texts it judges: train one "
                f"with {self.inputs / 'texts/tokenizer'}, or leave it out."
            )

    def _train_reference(self) -> None:
        source = {"source": str(self.start(2**20, reference=True)), "kind": "stock"}
        fields: dict[str, Any] = {"steps": self.size.reference_steps, "model": source}
        recipe = self.language_recipe("stock", {"kind": "next_token"}, 0, self.inputs / "reference", **fields)
        train_alone(recipe)

    def windows(self, text: str) -> torch.Tensor:
        """Returns at most `prompts` parts [B, N] of a text, at equal distances."""
        ids, length = torch.tensor(self.tokenizer(text, verbose=False)["input_ids"]), self.size.length
        windows_WN = ids[: len(ids) // length * length].view(-1, length)
        number = min(self.size.prompts, len(windows_WN))
        return windows_WN[torch.linspace(0, len(windows_WN) - 1, number).long()]

    @cached_property
    def prompts(self) -> torch.Tensor:
        """Returns windows [B, N] of the held-out text: each is a prompt [P] and its real continuation."""
        return self.windows(self.texts[1])

    def quality(self, text_BN: torch.Tensor) -> dict[str, float]:
        """Measures texts after their prompts."""
        return text_quality(self.reference(), text_BN, self.size.prompt_length)

    def generated_quality(self, model: Any, seed: int, **options: Any) -> dict[str, float]:
        """Measures the texts that a model writes after the prompts. `options` are those of `generate`."""
        prompt_BP = self.prompts[:, : self.size.prompt_length]
        num_tokens = self.size.length - self.size.prompt_length
        return self.quality(generate(model, prompt_BP, num_tokens, seed, **options))


@contextmanager
def trained_folder(recipe: Recipe) -> Iterator[Path]:
    """Trains a model, yields its folder and removes it afterwards: the weights of a whole grid would fill a disk."""
    train_alone(recipe)
    yield recipe.output
    shutil.rmtree(recipe.output)


def _generate(seed: int, documents: int) -> str:
    random = Random(seed)
    return " ".join(story(random, 120)[0] for _ in range(documents))
