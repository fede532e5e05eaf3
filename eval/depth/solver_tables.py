"""What the experiment on solvers compares, and its tables."""

from collections.abc import Sequence
from typing import Any

from condense.depth.settings import ADAPTIVE_SOLVERS

from ..intervals import LINEAR, LOG, Scale, interval, shown
from ..results import Table
from .convergence import ORDERS
from .models import TWINS

PAPER = 0.00068  # its divergence relative to |H(1)|
PASSES = 0.01  # ours: the paper gives no threshold
SUBJECTS = {  # name: what it is, and whether it is a flow
    "hybrid": ("the trained flow", True),
    "random": ("the flow with random weights", True),
    "steered_plus": ("the flow trained to steer, at u = +1", True),
    "steered_minus": ("the flow trained to steer, at u = -1", True),
    "alpha_one": ("a flow trained with alpha = 1", True),
    "hybrid_at_one": ("the trained flow with alpha set to 1 afterwards", True),
    "twin": ("as many different discrete MLP blocks as Euler steps, each a quarter as wide as the field", False),
    "wide_twin": ("the same with blocks as wide as the field", False),
    "layers": ("two layers of the trained baseline", False),
}
CRITERIA = {
    "to_state": "divergence / |H(1)|, the paper's",
    "to_displacement": "divergence / |H(1) - H(0)|",
    "one_more_step": "divergence with one more Euler step / divergence",
}
PROBLEMS = {"linear": "a linear field, exactly solved", "hybrid": "the trained field, against many steps of rk4"}


def tables(results: dict[str, Any]) -> list[Table]:
    return [_divergences(results), _effects(results), _criteria(results), _orders(results), _adaptive(results)]


def values_of(records: Sequence[dict[str, Any]], name: str, field: str) -> list[float]:
    return [record[field] for record in records if record["name"] == name]


def _percent(values: Sequence[float]) -> str:
    """The geometric mean and its interval over seeds, of ratios of norms."""
    return shown(values, scale=LOG, form="%")


def scientific(values: Sequence[float], scale: Scale = LINEAR) -> str:
    """The mean and its interval over seeds, of values that may be very small."""
    return shown(values, 2, scale, form="e")


def _divergences(results: dict[str, Any]) -> Table:
    rows: list[list[Any]] = [["paper", "a trained flow", f"{PAPER:.3%}", *["-"] * 4]]
    for name, (what, is_flow) in SUBJECTS.items():
        values = {field: values_of(results["divergence"], name, field) for field in ("displacement", *CRITERIA)}
        passes = interval(values["to_state"], LOG)[0] < PASSES
        verdict = ("passes" if passes else "fails") + (", and is " + ("a flow" if is_flow else "no flow"))
        cells = [_percent(values[field]) for field in ("to_state", "to_displacement", "displacement")]
        rows.append([name, what, *cells, shown(values["one_more_step"], scale=LOG), verdict])
    columns = [
        "model",
        "what it is",
        "divergence / |H(1)|",
        "divergence / |H(1) - H(0)|",
        "|H(1) - H(0)| / |H(1)|",
        "with one more step, / divergence",
        f"the paper's test, at {PASSES:.0%}",
    ]
    return Table("own Euler steps against dopri5: hidden states", columns, rows)


def _effects(results: dict[str, Any]) -> Table:
    rows = []
    for name in SUBJECTS:
        values = {
            field: values_of(results["divergence"], name, field) for field in ("logits", "kl", "loss", "loss_change")
        }
        rows.append(
            [
                name,
                _percent(values["logits"]),
                scientific(values["kl"], LOG),
                shown(values["loss"]),
                scientific(values["loss_change"]),
            ]
        )
    columns = ["model", "divergence of logits", "KL [nats]", "loss [nats]", "loss with dopri5, change [nats]"]
    return Table("own Euler steps against dopri5: predictions", columns, rows)


def _criteria(results: dict[str, Any]) -> Table:
    rows = [
        [
            CRITERIA[found["criterion"]],
            f"{found['highest_flow']:.3g}",
            f"{found['lowest_other']:.3g}",
            _yes(found["separates"]),
            *(_yes(found["pair_separates"][twin]) for twin in TWINS),
        ]
        for found in results["criteria"]
    ]
    pairs = [f"separates hybrid from {twin}" for twin in TWINS]
    columns = ["criterion", "highest of a flow", "lowest of no flow", "separates all", *pairs]
    return Table("does the criterion separate flows from networks that are no flow?", columns, rows)


def _yes(found: bool | None) -> str:
    return {True: "yes", False: "no", None: "needs 2 seeds"}[found]


def _orders(results: dict[str, Any]) -> Table:
    rows = []
    for name, what in PROBLEMS.items():
        for solver, expected in ORDERS.items():
            orders = [record[solver]["order"] for record in results["order"] if record["name"] == name]
            rows.append([what, solver, expected, shown(orders)])
    title = f"order of convergence; of the trained field against {results['reference_steps']:,} steps of rk4"
    return Table(title, ["problem", "solver", "order in theory", "measured"], rows)


def _adaptive(results: dict[str, Any]) -> Table:
    rows = []
    for name, what in PROBLEMS.items():
        records = [record for record in results["order"] if record["name"] == name]
        for solver in ADAPTIVE_SOLVERS:
            for number, tolerance in enumerate(records[0][solver]["tolerances"]):
                evaluations, errors = (
                    [record[solver][field][number] for record in records] for field in ("evaluations", "errors")
                )
                rows.append([what, solver, f"{tolerance:.0e}", shown(evaluations, 1), scientific(errors, LOG)])
    columns = ["problem", "solver", "tolerance", "evaluations", "error / displacement"]
    return Table("adaptive solvers", columns, rows)
