"""The probes' data sets: the package's own, or files in the same form, such as the paper's."""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

FIELDS: dict[str, dict[str, type]] = {
    "words": {"word": str, "category": str, "category_with_article": str, "repetitions": int},
    "tutorials": {"sentence": str, "num_sentences": int},
    "sums": {"template": str, "fields": dict, "shrink_1": bool},
    "objects": {"options": list, "questions": dict},
}
QUESTION_KINDS = ("both", "neither", "first", "second")


def load(name: str, path: Path | None = None) -> list[dict[str, Any]]:
    """Returns the records of a data set. Raises `ValueError`, naming the file and the first record of another form."""
    source = path if path is not None else files(__package__) / "data" / f"{name}.json"
    try:
        records = json.loads(source.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{source} cannot be read as JSON: {error}") from error
    if not isinstance(records, list):
        raise ValueError(f"{source} is not a list of records: the probe needs one of {', '.join(FIELDS[name])}.")
    if not records:
        raise ValueError(f"{source} is an empty list: the probe needs a record with {', '.join(FIELDS[name])}.")
    for number, record in enumerate(records):
        problem = _problem(name, record)
        if problem:
            raise ValueError(f"{source}, record {number}: {problem}.")
    return records


def _problem(name: str, record: Any) -> str | None:
    """Describes what is wrong with a record; returns None if it has the form of its data set."""
    for field, kind in FIELDS[name].items():
        found = record.get(field) if isinstance(record, dict) else None
        if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
            return f"{field!r} is {found!r} and should be a {kind.__name__}"
    for field in ("repetitions", "num_sentences"):
        if field in FIELDS[name] and not 1 <= record[field] <= 9:
            return f"{field!r} is {record[field]} and should be 1 to 9: the answer is one digit"
    if name == "sums":
        numbers = [record["fields"].get(field) for field in ("item_1", "item_2")]
        if not all(isinstance(number, int) for number in numbers):
            return f"item_1 and item_2 are {numbers} and should be whole numbers"
        try:
            record["template"].format(**record["fields"])
        except (KeyError, IndexError) as missing:
            return f"the template asks for {missing}, which is not in fields"
        if "{item_1}" not in record["template"] or "{item_2}" not in record["template"]:
            return "the template must have both {item_1} and {item_2}"
    if name == "objects":
        questions = record["questions"]
        if set(questions) != set(QUESTION_KINDS) or not all("{}" in question for question in questions.values()):
            return f"questions are {questions} and should be {', '.join(QUESTION_KINDS)}, each with {{}} for the object"
        if len(record["options"]) != 2:
            return f"options are {record['options']} and should be two"
    if name == "tutorials" and "\n- " not in record["sentence"]:
        return "no line of the sentence begins with '- '"
    return None
