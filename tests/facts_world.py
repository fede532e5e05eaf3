"""Reads the facts in a text and answers its question: written without the generator, from the sentences alone."""

import re

PERSON, THE = r"([A-Z]\w+)", r"the (\w+)"
MOVE = rf"{PERSON} (?:walks to|hurries to|comes into) {THE}\."
TAKE = rf"{PERSON} (?:picks up|takes) {THE}\."
LEAVE = rf"{PERSON} (?:puts {THE} down|leaves {THE} behind)\."
GIVE = rf"{PERSON} (?:hands|brings) {THE} to {PERSON}\."
LIES = r"The (\w+) lies directly (\w+) of the (\w+)\."
PATTERNS = {"move": MOVE, "take": TAKE, "leave": LEAVE, "give": GIVE, "lies": LIES}


def facts_in(text: str) -> list[tuple[str, ...]]:
    """Each fact as its kind and its words, in the order of the text."""
    found = []
    for kind, pattern in PATTERNS.items():
        for match in re.finditer(pattern, text):
            found.append((match.start(), kind, *(word for word in match.groups() if word)))
    return [tuple(fact) for _, *fact in sorted(found)]


def plain(decoded: str) -> str:
    """A decoded text without the spaces that a word-level tokenizer puts before punctuation marks."""
    return re.sub(r" ([.?:])", r"\1", decoded)


def trail(facts: list[tuple[str, ...]], thing: str) -> list[str]:
    """The known places of a thing, one after another; somebody may only take it where it is."""
    here: dict[str, str] = {}
    bearer, places = None, list[str]()
    for kind, *words in facts:
        if kind == "move":
            here[words[0]] = words[1]
        elif kind in ("take", "leave") and words[1] == thing:
            if kind == "take":
                assert bearer is None and (not places or here[words[0]] == places[-1])
                bearer = words[0]
            else:
                assert bearer == words[0] and bearer in here
        else:
            continue
        if bearer in here and places[-1:] != [here[bearer]]:
            places.append(here[bearer])
        if kind == "leave":
            bearer = None
    return places


def answer_to(text: str) -> str:
    """The answer to the question at the end of a text."""
    text, _, question = text.rpartition("Question: ")
    facts = facts_in(text)
    for pattern, find in (
        (rf"Where is {PERSON}\?", lambda who: [fact[2] for fact in facts if fact[:2] == ("move", who)][-1]),
        (rf"Where is {THE}\?", lambda thing: trail(facts, thing)[-1]),
        (rf"Where was {THE} before {THE}\?", lambda thing, place: _before(trail(facts, thing), place)),
        (r"What lies directly (\w+) of the (\w+)\?", lambda way, b: _only(f[1] for f in facts if f[2:] == (way, b))),
        (rf"What does {THE} lie directly (\w+) of\?", lambda a, way: _only(f[3] for f in facts if f[1:3] == (a, way))),
        (rf"Who gave {THE} to {PERSON}\?", lambda thing, to: [f[1] for f in facts if f[2:] == (thing, to)][-1]),
        (rf"Who got {THE} from {PERSON}\?", lambda thing, by: [f[3] for f in facts if f[1:3] == (by, thing)][-1]),
        (rf"What did {PERSON} give to {PERSON}\?", lambda a, b: [f[2] for f in facts if (f[1], f[3]) == (a, b)][-1]),
    ):  # fmt: skip
        if match := re.match(pattern, question):
            return find(*match.groups())
    raise AssertionError(question)


def _before(places: list[str], place: str) -> str:
    return places[len(places) - 1 - places[::-1].index(place) - 1]


def _only(found) -> str:
    (one,) = found
    return one
