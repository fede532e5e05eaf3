"""The card of a saved model, its README.md: what it is, and how to load it."""

import json
import re
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from ..extras import DISTRIBUTION, WHEEL
from ..families import family_of
from ..laboratories import REGISTERED_BY
from .remote_code import MODULE
from .source_name import stored_source

CARD = "README.md"
OURS = "<!-- condense writes this file when the model is saved: delete this line to keep your own text. -->"
UNKNOWN = "not known"
MEMORIES = {
    (1.0,): "each layer's output for the segment before",
    (0.0,): "each layer's input in the segment before, as in Transformer-XL",
}


def write_card(model: Any, folder: Path) -> None:
    """Writes the card of a folded model, unless the folder has one that somebody else wrote or changed."""
    path = folder / CARD
    if path.is_symlink() or (path.exists() and OURS not in path.read_text(encoding="utf-8", errors="replace")):
        return
    path.write_text(_card(model), encoding="utf-8")


def _card(model: Any) -> str:
    config, title = model.config, family_of(model.config).title
    base, on_hub = base_model(config.name_or_path)
    data = ModelCardData(
        base_model=base if on_hub else None,
        library_name=DISTRIBUTION,
        pipeline_tag="text-generation" if model.can_generate() else None,
        tags=["condense", config.model_type, "long-context"],
    )
    auto = "AutoModelForCausalLM" if model.can_generate() else "AutoModel"
    link = f"[{base}](https://huggingface.co/{base})" if on_hub else base or UNKNOWN
    rows = [f"| base model | {link} |"]
    rows += [f"| segment length | {config.segment_length} tokens |", f"| memory | {_memory(config)} |"]
    rows += [f"| depth block | in place of {config.depth['num_replaced']} layers |"] if config.depth else []
    table = "\n".join(rows)
    return f"""---
{data.to_yaml()}
---

{OURS}

# A folded {title}

This {title} reads a text segment by segment. Every layer stores its states of a segment, and attends to them in the
next one: memory does not grow with the text.

| | |
|---|---|
{table}

Loading it needs the package {DISTRIBUTION}. It is not on PyPI: install a checkout of its repository, or its wheel.

```
pip install .          # in a checkout
pip install {WHEEL}
```

```python
import {REGISTERED_BY.get(config.model_type, "condense")}  # registers the model with transformers
from transformers import {auto}, AutoTokenizer

model = {auto}.from_pretrained("THIS_FOLDER")
tokenizer = AutoTokenizer.from_pretrained("THIS_FOLDER")
```

Where nothing imports the package, as in `transformers serve`, load the folder with `trust_remote_code`: its file
`{MODULE}.py` imports the installed package, and does nothing else.
"""


def _memory(config: Any) -> str:
    shares, sink = config.memory_shares, config.sink_token_id
    states = MEMORIES.get(tuple(sorted(set(shares))))
    if states is None:
        values = ", ".join(f"{share:g}" for share in (shares if len(set(shares)) > 1 else shares[:1]))
        states = f"X + a (Y - X) of each layer's input X and output Y in the segment before, a = {values}"
    return states if sink is None else f"{states}; a sink, token {sink} alone, in place of its first row"


def base_model(source: str | None) -> tuple[str | None, bool]:
    """Returns the name of the model that was folded into the model of a source, and whether it is a hub id.

    A local model has the name of its folder or GGUF file, without the path; None if it has no name.
    """
    name = stored_source(source)
    if not name:
        return None, False
    path = Path(name)
    if not path.exists():
        return (name, True) if _is_hub_id(name) else (path.name, False)
    if (found := _base_on_card(path / CARD)) is not None:
        return found
    if _is_hub_id(stored := _stored_name(path / "config.json")) and not Path(stored).exists():
        return stored, True
    return path.resolve().name, False


def _base_on_card(card: Path) -> tuple[str | None, bool] | None:
    """Returns what a card of ours says of the base model; None for other cards."""
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    row = re.search(r"^\| base model \| (.*) \|$", text, re.MULTILINE)
    if OURS not in text or row is None:
        return None
    hub_id = ModelCard(text).data.get("base_model")
    return (hub_id, True) if hub_id else (None if row[1] == UNKNOWN else row[1], False)


def _stored_name(config: Path) -> str:
    """Returns the `_name_or_path` that releases of transformers before 5 stored in a config.json."""
    try:
        name = json.loads(config.read_text(encoding="utf-8")).get("_name_or_path")
    except (OSError, ValueError, AttributeError):
        return ""
    return name if isinstance(name, str) else ""


def _is_hub_id(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return "/" in name
