"""Prompts of the user's own: what counts as right, and what is said of lines that can't be used."""

import csv
import json
import math

import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

from condense.eval.tasks import evaluate
from condense.eval.tasks.answers import Answers, how_right, read_questions
from condense.eval.tasks.options import AnswersOptions
from condense.training.data.shards import wrong_encoding

from ...pictures import is_drawn
from ..measuring import command, save_folded
from ..rivals import rival, rival_tokenizer, save_rival
from .documents import TEXT, write_lines

pytestmark = pytest.mark.unit

PROMPTS = ["a cat sat on", "two dogs run far away from one old red house", "the sea", "and saw two dogs run far"]
NEW = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root, tokenizer = tmp_path_factory.mktemp("models"), rival_tokenizer()
    save_rival(root / "llama", "llama", tokenizer)
    save_folded(root / "llama", root / "folded", 16)
    save_rival(root / "mamba", "mamba", tokenizer)
    return root


def test_columns_that_nobody_asked_for_are_not_read(tmp_path):
    columns = {"prompt": ["one", "two"], "answer": ["1", "2"], "day": pa.array([10**7] * 2, pa.date32())}
    columns["zoned"] = pa.array([0] * 2, pa.timestamp("us", tz="Mars/Phobos"))
    pa.parquet.write_table(pa.table(columns), tmp_path / "mine.parquet")
    found = read_questions(AnswersOptions(models=["m"], data=[str(tmp_path / "mine.parquet")]))
    assert [(one.prompt, one.answers) for one in found] == [("one", ["1"]), ("two", ["2"])]


@torch.no_grad()
def said(name):
    """Returns what a model says after each prompt, each token by a pass over all before it."""
    tokenizer = rival_tokenizer()
    model, answers = rival(name, tokenizer), []
    for prompt in PROMPTS:
        ids_N = torch.tensor(before := [tokenizer.bos_token_id, *tokenizer(prompt).input_ids])
        for _ in range(NEW):
            ids_N = torch.cat([ids_N, model(ids_N[None], use_cache=False).logits[0, -1].argmax()[None]])
            if ids_N[-1] == tokenizer.eos_token_id:
                break
        answers.append(tokenizer.decode(ids_N[len(before) :], skip_special_tokens=True))
    return answers


def test_one_command_measures_a_file_of_prompts(folder, tmp_path):
    """Nested fields; the answers of Llama are right, except one."""
    expected = said("llama")
    lines = [
        {"input": {"text": prompt}, "gold": {"answers": [" ".join(answer.split()[1:3]).upper(), "nothing like it"]}}
        for prompt, answer in zip(PROMPTS, expected, strict=True)
    ]
    lines[1]["gold"]["answers"] = 12345
    data = write_lines(tmp_path / "mine.jsonl", lines)
    arguments = ["eval", "answers", "--data", data, "--prompt-field", "input.text", "--answer-field", "gold.answers"]
    arguments += ["--new-tokens", NEW, "--batch", 3, "--output", tmp_path / "out"]
    for name in ("llama", "folded", "mamba"):
        arguments += ["--model", folder / name]
    shown = command(*arguments)
    results = json.loads((tmp_path / "out" / "answers.json").read_text())
    found = {cell["model"]: (cell["correct"], cell["total"]) for cell in results["cells"]}
    mamba = sum(
        how_right(answer, line["gold"]["answers"], "contains")
        for answer, line in zip(said("mamba"), lines, strict=True)
        if line is not lines[1]
    )
    assert found == {"llama": (3, 4), "folded": (3, 4), "mamba": (mamba, 4)}  # the prompts are within a segment
    rows = list(csv.DictReader((tmp_path / "out" / "answers.csv").open()))
    by_line = {row["where"].rpartition(":")[2]: row["answer"] for row in rows if row["model"] == "llama"}
    assert [by_line[str(number)] for number in (1, 2, 3, 4)] == [answer.strip() for answer in expected]
    picture = tmp_path / "out" / "answers.png"
    assert "answers to mine.jsonl" in shown and picture.stat().st_size > 5000 and is_drawn(picture)
    states = {cell["model"]: cell["state_bytes"] for cell in results["cells"]}
    assert states["mamba"] == 4 * 4 * 64 * 8  # of one text


def test_what_how_right():
    assert how_right("It is  Paris.", ["paris"], "contains") and not how_right("Parisian", ["paris"], "contains")
    assert how_right("12 dogs", ["12"], "begins") and not how_right("123", ["12"], "begins")
    assert not how_right("the 12", ["12"], "begins") and how_right("the\n12", ["13", "the 12"], "exact")
    assert how_right("12.", ["12"], "exact") and not how_right("12 dogs", ["12"], "exact")
    assert how_right("costs $5 (a.b)", ["$5 (A.B)"], "contains") and not how_right("axb", ["a.b"], "contains")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('{"prompt": "a cat"}', r"mine\.jsonl:2: missing field \('answer'; there are 'prompt': name the right fields"),
        ('{"prompt": 3, "answer": "a"}', "wrong type .*'prompt' is int, not text"),
        ('{"prompt": "a", "answer": {"a": 1}}', "wrong type .*'answer' is neither text, nor a number"),
        ('{"prompt": "a", "answer": []}', "empty prompt or answer"),
        ('{"prompt": "a", "answer": ', "broken JSON"),
        ("[1]", "no JSON object"),
    ],
)
@pytest.mark.usefixtures("without_pictures")
def test_a_line_that_can_not_be_used_is_named_or_counted(line, why, folder, tmp_path):
    data = tmp_path / "mine.jsonl"
    data.write_text(json.dumps({"prompt": TEXT, "answer": "sea"}) + "\n" + line + "\n")
    given = {"models": [str(folder / "llama")], "data": [str(data)], "new_tokens": 2}
    with pytest.raises(ValueError, match=why):
        evaluate("answers", tmp_path / "out", **given)
    results = evaluate("answers", tmp_path / "out", bad_documents="skip", **given)
    assert list(results["left_out"].values()) == [1] and results["cells"][0]["total"] == 1


@pytest.mark.parametrize(
    ("answer", "expected", "match", "right"),
    [
        ("3.14", "3", "contains", False),
        ("The answer is -5", "5", "contains", False),
        ("The answer is -5.", "-5", "contains", True),
        ("1,000,000", "1", "contains", False),
        ("1/5", "5", "contains", False),
        ("It is .5", "5", "contains", False),
        ("3.5 km", "3", "begins", False),
        ("The answer is \N{MINUS SIGN}5", "5", "contains", False),
        ("The answer is \N{MINUS SIGN}5", "-5", "contains", True),
        ("10-5", "-5", "contains", False),
        ("3.5", ".5", "contains", False),
        ("It is -.5.", "-.5", "contains", True),
        ("答案是-5", "5", "contains", False),
        ("答案是-5", "-5", "contains", True),
        ("on 2024-05-01", "2024", "contains", True),
        ("It is 42.", "42", "contains", True),
        ("答案是北京。", "北京", "contains", True),
        ("北京市", "北京", "begins", True),
        ("東京です", "東京", "begins", True),
        ("𠮷𠮷", "𠮷", "begins", True),
        ("ﾄｳｷｮｳﾃﾞｽ", "ﾄｳｷｮｳ", "begins", True),
        ("**Paris**", "paris", "exact", True),
        ('"Paris."', "paris", "exact", True),
        ("Not Paris", "paris", "exact", False),
        ("-5", "5", "exact", False),
        ("caf\u00e9", "cafe\u0301", "exact", True),  # one letter, or a letter and its accent
        ("cafe\u0301", "caf\u00e9", "contains", True),
        ("\u212bngstro\u0308m", "\u00c5ngstr\u00f6m", "begins", True),  # also the sign of the unit
        ("cafe\u0301", "cafe", "contains", False),
        ("\u1ec7", "e", "begins", False),
        ("x\u0302", "x", "contains", False),  # which has no composed form
        ("\u1f80", "\u03b1\u0345\u0313", "exact", True),  # composed of marks in either order
        ("\u0130zmir", "i\u0307zmir", "exact", True),
        ("\uac00", "\u1100\u1161", "exact", True),
        ("रामायण", "राम", "contains", False),
        ("रामायण", "यण", "contains", False),
        ("राम है", "राम", "contains", True),
        ("กาแฟ", "กา", "begins", True),
        ("1\ufe0f\u20e3", "1", "begins", True),  # a digit in the form of an emoji
    ],
)
def test_numbers_and_scripts(answer, expected, match, right):
    """Signs and separators belong to a number; words end at letters only in scripts that have spaces between words."""
    assert how_right(answer, [expected], match) is right


def test_lists_of_values_count_in_part():
    """RULER's convention, for prompts with several values: the mean over prompts of the share that is in the answer."""
    expected = ["4821", "Paris", "blue"]
    shares = [how_right(answer, expected, "all") for answer in ("Blue, 4821.", "4821 paris blue", "none", "14821")]
    assert shares == [2 / 3, 1, 0, 0]
    assert [how_right(answer, ["7"], "all") for answer in ("7", "8")] == [1, 0]
    assert how_right("1 of ten", list("1234567890"), "contains") is True  # any of them
    assert how_right("1 of ten", list("1234567890"), "all") == 0.1


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.usefixtures("without_pictures")
def test_the_rule_of_lists_in_results(parts, folder, tmp_path):
    """The reference is RULER's function in lm-evaluation-harness, which takes any part of a word as well."""
    ruler = pytest.importorskip("lm_eval.tasks.ruler.common_utils")
    tokenizer_says = said("llama")
    lines = [
        {"prompt": prompt, "answer": [*answer.split()[:2], *(["nothing like it"] if parts else [])]}
        for prompt, answer in zip(PROMPTS, tokenizer_says, strict=True)
    ]
    data = write_lines(tmp_path / "mine.jsonl", lines)
    options = {"models": [str(folder / "llama")], "data": [str(data)], "new_tokens": NEW, "match": "all"}
    results = evaluate("answers", tmp_path / "out", **options)
    (cell,) = results["cells"]
    assert cell["accuracy"] == ruler.string_match_all(tokenizer_says, [line["answer"] for line in lines])
    assert (cell["accuracy"], cell.get("correct")) == ((2 / 3, None) if parts else (1, 4))
    assert cell["low"] <= cell["accuracy"] <= cell["high"] and cell["total"] == 4
    assert "a prompt counts with the share of its expected answers" in str(Answers.tables(results)[0])
    assert results["overview"][0]["measure"] == "answers to mine.jsonl [% of the expected]"


def test_numbers_of_columns_with_gaps(tmp_path):
    """A table with a gap has whole numbers as floats, and NaN in the gap."""
    path = tmp_path / "mine.jsonl"
    lines = ['"6 x 7", "answer": 42.0', '"pi", "answer": 3.5', '"?", "answer": NaN', '"what \\ud800", "answer": "x"']
    path.write_text("".join(f'{{"prompt": {line}}}\n' for line in lines))
    one, two, gap, broken = read_questions(AnswersOptions(models=["m"], data=[str(path)]))
    assert (one.answers, two.answers) == (["42"], ["3.5"])
    assert gap.kind == "missing field" and broken.kind == wrong_encoding("", UnicodeError("")).kind
    assert broken.where == f"{path}:4"


def test_numbers_that_no_float_holds(tmp_path):
    """An answer with more digits than a float has stays whole; a prompt can be in a gap as well."""
    path = tmp_path / "mine.jsonl"
    large = str(math.factorial(200))
    path.write_text(f'{{"prompt": "200!", "answer": {large}}}\n{{"prompt": NaN, "answer": "x"}}\n')
    one, gap = read_questions(AnswersOptions(models=["m"], data=[str(path)]))
    assert one.answers == [large]
    assert gap.kind == "missing field" and gap.detail.startswith("'prompt'")
