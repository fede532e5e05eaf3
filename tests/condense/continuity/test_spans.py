"""Parts of a text as tokens, for a tokenizer of words, one of bytes and a pretrained one of pieces."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from condense.continuity import TextSpan, find_spans, span_between
from condense.continuity.spans import encode_with_places
from training.small_llama import word_tokenizer

TEXT = "the cat sat on the mat, the cathedral cat."


@pytest.fixture(scope="module")
def words():
    return word_tokenizer([TEXT])


@pytest.fixture(scope="module")
def pieces():
    """Bytes merged into "the", " cat", " mat", " sat" and the like; everything else by single bytes; <s> in front."""
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


@pytest.fixture(params=["words", "pieces", "pretrained"])
def any_tokenizer(request):
    return request.getfixturevalue(request.param)


def tokens_of(tokenizer, text, span):
    return tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])[span.first : span.end]


def spoken(tokenizer, text, span):
    ids = tokenizer(text)["input_ids"]
    return "".join(tokenizer.decode([ids[n] for n in span.tokens], clean_up_tokenization_spaces=False).split())


def test_spans():
    span = TextSpan(2, 4, True)
    assert span.tokens == range(2, 4) and not span.is_one_token
    assert TextSpan(2, 3, True).is_one_token and not TextSpan(2, 3, False).is_one_token


def test_places_are_the_text_of_the_tokens(any_tokenizer):
    ids, places = encode_with_places(any_tokenizer, TEXT)
    assert ids == any_tokenizer(TEXT)["input_ids"]
    for token, (start, end) in zip(ids, places, strict=True):
        text = any_tokenizer.decode([token]).strip()
        assert TEXT[start:end] == ("" if token == any_tokenizer.bos_token_id else text)


def test_words_of_one_token(words, pieces):
    """Counted by hand; in `pieces`, <s> comes first."""
    assert find_spans(words, TEXT, "cat") == [TextSpan(1, 2, True), TextSpan(9, 10, True)]
    assert find_spans(words, TEXT, "the") == [TextSpan(0, 1, True), TextSpan(4, 5, True), TextSpan(7, 8, True)]
    text = "the cat sat on the mat"
    assert find_spans(pieces, text, "cat") == [TextSpan(2, 3, True)]
    assert find_spans(pieces, text, "the") == [TextSpan(1, 2, True), TextSpan(5, 6, True)]
    assert tokens_of(pieces, text, TextSpan(2, 3, True)) == ["Ġcat"]
    assert find_spans(pieces, text, "cat")[0].is_one_token


def test_words_of_several_tokens(words, pieces, pretrained):
    assert find_spans(pieces, "the dog sat", "dog") == [TextSpan(3, 6, True)]
    assert tokens_of(pieces, "the dog sat", TextSpan(1, 7, True)) == ["the", "Ġ", "d", "o", "g", "Ġsat"]
    (span,) = find_spans(pretrained, "Once the cat sat", "cat")
    assert tokens_of(pretrained, "Once the cat sat", span) == ["▁c", "at"]
    assert span.exact and not span.is_one_token
    assert find_spans(words, TEXT, "sat on the") == [TextSpan(2, 5, True)]
    assert not find_spans(words, TEXT, "sat on the")[0].is_one_token


@pytest.mark.parametrize("part", ["the", "cat", "cathedral", "sat on the", "on the mat, the", "mat"])
def test_tokens_say_what_the_part_says(any_tokenizer, part):
    spans = find_spans(any_tokenizer, TEXT, part)
    assert len(spans) == {"the": 3, "cat": 2}.get(part, 1) and spans == sorted(spans)
    for span in spans:
        assert span.exact and spoken(any_tokenizer, TEXT, span) == part.replace(" ", "")
        for shorter in (span._replace(first=span.first + 1), span._replace(end=span.end - 1)):
            assert spoken(any_tokenizer, TEXT, shorter) != part.replace(" ", "")


def test_parts_of_longer_words_are_found_on_request(pieces, words):
    text = "the cathedral of cats, a bobcat, a cat"
    assert len(find_spans(pieces, text, "cat")) == 1
    anywhere = find_spans(pieces, text, "cat", whole_words=False)
    assert len(anywhere) == 4 and anywhere[-1:] == find_spans(pieces, text, "cat")
    assert [spoken(pieces, text, span) for span in anywhere] == ["cat"] * 4 and all(span.exact for span in anywhere)
    assert find_spans(words, "the cathedral", "cat", whole_words=False) == [TextSpan(1, 2, False)]
    for digits in ("1", "2", "12"):
        with pytest.raises(ValueError, match=f"'{digits}' stands in .* only within longer words"):
            find_spans(words, "0123 4125", digits)
    assert find_spans(words, "0123 4125", "12", whole_words=False) == [TextSpan(1, 3, True), TextSpan(5, 7, True)]


def test_tokens_shared_with_a_neighbour_are_not_exact(words, pieces):
    assert span_between(words, "the cat", 4, 6) == TextSpan(1, 2, False)
    assert span_between(words, "the cat", 5, 7) == TextSpan(1, 2, False)
    assert span_between(words, "the cat", 2, 7) == TextSpan(0, 2, False)
    assert not span_between(words, "the cat", 4, 6).is_one_token
    assert find_spans(words, "the_cat sat", "cat") == [TextSpan(0, 1, False)]
    assert span_between(pieces, "the cat", 5, 7) == TextSpan(2, 3, False)
    assert span_between(pieces, "the cat", 4, 7) == TextSpan(2, 3, True)


@pytest.mark.parametrize("part", ["cat", " cat", "cat ", "\n cat\t "])
def test_white_space_around_a_part_does_not_count(any_tokenizer, part):
    text = "the  cat \n sat"
    (span,) = find_spans(any_tokenizer, text, part)
    assert [span] == find_spans(any_tokenizer, text, "cat") and span.exact
    assert spoken(any_tokenizer, text, span) == "cat"
    for start in (3, 4, 5):
        for end in (8, 9, 11):
            assert span_between(any_tokenizer, text, start, end) == span


def test_special_tokens_in_front_are_counted(pieces, pretrained):
    for tokenizer in (pieces, pretrained):
        assert tokenizer("the")["input_ids"][0] == tokenizer.bos_token_id
        assert find_spans(tokenizer, "the cat", "the") == [TextSpan(1, 2, True)]
        assert span_between(tokenizer, "the cat", 0, 3) == TextSpan(1, 2, True)


def test_characters_of_several_bytes(pieces, pretrained):
    for tokenizer in (pieces, pretrained):
        (span,) = find_spans(tokenizer, "a 😀 é cat", "😀")
        assert len(span.tokens) >= 4 and span.exact and spoken(tokenizer, "a 😀 é cat", span) == "😀"
        (after,) = find_spans(tokenizer, "a 😀 é cat", "cat")
        assert after.exact and after.first >= span.end + 1 and spoken(tokenizer, "a 😀 é cat", after) == "cat"


def test_sentences_between_places(words):
    text = "the cat sat. on the mat."
    start = text.index("on")
    assert span_between(words, text, 0, start) == TextSpan(0, 4, True)
    assert span_between(words, text, start, len(text)) == TextSpan(4, 8, True)


# What a user may get wrong


@pytest.mark.parametrize("part", ["dog", "The", "cat sat the", "", "  "])
def test_parts_that_stand_nowhere(any_tokenizer, part):
    with pytest.raises(ValueError, match=f"{part.strip()!r} does not stand in 'the cat sat"):
        find_spans(any_tokenizer, TEXT, part)


def test_places_of_white_space(any_tokenizer):
    for start, end in ((3, 6), (4, 5)):
        with pytest.raises(ValueError, match="characters .* hold nothing but white space"):
            span_between(any_tokenizer, "the   cat", start, end)


def test_tokenizers_that_drop_characters():
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "the": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.CharDelimiterSplit("-")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    with pytest.raises(ValueError, match="no token of the text covers '-': its tokenizer drops it"):
        span_between(fast, "the-cat", 3, 4)


def test_tokenizers_that_tell_no_places():
    class Slow:
        is_fast = False

    for tokenizer in (Slow(), object()):
        with pytest.raises(ValueError, match=f"{type(tokenizer).__name__} does not tell where.*fast tokenizer"):
            find_spans(tokenizer, "the cat", "cat")
        with pytest.raises(ValueError, match="fast tokenizer"):
            span_between(tokenizer, "the cat", 0, 3)


def test_a_hit_within_a_word_hides_none_behind_it(words):
    assert find_spans(words, "10 0 0", "0 0") == [TextSpan(2, 4, True)]


@pytest.mark.parametrize(
    ("text", "part", "span"),
    [
        ("the cat.", ".", TextSpan(2, 3, True)),
        ("cat,mat", ",mat", TextSpan(1, 3, True)),
        ("4+1", "+", TextSpan(1, 2, True)),
    ],
)
def test_parts_with_punctuation_at_their_ends(words, text, part, span):
    assert find_spans(words, text, part) == [span]


@pytest.mark.parametrize(("start", "end"), [(-3, 7), (-3, -1), (4, 70), (60, 70), (3, 1), (2, 2)])
def test_places_outside_the_text(words, start, end):
    with pytest.raises(ValueError, match=f"characters {start} to {end} .*7"):
        span_between(words, "the cat", start, end)


@pytest.mark.parametrize(
    ("find", "message"),
    [
        (lambda tokenizer: span_between(tokenizer, "the   cat", 3, 6), "characters 3 to 6"),
        (lambda tokenizer: find_spans(tokenizer, "the cathedral", "cat"), "whole_words=False"),
    ],
    ids=["places", "within a word"],
)
def test_unclear_messages(words, find, message):
    with pytest.raises(ValueError, match=message):
        find(words)
