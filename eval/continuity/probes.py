"""The probes by name, and `condense probe`: one experiment, or all of them, on models side by side."""

from dataclasses import replace
from pathlib import Path

from ..runner import Results, run
from .counts import Counting, Events
from .memory import Memory
from .options import ProbeOptions
from .probe import Probe, load_probed
from .space import Boolean, Space
from .sums import Sums
from .transformations import Density, Scaling, Translation

PROBES: dict[str, type[Probe]] = {
    probe.name(): probe for probe in (Counting, Events, Sums, Space, Boolean, Translation, Scaling, Density, Memory)
}


def find_probe(name: str) -> type[Probe]:
    """The experiment of a name. Raises `ValueError` for an unknown one."""
    if name not in PROBES:
        raise ValueError(f"there is no probe {name!r}: choose one of {', '.join(PROBES)}, or all.")
    return PROBES[name]


def shown_by(kind: str) -> type[Probe]:
    """The probe that has the tables of a result, by the name of its file."""
    return PROBES[kind.removeprefix("probe_")]


def probe(name: str, output: Path, options: ProbeOptions) -> Results:
    """Runs one experiment, writes its files into `output`, and returns what the JSON holds.

    Raises `ValueError` for an unknown experiment, options that do not apply to it, data of another form, and models
    that cannot be probed.
    """
    return run(find_probe(name).load(options), output)


def probe_all(output: Path, options: ProbeOptions) -> dict[str, Results]:
    """Every experiment with the options that apply to it; those for folded models on the folded ones alone."""
    if options.data is not None:
        raise ValueError("--data belongs to one probe: leave it out with all.")
    if not any(options.template in kind.templates for kind in PROBES.values()):
        raise ValueError(f"template={options.template!r}: no probe has prompts of that name.")
    models, found = load_probed(options), {}
    for name, kind in PROBES.items():
        chosen = [model for model in models if model.reader.lm.folded or not kind.folded_only]
        applying = replace(
            options,
            limit=options.limit if kind.data_set else None,
            template=options.template if options.template in kind.templates else "sentence",
            spans=options.spans if kind.has_spans else "exact",
            timed=options.timed and kind is Counting,
        )
        if chosen:
            found[name] = run(kind(applying, chosen), output)
        else:
            print(f"probe {name} is left out: it needs a folded model", flush=True)
    return found
