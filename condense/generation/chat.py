"""Prompts in a tokenizer's chat template, and the tokens that end an answer.

The prompt is a user's message, and the assistant's answer follows. The template brings its own first token, so the
tokenizer adds none. Templates that write today's date, such as Llama 3.2's, always get the same date, so a prompt
always has the same tokens.
"""

from typing import Any

from ..utils.text import plain_ids

DATE = "26 Jul 2024"  # the default date of Llama 3.2's templates
FIXED_DATE = f"{{% macro strftime_now(format) %}}{DATE}{{% endmacro %}}"  # for templates that ask for today's date
REMEDY = "correct chat_template.jinja in its folder, use the release's, or leave --chat out."
MESSAGE = "CONDENSE-MESSAGE"  # found again in a rendered template


def check_chat_template(tokenizer: Any, source: str) -> None:
    """Raises `ValueError` if a tokenizer has no chat template, or if it fails or leaves out the user's message.

    `source` names the tokenizer.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            f"the tokenizer of {source!r} has no chat template: leave --chat out for it, or put the release's "
            "chat_template.jinja into its folder."
        )
    try:
        chat_text(tokenizer, MESSAGE)
        _end_of_turn(tokenizer)
    except ValueError as error:
        raise ValueError(f"the tokenizer of {source!r}: {error}") from error


def chat_text(tokenizer: Any, prompt: str) -> str:
    """Returns the text to tokenise before an answer to a prompt, without the tokenizer's own special tokens.

    Raises `ValueError` for a template that fails or leaves out a part of the prompt; it may change case and spaces.
    """
    text = _render(tokenizer, [{"role": "user", "content": prompt}], add_generation_prompt=True)
    if _letters(prompt) not in _letters(text):
        raise ValueError(f"the chat template leaves out the user's message, or a part of it: {REMEDY}")
    return text


def chat_ids(tokenizer: Any, prompt: str) -> list[int]:
    """Returns the tokens before an answer to a prompt."""
    return plain_ids(tokenizer, chat_text(tokenizer, prompt))


def chat_frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Returns the tokens before and after a user's message, for messages that are made of tokens.

    Raises `ValueError` for a template that does not hold the message once and unchanged.
    """
    before, found, after = chat_text(tokenizer, MESSAGE).partition(MESSAGE)
    if not found or MESSAGE in after:
        raise ValueError("the chat template does not hold the user's message once and unchanged: use another template.")
    return plain_ids(tokenizer, before), plain_ids(tokenizer, after)


def end_tokens(model: Any, tokenizer: Any, chat: bool = False) -> set[int]:
    """Returns the tokens that end an answer: the model's and the tokenizer's end tokens, and in a chat the token with
    which the template ends the assistant's turn."""
    ends = model.generation_config.eos_token_id  # one token, or several
    found = [*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id]
    found += [_end_of_turn(tokenizer)] if chat else []
    return {token for token in found if token is not None}


def _end_of_turn(tokenizer: Any) -> int | None:
    """Returns the special token after the assistant's message; None if the template ends it with ordinary text."""
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MESSAGE}]
    after = _render(tokenizer, turns, add_generation_prompt=False).rpartition(MESSAGE)[2]
    first = plain_ids(tokenizer, after)[:1]
    return first[0] if first and first[0] in tokenizer.added_tokens_decoder else None


def _render(tokenizer: Any, turns: list[dict[str, str]], add_generation_prompt: bool) -> str:
    try:
        return tokenizer.apply_chat_template(
            turns,
            chat_template=FIXED_DATE + tokenizer.get_chat_template(),
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            date_string=DATE,
        )
    except Exception as error:  # a template can fail like any program, and raise its own errors
        reason = str(error).partition("\n")[0] or type(error).__name__
        roles = " and ".join(turn["role"] for turn in turns)
        raise ValueError(f"the chat template fails for a message of {roles} ({reason}): {REMEDY}") from error


def _letters(text: str) -> str:
    return "".join(text.split()).casefold()
