"""Documents that former versions prepared with other tokens are refused, and not mixed with today's."""

from functools import partial

import pytest
from tokenizers.processors import TemplateProcessing

from condense.training.data.answers import question_encoder
from condense.training.data.documents import Document
from condense.training.data.former import LINE_ENDS, changed_frame
from condense.training.data.preparation import prepare
from condense.training.data.store import Need, folder_of
from condense.training.data.text import text_encoder
from condense.training.recipe import Source, TextData
from condense.training.small_llama import word_tokenizer

pytestmark = pytest.mark.unit

ALL = Need(lambda lengths: lengths, 10**9)


def words(template="$A", bos="<s>"):
    tokenizer = word_tokenizer(["the cat sat"])
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=template, special_tokens=[("<s>", 1), ("</s>", 2), ("<unk>", 3)]
    )
    tokenizer.bos_token = bos
    return tokenizer


def prepared(path, tokenizer):
    data = TextData(task="text", sources=[Source(files=str(path))], prepared=path.parent / "prepared")
    folder = folder_of(data, data.sources, tokenizer, min_tokens=2)
    encode = partial(text_encoder, tokenizer, 2)
    return prepare(folder, data, data.sources, encode, ALL)


@pytest.mark.parametrize("data", ["the cat\r\nsat", "\ufeffthe cat\nsat"])
def test_other_line_ends(data, tmp_path):
    """The folder of a former version has no marker; without carriage returns and byte order marks it is read on."""
    tokenizer, plain, text = words(), tmp_path / "plain.txt", tmp_path / "text.txt"
    plain.write_text("the cat\nsat")
    text.write_bytes(data.encode())
    for path in (plain, text):
        store = prepared(path, tokenizer)
        assert tokenizer.decode(store[0].input_ids) == "<s> the cat sat </s>"
        (store.folder / LINE_ENDS).unlink()
    assert len(prepared(plain, tokenizer)) == 1
    with pytest.raises(ValueError, match=f"{store.folder} holds documents .* byte order mark or the carriage returns"):
        prepared(text, tokenizer)


def test_other_tokens_around_a_text(tmp_path, monkeypatch):
    """Training began texts with `bos_token` only, even if the template has another first token."""
    path, tokenizer = tmp_path / "text.txt", words("<unk> $A")
    path.write_text("the cat sat")
    with monkeypatch.context() as former:
        former.setattr("condense.training.data.store.changed_frame", lambda tokenizer, task: [])
        former.setattr("condense.training.data.text.first_tokens", lambda tokenizer: [tokenizer.bos_token_id])
        folder = prepared(path, tokenizer).folder
    with pytest.raises(ValueError, match=f"{folder} holds documents .* with other tokens around each text. Delete"):
        prepared(path, tokenizer)
    for part in folder.glob("part-*"):
        part.unlink()
    store = prepared(path, tokenizer)
    assert tokenizer.decode(store[0].input_ids) == "<unk> the cat sat </s>"


@pytest.mark.parametrize(
    ("template", "bos", "text", "questions"),
    [
        ("<s> $A", "<s>", [], []),
        ("$A", None, [], []),
        ("$A", "<s>", [], [[1], []]),  # questions had no first token
        ("<s> $A </s>", "<s>", [], [[1], [2]]),  # the last token was taken for one of the prompt
        ("<s> $A", None, [[1], []], []),
    ],
)
def test_which_tokens_have_changed(template, bos, text, questions):
    """A tokenizer like Llama's, or one without bos_token, keeps its folders."""
    tokenizer = words(template, bos)
    assert changed_frame(tokenizer, "text") == changed_frame(tokenizer, "summarization") == text
    assert changed_frame(tokenizer, "questions") == questions


def test_the_answer_s_first_token_is_a_label():
    """A template's last token has offset 0, as the prompt has."""
    for template in ("<s> $A </s>", "<s> $A"):
        tokenizer = words(template)
        (found,) = question_encoder(tokenizer, 10)([Document("1", "the cat ", "sat")])
        assert tokenizer.decode(found.input_ids[: found.num_given]) == "<s> the cat"
        assert tokenizer.decode(found.input_ids[found.num_given :]) == "sat </s>"
