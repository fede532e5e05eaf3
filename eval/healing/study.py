"""Loss against tokens while a folded model learns to use its memory, and the worth of its memory afterwards.

Every run starts from the same stock checkpoint. The cost of folding is the held-out loss of the untrained folded model,
less that of the stock model with full attention over the whole text. A run wins back a part of it. There are two
controls. The stock model, trained on the same texts, controls for learning next tokens, because new text improves any
model. An untrained model with Transformer-XL's memory sees a segment as the fold does; it holds a layer's input, as the
checkpoint's keys and values expect.
"""

import hashlib
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from condense import CondenseConfig, CondenseForCausalLM
from condense.checks import check_full_attention
from condense.hub import loading
from condense.hub.adapters import merge_adapters
from condense.training.data.shards import source_files
from condense.training.data.tasks import make_examples
from condense.training.preflight import check_run
from condense.training.recipe import Recipe, Source
from condense.training.recipe.models import stock_class
from condense.utils.memory_options import parse_share, parse_sink
from condense.utils.notices import without_notices

from ..charts import finish
from ..intervals import band, format_seeds
from ..models import SETTINGS_OF_SOURCE, load_evaluated
from ..options import identify
from ..results import Table, groups_of, picture
from ..results_store import Key, Record
from ..runner import Results
from ..statistics import bootstrap
from ..study.study import Study
from ..study.training import DTYPE, anneal, place, study_recipe
from ..tables import select
from ..tasks.windows import paired_losses
from ..texts import check_apart
from .options import AUTO, METHODS, TEACHER, UNTRAINED, HealingOptions

ARMS = {TEACHER: "stock model, not trained", **METHODS}
DISTILLED = ("distill", "lora")
VALIDATIONS = 16  # in a run, after the one before its first step
BAR = 0.8  # of the cost; the table shows the tokens until this much is won back
COLORS = {
    TEACHER: "black", "stock": "0.4", "full": "tab:blue", "distill": "tab:orange", "lora": "tab:green",
    UNTRAINED: "tab:red",
}  # fmt: skip


class Run(NamedTuple):
    """A run of the study. `segment_length` is 0 for the stock model; `share` is in the notation of `parse_share`."""

    method: str
    segment_length: int
    seed: int
    share: str = "1"

    @property
    def is_trained(self) -> bool:
        return self.method not in (TEACHER, UNTRAINED)

    @property
    def folder(self) -> str:
        if not self.segment_length:
            return f"stock-{self.seed}"
        share = "" if self.share == "1" else f"-share-{self.share.replace(':', '_')}"
        return f"{self.method}-{self.segment_length}{share}-{self.seed}"


class Healing(Study[Run]):
    """A record has `curve`, the held-out losses by step, and for folded models `memory`, see `memory_worth`."""

    kind = "healing"
    unit = "run"
    Options = HealingOptions

    def __init__(self, options: HealingOptions, output: Path):
        super().__init__(options, output)
        if options.text is not None and options.held_out is not None:
            check_apart([options.text], [options.held_out])
        config, reader = self.recipe(Run(TEACHER, 0, 0)).model.load_config(), "the stock model beside the folded ones"
        check_full_attention(config, options.total_length, reader, "--length {}".format)
        for item in self.items():  # refuses untrainable models before anything is trained
            if item.seed == 0 and item.is_trained:
                check_run(self.recipe(item), 1, None)

    def settings(self) -> dict[str, Any]:
        described = load_evaluated(self.options.model).describe()
        patterns = [pattern for pattern in (self.options.text, self.options.held_out) if pattern is not None]
        files = [path for pattern in patterns for path in source_files(Source(files=pattern))]
        texts = [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]
        model = {name: described[name] for name in ("name", "parameters", "weights", SETTINGS_OF_SOURCE)}
        found = identify(self.options) | {"model": model, "texts": texts, "dtype": DTYPE}
        return found if self._sink is None else found | {"sink_token_id": self._sink}

    def items(self) -> list[Run]:
        found = []
        for seed in range(self.options.seeds):
            found.append(Run(self._stock, 0, seed))  # others are compared with its loss before training
            methods = [method for method in self.options.methods if method != "stock"]
            for length, method in product(self.options.segment_lengths, methods):
                shares = ["1"] if method == UNTRAINED else self.options.shares
                found += [Run(method, length, seed, share) for share in shares]
        return [run for run in found if run.is_trained or run.seed == 0]  # untrained, it is the same with all seeds

    @property
    def _stock(self) -> str:
        """Returns the stock model's method: trained, as their control, if others learn next tokens."""
        return "stock" if {"stock", "full"} & set(self.options.methods) else TEACHER

    def key(self, item: Run) -> Key:
        key: Key = {"method": item.method, "segment_length": item.segment_length, "seed": item.seed}
        return key if item.share == "1" else key | {"share": item.share}

    def _memory(self, share: str) -> dict[str, Any]:
        return {"memory_share": parse_share(share), "sink_token_id": self._sink}

    @cached_property
    def _sink(self) -> int | None:
        """Returns the token of the folded models' sink."""
        if self.options.sink_token_id != AUTO:
            return parse_sink(self.options.sink_token_id)
        with without_notices():
            length = self.options.segment_lengths[0]
            return loading.load_config(CondenseConfig, self.options.model, segment_length=length).sink_token_id

    def recipe(self, item: Run) -> Recipe:
        """Returns the recipe of a run, which `condense train` could also run."""
        options, steps = self.options, self.options.steps
        is_stock, is_lora = item.method in ("stock", TEACHER), item.method == "lora"
        model: dict[str, Any] = {"kind": "stock"}
        if not is_stock:
            model = {"kind": "condense", "segment_length": item.segment_length, **self._memory(item.share)}
        prepared = self.output / "prepared"
        evaluation: dict[str, Any] = {"every": max(1, steps // VALIDATIONS), "sequences": options.sequences}
        data: dict[str, Any] = {"task": "samples", "prepared": prepared}
        if options.text is not None:
            data = {"task": "text", "sources": [{"files": options.text}], "fit": "cut", "prepared": prepared}
            evaluation["sources"] = [{"files": options.held_out}]
        return study_recipe(
            model={"source": options.model, **model},
            objective={"kind": "distill" if item.method in DISTILLED else "next_token"},
            data=data,
            output=self.output / "runs" / item.folder,
            stage=(options.total_length, steps),
            batch=options.batch,
            optimizer=anneal(options.lora_learning_rate if is_lora else options.learning_rate, steps),
            lora={"rank": options.rank, "alpha": 2 * options.rank} if is_lora else None,
            evaluation=evaluation,
            seed=item.seed,
        )

    def measure(self, item: Run) -> Record:
        if item.method == TEACHER:
            config = self.recipe(item).model.load_config()
            stock = place(loading.load_model(stock_class(config), self.options.model, dtype=torch.float32))
            return {"curve": [{"step": 0, "loss": mean_loss(stock, self.held_out)}]}
        if not item.is_trained:
            model = place(self._load_folded(self.options.model, item, self._memory("0")))
            curve = [{"step": 0, "loss": mean_loss(model, self.held_out)}]
            return {"curve": curve, "memory": memory_worth(model, self.held_out, item.segment_length)}
        return super().measure(item)

    def measure_trained(self, item: Run, recipe: Recipe) -> Record:
        if not item.segment_length:
            return {}
        return {"memory": memory_worth(self._load_trained(item, recipe), self.held_out, item.segment_length)}

    def _load_trained(self, item: Run, recipe: Recipe) -> Any:
        source = self.options.model if item.method == "lora" else recipe.output
        model = self._load_folded(source, item, self._memory(item.share))
        return place(merge_adapters(model, recipe.output) if item.method == "lora" else model)

    def _load_folded(self, source: Any, item: Run, memory: dict[str, Any]) -> Any:
        fields = {"dtype": torch.float32, "segment_length": item.segment_length, **memory}
        with without_notices():
            return loading.load_model(CondenseForCausalLM, source, **fields)

    @cached_property
    def held_out(self) -> list[torch.Tensor]:
        """Returns the token ids [N] of the texts to measure losses on."""
        recipe = self.recipe(Run(TEACHER, 0, 0))
        _, examples = make_examples(recipe, recipe.model.load_tokenizer(recipe.model.load_config()))
        assert examples is not None
        numbers, length = range(self.options.sequences), self.options.total_length
        return [torch.as_tensor(examples.sequence(number, length)[0].input_ids) for number in numbers]

    def summarise(self, measured: Sequence[tuple[Run, Record]]) -> dict[str, Any]:
        """Returns `runs`, each with its losses by validation and the share `won_back` of the fold's cost: None if
        folding costs nothing. With a memory share below 1, something is won back before any training.

        The rest of the cost is the loss above a reference. For distillation this is the stock model as teacher. For
        learning next tokens it is the stock model untrained or trained with as many tokens, whichever is lower, because
        learning from new text that any model would do does not count as won back.
        """
        by_run = dict(measured)
        stock = by_run[Run(self._stock, 0, 0)]["curve"][0]["loss"]
        runs = []
        for run, record in measured:
            losses = [point["loss"] for point in record["curve"]]
            found = {**self.key(run), "losses": losses, "cost": losses[0] - stock}
            if run.method == UNTRAINED:
                found |= record["memory"]
            elif run.segment_length:
                trained = [stock] * len(losses)  # the teacher of distilled models
                if run.method not in DISTILLED:
                    trained = [point["loss"] for point in by_run[Run("stock", 0, run.seed)]["curve"]]
                left = [loss - min(stock, known) for loss, known in zip(losses, trained, strict=True)]
                fold = by_run[run._replace(share="1")]["curve"][0]["loss"] - min(stock, trained[0])
                won_back = [1 - one / fold for one in left] if fold > 0 else None
                until = None if won_back is None else tokens_to_bar(self._tokens(record), won_back)
                found |= {"won_back": won_back, "tokens_to_bar": until, **record["memory"]}
            runs.append(found)
        seeds = self.options.seeds
        tokens = next(self._tokens(record) for run, record in measured if run.is_trained)
        return {"seeds": seeds, "stock_loss": stock, "tokens": tokens, "runs": runs}

    def _tokens(self, record: Record) -> list[int]:
        return [int(point["step"]) * self.options.batch * self.options.total_length for point in record["curve"]]

    def rows(self, results: Results) -> Sequence[dict[str, Any]]:
        """Returns a line for each validation of each run."""
        lines = []
        for run in results["runs"]:
            for number, loss in enumerate(run["losses"]):
                key = {name: run[name] for name in ("method", "segment_length", "seed")}
                key["share"] = run.get("share", "1")
                won_back = run["won_back"][number] if run.get("won_back") else None
                lines.append(key | {"tokens": results["tokens"][number], "loss": loss, "won_back": won_back})
        return lines

    @classmethod
    def tables(cls, results: Results) -> list[Table]:
        return [_costs(results), _memories(results)]

    @classmethod
    def draw(cls, results: Results, path: Path) -> None:
        """Draws the loss against tokens, and below it the final loss by segments before; a column per length."""
        lengths = _lengths(results)
        with picture(path, 2, len(lengths), figsize=(4 * len(lengths), 7), squeeze=False) as panels:
            for upper, lower, length in zip(*panels, lengths, strict=True):
                _draw_losses(results, length, upper)
                _draw_memory(results, length, lower)
            legend = panels[0][0].get_legend_handles_labels()
            panels[0][0].figure.legend(*legend, fontsize=7, loc="outside lower center")


def mean_loss(model: Any, texts: Sequence[torch.Tensor]) -> float:
    """Returns the loss over all predictable tokens of texts [N], in the precision of the trainer's validation."""
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=DTYPE == "bfloat16"):
        losses = [model(text[None].to(model.device), labels=text[None].to(model.device)).loss.item() for text in texts]
    return float(np.average(losses, weights=[len(text) - 1 for text in texts]))


def memory_worth(model: Any, texts: Sequence[torch.Tensor], segment_length: int) -> dict[str, Any]:
    """Returns the loss of the same segments with 0, 1, 2 ... segments before them (`by_before`). `further` is the worth
    of all but the last of these, paired by segment, with a 95 % interval (bootstrap over texts)."""
    sizes = [(len(text) - 1) // segment_length for text in texts]
    num_segments = max(3, (min(sizes) + 1) // 2)
    loss_nSL, text_n = paired_losses(model, texts, num_segments, segment_length)
    losses_nS = loss_nSL.mean(-1)
    further_n = losses_nS[:, 1] - losses_nS[:, -1]
    by_text = [further_n[text_n == text].mean() for text in sorted(set(text_n))]
    low, high = bootstrap(by_text)
    return {
        "by_before": losses_nS.mean(0).tolist(),
        "further": float(np.mean(by_text)),
        "further_low": low,
        "further_high": high,
        "segments": len(losses_nS),
    }


def tokens_to_bar(tokens: Sequence[int], won_back: Sequence[float]) -> float | None:
    """Returns the tokens until `BAR` of the cost is won back, interpolated between validations; None if never."""
    if won_back[0] >= BAR:
        return tokens[0]
    for (start, before), (end, after) in pairwise(zip(tokens, won_back, strict=True)):
        if before < BAR <= after:
            return start + (end - start) * (BAR - before) / (after - before)
    return None


def _lengths(results: Results) -> list[int]:
    return sorted({run["segment_length"] for run in results["runs"]} - {0})


class Arm(NamedTuple):
    """Runs that differ only in their seeds."""

    name: str
    method: str
    runs: list[dict[str, Any]]
    color: Any


def _arms(results: Results, length: int) -> list[Arm]:
    """Returns the arms by method, then by share in the order of the runs."""
    of_length = [{"share": "1"} | run for run in select(results["runs"], segment_length=length)]
    groups, found = groups_of(of_length, "method", "share"), list[Arm]()
    has_shares = len({share for _, share in groups}) > 1
    for (method, share), runs in sorted(groups.items(), key=lambda item: list(ARMS).index(item[0][0])):
        shown_share = f", share {share}" if has_shares and method != UNTRAINED else ""
        color = f"C{len(found)}" if has_shares and method not in ("stock", TEACHER, UNTRAINED) else COLORS[method]
        found.append(Arm(ARMS[method] + shown_share, method, runs, color))
    return found


def _costs(results: Results) -> Table:
    tokens = results["tokens"]
    quarters = [len(tokens) // 4, len(tokens) // 2, len(tokens) - 1]
    columns = ["segment [tokens]", "model", "loss before", "after", "cost of folding"]
    columns += [f"won back after {tokens[number]:,} tokens [%]" for number in quarters]
    columns += [f"tokens until {BAR:.0%} is won back"]
    rows: list[list[Any]] = []
    for length in (0, *_lengths(results)):
        for arm in _arms(results, length):
            runs = arm.runs
            # Before training, all seeds are the same model.
            before, after = f"{runs[0]['losses'][0]:.4f}", format_seeds([run["losses"][-1] for run in runs], 4)
            cost = f"{runs[0]['cost']:.4f}" if length else "-"
            row = [length or "-", arm.name, before, after if len(runs[0]["losses"]) > 1 else "-", cost]
            if runs[0].get("won_back"):
                row += [format_seeds([100 * run["won_back"][number] for run in runs], 1) for number in quarters]
                reached = [run["tokens_to_bar"] for run in runs]
                row.append("not reached" if None in reached else format_seeds(reached, 0))
            elif "won_back" in runs[0]:
                row.append("folding costs nothing")
            rows.append(row + ["-"] * (len(columns) - len(row)))
    return Table("held-out loss [nats a token], and what training wins back of the cost of folding", columns, rows)


def _memories(results: Results) -> Table:
    columns = ["segment [tokens]", "model", "0 segments before", "1 before", "the most before", "the most"]
    columns += ["worth of those beyond the last one", "interval over texts, worst seed", "segments measured"]
    rows = []
    for length in _lengths(results):
        for arm in _arms(results, length):
            runs = arm.runs
            losses = [format_seeds([run["by_before"][number] for run in runs], 4) for number in (0, 1, -1)]
            worst = min(runs, key=lambda run: run["further_low"])
            further = format_seeds([run["further"] for run in runs], 4)
            further_of_worst = f"{worst['further_low']:.4f} to {worst['further_high']:.4f}"
            most, number = len(runs[0]["by_before"]) - 1, runs[0]["segments"]
            rows.append([length, arm.name, *losses, most, further, further_of_worst, number])
    return Table("loss of the same segments by the segments before them, at the end [nats a token]", columns, rows)


def _draw_losses(results: Results, length: int, panel: Any) -> None:
    for arm in (*_arms(results, 0), *_arms(results, length)):
        if len(arm.runs[0]["losses"]) == 1:  # untrained
            loss, style = arm.runs[0]["losses"][0], "--" if arm.method == TEACHER else ":"
            panel.axhline(loss, color=arm.color, linestyle=style, linewidth=0.8, label=arm.name)
        else:
            losses = [run["losses"] for run in arm.runs]
            band(panel, results["tokens"], losses, arm.name, arm.color, marker=".")
    if not any(arm.method == TEACHER for arm in _arms(results, 0)):
        panel.axhline(results["stock_loss"], color=COLORS[TEACHER], linestyle="--", linewidth=0.8, label=ARMS[TEACHER])
    finish(panel, f"segments of {length} tokens", "tokens", "held-out loss [nats a token]")


def _draw_memory(results: Results, length: int, panel: Any) -> None:
    for arm in _arms(results, length):
        curves = [run["by_before"] for run in arm.runs]
        style = ":" if arm.method == UNTRAINED else "-"
        band(panel, range(len(curves[0])), curves, arm.name, arm.color, marker=".", linestyle=style)
    finish(panel, x="segments before", y="loss of the same segments [nats a token]")
