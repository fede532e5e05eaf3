"""`condense generate`: answers to a prompt of any length, or to each prompt of a file."""

import copy
import hashlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from condense.eval.command import Attention, quiet
from condense.eval.options import DTYPE_HELP

LOWEST_TEMPERATURE = 0.01  # logits are divided by the temperature

Prompts = Annotated[
    Path | None,
    typer.Option(
        metavar="JSONL", help="Prompts, one JSON object on each line; each comes after the prompt file, if given."
    ),
]
Answers = Annotated[
    Path | None,
    typer.Option(
        metavar="JSONL",
        help="Append the answer to each of --prompts to this file; started again, the command continues it.",
    ),
]
LoadState = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Continue the text whose state --save-state wrote to this file.")
]
SaveState = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write the state after the prompt to this file; --max-new-tokens 0 only reads."),
]


class States(NamedTuple):
    """The cache that a text continues, and the file for the state after the text."""

    continued: Any = None
    file: Path | None = None


def generate(
    model: Annotated[
        str, typer.Option(help="Folder, hub id or GGUF file: a folded model, or a stock one, which is folded.")
    ],
    prompt: Annotated[str, typer.Option(help="The prompt; it comes after the prompt file if both are given.")] = "",
    prompt_file: Annotated[Path | None, typer.Option(help="A text of any length to read first.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=0, help="Tokens of the answer at most.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0 picks the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed for sampling.")] = 0,
    segment_length: Annotated[int | None, typer.Option(help="Default the model's own; stock models: 512.")] = None,
    dtype: Annotated[str, typer.Option(help=DTYPE_HELP)] = "auto",
    attention: Attention = "auto",
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a user's message in the tokenizer's chat template.")
    ] = False,
    fixed_decoding: Annotated[
        bool, typer.Option("--fixed-decoding", help="Decode by a step of fixed shape: on CUDA a replayed graph.")
    ] = False,
    compiled_decoding: Annotated[
        bool,
        typer.Option(
            "--compiled-decoding",
            help="The same, compiled by torch, which takes up to a minute and a C++ compiler.",
        ),
    ] = False,
    control: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBER[,NUMBER]...",
            help="For a model with a depth block: the components of its control; default 0.",
        ),
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write the figures as JSON to this file.")] = None,
    prompts: Prompts = None,
    prompt_field: Annotated[
        str, typer.Option(help="The field of --prompts with the prompt; a.b is field b of the object in field a.")
    ] = "prompt",
    answers: Answers = None,
    load_state: LoadState = None,
    save_state: SaveState = None,
) -> None:
    """Reads a prompt of any length in constant memory and streams the answer."""
    quiet()
    from condense import FoldedCache
    from condense.checks import check_attention, check_dtype
    from condense.utils.files import check_output_file, read_text

    check_dtype(dtype)
    check_attention(attention)
    options = {"max_new_tokens": max_new_tokens, **_sampling(temperature)}
    if report is not None:
        check_output_file(report)
    before = "" if prompt_file is None else read_text(prompt_file)
    asked = _read_prompts_after(before, prompt, prompts, prompt_field, answers, report)
    _check_states(load_state, save_state, chat, prompts, max_new_tokens)
    fields = {} if segment_length is None else {"segment_length": segment_length}
    components = None if control is None else _components(control, model)
    fixed = "compiled" if compiled_decoding else fixed_decoding
    settings = {
        "max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed, "dtype": dtype,
        "attention": attention, "chat": chat, "fixed_decoding": fixed, "control": components, **fields,
        **({} if load_state is None else {"state": hashlib.sha256(load_state.read_bytes()).hexdigest()}),
    }  # fmt: skip
    with nullcontext() if answers is None else _answer_file(answers, asked, model, before, settings) as file:
        if chat:
            _check_chat(model, before, asked)
        loaded, tokenizer = _load_folded(model, dtype=dtype, attn_implementation=attention, **fields)
        loaded.fixed_decoding = fixed
        states = States(None if load_state is None else FoldedCache.load(load_state, loaded), save_state)

        def answer(text: str, stream: bool) -> dict[str, Any]:
            return _answer(loaded, tokenizer, before + text, settings, options, stream, states)

        if file is not None:
            _answer_all(asked, file, answer)
        else:
            _report_answer(answer(prompt, stream=True), report)


def _read_prompts_after(
    before: str, prompt: str, prompts: Path | None, prompt_field: str, answers: Path | None, report: Path | None
) -> list[Any]:
    """Returns the prompts that come after `before`. Raises `ValueError` for none, and for options that don't fit."""
    from condense.cli.prompts import Prompt, read_prompts

    if prompts is None:
        if answers is not None:
            raise ValueError(f"--answers {answers} needs --prompts: a single answer is printed, and in --report.")
        if not before + prompt:
            raise ValueError("there is no prompt: pass --prompt, --prompt-file or both, or --prompts.")
        return [Prompt(0, prompt)]
    if prompt or report is not None:
        other = "--prompt" if prompt else f"--report {report}"
        raise ValueError(f"{other} doesn't go with --prompts {prompts}: leave one of them out.")
    if answers is None:
        raise ValueError(f"--prompts {prompts} needs --answers, the JSONL file to write.")
    if answers.exists() and prompts.exists() and answers.samefile(prompts):
        raise ValueError(f"--answers {answers} is the file of --prompts: pass another one.")
    return read_prompts(prompts, prompt_field)


def _check_states(
    load_state: Path | None, save_state: Path | None, chat: bool, prompts: Path | None, max_new_tokens: int
) -> None:
    """Raises `ValueError` for a file that isn't a state or can't be written, and for options that don't fit."""
    from condense.state.state_file import check_new_state, check_state

    for name, path in (("--load-state", load_state), ("--save-state", save_state)):
        if path is not None and chat:
            raise ValueError(f"{name} {path}: --chat wraps a whole text in a template. Leave out one of the two.")
    if not max_new_tokens and save_state is None:
        raise ValueError("--max-new-tokens 0 only reads: pass --save-state, the file for the state.")
    if load_state is not None:
        check_state(load_state)
    if save_state is None:
        return
    if prompts is not None:
        raise ValueError(f"--save-state {save_state} doesn't go with --prompts {prompts}: leave out one of the two.")
    check_new_state(save_state)


def _answer_file(path: Path, asked: Sequence[Any], model: str, before: str, settings: dict[str, Any]) -> Any:
    """Opens the file of answers. It keeps the settings, and fingerprints of the model and the text before."""
    from condense.cli.prompts import AnswerFile
    from condense.hub.fingerprint import fingerprint
    from condense.utils.files import check_output_file

    check_output_file(path)
    prompt_file = hashlib.sha256(before.encode()).hexdigest() if before else None
    return AnswerFile(path, asked, {"model": fingerprint(model), "prompt_file": prompt_file, **settings})


def _check_chat(model: str, before: str, asked: Sequence[Any]) -> None:
    """Raises `ValueError` for a model without a chat template, and for a prompt that its template rejects."""
    from transformers import AutoConfig

    from condense.generation.chat import chat_text, check_chat_template
    from condense.hub.loading import load_config, load_tokenizer

    tokenizer = load_tokenizer(model, load_config(AutoConfig, model))
    check_chat_template(tokenizer, model)
    for one in asked:
        chat_text(tokenizer, before + one.text)


def _answer_all(asked: Sequence[Any], file: Any, answer: Callable[..., dict[str, Any]]) -> None:
    """Appends the answers that a file doesn't have yet, each as soon as it is complete."""
    from condense.utils.progress import ProgressBar, stoppable

    with stoppable(lambda: f"{file.path} keeps the answers that are complete"):
        left = asked[file.num_answered :]
        for prompt in ProgressBar(left, total=len(asked), initial=file.num_answered, unit="prompt"):
            file.append(prompt, answer(prompt.text, stream=False))
    print(f"{file.path}: {len(asked):,} answers, {file.num_answered:,} of them from before", file=sys.stderr)


def _answer(
    model: Any,
    tokenizer: Any,
    text: str,
    settings: dict[str, Any],
    options: dict[str, Any],
    stream: bool,
    states: States,
) -> dict[str, Any]:
    """Returns the answer to a text and the figures of reading and writing. `options` are arguments of `generate`."""
    import torch
    from transformers import LogitsProcessorList, TextStreamer

    from condense.generation.chat import chat_text, end_tokens
    from condense.generation.nonfinite_logits import RefuseNonFiniteLogits
    from condense.state.cache import FoldedCache
    from condense.state.cache_argument import CACHE
    from condense.utils.text import encode

    chat, control = settings["chat"], settings["control"]
    if chat:
        options = options | {"eos_token_id": sorted(end_tokens(model, tokenizer, chat=True)) or None}
        input_ids = encode(tokenizer, chat_text(tokenizer, text), with_first=False)  # the template has a first token
    else:
        input_ids = encode(tokenizer, text, with_first=states.continued is None)
    if not input_ids.numel():
        raise ValueError(f"the prompt {text!r} has no tokens: pass a text.")
    given = {} if control is None else {"control": torch.tensor([control], device=model.device)}
    start = time.perf_counter()
    cache = FoldedCache(model.config) if states.continued is None else copy.deepcopy(states.continued)
    cache.restart_columns()
    _prefill(model, input_ids[:, :-1], stream, cache, **given)
    if states.file is not None:
        _save_state(model, input_ids[:, -1:], cache, states.file, **given)
    middle = time.perf_counter()
    torch.manual_seed(settings["seed"])
    num_tokens, written = input_ids.shape[1], input_ids
    if options["max_new_tokens"]:
        written = model.generate(
            input_ids.to(model.device),  # with the tokens in the cache: penalties of repeated tokens count them
            attention_mask=torch.ones_like(input_ids, device=model.device),
            **{CACHE: cache},
            streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True) if stream else None,
            logits_processor=LogitsProcessorList([RefuseNonFiniteLogits()]),
            **options,
            **given,
        )
    end = time.perf_counter()
    new_ids = written[0, num_tokens:]
    return {
        "prompt_tokens": num_tokens,
        "prompt_tokens_per_second": (num_tokens - 1) / (middle - start) if num_tokens > 1 else None,
        "new_tokens": len(new_ids),
        "new_tokens_per_second": len(new_ids) / (end - middle),
        "state_bytes": cache.num_bytes,
        "dtype": str(model.dtype).removeprefix("torch."),
        "segment_length": model.config.segment_length,
        "text": tokenizer.decode(new_ids, skip_special_tokens=True),
        "chat": chat,
        "control": control,
    }


def _sampling(temperature: float) -> dict[str, Any]:
    """Returns the arguments of `generate`. Raises `ValueError` if the temperature makes logits overflow."""
    if not temperature:
        return {"do_sample": False}
    if temperature < LOWEST_TEMPERATURE:
        raise ValueError(
            f"--temperature {temperature}: pass 0 for the likeliest token, or {LOWEST_TEMPERATURE} or more."
        )
    return {"do_sample": True, "temperature": temperature}


def _components(control: str, source: str) -> list[float]:
    """Returns the components of `--control`. Raises `ValueError` if the model does not take such a control."""
    from math import isfinite

    from condense import CondenseConfig
    from condense.hub.loading import load_config

    try:
        found = [float(part) for part in control.split(",")]
    except ValueError:
        found = []
    if not found or not all(map(isfinite, found)):
        raise ValueError(f"--control {control}: write numbers with commas between them, such as 1.0 or 1,-0.5.")
    size = load_config(CondenseConfig, source).control_size
    if len(found) != size:
        raise ValueError(f"--control {control}: model {source!r} has a control of {size} components, not {len(found)}.")
    return found


def _load_folded(source: str, **options: Any) -> tuple[Any, Any]:
    """Returns a folded model, on the GPU if there is one, and its tokenizer."""
    import torch

    from condense import CondenseForCausalLM
    from condense.hub.loading import load_model, load_tokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(CondenseForCausalLM, source, **options).to(device).eval()
    return model, load_tokenizer(source, model.config)


def _prefill(model: Any, input_ids: Any, with_bar: bool, cache: Any, **options: Any) -> None:
    """Reads a prompt, which may be empty, into a cache."""
    from condense.generation.prefill import prefill
    from condense.utils.progress import ProgressBar

    num_segments = -(-input_ids.shape[1] // model.config.segment_length)
    with ProgressBar(total=num_segments, unit="segment", desc="reading", disable=not with_bar) as bar:
        prefill(model, input_ids, cache, progress=bar.update, restart_columns=False, **options)


def _save_state(model: Any, last_token: Any, cache: Any, path: Path, **options: Any) -> None:
    """Writes the state after a prompt, whose last token `generate` will read into the cache."""
    from condense.generation.prefill import prefill

    before = cache.snapshot()
    prefill(model, last_token, cache, **options)
    cache.save(path, model)
    cache.restore(before)


def _report_answer(figures: dict[str, Any], report: Path | None) -> None:
    """Prints the figures of a single answer, and writes them to the report, if requested."""
    from condense.utils.files import atomic_file

    rate = figures["prompt_tokens_per_second"]
    read_rate = "" if rate is None else f" at {rate:,.0f} tokens/s"
    print(
        f"read {figures['prompt_tokens']:,} tokens{read_rate}, wrote {figures['new_tokens']:,} at "
        f"{figures['new_tokens_per_second']:,.1f} tokens/s; state held: {figures['state_bytes']:,} bytes "
        f"({figures['dtype']})",
        file=sys.stderr,
    )
    if report is not None:
        with atomic_file(report) as file:
            file.write_text(json.dumps(figures, indent=2, ensure_ascii=False), encoding="utf-8")
