"""Pictures of the experiment on solvers."""

from pathlib import Path
from typing import Any

import numpy as np

from condense.depth.settings import ADAPTIVE_SOLVERS, FIXED_SOLVERS

from ..results import picture, set_log_scale
from .convergence import ORDERS
from .solver_tables import PAPER, PROBLEMS, SUBJECTS

MARKERS = {True: "o", False: "X"}


def draw_divergence(results: dict[str, Any], path: Path) -> None:
    """The divergence of each model, relative to the state and to the displacement, and by Euler steps."""
    shown: list[float] = [100 * PAPER]
    with picture(path, columns=3, figsize=(15, 4.2)) as (state, displacement, curves):
        for number, (name, (_, is_flow)) in enumerate(SUBJECTS.items()):
            records = [record for record in results["divergence"] if record["name"] == name]
            style = {"marker": MARKERS[is_flow], "color": f"C{number}"}
            for panel, field in ((state, "to_state"), (displacement, "to_displacement")):
                values = [100 * record[field] for record in records]
                shown += values
                panel.plot(values, [name] * len(values), linestyle="", ms=7, alpha=0.7, **style)
            errors = np.mean([record["curve"]["errors"] for record in records], axis=0)
            label = f"{name} ({'a flow' if is_flow else 'no flow'})"
            curves.plot(records[0]["curve"]["steps"], errors, ms=4, lw=1, label=label, **style)
        state.axvline(100 * PAPER, color="grey", ls="--", lw=1, label=f"the paper: {PAPER:.3%}")
        state.legend(fontsize=8)
        state.set_xlabel("divergence / |H(1)| [%]")
        displacement.set_xlabel("divergence / |H(1) - H(0)| [%]")
        for panel in (state, displacement):
            set_log_scale(panel, "x")
            panel.set_title("circles: flows; crosses: no flows", fontsize=9)
            panel.set_xlim(min(shown) / 2, max(shown) * 2)
            panel.xaxis.set_minor_formatter("")
            panel.invert_yaxis()
        curves.set_xscale("log", base=2)
        set_log_scale(curves, "y")
        curves.set_xlabel("Euler steps")
        curves.set_ylabel("divergence / displacement")
        curves.set_title("mean over seeds", fontsize=9)
        curves.legend(fontsize=7)
        for panel in (state, displacement, curves):
            panel.grid(alpha=0.3)


def draw_order(results: dict[str, Any], path: Path) -> None:
    """Error against evaluations of every solver, and the error of adaptive ones against their tolerance."""
    with picture(path, len(PROBLEMS), 2, figsize=(11, 8)) as axes:
        for (work, kept), (name, what) in zip(axes, PROBLEMS.items(), strict=True):
            records = [record for record in results["order"] if record["name"] == name]
            for number, solver in enumerate((*FIXED_SOLVERS, *ADAPTIVE_SOLVERS)):
                evaluations, errors = (
                    np.mean([record[solver][field] for record in records], axis=0)
                    for field in ("evaluations", "errors")
                )
                label = f"{solver}, order {ORDERS[solver]}" if solver in ORDERS else solver
                style = {"color": f"C{number}", "marker": ".", "ls": "-" if solver in ORDERS else "--", "label": label}
                work.plot(evaluations, errors, **style)
                if solver in ADAPTIVE_SOLVERS:
                    kept.plot(records[0][solver]["tolerances"], errors, **style)
            kept.plot(*[records[0]["dopri5"]["tolerances"]] * 2, color="grey", lw=0.8, label="error = tolerance")
            work.set_xlabel("evaluations of the field")
            kept.set_xlabel("tolerance (rtol = atol)")
            for panel in (work, kept):
                set_log_scale(panel, "x")
                set_log_scale(panel, "y")
                panel.set_ylabel("error / displacement")
                panel.set_title(what, fontsize=9)
                panel.grid(alpha=0.3)
                panel.legend(fontsize=7)
