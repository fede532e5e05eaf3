"""Prompts of the user's own: what counts as right, and what is said of lines that can't be used."""

import csv
import json
import math

import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

from condense.eval.tasks import evaluate
from condense.eval.tasks.answers import is_right, read_questions
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
        is_right(answer, line["gold"]["answers"], "contains")
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


def test_what_is_right():
    assert is_right("It is  Paris.", ["paris"], "contains") and not is_right("Parisian", ["paris"], "contains")
    assert is_right("12 dogs", ["12"], "begins") and not is_right("123", ["12"], "begins")
    assert not is_right("the 12", ["12"], "begins") and is_right("the\n12", ["13", "the 12"], "exact")
    assert is_right("12.", ["12"], "exact") and not is_right("12 dogs", ["12"], "exact")
    assert is_right("costs $5 (a.b)", ["$5 (A.B)"], "contains") and not is_right("axb", ["a.b"], "contains")


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
    ],
)
def test_numbers_and_scripts(answer, expected, match, right):
    """Signs and separators belong to a number; words end at letters only in scripts that have spaces between words."""
    assert is_right(answer, [expected], match) is right


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
