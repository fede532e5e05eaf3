"""Models that differ only in their memory, and its worth to them: loss by the segments before, on novels.

All have the same parameters and, with the same seed, the same first weights and batches. The model without memory
trains on as many tokens, with every segment as a separate text. With `first_steps` all start from one stock model that
was trained in that way.
"""

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from condense import CondenseForCausalLM
from condense.training.data.documents import good_documents, read_documents
from condense.training.recipe import Recipe, Source
from condense.utils.memory_options import parse_share

from ..charts import finish
from ..intervals import band, format_seeds
from ..options import identify
from ..results import Table, picture
from ..results_store import Record
from ..runner import Results
from ..study.study import Study
from ..study.training import (
    DTYPE,
    PAPERS_MEMORY,
    anneal,
    inputs_folder,
    make_once,
    place,
    remove_checkpoints,
    study_recipe,
    train_alone,
)
from ..tables import select
from ..tasks.windows import paired_losses, read_texts
from ..texts import check_apart, train_tokenizer
from .options import MEMORIES, SHARE, MemoryOptions, label

HEAD_DIM = 32
VALIDATION_TEXTS = 16  # at most
HUES = ("tab:blue", "tab:cyan", "tab:purple", "tab:pink", "tab:orange", "tab:red", "tab:green", "0.4")
COLORS = dict(zip(MEMORIES, HUES, strict=True))


class Trained(NamedTuple):
    memory: str
    seed: int

    @property
    def folder(self) -> str:
        return f"{self.memory}-{self.seed}".replace(" ", "-").replace(":", "_")


class Memory(Study[Trained]):
    """A record has `curve`, the held-out loss in training. `loss_by_segments_before` [S] is the mean over the
    `segments_measured` of the held-out text, in nats a token, with 0 to S - 1 segments before them. `by_position` [L]
    has S - 1 before. A model without memory has S = 1."""

    kind = "memory"
    unit = "model"
    Options = MemoryOptions

    def __init__(self, options: MemoryOptions, output: Path):
        super().__init__(options, output)
        check_apart(options.text, options.held_out)

    @cached_property
    def texts(self) -> tuple[list[str], list[str]]:
        """Returns texts to train on and to evaluate with. Raises `ValueError` for files that can't be read."""
        return _documents(self.options.text), _documents(self.options.held_out)

    def settings(self) -> dict[str, Any]:
        fingerprint = hashlib.sha256("\0".join("".join(texts) for texts in self.texts).encode()).hexdigest()
        return identify(self.options) | {"texts": fingerprint, "dtype": DTYPE}

    def items(self) -> list[Trained]:
        return [Trained(memory, seed) for seed in range(self.options.seeds) for memory in self.options.compared]

    def measure(self, item: Trained) -> Record:
        _ = self.held_out  # refuses a text that is too short before training
        return super().measure(item)

    def measure_trained(self, item: Trained, recipe: Recipe) -> Record:
        model = place(AutoModelForCausalLM.from_pretrained(recipe.output))
        losses_nSL = self.losses(model, 1 if item.memory == "no_memory" else self.options.segments_before + 1)
        return {
            "parameters": model.num_parameters(),
            "loss_by_segments_before": losses_nSL.mean((0, 2)).tolist(),
            "segments_measured": len(losses_nSL),
            "by_position": losses_nSL[:, -1].mean(0).tolist(),
        }

    def losses(self, model: Any, num_segments: int) -> np.ndarray:
        """Returns losses [n, S, L] of the held-out segments that have `segments_before` others before them."""
        options, length = self.options, self.options.segment_length
        first = options.segments_before + 1 - num_segments  # so every model predicts the same segments
        losses_nSL, _ = paired_losses(model, [self.held_out[first * length :]], num_segments, length)
        return losses_nSL

    @cached_property
    def validation_texts(self) -> int:
        """Returns the number of held-out texts for validation, as long as those in training. Raises `ValueError` if no
        document to train on or to evaluate on is that long."""
        tokenizer, length = AutoTokenizer.from_pretrained(self.inputs / "tokenizer"), self.options.total_length
        for name, texts in zip(("--text", "--held-out"), self.texts, strict=True):
            lengths = [len(ids) + 1 for ids in tokenizer(texts)["input_ids"]]  # each document has an end token
            if max(lengths) < length:
                raise ValueError(
                    f"the longest document of {name} has {max(lengths):,} tokens, and a text in training has "
                    f"{length:,}: pass a longer one, or a shorter --length."
                )
        return min(VALIDATION_TEXTS, sum(found // length for found in lengths))

    @cached_property
    def held_out(self) -> torch.Tensor:
        """Returns the token ids [N] of the held-out text: whole segments and one token."""
        most = self.options.segments_held_out * self.options.segment_length + 1
        tokenizer = AutoTokenizer.from_pretrained(self.inputs / "tokenizer")
        ids = torch.cat(read_texts(tokenizer, self.options.held_out, most))
        if len(ids) < most:
            raise ValueError(
                f"the held-out text has {len(ids):,} tokens, and segments_held_out="
                f"{self.options.segments_held_out} need {most:,}: pass more text, or ask for fewer segments."
            )
        return ids

    @cached_property
    def inputs(self) -> Path:
        """Returns the folder of the tokenizer and the models that training starts from, one per set of settings."""
        folder = inputs_folder(self.output, self.settings())
        make_once(folder / "tokenizer", self._write_tokenizer)
        return folder

    def _write_tokenizer(self, folder: Path) -> None:
        train_tokenizer("\n".join(self.texts[0]), self.options.vocab_size).save_pretrained(folder)
        (folder / "settings.json").write_text(json.dumps(self.settings(), sort_keys=True), encoding="utf-8")

    def first(self, seed: int) -> Path:
        """Returns the checkpoint from which all models of a seed start: random, or trained on single segments."""
        random = make_once(self.inputs / f"random-{seed}", partial(self._write_random, seed))
        if not self.options.first_steps:
            return random
        trained = self.inputs / f"first-{seed}"
        if not trained.exists():
            model, steps = {"kind": "stock", "source": str(random)}, self.options.first_steps
            recipe = self._recipe(f"first-{seed}", model, self.options.segments, steps, seed)
            train_alone(recipe)
            make_once(trained, partial(_copy_model, recipe.output))
            remove_checkpoints(recipe.output)
        return trained

    def _write_random(self, seed: int, folder: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(self.inputs / "tokenizer")
        torch.manual_seed(seed)
        LlamaForCausalLM(LlamaConfig(**self._shape(tokenizer))).save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    def start(self, item: Trained) -> Path:
        """Returns the checkpoint from which a model starts; with one seed, all models have the same weights."""
        first = self.first(item.seed)
        if item.memory not in ("transformer_xl", "sliding_window"):
            return first
        start = self.inputs / f"start-{item.memory}-{item.seed}"
        return make_once(start, partial(self._write_start, item.memory, first))

    def _write_start(self, memory: str, first: Path, folder: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(first)
        model: Any
        if memory == "sliding_window":
            window = 2 * self.options.segment_length
            model = MistralForCausalLM(MistralConfig(**self._shape(tokenizer), sliding_window=window))
            model.load_state_dict(LlamaForCausalLM.from_pretrained(first).state_dict())
        else:
            model = CondenseForCausalLM.from_pretrained(
                first, segment_length=self.options.segment_length, memory_source="layer_input", sink_token_id=None
            )
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    def _shape(self, tokenizer: Any) -> dict[str, Any]:
        options = self.options
        return {
            "vocab_size": len(tokenizer), "hidden_size": options.width, "num_hidden_layers": options.layers,
            "intermediate_size": 8 * options.width // 3 // 8 * 8, "num_attention_heads": options.width // HEAD_DIM,
            "num_key_value_heads": options.width // HEAD_DIM, "tie_word_embeddings": True,
            "max_position_embeddings": 2**20, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        }  # fmt: skip

    def recipe(self, item: Trained) -> Recipe:
        """Returns the recipe of a model, which `condense train` could also run."""
        memory = item.memory
        model: dict[str, Any] = {"kind": "condense", "segment_length": self.options.segment_length, **PAPERS_MEMORY}
        if memory in ("sliding_window", "full_attention"):
            model = {"kind": "stock"}
        elif memory.startswith("folded_"):
            model["bptt_segments"] = int(memory.removeprefix("folded_"))
        elif memory.startswith(SHARE):
            model["memory_share"] = parse_share(memory.removeprefix(SHARE))
        # Without memory, each segment is a separate text.
        texts = self.options.segments if memory == "no_memory" else 1
        model["source"] = str(self.start(item))
        return self._recipe(item.folder, model, texts, self.options.steps, item.seed)

    def _recipe(self, name: str, model: dict[str, Any], texts: int, steps: int, seed: int) -> Recipe:
        """Returns a training of `steps` steps, with each text divided into `texts` separate ones."""
        options = self.options
        length, batch = options.total_length // texts, options.batch * texts
        return study_recipe(
            model=model,
            data={
                "task": "text", "sources": [{"files": files} for files in options.text], "fit": "cut",
                "prepared": self.output / "prepared",
            },
            output=self.output / "models" / name,
            stage=(length, steps),
            batch=batch,
            optimizer=anneal(options.learning_rate, steps, weight_decay=0.1),
            evaluation={
                "every": max(1, steps // 8), "sequences": self.validation_texts * texts,
                "sources": [{"files": files} for files in options.held_out],
            },
            seed=seed,
        )  # fmt: skip

    def summarise(self, measured: Sequence[tuple[Trained, Record]]) -> dict[str, Any]:
        """Returns `models`, each with its mean loss by segments before. `against_folded` is its loss above the folded
        one of its seed on the same segments, with as much text before as in training, and with the most."""
        losses = {item: record["loss_by_segments_before"] for item, record in measured}
        models = []
        for item, record in measured:
            folded = losses.get(Trained("folded", item.seed))
            models.append(
                {
                    **self.key(item),
                    "parameters": record["parameters"],
                    "loss_by_segments_before": losses[item],
                    "by_position": record["by_position"],
                    "validation": [point["loss"] for point in record["curve"]],
                    "against_folded": None if folded is None else self._against(losses[item], folded),
                    "segments_measured": record["segments_measured"],
                }
            )
        return {"models": models, "seeds": self.options.seeds, "memories": list(self.options.compared)}

    def _against(self, losses_S: list[float], folded_S: list[float]) -> list[float]:
        """Returns the mean of paired differences, because all models are measured on the same segments."""
        trained = min(self.options.segments - 1, len(folded_S) - 1)
        return [losses_S[min(before, len(losses_S) - 1)] - folded_S[before] for before in (trained, len(folded_S) - 1)]

    def rows(self, results: Results) -> Sequence[dict[str, Any]]:
        return [
            {"memory": model["memory"], "seed": model["seed"], "segments_before": before, "loss": loss}
            for model in results["models"]
            for before, loss in enumerate(model["loss_by_segments_before"])
        ]

    @classmethod
    def tables(cls, results: Results) -> list[Table]:
        """Returns a table with a line per memory, for numbers of segments before that are powers of two."""
        most = results["segments_before"]
        shown_at = [0, *(2**n for n in range(most.bit_length()) if 2**n < most), most]
        # As much text before as in training.
        trained = min(results["total_length"] // results["segment_length"] - 1, most)
        columns = ["memory", "parameters", *(f"{before} before" for before in shown_at)]
        columns += [f"more than folded, {before} before" for before in (trained, most)]
        rows: list[list[Any]] = []
        for memory in results["memories"]:
            models = select(results["models"], memory=memory)
            curves = [model["loss_by_segments_before"] for model in models]
            cells = [
                format_seeds([curve[at] for curve in curves], 4) if at < len(curves[0]) else "-" for at in shown_at
            ]
            more = [model["against_folded"] or [None, None] for model in models]
            against = [format_seeds([values[which] for values in more], 4) for which in (0, 1)]
            rows.append([label(memory), f"{models[0]['parameters']:,}", *cells, *against])
        counted = results["models"][0]["segments_measured"]
        return [Table(f"loss of the same {counted:,} segments by the segments before [nats a token]", columns, rows)]

    @classmethod
    def draw(cls, results: Results, path: Path) -> None:
        """Draws the loss by segments before, the loss by position in the segment, and the validation loss."""
        with picture(path, columns=3, figsize=(15, 4.5)) as (before, position, training):
            for memory in results["memories"]:
                models, look = select(results["models"], memory=memory), (label(memory), _color(memory, results))
                curves = [model["loss_by_segments_before"] for model in models]
                if len(curves[0]) == 1:
                    before.axhline(np.mean(curves), color=look[1], linestyle="--", label=look[0])
                else:
                    band(before, range(1, len(curves[0]) + 1), curves, *look)
                band(position, range(results["segment_length"]), [model["by_position"] for model in models], *look)
                band(training, range(len(models[0]["validation"])), [model["validation"] for model in models], *look)
            before.set_xscale("log", base=2)
            finish(before, x="segments read, its own included", y="loss [nats a token]", legend=7)
            finish(position, x="position in the segment [tokens], all text before", y="loss [nats a token]")
            finish(training, x="validations", y="loss [nats a token]")


def _color(memory: str, results: Results) -> Any:
    if memory in COLORS:
        return COLORS[memory]
    shares = [name for name in results["memories"] if name.startswith(SHARE)]
    return matplotlib.colormaps["viridis"]((1 + shares.index(memory)) / (1 + len(shares)))


def _copy_model(source: Path, folder: Path) -> None:
    AutoModelForCausalLM.from_pretrained(source).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


def _documents(files: Sequence[str]) -> list[str]:
    reader = read_documents([Source(files=pattern) for pattern in files], with_summaries=False)
    return [document.text for document in good_documents(reader, "refuse")]
