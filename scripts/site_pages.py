"""Hooks of `mkdocs.yml`: write pages from the code, and replace links that leave the documentation."""

import inspect
import re
from pathlib import Path, PurePosixPath
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from mkdocs.structure.files import File, Files
from pydantic_core import PydanticUndefined

ROOT = Path(__file__).resolve().parents[1]

# Keys of a recipe, and their names in transformers' `TrainingArguments`.
TRAINER_NAMES = {
    "output": "output_dir",
    "micro_batch": "per_device_train_batch_size",
    "global_batch": "gradient_accumulation_steps",
    "dtype": "bf16",
    "gradient_checkpointing": "gradient_checkpointing",
    "deepspeed": "deepspeed",
    "resume": "resume_from_checkpoint",
    "log_every": "logging_steps",
    "report_to": "report_to",
    "seed": "seed",
    "stages[].steps": "max_steps",
    "optimizer.name": "optim",
    "optimizer.learning_rate": "learning_rate",
    "optimizer.final_learning_rate": "lr_scheduler_kwargs: min_lr_ratio",
    "optimizer.warmup_steps": "warmup_steps",
    "optimizer.decay_steps": "lr_scheduler_kwargs: num_decay_steps",
    "optimizer.weight_decay": "weight_decay",
    "optimizer.beta1": "adam_beta1",
    "optimizer.beta2": "adam_beta2",
    "optimizer.eps": "adam_epsilon",
    "optimizer.max_grad_norm": "max_grad_norm",
    "evaluation.every": "eval_steps",
    "checkpoints.every": "save_steps",
    "checkpoints.keep": "save_total_limit",
}

API = {
    "Models": ("condense.modeling", ["CondenseModel", "CondenseForCausalLM"]),
    "Configuration": ("condense.configuration", ["CondenseConfig"]),
    "Memory": ("condense.state.cache", ["FoldedCache"]),
    "Conversion": ("condense.hub.conversion", ["to_stock"]),
    "Reference": ("condense.reference", []),
    "Recipes": ("condense.training.recipe.schema", ["Recipe"]),
    "Evaluations": ("condense.eval.runner", []),
}


def on_files(files: Files, config) -> Files:
    for path, content in {
        "index.md": home(),
        "command-line.md": command_line(),
        "recipes.md": recipes(),
        "api.md": api(),
    }.items():
        if (stub := files.get_file_from_path(path)) is not None:  # for readers of the repository
            files.remove(stub)
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page, config, files: Files) -> str:
    """Adapts the links of a page to the site.

    Links to files outside `docs`, which the site lacks, become text. Those to a page by its file name get its title.
    Each plot on a line of its own links to its file.
    """

    def link(match: re.Match) -> str:
        text, target = match.groups()
        folder = PurePosixPath(page.file.src_uri).parent
        path = (ROOT / "docs" / folder / target.split("#")[0]).resolve()
        if "://" in target or target.startswith("#") or (path.is_relative_to(ROOT / "docs") and not path.is_dir()):
            if text != path.name or path.suffix != ".md":
                return match[0]
            return f"[{files.get_file_from_path(path.relative_to(ROOT / 'docs').as_posix()).page.title}]({target})"
        assert path.exists(), f"{page.file.src_uri} links to {target}, which does not exist"
        return text

    markdown = re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)", link, markdown)
    return re.sub(r"^(!\[[^\]]*\]\(([^)\s]+)\))$", r"[\1](\2)", markdown, flags=re.MULTILINE)


def home() -> str:
    """Returns the README with its links seen from `docs`."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.sub(r"\]\((?!https?:|#)([^)]+)\)", lambda m: f"]({_from_docs(m[1])})", text)


def _from_docs(target: str) -> str:
    return target.removeprefix("docs/") if target.startswith("docs/") else f"../{target}"


def command_line() -> str:
    """Returns a section for each command, with its options as a table."""
    from condense.cli.main import app

    lines = ["# Command line", "", "Written from the commands themselves: `condense COMMAND --help` says the same."]
    _command(typer.main.get_command(app), ["condense"], lines)
    return "\n".join(lines)


def _command(command: Any, names: list[str], lines: list[str]) -> None:
    if command.hidden:
        return
    if hasattr(command, "commands"):
        if len(names) > 1:
            lines += ["", f"## {' '.join(names)}", "", _paragraphs(command.help)]
        for name, child in command.commands.items():
            _command(child, [*names, name], lines)
        return
    lines += ["", f"{'#' * min(len(names), 3)} {' '.join(names)}", "", _paragraphs(command.help)]
    params = [param for param in command.params if not getattr(param, "hidden", False)]
    if params:
        lines += ["", "| option | default | meaning {: .meaning } |", "|---|---|---|"]
    for param in params:
        name = ", ".join(param.opts) if param.param_type_name == "option" else param.name.upper()
        default = "required" if param.required else _value(param.default)
        lines.append(f"| `{name}` | {default} | {_cell(getattr(param, 'help', None))} |")


def recipes() -> str:
    """Returns a table of keys for each section of a recipe, and for each kind of a section."""
    from condense.training.presets import recipe_names
    from condense.training.recipe.schema import Recipe

    lines = [
        "# Recipes", "",
        "Every key of a recipe, written from its schema. *Resume*: whether a resumed run may change the key. "
        "Trainer: the name in transformers' `TrainingArguments`.", "",
        "Recipes that come with the package: " + ", ".join(f"`{name}`" for name in recipe_names()) + ".",
    ]  # fmt: skip
    _section(Recipe, "", "A recipe", lines, set())
    return "\n".join(lines)


def _section(section: type, prefix: str, title: str, lines: list[str], written: set[tuple[str, type]]) -> None:
    from condense.training.recipe.section import MAY_CHANGE, MAY_CHANGE_FROM_HERE, sections_of

    if (prefix, section) in written:
        return
    written.add((prefix, section))
    lines += ["", f"## {title}", "", _paragraphs(section.__dict__.get("__doc__"))]
    lines += ["", "| key | type | default | resume | meaning {: .meaning } |", "|---|---|---|---|---|"]
    nested = []
    for name, field in section.model_fields.items():
        key = prefix + name
        default = "required" if field.default is PydanticUndefined else _value(field.default)
        resume = (
            "yes" if MAY_CHANGE in field.metadata else "from here on" if MAY_CHANGE_FROM_HERE in field.metadata else ""
        )
        meaning = _cell(field.description)
        if key in TRAINER_NAMES:
            meaning = f"{meaning} (Trainer: `{TRAINER_NAMES[key]}`)".strip()
        cells = [f"`{name}`", _type(field.annotation), default, resume, meaning]
        lines.append(f"| {' | '.join(cells)} |")
        is_list = "list[" in str(field.annotation)
        nested += [(kind, f"{key}{'[]' if is_list else ''}.") for kind in sections_of(field)]
    for kind, path in nested:
        chooser = next((name for name in ("kind", "task") if name in kind.model_fields), None)
        chosen = kind.model_fields[chooser] if chooser else None
        value = chosen and (getattr(chosen.annotation, "__args__", None) or [chosen.default])
        of_kind = f", {chooser}: {' or '.join(map(str, value))}" if chosen else ""
        _section(kind, path, path[:-1] + of_kind, lines, written)


def _type(annotation: Any) -> str:
    return f"`{_type_name(annotation)}`"


def _type_name(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_name(arguments[0])
    if origin is Literal:
        return " or ".join(map(str, arguments))
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(_type_name, arguments)))
    if hasattr(annotation, "model_fields"):
        return "section"
    name = "None" if annotation is NoneType else getattr(annotation, "__name__", str(annotation))
    return f"{name}[{', '.join(map(_type_name, arguments))}]" if arguments else name


def api() -> str:
    lines = ["# Python API", "", "Shapes name their axes by letters; each module's head explains its own."]
    for title, (module, names) in API.items():
        lines += ["", f"## {title}", ""]
        for name in [f"{module}.{name}" for name in names] or [module]:
            lines += [f"::: {name}", "    options: {heading_level: 3}", ""]
    return "\n".join(lines)


def _paragraphs(text: str | None) -> str:
    return inspect.cleandoc(text or "").replace("\b\n", "")


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


def _value(value) -> str:
    if value is None or value in ((), [], ""):
        return ""
    if callable(value):
        return ""
    if hasattr(value, "model_dump"):
        return "its defaults"
    text = str(getattr(value, "value", value))
    return "<code>" + text.replace(",", ",<wbr>") + "</code>" if len(text) > 20 else f"`{text}`"
