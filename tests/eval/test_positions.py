"""Texts past a model's positions are measured and marked; a model whose table of positions ends there is refused."""

import csv
import json

import pytest
from typer.testing import CliRunner

import condense.cli.main
from condense import CondenseForCausalLM
from condense.eval.positions import has_position_table, positions_exceeded
from condense.eval.tasks import evaluate, find_task
from condense.eval.tasks.evaluation import shown_name

from .measuring import save_folded
from .rivals import rival, rival_tokenizer, save_rival
from .tasks.documents import TEXT, made_documents, write_lines

POSITIONS = 100


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root, tokenizer = tmp_path_factory.mktemp("models"), rival_tokenizer()
    save_rival(root / "llama", "llama", tokenizer, max_position_embeddings=POSITIONS)
    for name, length in {"folded": 16, "wide": 64}.items():
        save_folded(root / "llama", root / name, length)
    save_rival(root / "mamba", "mamba", tokenizer)
    save_rival(root / "gpt2", "gpt2", tokenizer, n_positions=POSITIONS)
    return root


def test_lengths_past_the_positions_are_marked_everywhere(folders, tmp_path):
    names = ("llama", "folded", "wide", "mamba")
    arguments = [word for name in names for word in ("--model", str(folders / name))]
    arguments += ["--lengths", "80,200", "--depths", "50", "--prompts", "2", "--output", str(tmp_path)]
    done = CliRunner().invoke(condense.cli.main.app, ["eval", "passkey", *arguments])
    assert done.exit_code == 0, done.output
    assert "note: llama reads texts of up to 200 tokens here, and has max_position_embeddings=100" in done.stderr
    assert "note: wide reads" in done.stderr and "mamba reads" not in done.stderr and "folded reads" not in done.stderr
    assert "llama (past its 100 positions): % correct" in done.stdout and "mamba: % correct" in done.stdout
    records = [json.loads(line) for line in (tmp_path / "passkey.records.jsonl").read_text().splitlines()[1:]]
    marked = {(one["key"]["model"], one["key"]["length"]) for one in records if "positions_exceeded" in one["record"]}
    # Pairs of segments of 64 tokens are 128 positions; a text of 80 tokens has no more than 80.
    assert marked == {("llama", 200), ("wide", 200)}
    rows = csv.DictReader((tmp_path / "passkey.csv").open())
    past = {(row["model"], row["length"]) for row in rows if row["positions_exceeded"] == "100"}
    assert past == {("llama", "200"), ("wide", "200")}
    results = json.loads((tmp_path / "passkey.json").read_text())
    assert results["positions_exceeded"] == {"llama": 100, "wide": 100}
    assert shown_name("llama", results) == "llama (past its 100 positions)"  # as pictures have it


@pytest.mark.usefixtures("without_pictures")
def test_every_kind_of_measurement_marks_them(folders, tmp_path, capsys):
    llama, folded, wide = (str(folders / name) for name in ("llama", "folded", "wide"))
    (tmp_path / "text.txt").write_text(f"{TEXT} " * 30)
    data = write_lines(tmp_path / "data.jsonl", made_documents(2))
    given = {
        "facts": {"models": [llama], "lengths": [128], "kinds": ["one_fact"], "num_prompts": 1},
        "recall": {"models": [llama, wide], "lengths": [128], "pairs": [1], "num_prompts": 1},
        "summarization": {
            "models": [llama, wide], "data": str(data), "text_field": "source", "summary_field": "target",
            "new_tokens": 99,
        },
        "perplexity": {"models": [llama, folded], "data": [str(tmp_path / "text.txt")], "segment_length": 20},
        "fold_cost": {
            "models": [llama], "data": [str(tmp_path / "text.txt")], "segment_lengths": [20], "by_position": [20],
            "shares": ["0.2"], "num_tokens": 120,
        },
        "attention": {"models": [llama], "text": str(tmp_path / "text.txt"), "segments": [6], "segment_length": 16},
    }  # fmt: skip
    for kind, options in given.items():
        results = evaluate(kind, tmp_path, **options)
        tables = "\n".join(map(str, find_task(kind).tables(results)))
        assert "past its 100 positions" in tables and "note: llama" in capsys.readouterr().err, kind
        if wide in options["models"]:
            assert results["positions_exceeded"] == {"llama": 100, "wide": 100}, kind
            assert "wide" not in tables.replace("wide (past its 100 positions)", ""), kind
    # A folded model's own curves are within its positions; the curve of its weights as a stock model is not.
    assert results["kind"] == "attention"
    perplexity = json.loads((tmp_path / "perplexity.json").read_text())
    rows = find_task("perplexity").tables(perplexity)[0].rows
    past = {row[3]: "past its" in row[1] for row in rows if row[0] == "llama" and row[1].startswith("full")}
    assert past == {1: False, 2: False, 4: False, 7: True}  # up to 100 tokens are within them
    assert perplexity["positions_exceeded"] == {"llama, full attention": 100, "folded, full attention": 100}


def test_a_table_of_positions_is_never_overrun(folders, tmp_path):
    with pytest.raises(ValueError, match="gpt2 has a table of 100 positions and can't read texts of 200 tokens"):
        evaluate("passkey", tmp_path, models=[str(folders / "gpt2")], lengths=[80, 200], num_prompts=1)
    assert not (tmp_path / "passkey.json").exists()
    tokenizer = rival_tokenizer()
    tables = {name: has_position_table(rival(name, tokenizer)) for name in ("gpt2", "gpt_neox", "llama", "mamba")}
    assert tables == {"gpt2": True, "gpt_neox": False, "llama": False, "mamba": False}


def test_positions_of_a_folded_model_are_those_of_two_segments(folders):
    config = CondenseForCausalLM.config_class.from_pretrained(folders / "folded")
    assert positions_exceeded(config, 10**6) is None
    config.segment_length = 51
    assert [positions_exceeded(config, n) for n in (100, 101, 10**6)] == [None, 100, 100]
