"""Short stories of facts, with questions whose answers are one word: five kinds, as in the first bAbI tasks.

People walk about, carry things and hand them on; places lie beside each other. The last statement holds. All names and
sentences are here.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from condense.utils.choices import check_choice

if TYPE_CHECKING:  # the command line reads the kinds of stories only
    from numpy.random import Generator

PEOPLE = ["Odile", "Bruno", "Carmen", "Darius", "Ingrid", "Kenji", "Leila", "Marek"]
PLACES = ["cellar", "attic", "stable", "harbour", "market", "tower", "chapel", "library", "orchard"]
THINGS = ["lantern", "compass", "violin", "ledger", "kettle", "parasol", "ladder", "basket"]
DIRECTIONS = {"north": (-1, 0), "south": (1, 0), "east": (0, 1), "west": (0, -1)}  # rows and columns on a map

MOVES = ["{person} walks to the {place}.", "{person} hurries to the {place}.", "{person} comes into the {place}."]
TAKES = ["{person} picks up the {thing}.", "{person} takes the {thing}."]
LEAVES = ["{person} puts the {thing} down.", "{person} leaves the {thing} behind."]
RELATION = "The {place} lies directly {direction} of the {other}."
GIFTS = ["{person} hands the {thing} to {receiver}.", "{person} brings the {thing} to {receiver}."]

QUESTION = "Question: {question} Answer:"
WHERE_PERSON = "Where is {person}?"
WHERE_THING = "Where is the {thing}?"
WHERE_BEFORE = "Where was the {thing} before the {place}?"
WHICH_PLACE = ["What lies directly {direction} of the {other}?", "What does the {place} lie directly {direction} of?"]
WHO_GAVE = "Who gave the {thing} to {receiver}?"
WHO_GOT = "Who got the {thing} from {person}?"
WHAT_GIVEN = "What did {person} give to {receiver}?"

WORDS = {
    "person": PEOPLE, "receiver": PEOPLE, "place": PLACES, "other": PLACES, "thing": THINGS,
    "direction": list(DIRECTIONS),
}  # fmt: skip
TEMPLATES = [*MOVES, *TAKES, *LEAVES, RELATION, *GIFTS]
QUESTIONS = [WHERE_PERSON, WHERE_THING, WHERE_BEFORE, *WHICH_PLACE, WHO_GAVE, WHO_GOT, WHAT_GIVEN]
ANSWERS = [*PEOPLE, *PLACES, *THINGS]
SIDE = 3  # of the map, in places


class Question(NamedTuple):
    """The answer is one of `ANSWERS`."""

    text: str
    answer: str


class Story(NamedTuple):
    """Sentences in order, and questions of one kind about them. A random question is first; the others are in a fixed
    order. No question tells another's answer."""

    facts: list[str]
    questions: list[Question]


class Kind(NamedTuple):
    """`tell(generator, n)` makes a story of n facts: from `least` to `most` of them (None: any number)."""

    least: int
    most: int | None
    tell: Callable[["Generator", int], Story]


def pick(generator: "Generator", items: Sequence[str]) -> str:
    return items[int(generator.integers(len(items)))]


class World:
    """The facts so far, and what they say: who is where and holds what."""

    def __init__(self, generator: "Generator"):
        self.generator = generator
        self.facts: list[str] = []
        self.place_of: dict[str, str] = {}
        self.holder_of: dict[str, str] = {}
        # In order, each different from the one before.
        self.places_of: dict[str, list[str]] = {thing: [] for thing in THINGS}

    def _say(self, templates: Sequence[str], **words: str) -> None:
        self.facts.append(pick(self.generator, templates).format(**words))

    def _note(self, thing: str, place: str | None) -> None:
        if place is not None and self.places_of[thing][-1:] != [place]:
            self.places_of[thing].append(place)

    def move(self, person: str) -> None:
        """Moves a person to a place where the person is not known to be."""
        place = pick(self.generator, [place for place in PLACES if place != self.place_of.get(person)])
        self._say(MOVES, person=person, place=place)
        self.place_of[person] = place
        for thing, holder in self.holder_of.items():
            if holder == person:
                self._note(thing, place)

    def take(self, person: str, thing: str) -> None:
        self._say(TAKES, person=person, thing=thing)
        self.holder_of[thing] = person
        self._note(thing, self.place_of.get(person))

    def leave(self, thing: str) -> None:
        self._say(LEAVES, person=self.holder_of.pop(thing), thing=thing)

    def can_take(self, person: str, thing: str) -> bool:
        """Returns whether nobody holds the thing, and it is not known to be elsewhere."""
        places = self.places_of[thing]
        return thing not in self.holder_of and (not places or places[-1] == self.place_of.get(person))

    def anything(self, untouched: str | None) -> None:
        """Lets somebody move, take a thing other than `untouched`, or put one down at a known place."""
        person = pick(self.generator, PEOPLE)
        free = [thing for thing in THINGS if thing != untouched and self.can_take(person, thing)]
        held = [thing for thing, holder in self.holder_of.items() if holder == person and person in self.place_of]
        choice = self.generator.random()
        if choice < 0.25 and held:
            self.leave(pick(self.generator, held))
        elif choice < 0.5 and free:
            self.take(person, pick(self.generator, free))
        else:
            self.move(person)


def carry(generator: "Generator", num_facts: int, num_moves: int) -> tuple[World, str]:
    """Returns a world in which somebody takes a thing and moves `num_moves` times, among other facts; and the thing."""
    world, person, thing = World(generator), pick(generator, PEOPLE), pick(generator, THINGS)
    needed = sorted(generator.choice(num_facts, 1 + num_moves, replace=False))
    for number in range(num_facts):
        if number == needed[0]:
            world.take(person, thing)
        elif number in needed:
            world.move(person)
        else:
            world.anything(untouched=thing if number < needed[0] else None)
    return world, thing


def first_of(items: Iterable[str], first: str) -> list[str]:
    """Returns the items, `first` before the others."""
    return [first, *(item for item in items if item != first)]


def one_fact(generator: "Generator", num_facts: int) -> Story:
    """Asks where a person is, after moves of several people."""
    world = World(generator)
    for _ in range(num_facts):
        world.move(pick(generator, PEOPLE))
    people = first_of(world.place_of, pick(generator, list(world.place_of)))
    asked = [Question(WHERE_PERSON.format(person=person), world.place_of[person]) for person in people]
    return Story(world.facts, asked)


def two_facts(generator: "Generator", num_facts: int) -> Story:
    """Asks where a thing is that somebody has taken along."""
    world, thing = carry(generator, num_facts, num_moves=1)
    things = first_of((other for other, places in world.places_of.items() if places), thing)
    asked = [Question(WHERE_THING.format(thing=thing), world.places_of[thing][-1]) for thing in things]
    return Story(world.facts, asked)


def three_facts(generator: "Generator", num_facts: int) -> Story:
    """Asks where a thing was before it came to its present place."""
    while True:  # somebody may have put the thing down before the second move
        world, thing = carry(generator, num_facts, num_moves=2)
        moved = {thing: places for thing, places in world.places_of.items() if len(places) > 1}
        if thing in moved:
            places = [(thing, *moved[thing][-2:]) for thing in first_of(moved, thing)]
            asked = [Question(WHERE_BEFORE.format(thing=thing, place=now), before) for thing, before, now in places]
            return Story(world.facts, asked)


def two_arguments(generator: "Generator", num_facts: int) -> Story:
    """Asks which place lies beside another one, on a map in which no two places have the same spot."""
    on_map = dict(zip(product(range(SIDE), repeat=2), generator.permutation(PLACES).tolist(), strict=True))
    pairs = [
        (place, direction, on_map[row - down, column - right])  # north of it: one row further down
        for (row, column), place in on_map.items()
        for direction, (down, right) in DIRECTIONS.items()
        if (row - down, column - right) in on_map
    ]
    facts: dict[frozenset[str], dict[str, str]] = {}
    for number in generator.permutation(len(pairs)):
        place, direction, other = pairs[number]
        facts.setdefault(frozenset((place, other)), {"place": place, "direction": direction, "other": other})
    told = list(facts.values())[:num_facts]
    first, which = int(generator.integers(len(told))), int(generator.integers(2))
    asked = []
    for fact in [told[first], *told[:first], *told[first + 1 :]]:
        asked.append(Question(WHICH_PLACE[which].format(**fact), fact[("place", "other")[which]]))
        which = 1 - which  # asks for the two sides in turn
    return Story([RELATION.format(**fact) for fact in told], asked)


def three_arguments(generator: "Generator", num_facts: int) -> Story:
    """Asks who gave what to whom. A thing is handed on by the person who has got it."""
    holder_of: dict[str, str] = {}
    given: list[dict[str, str]] = []
    for _ in range(num_facts):
        thing = pick(generator, THINGS)
        person = holder_of.get(thing) or pick(generator, PEOPLE)
        receiver = pick(generator, [other for other in PEOPLE if other != person])
        holder_of[thing] = receiver
        given.append({"person": person, "thing": thing, "receiver": receiver})
    facts = [pick(generator, GIFTS).format(**gift) for gift in given]
    first, role = int(generator.integers(len(given))), int(generator.integers(3))
    told, asked = list[dict[str, str]](), list[Question]()  # facts that questions and their answers repeat
    for gift in [given[first], *given[:first], *given[first + 1 :]]:
        name, text = [("person", WHO_GAVE), ("receiver", WHO_GOT), ("thing", WHAT_GIVEN)][role]
        others = {other: word for other, word in gift.items() if other != name}
        last = next(later for later in reversed(given) if others.items() <= later.items())
        if last not in told:
            told.append(last)
            asked.append(Question(text.format(**others), last[name]))
            role = (role + 1) % 3  # asks for the three roles in turn
    return Story(facts, asked)


KINDS = {
    "one_fact": Kind(1, None, one_fact),
    "two_facts": Kind(2, None, two_facts),
    "three_facts": Kind(3, None, three_facts),
    "two_arguments": Kind(1, 2 * SIDE * (SIDE - 1), two_arguments),
    "three_arguments": Kind(1, None, three_arguments),
}


def check_kinds(kinds: Sequence[str], most_facts: int) -> None:
    """Raises `ValueError` for no kinds, and for a kind that is unknown, is named twice or needs more facts."""
    if not kinds:
        raise ValueError(f"kinds is empty: name some of {', '.join(KINDS)}.")
    for kind in kinds:
        check_choice("kind", kind, KINDS)
        if kinds.count(kind) > 1:
            raise ValueError(f"kinds names {kind!r} twice: leave one out.")
        if KINDS[kind].least > most_facts:
            raise ValueError(
                f"facts={most_facts}, and the kind {kind!r} needs {KINDS[kind].least}: raise facts, or leave it out."
            )


def tell(kind: str, most_facts: int, generator: "Generator") -> Story:
    """Returns a story of one kind. Numbers of facts, from the fewest it needs to `most_facts`, are equally likely."""
    least, most, make = KINDS[kind]
    return make(generator, int(generator.integers(least, min(most_facts, most or most_facts) + 1)))


def candidates(story: Story) -> list[str]:
    """Returns the words of the answer's kind in the facts, the last one first, without the first question's words."""
    question = story.questions[0]
    (alike,) = (words for words in (PEOPLE, PLACES, THINGS) if question.answer in words)
    said = " ".join(story.facts).replace(".", "").split()
    named = question.text.replace("?", "").split()
    return list(dict.fromkeys(word for word in reversed(said) if word in alike and word not in named))


def guess(story: Story) -> str | None:
    """Returns the answer of a reader who tracks nothing: the last of the candidates."""
    return next(iter(candidates(story)), None)


def guess_accuracies(kind: str, most_facts: int, stories: int = 1000) -> tuple[float, float | None]:
    """Returns the share of stories of a kind in which `guess` is right, and how often another candidate at random is
    right in the other stories (None: there are none)."""
    from numpy.random import default_rng

    generator = default_rng(0)
    told = [tell(kind, most_facts, generator) for _ in range(stories)]
    unguessed = [story for story in told if guess(story) != story.questions[0].answer]
    shares = [1 / len(others) for story in unguessed if (others := candidates(story)[1:])]  # the answer is one of them
    return 1 - len(unguessed) / stories, sum(shares) / len(unguessed) if unguessed else None


def most_tokens(num_tokens: Callable[[str], int]) -> tuple[int, int]:
    """Returns the most tokens that a fact has, and that a question has, by a function that counts tokens."""
    words = {role: max(options, key=num_tokens) for role, options in WORDS.items()}
    facts, questions = ([text.format(**words) for text in texts] for texts in (TEMPLATES, QUESTIONS))
    return max(map(num_tokens, facts)), max(num_tokens(QUESTION.format(question=text)) for text in questions)


def all_texts() -> list[str]:
    """Returns texts with all words of all stories."""
    templates = [*TEMPLATES, QUESTION, *QUESTIONS]
    return [*ANSWERS, *DIRECTIONS, *(text.format_map(dict.fromkeys((*WORDS, "question"), "")) for text in templates)]
