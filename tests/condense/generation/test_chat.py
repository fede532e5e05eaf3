"""Prompts in a chat template, token by token, and the tokens that end an answer."""

import json
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from condense import CondenseForCausalLM
from condense.generation.chat import chat_frame, chat_ids, chat_text, check_chat_template, end_tokens
from condense.utils.text import encode

from ...chat_models import chat_tokenizer, greedy, save_chat_model
from ...commands import printed
from ...refusals import assert_refused

pytestmark = pytest.mark.unit

NOW = "strftime_now('%d %b %Y')"
TEXT = "the cat sat on the mat and the dog ran to the cat ?"


@pytest.fixture
def tokenizer():
    return chat_tokenizer([TEXT])


def ids_of(tokenizer, words):
    return tokenizer.convert_tokens_to_ids(words.split())


def with_ends(ends):
    return SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=ends))


def test_ids_by_hand(tokenizer):
    """Nothing is around the message but the template, which has the first token; it trims the message."""
    assert tokenizer("the cat")["input_ids"] == ids_of(tokenizer, "<s> the cat")
    wanted = "<s> <|start|> user <|stop|> the cat sat <|eot|> <|start|> assistant <|stop|>"
    assert chat_ids(tokenizer, "the cat sat\n") == ids_of(tokenizer, wanted)
    before, after = chat_frame(tokenizer)
    assert before == ids_of(tokenizer, "<s> <|start|> user <|stop|>")
    assert after == ids_of(tokenizer, "<|eot|> <|start|> assistant <|stop|>")


def test_ids_of_a_real_tokenizer(stories):
    tokenizer = AutoTokenizer.from_pretrained(stories)
    turn = "[{{ m['role'] }}] {{ m['content'] }}{{ eos_token }}"
    tokenizer.chat_template = f"{{{{ bos_token }}}}{{% for m in messages %}}{turn}{{% endfor %}}[assistant]"
    prompt = "Once upon a time, there was a little girl.\n" * 2
    turns = [{"role": "user", "content": prompt}]
    found = chat_ids(tokenizer, prompt)
    assert found == tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    assert found.count(tokenizer.bos_token_id) == 1 and found.count(tokenizer.eos_token_id) == 1


def test_the_end_of_the_turn_ends_an_answer(tokenizer):
    eos, eot, cat = ids_of(tokenizer, "</s> <|eot|> cat")
    assert end_tokens(with_ends(eos), tokenizer) == {eos}
    assert end_tokens(with_ends([cat, eos]), tokenizer, chat=True) == {cat, eos, eot}
    assert end_tokens(with_ends(None), tokenizer, chat=True) == {eos, eot}
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} ? {% endfor %}"  # ordinary text ends a turn
    assert end_tokens(with_ends(eos), tokenizer, chat=True) == {eos}


@pytest.mark.parametrize("date", ["date_string if date_string is defined else strftime_now('%d %b %Y')", NOW])
def test_a_prompt_is_the_same_on_every_day(tokenizer, date):
    tokenizer.chat_template = "{{ " + date + " }} {{ messages[0]['content'] }}"
    assert chat_ids(tokenizer, "cat")[:2] == ids_of(tokenizer, "2 6")


def test_what_has_no_chat_is_refused(tokenizer):
    for template in ("{{ messages[0]['content'] | lower }}", "{{ messages[0]['content'] }} " * 2):
        tokenizer.chat_template = template
        assert_refused("does not hold the user's message once and unchanged", chat_frame, tokenizer)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"the tokenizer of 'a/b' has no chat template: leave --chat out"):
        check_chat_template(tokenizer, "a/b")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('Only tools may speak.') }}", r"message of user \(Only tools may speak.\)"),
        ("{{ messages[0].author.name }}", r"message of user \('dict object' has no attribute 'author'\)"),
        ("{% for m in messages %}{{ m['content'] }}", r"message of user \(Unexpected end of template"),
        ("{{ messages[0]['content'] + 1 }}", r"message of user \(can only concatenate str"),
        (
            "{{ messages[0]['content'] }}{% if messages[1] %}{{ raise_exception('') }}{% endif %}",
            r"message of user and assistant \(TemplateError\)",
        ),
        ("{{ bos_token }}Answer:", "leaves out the user's message"),
    ],
)
def test_templates_that_fail_or_drop_the_message(tokenizer, template, reason):
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=f"the tokenizer of 'a/b': the chat template .*{reason}.*: correct chat_temp"):
        check_chat_template(tokenizer, "a/b")


def test_a_part_of_the_message_is_not_dropped(tokenizer):
    tokenizer.chat_template = "{{ (messages[0]['content'] | upper).split('\n')[0] }}"
    check_chat_template(tokenizer, "a/b")
    assert chat_text(tokenizer, " the cat\n") == " THE CAT"
    assert_refused("leaves out the user's message, or a part of it: correct", chat_text, tokenizer, "the cat\nsat")


def test_a_text_in_blocks_gets_no_first_token(tokenizer, monkeypatch):
    monkeypatch.setattr("condense.utils.text.CHARACTERS_PER_PIECE", 7)
    whole = ids_of(tokenizer, TEXT)
    assert encode(tokenizer, TEXT, with_first=False)[0].tolist() == whole
    assert encode(tokenizer, TEXT)[0].tolist() == [tokenizer.bos_token_id, *whole]


def test_generate_answers_in_a_chat(tmp_path):
    folder, report = save_chat_model(tmp_path / "model", [TEXT]), tmp_path / "report.json"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), CondenseForCausalLM.from_pretrained(folder).eval()

    def answer(*options):
        printed("generate", "--model", folder, "--max-new-tokens", 12, "--report", report, *options)
        return json.loads(report.read_text())

    num_stopped = 0
    for prompt in ("the cat sat", "dog ran to the mat", "on the cat", "and the dog ?"):
        found, ids = answer("--prompt", prompt, "--chat"), chat_ids(tokenizer, prompt)
        expected = greedy(model, ids, {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|eot|>")}, 12)
        assert found["chat"] and found["prompt_tokens"] == len(ids)
        assert found["text"] == tokenizer.decode(expected, skip_special_tokens=True)
        num_stopped += 0 < len(expected) < 12
    assert num_stopped  # by the end of the turn
    assert answer("--prompt", "the cat sat")["prompt_tokens"] == 4
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    assert_refused("no chat template", answer, "--prompt", "the cat", "--chat")
