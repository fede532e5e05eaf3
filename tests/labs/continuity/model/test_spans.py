"""The tokens that cover a part of a text: word-level, byte-level BPE and pretrained SentencePiece tokenizers."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from condense.labs.continuity.model import TextSpan, find_spans, span_between
from condense.labs.continuity.model.spans import encode_with_offsets
from condense.training.small_llama import word_tokenizer
from tests.refusals import assert_refused

pytestmark = pytest.mark.unit

TEXT = "the cat sat on the mat, the cathedral cat."


@pytest.fixture(scope="module")
def words():
    return word_tokenizer([TEXT])


@pytest.fixture(scope="module")
def byte_level():
    """Byte-level BPE with merges such as "the", " cat", " mat" and " sat", else single bytes; <s> comes first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        min_frequency=2,
        special_tokens=["<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat, the cat"] * 3, trainer)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>")


@pytest.fixture(scope="module")
def pretrained(stories):
    return AutoTokenizer.from_pretrained(stories)


@pytest.fixture(params=["words", "byte_level", "pretrained"])
def any_tokenizer(request):
    return request.getfixturevalue(request.param)


def tokens_of(tokenizer, text, span):
    return tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])[span.first : span.end]


def decoded(tokenizer, text, span):
    ids = tokenizer(text)["input_ids"]
    return "".join(tokenizer.decode([ids[n] for n in span.tokens], clean_up_tokenization_spaces=False).split())


def test_a_span_has_a_range_of_tokens():
    span = TextSpan(2, 4, True)
    assert span.tokens == range(2, 4) and not span.is_one_token
    assert TextSpan(2, 3, True).is_one_token and not TextSpan(2, 3, False).is_one_token


def test_offsets_select_the_text_of_the_tokens(any_tokenizer):
    ids, offsets = encode_with_offsets(any_tokenizer, TEXT)
    assert ids == any_tokenizer(TEXT)["input_ids"]
    for token, (start, end) in zip(ids, offsets, strict=True):
        text = any_tokenizer.decode([token]).strip()
        assert TEXT[start:end] == ("" if token == any_tokenizer.bos_token_id else text)


def test_find_spans_of_words_with_one_token(words, byte_level):
    """Counted by hand; in `byte_level`, <s> comes first."""
    assert find_spans(words, TEXT, "cat") == [TextSpan(1, 2, True), TextSpan(9, 10, True)]
    assert find_spans(words, TEXT, "the") == [TextSpan(0, 1, True), TextSpan(4, 5, True), TextSpan(7, 8, True)]
    text = "the cat sat on the mat"
    assert find_spans(byte_level, text, "cat") == [TextSpan(2, 3, True)]
    assert find_spans(byte_level, text, "the") == [TextSpan(1, 2, True), TextSpan(5, 6, True)]
    assert tokens_of(byte_level, text, TextSpan(2, 3, True)) == ["Ġcat"]
    assert find_spans(byte_level, text, "cat")[0].is_one_token


def test_find_spans_of_words_with_several_tokens(words, byte_level, pretrained):
    assert find_spans(byte_level, "the dog sat", "dog") == [TextSpan(3, 6, True)]
    assert tokens_of(byte_level, "the dog sat", TextSpan(1, 7, True)) == ["the", "Ġ", "d", "o", "g", "Ġsat"]
    (span,) = find_spans(pretrained, "Once the cat sat", "cat")
    assert tokens_of(pretrained, "Once the cat sat", span) == ["▁c", "at"]
    assert span.exact and not span.is_one_token
    assert find_spans(words, TEXT, "sat on the") == [TextSpan(2, 5, True)]
    assert not find_spans(words, TEXT, "sat on the")[0].is_one_token


@pytest.mark.parametrize("part", ["the", "cat", "cathedral", "sat on the", "on the mat, the", "mat"])
def test_the_tokens_of_a_span_decode_to_the_part(any_tokenizer, part):
    spans = find_spans(any_tokenizer, TEXT, part)
    assert len(spans) == {"the": 3, "cat": 2}.get(part, 1) and spans == sorted(spans)
    for span in spans:
        assert span.exact and decoded(any_tokenizer, TEXT, span) == part.replace(" ", "")
        for shorter in (span._replace(first=span.first + 1), span._replace(end=span.end - 1)):
            assert decoded(any_tokenizer, TEXT, shorter) != part.replace(" ", "")


def test_parts_of_longer_words_are_found_on_request(byte_level, words):
    text = "the cathedral of cats, a bobcat, a cat"
    assert len(find_spans(byte_level, text, "cat")) == 1
    anywhere = find_spans(byte_level, text, "cat", whole_words=False)
    assert len(anywhere) == 4 and anywhere[-1:] == find_spans(byte_level, text, "cat")
    assert [decoded(byte_level, text, span) for span in anywhere] == ["cat"] * 4 and all(
        span.exact for span in anywhere
    )
    assert find_spans(words, "the cathedral", "cat", whole_words=False) == [TextSpan(1, 2, False)]
    for digits in ("1", "2", "12"):
        assert_refused(f"'{digits}' does not occur in .* as a word", find_spans, words, "0123 4125", digits)
    assert find_spans(words, "0123 4125", "12", whole_words=False) == [TextSpan(1, 3, True), TextSpan(5, 7, True)]


def test_tokens_shared_with_a_neighbour_are_not_exact(words, byte_level):
    assert span_between(words, "the cat", 4, 6) == TextSpan(1, 2, False)
    assert span_between(words, "the cat", 5, 7) == TextSpan(1, 2, False)
    assert span_between(words, "the cat", 2, 7) == TextSpan(0, 2, False)
    assert not span_between(words, "the cat", 4, 6).is_one_token
    assert find_spans(words, "the_cat sat", "cat") == [TextSpan(0, 1, False)]
    assert span_between(byte_level, "the cat", 5, 7) == TextSpan(2, 3, False)
    assert span_between(byte_level, "the cat", 4, 7) == TextSpan(2, 3, True)


@pytest.mark.parametrize("part", ["cat", " cat", "cat ", "\n cat\t "])
def test_white_space_around_a_part_is_ignored(any_tokenizer, part):
    text = "the  cat \n sat"
    (span,) = find_spans(any_tokenizer, text, part)
    assert [span] == find_spans(any_tokenizer, text, "cat") and span.exact
    assert decoded(any_tokenizer, text, span) == "cat"
    for start in (3, 4, 5):
        for end in (8, 9, 11):
            assert span_between(any_tokenizer, text, start, end) == span


def test_special_tokens_in_front_are_counted(byte_level, pretrained):
    for tokenizer in (byte_level, pretrained):
        assert tokenizer("the")["input_ids"][0] == tokenizer.bos_token_id
        assert find_spans(tokenizer, "the cat", "the") == [TextSpan(1, 2, True)]
        assert span_between(tokenizer, "the cat", 0, 3) == TextSpan(1, 2, True)


def test_spans_of_characters_with_several_bytes(byte_level, pretrained):
    for tokenizer in (byte_level, pretrained):
        (span,) = find_spans(tokenizer, "a 😀 é cat", "😀")
        assert len(span.tokens) >= 4 and span.exact and decoded(tokenizer, "a 😀 é cat", span) == "😀"
        (after,) = find_spans(tokenizer, "a 😀 é cat", "cat")
        assert after.exact and after.first >= span.end + 1 and decoded(tokenizer, "a 😀 é cat", after) == "cat"


def test_span_between_selects_sentences(words):
    text = "the cat sat. on the mat."
    start = text.index("on")
    assert span_between(words, text, 0, start) == TextSpan(0, 4, True)
    assert span_between(words, text, start, len(text)) == TextSpan(4, 8, True)


# Refused arguments


@pytest.mark.parametrize("part", ["dog", "The", "cat sat the", "", "  "])
def test_a_part_that_does_not_occur_is_refused(any_tokenizer, part):
    assert_refused(f"{part.strip()!r} does not occur in 'the cat sat", find_spans, any_tokenizer, TEXT, part)


def test_a_part_of_only_white_space_is_refused(any_tokenizer):
    for start, end in ((3, 6), (4, 5)):
        assert_refused("characters .* are only white space", span_between, any_tokenizer, "the   cat", start, end)


def test_a_part_that_the_tokenizer_drops_is_refused():
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "the": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.CharDelimiterSplit("-")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    assert_refused("no token of the text covers '-', the tokenizer drops it", span_between, fast, "the-cat", 3, 4)


def test_tokenizers_without_offsets_are_refused():
    class Slow:
        is_fast = False

    for tokenizer in (Slow(), object()):
        with pytest.raises(ValueError, match=f"{type(tokenizer).__name__} does not report offsets.*fast tokenizer"):
            find_spans(tokenizer, "the cat", "cat")
        assert_refused("fast tokenizer", span_between, tokenizer, "the cat", 0, 3)


def test_an_occurrence_within_a_word_does_not_hide_a_later_one(words):
    assert find_spans(words, "10 0 0", "0 0") == [TextSpan(2, 4, True)]


@pytest.mark.parametrize(
    ("text", "part", "span"),
    [
        ("the cat.", ".", TextSpan(2, 3, True)),
        ("cat,mat", ",mat", TextSpan(1, 3, True)),
        ("4+1", "+", TextSpan(1, 2, True)),
    ],
)
def test_find_spans_of_parts_with_punctuation_at_their_ends(words, text, part, span):
    assert find_spans(words, text, part) == [span]


@pytest.mark.parametrize(("start", "end"), [(-3, 7), (-3, -1), (4, 70), (60, 70), (3, 1), (2, 2)])
def test_characters_outside_the_text_are_refused(words, start, end):
    assert_refused(f"characters {start} to {end} .*7", span_between, words, "the cat", start, end)


@pytest.mark.parametrize(
    ("find", "message"),
    [
        (lambda tokenizer: span_between(tokenizer, "the   cat", 3, 6), "characters 3 to 6"),
        (lambda tokenizer: find_spans(tokenizer, "the cathedral", "cat"), "whole_words=False"),
    ],
    ids=["white space", "within a word"],
)
def test_the_message_names_the_value_or_the_remedy(words, find, message):
    assert_refused(message, find, words)
