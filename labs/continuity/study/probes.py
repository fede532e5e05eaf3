"""The probes by name, and the actions of `condense probe`: one experiment or all of them, on models side by side."""

from dataclasses import replace
from pathlib import Path

from condense.eval.runner import Results, run

from .counts import Counting, Events
from .memory import Memory
from .options import ProbeOptions
from .probe import Probe, load_probed
from .space import Boolean, Space
from .sums import Sums
from .transformations import Density, Scaling, Translation
from .wholes import Wholes

PROBES: dict[str, type[Probe]] = {
    probe.name(): probe
    for probe in (Counting, Wholes, Events, Sums, Space, Boolean, Translation, Scaling, Density, Memory)
}


def shown_by(kind: str) -> type[Probe]:
    """Returns the probe that has the tables for a kind of results."""
    return PROBES[kind.removeprefix("probe_")]


def probe(name: str, output: Path, options: ProbeOptions) -> Results:
    """Runs one experiment, writes its files into `output`, and returns the contents of the JSON file.

    Raises `ValueError` for an unknown experiment, options that do not apply to it, data of another form, and models
    that can't be probed.
    """
    if name not in PROBES:
        raise ValueError(f"there is no probe {name!r}: choose one of {', '.join(PROBES)}, or all.")
    return run(PROBES[name].load(options), output)


def probe_all(output: Path, options: ProbeOptions) -> dict[str, Results]:
    """Runs every experiment with the options that apply to it; an experiment for folded models only on those."""
    if options.data is not None:
        raise ValueError("--data belongs to one probe: name that probe, or leave out --data.")
    known = dict.fromkeys(template for kind in PROBES.values() for template in kind.templates)
    if options.template not in known:
        raise ValueError(f"template={options.template!r} is unknown to all probes: choose {' or '.join(known)}.")
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
