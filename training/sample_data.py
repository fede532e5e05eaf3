"""A small Llama, stories and summaries, generated without a download, to try every recipe on.

A story states the town, trade and possession of its people early and repeats them later, so a model with a memory can
predict them. An article is a story with two sentences marked as its news, which are its summary.
"""

import json
import shutil
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from condense.utils.files import check_not_linked

from .data.fact_kinds import all_texts
from .data.passkey import NAMES, PASSKEY_TEXTS
from .data.recall import RECALL_TEXTS
from .small_llama import small_llama, word_tokenizer

NUM_DOCUMENTS = {"train": 400, "validation": 40}
# Attributes of a person: no two people in a story share a value.
ATTRIBUTES = {
    attribute: words.split()
    for attribute, words in {
        "name": "Ada Ben Clara David Emma Felix Greta Hugo Ida Jonas Karin Leo Mara Nils Olga Paul Rosa Simon Tilda",
        "town": "Aldwick Brackley Colby Dunmore Farrow Glenby Hatfield Kelso Langley Marlow Norwood Redcar Selby",
        "trade": "baker carpenter doctor farmer gardener hunter judge mason miller painter potter sailor weaver writer",
        "thing": "basket bell book box clock coat cup drum flute hat knife lamp letter map mirror ring rope spoon",
        "colour": "red blue green yellow white black brown golden",
    }.items()
}
SCENERY = {
    "place": NAMES,
    "weather": ["rain", "wind", "snow", "fog", "storm"],
    "mood": ["quiet", "long", "cold", "warm", "strange", "happy"],
}
MEETING = "Once upon a time there was {name} from {town}. {name} was a {trade} and had a {colour} {thing}."
MENTIONS = (
    "{name} from {town} came by.",
    "There was {name} the {trade}, waiting at the {place}.",
    "{name} held the {colour} {thing} and smiled.",
    "Whose is the {thing}? It is the {thing} of {name}.",
    "Where does {name} come from? {name} comes from {town}.",
    "What is the trade of {name}? {name} is a {trade}.",
    "Somebody at the {place} spoke of the {trade} from {town}, who is {name}.",
)
SCENES = (
    "The {weather} came over the {place}.",
    "It was a {mood} day and nobody went to the {place}.",
    "Then the {weather} stopped and the {place} was {mood} again.",
)
NEWS = "{name} from {town} %s the {colour} {thing}."
EVENTS = ("lost", "found", "sold", "hid", "broke", "repaired")
MARK = "Here is the news: "


def story(random: Random, num_words: int, events: Sequence[str] = ()) -> tuple[str, list[str]]:
    """Returns a text filled up to `num_words`, and its news: each event happens to a different person."""
    size = 3 + num_words // 600
    columns = [random.sample(values, size) for values in ATTRIBUTES.values()]
    cast = [dict(zip(ATTRIBUTES, person, strict=True)) for person in zip(*columns, strict=True)]
    people = random.sample(cast, len(events))
    news = [(NEWS % event).format(**person) for event, person in zip(events, people, strict=True)]
    beginning, middle = [MEETING.format(**person) for person in cast], list[str]()
    room = num_words - _words(beginning) - _words([MARK + sentence for sentence in news])
    while True:
        scenery = {kind: random.choice(values) for kind, values in SCENERY.items()}
        sentence = random.choice(random.choice((MENTIONS, SCENES))).format(**random.choice(cast), **scenery)
        room -= _words([sentence])
        if room < 0:
            break
        middle.append(sentence)
    places = sorted(random.choices(range(len(middle) + 1), k=len(news)))
    for place, sentence in reversed(list(zip(places, news, strict=True))):
        middle.insert(place, MARK + sentence)
    return " ".join(beginning + middle), news


def _words(sentences: list[str]) -> int:
    return sum(len(sentence.split()) for sentence in sentences)


def text_document(random: Random) -> dict[str, str]:
    num_words = int(120 * 25 ** random.random())  # from 120 to 3,000, with a median of 600
    return {"text": story(random, num_words)[0]}


def summary_document(random: Random) -> dict[str, str]:
    article, news = story(random, random.randint(90, 380), random.sample(EVENTS, 2))
    return {"article": article, "highlights": " ".join(news)}


def make_documents(seed: int) -> dict[str, list[dict[str, str]]]:
    """Returns documents by file name without suffix, such as `text/train`."""
    return {
        f"{kind}/{split}": [make(Random(f"{seed} {kind}/{split} {number}")) for number in range(count)]
        for kind, make in (("text", text_document), ("summaries", summary_document))
        for split, count in NUM_DOCUMENTS.items()
    }


def write_sample_data(folder: Path, seed: int = 0) -> None:
    """Writes `llama`, `text` and `summaries` to a folder and prints the size of each file.

    If a file in the folder has different content, raises `ValueError` and changes nothing.
    """
    import pyarrow
    import pyarrow.parquet

    documents = make_documents(seed)
    texts = {name: [" ".join(document.values()) for document in items] for name, items in documents.items()}
    tokenizer = word_tokenizer([*PASSKEY_TEXTS, *NAMES, *RECALL_TEXTS, *all_texts(), *chain(*texts.values())])
    model = small_llama(tokenizer, seed, width=128, layers=4)
    lines = [f"llama: a Llama of {model.num_parameters():,} parameters, {len(tokenizer)} tokens"]
    with TemporaryDirectory() as temporary:
        made = Path(temporary)
        model.save_pretrained(made / "llama")
        tokenizer.save_pretrained(made / "llama")
        for name, items in documents.items():
            counts = f"{len(items):,} documents, {sum(map(len, tokenizer(texts[name])['input_ids'])):,} tokens"
            path = made / f"{name}.jsonl"
            path.parent.mkdir(exist_ok=True)
            path.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
            lines.append(f"{name}.jsonl: {counts}")
            if name == "summaries/train":
                pyarrow.parquet.write_table(pyarrow.Table.from_pylist(items), path.with_suffix(".parquet"))
                lines.append(f"{name}.parquet: {counts}")
        copy_files(made, folder)
    print("\n".join(f"{folder}/{line}" for line in lines))


def copy_files(made: Path, folder: Path) -> None:
    """Copies all files to a folder, with the modes of new files: a temporary folder's own would close it to others.

    Raises `ValueError` first if a file exists there with different content, or is a link.
    """
    copies = {path: folder / path.relative_to(made) for path in made.rglob("*.*")}
    check_not_linked(*copies.values())
    for path, copy in copies.items():
        if copy.exists() and copy.read_bytes() != path.read_bytes():
            raise ValueError(f"{copy} exists with different content: pass another folder, or delete it.")
    for path, copy in copies.items():
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
