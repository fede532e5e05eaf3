"""Measures the cost of replacing layers of a trained Llama with a flow, before and after training.

Axes: B rows, N tokens of a row.
"""

import copy
import hashlib
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import nn

from condense import CondenseForCausalLM
from condense.eval.intervals import format_seeds
from condense.eval.models import SETTINGS_OF_SOURCE, EvaluatedModel, generate
from condense.eval.results import Table, picture
from condense.eval.results_store import Record
from condense.eval.runner import Results
from condense.eval.study.training import place
from condense.hub.fingerprint import fingerprint
from condense.hub.loading import load_config, load_model, load_tokenizer
from condense.training.small_llama import passkey_tokenizer, small_llama
from condense.utils.files import read_text
from condense.utils.notices import without_notices
from condense.utils.progress import ProgressBar

from ..model import convert_to_depth, fit_field, missed_share
from .experiment import Experiment
from .lines import draw_band, groups, table
from .options import DepthOptions
from .pretraining import mean_loss

FITTED = ("shuffled", "layers_path", "fitted", "one_step")
MODEL = "HuggingFaceTB/SmolLM2-135M"
REPLACED = 2  # layers
RANGES = {"middle": "in the middle", "next": "one layer later", "worst": "the costliest to leave out"}
ARMS = {
    "original": "original, nothing replaced",
    "left_out": "layers left out",
    "random": "MLP field, random",
    "shuffled": "MLP field, fitted on shuffled tokens",
    "layers_path": "MLP field, fitted to each layer's output",
    "fitted": "MLP field, fitted to the last layer's output",
    "one_step": "MLP field as one discrete step, fitted",
    "layer": "first replaced layer as field, twice",
}
COST_TICKS = (0, 0.25, 0.5, 0.75, 1, 2, 4)  # nats
TUNED = {"block": "the block alone", "all": "everything"}


class Scale(NamedTuple):
    tokens: int = 128  # per row
    train_rows: int = 768
    held_out_rows: int = 64
    fit_rows: int = 64  # training rows used for the fit
    batch: int = 4  # rows
    steps: tuple[int, ...] = (0, 10, 50, 100, 200)  # finetuning steps at which the loss is measured
    warmup: int = 10  # steps
    learning_rate: float = 5e-4


FULL = Scale()
SMALL = Scale(tokens=32, train_rows=8, held_out_rows=4, fit_rows=4, batch=4, steps=(0, 2))


class Texts(NamedTuple):
    train_BN: torch.Tensor
    held_out_BN: torch.Tensor


class Start(NamedTuple):
    where: str
    arm: str
    seed: int


class Swap(Experiment[Start]):
    """Measures the held-out loss after a swap, as finetuning of the block or of everything goes on."""

    kind = "depth_swap"
    unit = "start"
    about = (
        "Two layers of a trained Llama are replaced by a depth block that begins in different ways. Then the model, "
        "or only the block, is finetuned on next tokens. The cost is the held-out loss minus that of the untouched "
        "original, whose block is the two layers themselves. A fitted field is the least squares of the replaced "
        "layers' change on random features, of training rows as they are or with shuffled tokens. A block takes 4 "
        "Euler steps, one_step a single one, and the field layer one for each replaced layer. missed is the share of "
        "the layers' change on held-out rows (its variance over tokens) that the end of the block misses. Without "
        "files, the texts are sampled from the model at temperature 1. Seeds differ in random weights, features and "
        "batches; intervals are 95 % t intervals over seeds."
    )

    def __init__(self, options: DepthOptions, output: Path):
        super().__init__(options, output)
        self.scale = SMALL if options.small else FULL

    @cached_property
    def evaluated(self) -> EvaluatedModel:
        """The original model, which reads a row as one segment, like the stock Llama."""
        if self.options.small and self.options.model is None:
            tokenizer = passkey_tokenizer()
            llama = small_llama(tokenizer, seed=0, width=16, layers=4)
            config = llama.config.to_dict() | {"segment_length": self.scale.tokens}
            model = CondenseForCausalLM(CondenseForCausalLM.config_class.from_dict(config))
            model.load_state_dict(llama.state_dict())
            return EvaluatedModel("random", "random", model.eval(), tokenizer)
        source = self.options.model or MODEL
        with without_notices():  # no text passes its first segment
            config = load_config(CondenseForCausalLM.config_class, source)
        if config.depth is not None:
            raise ValueError(f"{source} already has a depth block: pass a Llama with all its layers.")
        if config.num_hidden_layers < REPLACED + 2:
            raise ValueError(f"{source} has {config.num_hidden_layers} layers: pass a model of {REPLACED + 2} or more.")
        with without_notices():
            model = load_model(CondenseForCausalLM, source, dtype=torch.float32, segment_length=self.scale.tokens)
        tokenizer = load_tokenizer(source, model.config)
        return EvaluatedModel(Path(source).name, source, place(model), tokenizer, fingerprint(source, weights=False))

    @cached_property
    def texts(self) -> Texts:
        """Rows of files, or texts that the model samples from its first token on, different ones for each purpose."""
        counts, tokens = [self.scale.train_rows, self.scale.held_out_rows], self.scale.tokens - 1
        if self._files:
            return Texts(*map(self._rows, self._files.values(), counts))
        torch.manual_seed(0)
        begin_B1 = torch.full((sum(counts), 1), self.evaluated.tokenizer.bos_token_id)
        sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "eos_token_id": None}
        sampling |= {"min_new_tokens": tokens, "max_new_tokens": tokens}
        rows_BN, _ = generate(self.evaluated.model, begin_B1, torch.ones_like(begin_B1), **sampling)
        return Texts(*rows_BN.split(counts))

    @property
    def _files(self) -> dict[str, Path]:
        """Returns the files of the texts by option, if any are given."""
        paths = {"text": self.options.text, "held_out": self.options.held_out}
        return {name: path for name, path in paths.items() if path is not None}

    def _rows(self, path: Path, count: int) -> torch.Tensor:
        """Returns rows [count, N], spread evenly over the text of a file."""
        ids = torch.tensor(self.evaluated.tokenizer(read_text(path), add_special_tokens=False, verbose=False).input_ids)
        width = self.scale.tokens
        if len(ids) < count * width:
            raise ValueError(f"{path} has {len(ids)} tokens, but {count * width} are needed: pass more text.")
        starts = torch.linspace(0, len(ids) - width, count).long()
        return ids[starts[:, None] + torch.arange(width)]

    @cached_property
    def ranges(self) -> dict[str, tuple[int, int]]:
        """FIRST:END of the replaced layers by name."""
        count = len(self.evaluated.model.model.layers)
        pairs = [(first, first + REPLACED) for first in range(count - REPLACED + 1)]
        costs = [self.loss(without(self.evaluated.model, *pair)) for pair in pairs]
        middle = count // 2 - 1
        return {"middle": pairs[middle], "next": pairs[middle + 1], "worst": pairs[costs.index(max(costs))]}

    def settings(self) -> dict[str, Any]:
        """Identifies the model by its weights and the texts by content; own texts follow from the weights."""
        files = {
            name: [path.name, hashlib.sha256(read_text(path).encode()).hexdigest()]
            for name, path in self._files.items()
        }
        described = self.evaluated.describe()
        identity = ("name", "parameters", "weights", SETTINGS_OF_SOURCE)
        model = {name: described[name] for name in identity if name in described}
        measured = {"small": self.options.small, "model": model, "scale": self.scale._asdict()}
        return measured | {"text": None, "held_out": None} | files

    def items(self) -> list[Start]:
        return [Start(where, arm, seed) for seed in self.seeds for where in RANGES for arm in ARMS]

    def measure(self, item: Start) -> Record:
        first, end = self.ranges[item.where]
        model, original = self.begin(item.arm, first, end, item.seed), self.evaluated.model
        layers, missed = model.model.layers, None
        if item.arm not in ("original", "left_out"):
            missed = missed_share(model, original, self.texts.held_out_BN)
        losses = {"all": self.finetuned(copy.deepcopy(model), model.model.embed_tokens, item.seed, everything=True)}
        if item.arm != "left_out":
            block = layers[first:end] if item.arm == "original" else layers[first]
            losses["block"] = self.finetuned(model, block, item.seed, everything=False)
        count = sum(p.numel() for p in model.parameters())
        return {"layers": [first, end], "parameters": count, "missed": missed, "losses": losses}

    def begin(self, arm: str, first: int, end: int, seed: int) -> CondenseForCausalLM:
        """Returns the model of an arm before any training."""
        original = self.evaluated.model
        if arm == "left_out":
            return without(original, first, end)
        model = copy.deepcopy(original)
        if arm == "original":
            return model
        if arm == "layer":
            return convert_to_depth(model, first, end, field="layer", control_size=0, steps=end - first)
        convert_to_depth(model, first, end, seed=seed, control_size=0, steps=1 if arm == "one_step" else 4)
        if arm in FITTED:
            ids_BN = self.texts.train_BN[: self.scale.fit_rows]
            ids_BN = shuffle(ids_BN, seed) if arm == "shuffled" else ids_BN
            fit_field(model, original, ids_BN, path="layers" if arm == "layers_path" else "straight", seed=seed)
        return model

    def finetuned(self, model: CondenseForCausalLM, block: nn.Module, seed: int, everything: bool) -> list[float]:
        """Trains the block or everything, and returns the held-out loss at each of the scale's steps."""
        scale, train_BN = self.scale, self.texts.train_BN
        model.requires_grad_(everything)
        block.requires_grad_(True)
        learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(learned, lr=scale.learning_rate, weight_decay=0.0)
        warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / scale.warmup))
        generator, losses = torch.Generator().manual_seed(seed), [self.loss(model)]
        steps, trained = range(1, scale.steps[-1] + 1), "everything" if everything else "block"
        for step in ProgressBar(steps, desc=trained, unit="step", leave=False):
            rows = torch.randint(len(train_BN), (scale.batch,), generator=generator)
            ids_BN = train_BN[rows].to(model.device)
            optimizer.zero_grad()
            model(ids_BN, labels=ids_BN).loss.backward()
            nn.utils.clip_grad_norm_(learned, 1.0)
            optimizer.step()
            warmup.step()
            if step in scale.steps:
                losses.append(self.loss(model))
        return losses

    @torch.no_grad()
    def loss(self, model: CondenseForCausalLM) -> float:
        """Returns nats per token of the held-out rows, which all have the same length."""
        batches = [rows_BN.to(model.device) for rows_BN in self.texts.held_out_BN.split(16)]
        return mean_loss(lambda rows_BN: model(rows_BN, labels=rows_BN).loss, batches)

    def rows(self, results: Results) -> list[dict[str, Any]]:
        return _lines(results)

    @classmethod
    def tables(cls, results: Results) -> list[Table]:
        last, lines, tables = results["scale"]["steps"][-1], pd.DataFrame(_lines(results)), []
        for (where, layers), of_range in groups(lines, "where", "layers"):
            rows = []
            for arm, own in groups(of_range, "arm"):
                missed = own[(own.tuned == "all") & (own.step == 0)].missed.dropna()
                row = {"start": ARMS[arm], "parameters": f"{own.parameters.iloc[0]:,}"}
                row["missed [%]"] = format_seeds(100 * missed, 1)
                for tuned, step in [("all", 0), *product(TUNED, sorted({50, last} & {*own.step}))]:
                    found = own[(own.tuned == tuned) & (own.step == step)]
                    row[f"{step} steps, {TUNED[tuned]}" if step else "0 steps"] = format_seeds(found.cost)
                rows.append(row)
            cost = f"cost of the swap [nats a token], the original has {_original_loss(results):.3f}"
            tables.append(table(f"layers {layers} ({RANGES[where]}): {cost}", rows))
        return [*tables, _paired_table(lines)]

    @classmethod
    def draw(cls, results: Results, path: Path) -> None:
        lines = pd.DataFrame(_lines(results))
        with picture(path, len(TUNED), len(RANGES), sharex=True, sharey=True, figsize=(11, 6.4)) as panels:
            for line, (tuned, trained) in zip(panels, TUNED.items(), strict=True):
                for axes, ((where, layers), own) in zip(line, groups(lines, "where", "layers"), strict=True):
                    for number, (arm, described) in enumerate(ARMS.items()):
                        curves = own[(own.arm == arm) & (own.tuned == tuned)]
                        if len(curves):
                            style: dict[str, Any] = {"marker": "osD^v<>P"[number], "markersize": 4}
                            draw_band(axes, curves, "step", "cost", described, f"C{number}", **style)
                    axes.set_title(f"layers {layers} ({RANGES[where]})\ntrained: {trained}", fontsize=9)
                    axes.axhline(0, color="grey", linewidth=0.8)
                    axes.set_yscale("symlog", linthresh=1, linscale=3)  # from 0 (the original) to above 5
                    axes.set_yticks(COST_TICKS, labels=list(map(str, COST_TICKS)))
                line[0].set_ylabel("cost [nats a token]")
            for axes in panels[-1]:
                axes.set_xlabel("finetuning step")
            handles, labels = panels[-1, -1].get_legend_handles_labels()  # all starts are in this panel
            panels[-1, -1].figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8)


def without(model: CondenseForCausalLM, first: int, end: int) -> CondenseForCausalLM:
    """Returns a copy without layers `first` to `end` - 1."""
    model = copy.deepcopy(model)
    model.model.layers = nn.ModuleList([*model.model.layers[:first], *model.model.layers[end:]])
    model.config.num_hidden_layers = len(model.model.layers)
    return model


def shuffle(ids_BN: torch.Tensor, seed: int) -> torch.Tensor:
    """Shuffles each row separately; its first token stays."""
    generator = torch.Generator().manual_seed(seed)
    order_BN = torch.rand(ids_BN[:, 1:].shape, generator=generator).argsort(dim=1).to(ids_BN.device)
    return torch.cat([ids_BN[:, :1], ids_BN[:, 1:].gather(1, order_BN)], dim=1)


def _lines(results: Results) -> list[dict[str, Any]]:
    """Returns a line per start, trained part and number of steps."""
    return [
        {name: record[name] for name in ("where", "arm", "seed", "parameters", "missed")}
        | {"layers": ":".join(map(str, record["layers"])), "tuned": tuned, "step": step}
        | {"loss": loss, "cost": loss - _original_loss(results)}
        for record in results["records"]
        for tuned, losses in record["losses"].items()
        for step, loss in zip(results["scale"]["steps"], losses, strict=True)
    ]


def _original_loss(results: Results) -> float:
    """Returns the original's loss before any training."""
    return next(record for record in results["records"] if record["arm"] == "original")["losses"]["all"][0]


# The first start of each pair is compared with the second, seed by seed.
PAIRS = (("one_step", "fitted"), ("fitted", "shuffled"), ("layers_path", "shuffled"), ("random", "left_out"))


def _paired_table(lines: pd.DataFrame) -> Table:
    rows = []
    for (arm, other), where, (tuned, trained) in product(PAIRS, RANGES, TUNED.items()):
        own = lines[(lines["where"] == where) & (lines.tuned == tuned)]
        paired = own[own.arm == arm].merge(own[own.arm == other], on=["layers", "step", "seed"])
        if paired.empty:
            continue  # without the layers there is no block to train
        named = {"start": ARMS[arm], "minus": ARMS[other], "layers": paired.layers.iloc[0], "trained": trained}
        differences = {f"{n} steps": format_seeds(found.loss_x - found.loss_y) for n, found in groups(paired, "step")}
        rows.append(named | differences)
    return table("differences of two starts, paired by seed [nats a token]", rows)
