"""Is it a flow? Euler's steps against the exact solution, for the trained flow and for networks that are no flow."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from condense.depth.settings import ADAPTIVE_SOLVERS, FIXED_SOLVERS

from ..intervals import LOG, interval
from ..results import Table
from ..results_store import Key, Record
from . import solver_pictures, solver_tables
from .convergence import converge, linear_problem
from .divergence import diverge
from .experiment import Experiment
from .models import TWINS, block_of, build
from .pretraining import trained
from .readings import Reading, accurate, held_out_texts, input_of, read_flow, read_layers, read_steps
from .solver_tables import CRITERIA, PAPER, PASSES, PROBLEMS, SUBJECTS, values_of
from .steered import steered

CONTROLS = {"steered_plus": 1.0, "steered_minus": -1.0}
NUM_TEXTS = 16
REFERENCE_STEPS, SMALL_REFERENCE_STEPS = 4096, 512  # of rk4, for the trained field
NUM_TOKENS = 32  # of the trained field, whose order is measured


class Measurement(NamedTuple):
    """`part` is divergence, of a subject, or order, of a problem."""

    part: str
    name: str
    seed: int


class Solvers(Experiment[Measurement]):
    kind = "depth_solvers"
    unit = "measurement"
    about = (
        "The paper tests whether its block is a flow by the divergence of 4 Euler steps from dopri5, relative to the "
        f"norm of the end, and finds {PAPER:.3%}. Here the same test is given to networks that are no flow: different "
        "residual blocks, read as a field that is constant in tau between them. dopri5 solves such a field piece by "
        f"piece, so that it meets every jump. dopri5 has the tolerance 1e-9; all of it is float64, over {NUM_TEXTS} "
        f"texts. A row passes below {PASSES:.0%}; the threshold is ours. A criterion separates where every flow of "
        "every seed lies below every network that is no flow. Intervals are 95 % t intervals over seeds; those of "
        "ratios, divergences and errors, and their means, are on a log scale."
    )

    @property
    def _reference_steps(self) -> int:
        return SMALL_REFERENCE_STEPS if self.options.small else REFERENCE_STEPS

    def items(self) -> Sequence[Measurement]:
        parts = {"divergence": list(SUBJECTS), "order": list(PROBLEMS)}
        return [Measurement(part, name, seed) for seed in self.seeds for part, names in parts.items() for name in names]

    def key(self, item: Measurement) -> Key:
        return item._asdict()

    def measure(self, item: Measurement) -> Record:
        if item.part == "divergence":
            model, first, last, reading = self._subject(item.name, item.seed)
            return diverge(model, first, last, reading, self._texts())
        if item.name == "linear":
            return converge(*linear_problem(item.seed))
        model, first, _, reading = self._subject(item.name, item.seed)
        ids_1T = self._texts()[:1]
        with torch.no_grad():
            start_1TD = input_of(model, first, ids_1T)[:, -NUM_TOKENS:]
            exact_1TD = reading.fixed(start_1TD, "rk4", self._reference_steps)
        return converge(reading, start_1TD, exact_1TD)

    def _texts(self) -> torch.Tensor:
        return held_out_texts(self.setup, NUM_TEXTS)

    def _subject(self, name: str, seed: int) -> tuple[nn.Module, nn.Module, nn.Module, Reading]:
        """A float64 model, the first and the last module of what is read as a flow, and how it is read."""
        if name == "random":
            model = build("hybrid", self.size, seed)
        elif name in CONTROLS:
            model = steered(seed, self.setup, self.output)
        else:
            arm = {"hybrid_at_one": "hybrid", "layers": "baseline"}.get(name, name)
            model = trained(arm, seed, self.setup, self.output)
        model = accurate(model)
        if name == "layers":
            layers = model.transformer.h[slice(*self.size.replaced)]
            return model, layers[0], layers[-1], read_layers(layers, self.size.width)
        block = block_of(model)
        assert block is not None
        if name == "hybrid_at_one":
            block.alpha.data.fill_(1)
        reading = read_steps(block) if name in TWINS else read_flow(block, CONTROLS.get(name, 0.0))
        return model, block, block, reading

    def summarise(self, measured: Sequence[tuple[Measurement, Record]]) -> dict[str, Any]:
        parts: dict[str, list[dict[str, Any]]] = {"divergence": [], "order": []}
        for item, record in measured:
            parts[item.part].append({"name": item.name, "seed": item.seed, **record})
        return {"reference_steps": self._reference_steps, **parts, "criteria": criteria(parts["divergence"])}

    def rows(self, results: dict[str, Any]) -> list[dict[str, Any]]:
        lines = [{"part": "divergence", **record} for record in results["divergence"]]
        for record in results["divergence"]:
            for steps, error in zip(record["curve"]["steps"], record["curve"]["errors"], strict=True):
                named = {"part": "curve", "name": record["name"], "seed": record["seed"], "solver": "euler"}
                lines.append(named | {"evaluations": steps, "error": error})
        for record in results["order"]:
            for solver, found in _by_solver(record):
                for evaluations, error in zip(found["evaluations"], found["errors"], strict=True):
                    named = {"part": "order", "name": record["name"], "seed": record["seed"], "solver": solver}
                    lines.append(named | {"evaluations": evaluations, "error": error})
        return lines

    @classmethod
    def tables(cls, results: dict[str, Any]) -> list[Table]:
        return solver_tables.tables(results)

    @classmethod
    def draw(cls, results: dict[str, Any], path: Path) -> None:
        solver_pictures.draw_divergence(results, path.with_name(f"{path.name}-divergence"))
        solver_pictures.draw_order(results, path.with_name(f"{path.name}-order"))


def criteria(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Whether each criterion tells flows from networks that are no flow, over all seeds.

    `separates`: one threshold puts all flows below it and all others above. `pair_separates`: by twin, whether it
    lies above the trained flow, with an interval of the ratio over seeds, on a log scale, that leaves out 1.
    """
    found = []
    for criterion in CRITERIA:
        values = {name: values_of(records, name, criterion) for name in SUBJECTS}
        flows = [value for name, (_, is_flow) in SUBJECTS.items() if is_flow for value in values[name]]
        others = [value for name, (_, is_flow) in SUBJECTS.items() if not is_flow for value in values[name]]
        pairs = {}
        for twin in TWINS:
            ratios = [other / flow for other, flow in zip(values[twin], values["hybrid"], strict=True)]
            _, low, _ = interval(ratios, LOG)
            pairs[twin] = None if low is None else low > 1
        found.append(
            {
                "criterion": criterion,
                "highest_flow": max(flows),
                "lowest_other": min(others),
                "separates": max(flows) < min(others),
                "pair_separates": pairs,
            }
        )
    return found


def _by_solver(record: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(solver, record[solver]) for solver in (*FIXED_SOLVERS, *ADAPTIVE_SOLVERS)]
