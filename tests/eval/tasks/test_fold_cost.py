"""What folding costs: each way of reading against an independent one, then means, choice, resumption and command."""

import csv
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from condense import CondenseForCausalLM, to_stock
from condense.eval.models import EvaluatedModel
from condense.eval.overview import Figure
from condense.eval.runner import measure
from condense.eval.tasks import evaluate, fold_cost, fold_texts, window_attention
from condense.eval.tasks.fold_arms import FULL, NONE, WINDOW, arm_losses
from condense.eval.tasks.fold_choice import choose, late_excess
from condense.eval.tasks.fold_cost import FoldCost, Reading
from condense.eval.tasks.options import FoldCostOptions
from condense.eval.tasks.variants import variant, variant_config
from condense.reference import head_norm, linear, reference_logits, rms_norm, rotate
from tests.condense.models import random_ids, tiny_model, vary, weights
from tests.condense.test_families import STOCK

from ...refusals import assert_refused
from ..measuring import command, stop_within

LENGTH, SINK = 5, 7


@pytest.fixture(scope="module")
def stock():
    return to_stock(tiny_model())


def losses_of(logits_ND, ids_N):
    return F.cross_entropy(logits_ND, ids_N[1:], reduction="none")


def text(num_tokens=43, seed=3):
    return random_ids(1, num_tokens, seed)[0]


@torch.no_grad()
def test_full_attention_is_the_stock_model(stock):
    ids = text()
    expected = losses_of(stock(ids[None, :-1]).logits[0], ids)
    torch.testing.assert_close(arm_losses(stock, FULL, None, ids, 0), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("sink", [None, SINK])
@pytest.mark.parametrize("num_tokens", [43, 41])  # the last segment has two tokens to read, or is whole
@torch.no_grad()
def test_no_memory_is_each_segment_alone(stock, sink, num_tokens, monkeypatch):
    monkeypatch.setattr("condense.eval.tasks.fold_arms.ROW_TOKENS", 13)  # two rows at once
    ids, before = text(num_tokens), [] if sink is None else [sink]
    rows = [torch.tensor(before + part.tolist()) for part in ids[:-1].split(LENGTH)]
    logits = torch.cat([stock(row[None]).logits[0, len(before) :] for row in rows])
    found = arm_losses(stock, NONE, sink, ids, LENGTH)
    torch.testing.assert_close(found, losses_of(logits, ids), atol=1e-12, rtol=0)


def head_dim(config):
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def streaming_logits(model, ids, num_keys, num_sinks):
    """StreamingLLM as a loop: unrotated keys in a cache of the first tokens and the last ones, rotated by their place
    in it for each query."""
    w, config = weights(model), model.config
    caches = [[] for _ in range(config.num_hidden_layers)]
    found = []
    for token in ids:
        x = w["model.embed_tokens.weight"][token][None]
        for n, cache in enumerate(caches):
            layer = {name.split(f"layers.{n}.")[1]: one for name, one in w.items() if f"layers.{n}." in name}
            h = rms_norm(x, layer["input_layernorm.weight"], config)
            q, k, v = (linear(layer, f"self_attn.{name}_proj", h).view(-1, head_dim(config)) for name in "qkv")
            q, k = (head_norm(layer, f"self_attn.{name}_norm", one, config) for name, one in (("q", q), ("k", k)))
            cache.append((k, v))
            if len(cache) > num_keys:
                del cache[num_sinks]
            place = torch.arange(len(cache), dtype=torch.float64)
            heads = []
            for head, query in enumerate(q):
                group = head // (len(q) // len(k))
                keys = rotate(torch.stack([one[group] for one, _ in cache]), place, config)
                values = torch.stack([one[group] for _, one in cache])
                scores = keys @ rotate(query[None], place[-1:], config)[0] / head_dim(config) ** 0.5
                heads.append(scores.softmax(-1) @ values)
            x = x + linear(layer, "self_attn.o_proj", torch.cat(heads)[None])
            h = rms_norm(x, layer["post_attention_layernorm.weight"], config)
            gate = F.silu(linear(layer, "mlp.gate_proj", h)) * linear(layer, "mlp.up_proj", h)
            x = x + linear(layer, "mlp.down_proj", gate)
        head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
        found.append(rms_norm(x, w["model.norm.weight"], config) @ head.T)
    return torch.cat(found)


@pytest.mark.parametrize("sink", [None, SINK])
@pytest.mark.parametrize("queries", [3, 7, 512])  # of a block: fewer than the sinks, amid the text, all
@torch.no_grad()
def test_the_window_is_a_cache_of_the_last_keys(stock, sink, queries, monkeypatch):
    monkeypatch.setattr(window_attention, "QUERIES", queries)
    ids = text()
    logits = streaming_logits(stock, ids[:-1], 2 * LENGTH, 0 if sink is None else 4)
    found = arm_losses(stock, WINDOW, sink, ids, LENGTH)
    torch.testing.assert_close(found, losses_of(logits, ids), atol=1e-5, rtol=1e-5)  # rotary tables are in float32
    full = arm_losses(stock, FULL, None, ids, LENGTH)
    assert torch.equal(found[: 2 * LENGTH] - full[: 2 * LENGTH] < 1e-6, torch.ones(2 * LENGTH, dtype=torch.bool))
    assert (found - full)[2 * LENGTH :].abs().max() > 1e-2
    assert stock.config._attn_implementation != window_attention.NAME  # as it was


@torch.no_grad()
def test_a_window_without_sinks_is_a_band_of_the_mask(stock):
    ids = text()
    token = torch.arange(len(ids) - 1)
    distance = token[:, None] - token
    band = ((distance >= 0) & (distance < 2 * LENGTH))[None, None]
    logits = stock(ids[None, :-1], attention_mask=band).logits[0]
    found = arm_losses(stock, WINDOW, None, ids, LENGTH)
    torch.testing.assert_close(found, losses_of(logits, ids), atol=1e-9, rtol=0)


SHARES = {"0": 0.0, "0.2": 0.2, "lowest": [1.0, 0.0, 0.0], "1": 1.0, "1:0:0.3": [1.0, 0.0, 0.3]}


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("sink", [None, SINK])
@torch.no_grad()
def test_folds_are_those_of_the_equations(stock, share, sink):
    ids = text()
    config = tiny_model(memory_share=SHARES[share], sink_token_id=sink).config
    logits = reference_logits(weights(stock), config, ids[:-1])
    found = arm_losses(stock, share, sink, ids, LENGTH)
    torch.testing.assert_close(found, losses_of(logits, ids), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["mistral, wide heads", "qwen2", "qwen3", "qwen3, tied, biases"])
@torch.no_grad()
def test_other_families(family):
    torch.manual_seed(0)
    model, ids = vary(STOCK[family]().double().eval()), text()
    expected = losses_of(streaming_logits(model, ids[:-1], 2 * LENGTH, 4), ids)
    torch.testing.assert_close(arm_losses(model, WINDOW, SINK, ids, LENGTH), expected, atol=1e-5, rtol=1e-5)
    config = variant_config(model.config, segment_length=LENGTH, memory_share=0.2, sink_token_id=SINK)
    expected = losses_of(reference_logits(weights(model), config, ids[:-1]), ids)
    torch.testing.assert_close(arm_losses(model, "0.2", SINK, ids, LENGTH), expected, atol=1e-5, rtol=1e-5)


def test_variants_share_the_weights(stock):
    made = variant(stock, segment_length=3, memory_share=0.5)
    for name, parameter in stock.named_parameters():
        assert made.get_parameter(name).data_ptr() == parameter.data_ptr()
    assert (made.config.segment_length, made.config.memory_share, made.training) == (3, 0.5, False)


OPTIONS = {"segment_lengths": (LENGTH, 8), "shares": ("0", "1"), "by_position": (LENGTH,), "num_tokens": 22}
OPTIONS |= {"position_tokens": 60, "sink_token_id": SINK}


def task_of(model, texts, **options):
    given = FoldCostOptions(models=[], data=["book.txt"], **(OPTIONS | options))
    return FoldCost(given, [EvaluatedModel("tiny", "", model, None)], {"tiny": texts})


@pytest.fixture(scope="module")
def measured(stock):
    task = task_of(stock, [text(30, 1), text(70, 2), text(20, 3)])
    records = measure(task)
    return task, records, task.results(task.settings(), records)


def cost_of(results, *wanted):
    fields = ("segment_length", "memory", "sink")
    (found,) = (one for one in results["costs"] if tuple(one[field] for field in fields) == wanted)
    return found


def test_a_cost_is_a_mean_over_the_same_tokens(measured):
    _, records, results = measured
    losses = {item: np.array(record["losses"]) for item, record in records}
    cost = cost_of(results, LENGTH, "1", True)
    by_text = []
    for number, tokens in enumerate((22, 22, 20)):  # the last text is shorter
        own, full = (losses[Reading("tiny", number, tokens, *way)] for way in [(LENGTH, "1", True), (0, FULL, False)])
        assert len(own) == len(full) == tokens - 1
        by_text.append(own[LENGTH:].mean() - full[LENGTH:].mean())
    assert cost["by_text"] == pytest.approx(by_text) and cost["cost"] == pytest.approx(np.mean(by_text))
    half = 4.302653 * np.std(by_text, ddof=1) / 3**0.5  # t of two degrees of freedom
    assert (cost["low"], cost["high"]) == pytest.approx((cost["cost"] - half, cost["cost"] + half))
    assert cost["stock_loss"] + cost["cost"] == pytest.approx(cost["loss"]) and cost["read"] == 60


def test_losses_by_position_are_of_the_longest_text(measured):
    _, records, results = measured
    curves = {(one["memory"], one["sink"]): one for one in results["by_position"]}
    assert len(curves) == len(results["by_position"]) == 1 + 8
    losses = {item: np.array(record["losses"]) for item, record in records}
    own = losses[Reading("tiny", 1, 60, LENGTH, "1", True)]
    expected = [own[first : first + 4].mean() for first in range(0, 59, 4)]  # 60 tokens in at most 16 parts
    assert curves["1", True]["losses"] == pytest.approx(expected) and curves["1", True]["block"] == 4
    none = losses[Reading("tiny", 1, 60, LENGTH, NONE, True)]
    short = [
        late_excess(*(losses[Reading("tiny", number, tokens, LENGTH, one, True)] for one in ("1", NONE)))
        for number, tokens in enumerate((22, 22, 20))
    ]
    cost = cost_of(results, LENGTH, "1", True)
    assert cost["late"] == pytest.approx(max(np.mean(short), (own - none)[-15:].mean()))  # the last quarter


def test_full_attention_ends_with_the_positions(stock):
    """By position it isn't read beyond them; folds and windows need those of two segments only."""
    task = task_of(stock, [text(70)])
    task.models[0].config.max_position_embeddings, before = 40, task.models[0].config.max_position_embeddings
    try:
        full = [item.tokens for item in task.items() if item.memory == FULL]
        assert full == [22, 40] and {item.tokens for item in task.items()} == {22, 40, 60}
        assert not any(task.positions_exceeded(item) for item in task.items())
        assert task.positions_exceeded(Reading("tiny", 0, 60, 0, FULL, False)) == 40
    finally:
        task.models[0].config.max_position_embeddings = before


def test_a_folded_model_is_measured_as_its_stock(measured, stock):
    other = tiny_model(memory_share=0.5, sink_token_id=9, segment_length=4)  # the same weights
    task = task_of(other, [text(30, 1)], by_position=(0,))
    records = dict(measured[1])
    for item, record in measure(task):
        assert record["losses"] == pytest.approx(records[item]["losses"], abs=2e-5)


def test_what_is_shown(measured, tmp_path):
    _, _, results = measured
    costs, positions, choices = FoldCost.tables(results)
    assert "3 texts (book.txt)" in costs.title and len(costs.rows) == 2 * (1 + 2 + 2)
    assert costs.rows[0][1:4] == [LENGTH, "full attention", "0"]
    assert costs.rows[1][2] == "no memory" and costs.rows[1][-1] == ""
    assert len(positions.rows) == 9 and positions.rows[0][:2] == ["", "full attention"]
    assert f"{results['by_position'][0]['losses'][3]:.2f}" == positions.rows[0][5]
    assert [row[1] for row in choices.rows] == [LENGTH, 8] and "diverges if" in choices.title
    rows = measured[0].rows(results)
    assert len(rows) == 16 + 9 * 15 and rows[0]["cost"] == results["costs"][0]["cost"]
    figures = FoldCost.overview(results)
    assert all(isinstance(figure, Figure) for figure in figures) and len(figures) == 2
    assert "cost of folding in segments of 5 on book.txt" in figures[0].measure
    FoldCost.draw(results, tmp_path / "fold_cost")
    assert (tmp_path / "fold_cost.png").stat().st_size > 10_000


def costs(*entries, segments=16):
    names, size = ("memory", "sink", "cost", "late"), {"segment_length": 256, "read": 256 * segments}
    return [dict(zip(names, entry, strict=True)) | size for entry in entries]


NO_MEMORY = costs((NONE, True, 0.01, 0.0), (WINDOW, True, 0.02, 9.0))  # never chosen


@pytest.mark.parametrize(
    ("entries", "expected", "words"),
    [
        # The least cost, whatever the sink.
        ([("0.2", False, 0.3, 0), ("0.2", True, 0.2, 0), ("1", True, 0.7, 0)], ("0.2", True), "It costs least."),
        ([("0.2", False, 0.1, 0), ("0.2", True, 0.2, 0)], ("0.2", False), "It costs least."),
        # One that diverges is not taken.
        (
            [("0.2", True, 0.2, 0.49), ("1", True, 0.1, 0.51)],
            ("0.2", True),
            "least of the folds that are known not to diverge.",
        ),
        ([("0.2", True, 0.2, 3), ("1", True, 0.1, 7)], ("1", True), "All folds diverge"),
        # A memory that can be trained is worth up to 0.1.
        ([("0", True, 0.128, 0), ("0.2", True, 0.183, 0)], ("0.2", True), "share 0 costs 0.055 nats a token less"),
        ([("0", True, 0.1, 0), ("0.2", True, 0.21, 0)], ("0", True), "It costs least."),
        ([("0", True, 0.1, 0), ("0.2", False, 0.15, 0)], ("0", True), "It costs least."),  # of the same sink
        (
            [("0", True, 0.1, 0), ("0.2", True, 0.15, 0.6)],
            ("0", True),
            "least of the folds that are known not to diverge.",
        ),
    ],
)
def test_the_choice(entries, expected, words):
    chosen, why = choose(NO_MEMORY + costs(*entries))
    assert (chosen["memory"], chosen["sink"]) == expected and words in why


@pytest.mark.parametrize(
    ("share", "segments", "taken"),
    [
        ("1", 15, False),
        ("1", 16, True),
        ("0.9", 15, False),
        ("0.8", 15, True),
        ("1:0", 15, True),
        ("1:0.9", 15, False),
        ("lowest", 15, True),
    ],
)
def test_a_large_share_needs_a_text_that_shows_whether_it_diverges(share, segments, taken):
    entries = costs((share, True, 0.1, 0), ("0.2", True, 0.3, 0), segments=segments)
    assert (choose(entries)[0]["memory"] == share) is taken
    assert choose(entries, memory=share)[0]["memory"] == share  # a given one is kept


def test_the_choice_keeps_what_is_given():
    entries = costs(("0", True, 0.1, 0), ("0.2", True, 0.15, 0), ("0", False, 0.5, 0), ("0.2", False, 0.7, 0))
    assert choose(entries, sink=False)[0]["cost"] == 0.5  # 0.2 costs too much more
    assert choose(entries, memory="0.2")[0]["cost"] == 0.15
    assert choose(entries, memory="0", sink=True)[0]["cost"] == 0.1


@pytest.fixture
def arguments(stories, novel, tmp_path):
    def made(output, **options):
        given = {"model": stories, "data": novel, "texts": 1, "tokens": 200, "segment-lengths": "32,64"}
        given |= {"shares": "0.2,1", "by-position": 32, "position-tokens": 700} | options
        words = [word for name, value in given.items() for word in (f"--{name}", value)]
        return ["eval", "fold-cost", *words, "--output", tmp_path / output]

    return made


def results_in(folder):
    found = json.loads((folder / "fold_cost.json").read_text())
    return {name: value for name, value in found.items() if name not in ("command", "date")}


def test_the_command_goes_on_where_it_stopped(arguments, tmp_path, noted):
    shown = command(*arguments("whole"))
    expected = results_in(tmp_path / "whole")
    records = tmp_path / "whole" / "fold_cost.records.jsonl"
    total = 1 + 2 * 8 + 1 + 8  # readings of the beginning, and of more of the text
    lines = stop_within(records, 6)
    assert len(lines) == 1 + total
    calls = noted(fold_cost, "arm_losses")
    assert command(*arguments("whole")) == shown and results_in(tmp_path / "whole") == expected
    assert len(calls) == total - 5
    assert records.read_text().splitlines(keepends=True) == lines
    for table in FoldCost.tables(expected):
        assert str(table) in shown
    rows = list(csv.DictReader((tmp_path / "whole" / "fold_cost.csv").open()))
    assert float(rows[0]["cost"]) == expected["costs"][0]["cost"]
    command(*arguments("whole", **{"segment-lengths": "32,64,100", "shares": "0,0.2,1"}))  # more of the same
    assert len(calls) == total - 5 + 4 + 2 * 2 + 6 + 2


def test_a_real_model_forgets_without_memory(stories, tmp_path):
    given = {"models": [str(stories)], "num_texts": 2, "num_tokens": 256, "segment_lengths": [32], "shares": ["0.2"]}
    results = evaluate("fold_cost", tmp_path, **given, by_position=[0])
    cost = {(one["memory"], one["sink"]): one["cost"] for one in results["costs"]}
    assert cost["0.2", False] < cost[NONE, False] - 0.05 and cost[WINDOW, False] < cost[NONE, False] - 0.05


def test_its_own_samples_are_drawn_once(stories, tmp_path, noted):
    given = {"models": [str(stories)], "num_texts": 2, "num_tokens": 64, "segment_lengths": [16], "shares": ["0.2"]}
    given |= {"by_position": [0]}
    calls = noted(fold_texts, "draw")
    first = evaluate("fold_cost", tmp_path, **given)
    assert len(calls) == 1 and calls[0].result.shape == (2, 64) and (calls[0].result[:, 0] == 1).all()
    (tmp_path / "fold_cost.records.jsonl").unlink()
    again = evaluate("fold_cost", tmp_path, **given)
    assert len(calls) == 1 and again["texts"] == first["texts"] and again["costs"] == first["costs"]
    assert "its own samples" in FoldCost.tables(first)[0].title and len(first["costs"][0]["by_text"]) == 2
    with pytest.raises(ValueError, match="comes from another measurement"):
        evaluate("fold_cost", tmp_path, **given | {"seed": 1})
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"--tokens": "15"}, r"--tokens 15 end before the second segment of 8 does"),
        ({"--segment-lengths": "8", "--by-position": "512"}, "1,024 are needed"),
        ({"--segment-lengths": "512", "--tokens": "1k"}, r"the longest document has \d+ tokens, and 1,024 are needed"),
        ({"--data": "nowhere.txt"}, "nowhere.txt"),
        ({"--shares": "half"}, "the memory share 'half': pass a number"),
        ({"--shares": "1:0"}, r"memory_share=\[1.0, 0.0\]: .* one for each of 3 layers"),
        ({"--shares": "0,0"}, "names 0 twice"),
        ({"--sink-token-id": "100000"}, "sink_token_id=100000 is not a token"),
        ({"--model": "HYBRID"}, "has a depth block"),
        ({"--model": "NO_BOS"}, "has no bos_token_id: pass --sink-token-id"),
        ({"--device-map": "auto"}, "--device-map auto places one model"),
        ({"--model": "GPT2"}, "family='gpt2' is not folded: Choose one of llama"),
    ],
)
def test_errors_are_named(folders, tmp_path, changed, words):
    if changed.get("--model") == "HYBRID":
        command("convert", folders / "llama", tmp_path / "HYBRID", "--depth", "0:1", "--segment-length", 8)
    if changed.get("--model") == "NO_BOS":
        copy_of(folders / "folded", tmp_path / "NO_BOS", bos_token_id=None)
    if changed.get("--model") == "GPT2":
        from transformers import GPT2Config, GPT2LMHeadModel

        GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=8, n_layer=1, n_head=1)).save_pretrained(tmp_path / "GPT2")
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (tmp_path / "GPT2" / file).write_bytes((folders / "llama" / file).read_bytes())
    options = {"--model": folders / "llama", "--data": folders / "text.txt", "--segment-lengths": "8"}
    options |= {"--tokens": "40", "--by-position": "0", "--output": tmp_path / "out"} | changed
    if (tmp_path / str(options["--model"])).is_dir():
        options["--model"] = tmp_path / options["--model"]
    assert_refused(words, command, "eval", "fold-cost", *(part for pair in options.items() for part in pair))


def copy_of(source, target, **fields):
    """Copies a model's folder, with other fields in its configuration."""
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text()) | fields
    (target / "config.json").write_text(json.dumps(config))


@pytest.fixture
def converted(stories, novel, tmp_path):
    def convert(name, *options):
        shown = command("convert", stories, tmp_path / name, novel, "--measure", "--segment-length", 64, *options)
        config = CondenseForCausalLM.config_class.from_pretrained(tmp_path / name)
        return shown.strip().splitlines(), config, results_in(tmp_path / f"{name}-fold-cost")

    return convert


def test_convert_takes_the_choice(converted, tmp_path, noted):
    shown, config, results = converted("folded")
    (choice,) = results["choices"]
    assert (config.memory_share, config.sink_token_id) == (choice["memory_share"], choice["sink_token_id"])
    assert (config.segment_length, config.memory_source) == (64, "layer_output")
    (said,) = (line for line in shown if line.startswith(f"{tmp_path / 'folded'}: "))
    assert f"{choice['cost']:+.3f} nats a token above full attention, untrained (Austen_Emma.txt)" in said
    assert {one["memory"] for one in results["costs"]} == {NONE, WINDOW, "0", "0.2", "1"}
    assert results["num_tokens"] == 512  # the model's positions; else 1,536
    for table in FoldCost.tables(results):
        assert str(table) in "\n".join(shown)
    (tmp_path / "folded").rename(tmp_path / "moved")
    calls = noted(fold_cost, "arm_losses")
    assert converted("folded")[1].to_dict() == config.to_dict() and not calls


def test_convert_keeps_what_is_given(converted):
    shown, config, results = converted("folded", "--memory-share", "1:0:0:0:0.5")
    assert config.memory_share == [1, 0, 0, 0, 0.5] and {one["memory"] for one in results["costs"]} > {"1:0:0:0:0.5"}
    cost = min(one["cost"] for one in results["costs"] if one["memory"] == "1:0:0:0:0.5")
    assert "share 1:0:0:0:0.5" in shown[-2] and f"{cost:+.3f} nats a token" in shown[-2]
    _, config, results = converted("input", "--memory-source", "layer_input")
    assert config.memory_source == "layer_input" and {one["memory"] for one in results["costs"]} == {NONE, WINDOW, "0"}


def test_convert_measures_neither_another_text_nor_a_folded_model(stories, novel, tmp_path, error_line):
    command("convert", stories, tmp_path / "folded", "--segment-length", 64, "--memory-share", 0.5)
    (tmp_path / "other.txt").write_text("Once upon a time there was a cat. " * 400)
    command("convert", stories, tmp_path / "out", novel, "--measure", "--segment-length", 64)
    (tmp_path / "out").rename(tmp_path / "former")
    line = error_line("convert", stories, tmp_path / "out", tmp_path / "other.txt", "--measure", "--segment-length", 64)
    assert "out-fold-cost holds the cost on another text or model: delete it, or pass another target." in line
    line = error_line("convert", tmp_path / "folded", tmp_path / "again", novel, "--measure")
    assert "is folded, and --measure chooses the memory of a stock checkpoint" in line
    assert not list(tmp_path.glob("again*"))


def test_convert_refuses_what_it_would_not_measure(folders, tmp_path, error_line):
    source, target = folders / "llama", tmp_path / "out"
    assert "a text is for --measure" in error_line("convert", source, target, folders / "text.txt")
    for option, value in (("to", "stock"), ("depth", "0:1"), ("merge", folders)):
        line = error_line("convert", source, target, "--measure", f"--{option}", value)
        assert f"leave --{option} out" in line
    assert not target.exists()
