"""The studies of docs/results: counted output equals the stored files, and timed studies run at small sizes."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from condense import CondenseConfig
from condense.attention import AttentionMask, AttentionMetadata, blocked
from condense.eval.benchmark.models import table_1
from condense.eval.benchmark.workloads import training_step
from condense.execution import static_decoding
from condense.layers import CondenseDecoderLayer
from condense.memory import Memory
from condense.segmentation import Chunk
from condense.training.data.passkey import Passkeys
from scripts.benchmarks import (
    attention,
    attention_alternatives,
    checkpoint_groups,
    costs,
    decoding,
    diagonals,
    gpu_attention,
    gpu_kernels,
    gpu_launches,
    gpu_memory,
    gpu_peers,
    gpu_trace,
    gradient_sums,
    heal_frontier,
    passkey_tokens,
    products,
    schedule_drift,
    schedule_rule,
    short_texts,
    training_floor,
)
from scripts.benchmarks.gpu.sizes import REHEARSAL

RESULTS = Path(__file__).resolve().parents[3] / "docs" / "results"


@pytest.mark.parametrize(
    ("study", "stored"),
    [(schedule_rule, "schedules/rule.txt"), (gpu_memory, "gpu/memory.txt"), (gpu_launches, "gpu/launches.txt")],
    ids=["rule of auto", "estimates beside a GPU", "launches on a GPU"],
)
def test_what_is_computed_is_what_is_stored(study, stored, capsys):
    study.main()
    printed = capsys.readouterr().out
    assert printed == (RESULTS / stored).read_text()
    lines = printed.splitlines()
    stock = [line for line in lines if "stock sdpa" in line]
    assert len(stock) == (22 if study is gpu_memory else 0)
    assert all(0.99 < float(line.split()[-1]) < 1.003 for line in stock)
    assert study is not gpu_launches or len(lines) == 2 + 8  # both orders at four lengths


def test_the_busy_time_of_a_device_counts_overlapping_kernels_once():
    kernels = [
        gpu_trace.Kernel("product", 0.0, 2.0),
        gpu_trace.Kernel("copy", 5.2, 5.5),  # within the sum
        gpu_trace.Kernel("product", 1.0, 3.0),
        gpu_trace.Kernel("sum", 5.0, 6.0),
    ]
    assert gpu_trace.busy_us(kernels) == 4.0
    assert gpu_trace.row("step", 8e-6, kernels)[2:] == ["0.00", "50%", "4", "1.0", "2.0"]
    assert [line.split() for line in gpu_trace.largest(kernels).splitlines()] == [
        ["75.5%", "2", "x", "product"],
        ["18.9%", "1", "x", "sum"],
        ["5.7%", "1", "x", "copy"],
    ]


def test_the_share_of_concatenations():
    kernels = [gpu_trace.Kernel("void CatArrayBatchedCopy<2>", 0.0, 1.0), gpu_trace.Kernel("product", 1.0, 4.0)]
    assert gpu_trace.details("step", kernels).splitlines()[0] == "step: 25.0% concatenations"


def test_the_drift_between_two_logs(tmp_path, capsys):
    """Two hand-made logs: one of two losses is equal, and norms are 10 and 5 % apart."""
    runs = {"graph": [(2.0, 1.0), (1.0, 2.0)], "sequential": [(2.0, 1.1), (1.5, 2.1)]}
    for name, values in runs.items():
        lines = [{"step": n, "loss": a, "grad_norm": b, "tokens_per_second": 7} for n, (a, b) in enumerate(values)]
        lines.append({"step": 9, "note": "no loss"})
        (tmp_path / name).write_text("\n".join(json.dumps(line) for line in lines))
    schedule_drift.main([str(tmp_path / "both.json"), *[f"{name}={tmp_path / name}" for name in runs]])
    logs = json.loads((tmp_path / "both.json").read_text())
    assert schedule_drift.table(logs).rows == [
        ["loss", "2", "1", "5.0e-01", "5.0e-01"],
        ["norm of the gradient", "2", "0", "1.0e-01", "1.0e-01"],
    ]
    assert str(schedule_drift.table(logs)) in capsys.readouterr().out
    logs["graph"][0]["step"] = 5
    with pytest.raises(ValueError, match="different steps"):
        schedule_drift.table(logs)


def test_the_stored_drift_is_that_of_the_docs():
    """docs/speed.md: equal losses, and norms at most 2e-7 of their size apart."""
    logs = json.loads((RESULTS / "gpu" / "h100" / "zero2.json").read_text())
    losses, norms = schedule_drift.table(logs).rows
    assert losses[1:3] == ["20", "20"] and float(norms[-1]) < 2e-7


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what is said without a CUDA device")
@pytest.mark.parametrize("study", [gpu_trace, gpu_peers, gpu_kernels], ids=lambda study: study.__name__.split(".")[-1])
def test_what_needs_a_gpu(study):
    with pytest.raises(SystemExit, match="no CUDA device"):
        study.main()


def test_peers_on_a_cpu():
    """The stock and the folded model at tiny sizes: Liger's kernels need a GPU."""
    points = gpu_peers.measure_all({"tiny": (REHEARSAL, 32)}, "cpu", ("stock", "folded"))
    names, kinds = ("tiny", "tiny, checkpointing"), ("stock", "folded")
    assert [(one["row"], one["kind"]) for one in points] == [(name, kind) for kind in kinds for name in names]
    rows = gpu_peers.table(points).rows
    assert [one[:2] for one in rows] == [[name, kind] for name in names for kind in kinds]
    ratio = points[2]["seconds"] / points[0]["seconds"]
    assert rows[0][-1] == "1.00" and float(rows[1][-1]) == pytest.approx(ratio, abs=0.01)


def test_counted_costs_are_the_stored_ones(capsys):
    stored = (RESULTS / "costs" / "costs.txt").read_text()
    costs.print_texts()
    costs.print_borders()
    printed = capsys.readouterr().out
    assert stored.startswith(printed)
    assert len(printed.splitlines()) > 20
    model = costs.meta_model()
    counts = [costs.count_launches(model, 2048, schedule) for schedule in ("sequential", "wavefront")]
    assert f"  2,048 tokens: sequential {counts[0]:,}, wavefront {counts[1]:,};" in stored


@pytest.mark.parametrize("mode", ["training", "durations", "reading", "decoding"])
def test_implementations_of_a_case_agree(mode):
    tensors, visibility = attention.case_of("stories", 32, mode, torch.float64)
    sdpa, blocked, eager = (attention.attend(name, tensors, visibility) for name in attention.NAMES)
    torch.testing.assert_close([sdpa, blocked], [eager, eager])
    attention.run("sdpa", tensors, visibility)
    assert all(tensor.requires_grad == (mode in ("training", "durations")) for tensor in tensors)


def test_alternatives_are_one_attention(monkeypatch):
    monkeypatch.setattr(blocked, "BLOCK_BYTES", blocked.BLOCK_BYTES)  # the variants set it
    query, key, value = (torch.randn(1, 2, length, 8, dtype=torch.float64) for length in (16, 32, 32))
    expected = attention_alternatives.ALTERNATIVES["one call with a mask"](query, key, value)
    for variant in (*attention_alternatives.ALTERNATIVES.values(), *attention_alternatives.SIZES.values()):
        torch.testing.assert_close(variant(query, key, value), expected)


def test_floors_are_timed():
    for kind, tokens in (("folded", 256), ("stock", 16)):
        for seconds in (training_floor.product_seconds, training_floor.attention_seconds):
            assert min(seconds(kind, tokens, torch.float32, repeats=1)) > 0


def test_floors_of_a_step_are_sums(monkeypatch):
    """1,024 tokens are one text or four segments, of which the first has no memory and the last writes none."""
    attention = {("stock", 1024): (10.0, 20.0), ("stock", 256): (1.0, 2.0), ("folded", 256): (3.0, 5.0)}
    of_attention = lambda kind, tokens, dtype: training_floor.Seconds(*attention[kind, tokens])  # noqa: E731
    monkeypatch.setattr(training_floor, "attention_seconds", of_attention)
    monkeypatch.setattr(training_floor, "product_seconds", lambda *_: training_floor.Seconds(1.0, 2.0))
    weights, head = 4 * 512 * (2 * 32 * 64 + 2 * 8 * 64 + 3 * 8192), 8192 * 512
    products, seconds, again = training_floor.step_seconds("stock", 1024, torch.float32)
    assert products == (2048 * (weights + head), 2 * 2048 * (weights + head))
    assert seconds == (40, 80) and again == 2048 * weights + 40
    products, seconds, again = training_floor.step_seconds("folded", 1024, torch.float32)
    layers = 2048 * weights + 3 * 2 * 256 * 4 * 512 * 2 * 8 * 64
    assert products == (layers + 2048 * head, 2 * (layers + 2048 * head))
    assert seconds == (4 * (1 + 9), 4 * (2 + 15)) and again == layers + 40


def test_groups_of_checkpointing_are_timed(monkeypatch):
    shape = table_1() | {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 1, "head_dim": 8, "num_hidden_layers": 2}
    built, ran = checkpoint_groups.models(shape, 4, torch.float32), []

    def recorded(model, ids_BN):
        step = training_step(model, ids_BN)
        groups = lambda: getattr(model.base_model, "checkpoint_segments", None)  # noqa: E731
        return lambda: (ran.append((model.is_gradient_checkpointing, groups())), step())

    monkeypatch.setattr(checkpoint_groups, "training_step", recorded)
    figures = checkpoint_groups.row(built, 4, 10, (1, 2, 4), torch.float32, repeats=1)
    assert figures[:2] == ["float32", "10"] and figures[5] == "-", "a text of two and a half segments"
    assert ran == 2 * [(True, None), (True, 1), (True, 2)]


def test_products_are_timed(monkeypatch):
    monkeypatch.setattr(products, "SHAPES", [(4, 8, 6)])
    shape, size, *figures = products.times((4, 8, 6), repeats=1)
    assert (shape, size) == ("4 x 8 x 6", "2^7.6") and len(figures) == 6 and all(float(one) >= 0 for one in figures)


def test_short_and_padded_texts_are_timed():
    """Both models compute the same within one segment."""
    shape = "5 layers of width 64, segments of 32"
    stock, folded = short_texts.models(short_texts.SHAPES[shape])
    ids_BN = torch.arange(32)[None]
    torch.testing.assert_close(short_texts.read(folded, "auto", ids_BN), short_texts.read(stock, None, ids_BN))
    assert len(short_texts.one_text(shape, 64, 1)) == 7
    lengths = [40, 70]
    positions_1N = torch.cat([torch.arange(length) for length in lengths])[None]
    packed_1ND = short_texts.hidden(folded, torch.arange(110)[None], position_ids=positions_1N)
    alone_1ND = [short_texts.hidden(folded, ids_1N) for ids_1N in torch.arange(110)[None].split(lengths, 1)]
    torch.testing.assert_close(packed_1ND, torch.cat(alone_1ND, dim=1))
    assert len(short_texts.padded(shape, [40, 70], 1)) == 8


@torch.no_grad()
def test_the_operations_of_a_diagonal_are_those_of_the_layers():
    width, layers, heads, tokens = 16, 3, 2, 8
    diagonal = diagonals.Diagonal((width, layers, heads, tokens))
    config = CondenseConfig(
        hidden_size=width, num_attention_heads=heads, num_key_value_heads=heads, intermediate_size=8 * width // 3,
        segment_length=tokens, attn_implementation="sdpa",
    )  # fmt: skip
    chunk = Chunk(1, tokens, [0], [0], [tokens], [0], [1])
    tables = diagonal.cos_TE[None, None], diagonal.sin_TE[None, None]
    metadata = AttentionMetadata(chunk, tables, tables, AttentionMask(chunk), True, (False,))
    output_MTD, key_MHTE, value_MHTE = diagonal.all()
    for number in range(layers):
        layer = CondenseDecoderLayer(config, layer_idx=0).eval()
        attention, mlp = layer.self_attn, layer.mlp
        for linear, weights in (
            (attention.q_proj, diagonal.query_MDD), (attention.k_proj, diagonal.key_MDD),
            (attention.v_proj, diagonal.value_MDD), (attention.o_proj, diagonal.output_MDD),
            (mlp.gate_proj, diagonal.gate_MDI), (mlp.up_proj, diagonal.up_MDI), (mlp.down_proj, diagonal.down_MID),
        ):  # fmt: skip
            linear.weight.copy_(weights[number].T)
        memory = Memory(*[diagonal.memory_MHTE[number][None]] * 2)
        output_RTD, new_memory = layer(diagonal.hidden_MTD[number][None], memory, metadata)
        found = [one_M[number][None] for one_M in (output_MTD, key_MHTE, value_MHTE)]
        torch.testing.assert_close(found, [output_RTD, *new_memory], atol=1e-5, rtol=1e-4)


def test_diagonals_are_timed(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function: function)  # compilation takes long
    _, number, *milliseconds = diagonals.line("2 layers of width 128, segments of 64", repeats=1)
    assert number == "17" and len(milliseconds) == 6 and all(float(one) > 0 for one in milliseconds)


def test_steps_of_decoding_are_timed(monkeypatch):
    """All steps except compiled ones, which take long; within a segment they are the same computation."""
    monkeypatch.setattr(decoding, "TOKENS", 20)
    logits = {}
    for kind in ("stock", "stock, static", "folded", "folded, fixed"):
        torch.manual_seed(0)
        stock, folded = decoding.models(decoding.SHAPES["5 layers of width 64"])
        logits[kind] = decoding.stepper(kind, stock, folded, 2, repeats=1)()
    for kind, found in logits.items():
        torch.testing.assert_close(found, logits["stock"], atol=1e-5, rtol=1e-4, msg=kind)
    monkeypatch.setattr(decoding, "KINDS", ["stock", "folded, compiled"])
    monkeypatch.setattr(static_decoding, "_compiled_step", lambda: static_decoding.static_step)
    name, rows, *rates, ratio = decoding.line("5 layers of width 64", 1, repeats=1)
    assert (name, rows) == ("5 layers of width 64", "1") and len(rates) == 2 and float(ratio) > 0


def test_errors_of_gradients(stories, tmp_path, capsys, monkeypatch):
    """Sums over 128 segments in bfloat16 add to the rounding of products."""
    monkeypatch.setattr(gradient_sums, "ORDERS", {"in order": {}})
    (tmp_path / "text").write_text("Once upon a time there was a little girl. " * 200)
    gradient_sums.main(["--model", str(stories), "--data", str(tmp_path / "text"), "--segments", "128"])
    lines = [line.split()[-2:] for line in capsys.readouterr().out.splitlines() if line.split()[:1] == ["128"]]
    (by_autograd, in_float32) = map(float, *lines)
    assert 0 < in_float32 < 2 < by_autograd


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_attention_in_two_parts(dtype):
    """Two calls for memory and segment give the output and gradients of one call."""
    limit = 1e-5 if dtype == torch.float32 else 1e-12
    for form in gpu_attention.forms_on("cpu").values():
        inputs = gpu_attention.inputs_of(2, 12, "cpu", dtype)
        assert max(gpu_attention.errors(form, inputs)) < limit


def test_the_cost_of_folding_against_trained_tokens(tmp_path, capsys):
    """Checkpoints stand in order of their steps, beside the window of the same text and the first run, text by text."""

    def cost(model: str, way: str, mean: float) -> dict:
        between = {"cost": mean, "low": mean - 0.02, "high": mean + 0.02}
        above = {name: value - 0.05 for name, value in between.items()}
        by_text = [mean - 0.5, mean + 0.5]
        return {
            "model": model,
            "way": way,
            "source": "data/emma.txt",
            **between,
            "by_text": by_text,
            "above_window": above,
        }

    costs = [
        cost("stock", "own", 0.0), cost("stock", "window", 0.05), cost("untrained", "own", 0.1),
        cost("all@128", "own", 0.06), cost("all@16", "own", 0.08), cost("adapters@16", "own", 0.09),
    ]  # fmt: skip
    (tmp_path / "loss.json").write_text(json.dumps({"costs": costs}))
    heal_frontier.main([str(tmp_path / "loss.json"), "--tokens-per-step", "4096"])
    lines = [line.split(maxsplit=3) for line in capsys.readouterr().out.splitlines() if line.startswith("emma.txt")]
    runs = [("adapters", "0"), ("adapters", "65,536"), ("all", "0"), ("all", "65,536"), ("all", "524,288")]
    assert [tuple(line[1:3]) for line in lines[:-1]] == runs
    assert lines[-1][1] == "window"
    assert lines[4][3].split("  ")[0] == "+0.0600 [+0.0400, +0.0800]"
    assert lines[4][3].split("  ")[-1] == "+0.0100 [-0.0100, +0.0300]"
    assert lines[3][3].split("  ")[-1] == "-0.0100 [-0.0100, -0.0100]", "both texts are as much below adapters"
    assert (tmp_path / "frontier.png").stat().st_size > 1_000
    (tmp_path / "loss.json").write_text(json.dumps({"costs": costs[2:]}))
    with pytest.raises(ValueError, match="or no window: give all to condense eval loss"):
        heal_frontier.main([str(tmp_path / "loss.json"), "--tokens-per-step", "4096"])


def test_which_tokens_of_an_answer_are_right():
    """A model that says each token after itself: an answer of two equal tokens is half right."""

    class Repeats(torch.nn.Module):
        device = torch.device("cpu")

        def forward(self, input_ids, logits_to_keep):
            logits = torch.nn.functional.one_hot(input_ids[:, -logits_to_keep:], 9).double()
            return SimpleNamespace(logits=logits)

    prompts, answers = torch.tensor([[4, 1], [2, 3]]), torch.tensor([[1, 1], [5, 5]])
    right = passkey_tokens.right_tokens(Repeats(), Passkeys(prompts, answers, ["1", "5"], [0, 0]))
    assert right.tolist() == [[True, True], [False, True]]


def test_passkeys_before_the_question_are_read_by_any_model(stories, capsys):
    passkey_tokens.main([f"stories={stories}", "--lengths", "300", "--prompts", "2"])
    name, length, first, others = capsys.readouterr().out.splitlines()[-1].split()
    assert (name, length) == ("stories", "300") and float(first) >= 0 and float(others) >= 0
