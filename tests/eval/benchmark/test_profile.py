"""Cases are measured in processes of their own, one by one, and compared with their exact figures."""

import json

import pytest
import torch
from transformers import Gemma3Config, GPTNeoXConfig, LlamaConfig, MambaConfig

from condense import CondenseConfig, CondenseForCausalLM
from condense.eval.benchmark import grid, process
from condense.eval.benchmark.cases import BenchmarkCase, ModelVariant
from condense.eval.benchmark.grid import Environment
from condense.eval.benchmark.models import TABLE_1_PARAMETERS
from condense.eval.benchmark.options import ProfileOptions
from condense.eval.benchmark.process import ProcessKilledError
from condense.eval.benchmark.profile import NEW_TOKENS, WARM_UP_TOKENS, Profile, measure, profile, utilization
from condense.eval.benchmark.profile_tables import tables
from condense.eval.benchmark.sources import build, read_models

from ...pictures import is_drawn
from ..measuring import command, stop_within

pytestmark = [pytest.mark.usefixtures("forked_cases"), pytest.mark.process]
SHAPE = {
    "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def results(llama, forked_cases, tmp_path_factory):
    output = tmp_path_factory.mktemp("profile")
    arguments = ["--segment-length", 64, "--lengths", 512, "--repeats", 2, "--optimizer", "off,on"]
    arguments += ["--modes", "training,decoding", "--kinds", "folded,stock", "--output", output]
    shown = command("profile", "--config", llama, *arguments)
    results = json.loads((output / "profile.json").read_text())
    assert (output / "profile.csv").exists() and (output / "profile.svg").exists()
    return results, shown, output


def test_points(results):
    points = results[0]["points"]
    assert len(points) == 6  # decoding has no optimizer
    for point in points:
        assert point["parameters"] == 102_208 and point["dtype"] == "float32" and not point["out_of_memory"]
        assert 0 < point["seconds_low"] <= point["seconds"] <= point["seconds_high"]
        assert point["repeats"] == (2 if point["mode"] == "training" else 2 * NEW_TOKENS)
        assert point["peak_bytes"] > point["before_bytes"] > 2**20
    state = {(point["kind"], point["length"]): point.get("state_bytes") for point in points if "state_bytes" in point}
    # The exact size: 2 layers x (2L + L) tokens x keys and values x 64 numbers of 4 bytes, one hidden state.
    assert state["folded", 512] == 2 * 3 * 64 * 2 * 64 * 4 + 64 * 4
    # A stock cache also holds the tokens decoded.
    assert state["stock", 512] == 2 * 2 * 64 * 4 * (512 + WARM_UP_TOKENS + 2 * NEW_TOKENS)


def test_tables_are_printed_and_curves_drawn(results):
    _, printed, output = results
    for step in ("training step", "training step with AdamW"):
        assert f"{step}, batch 1, attention auto" in printed
    assert all(words in printed for words in ("folded, segment 64", "stock's later peak", "new token"))
    assert "peak resident memory of the process" in printed or "CUDA allocator" in printed
    assert is_drawn(output / "profile.png")


@pytest.mark.usefixtures("without_pictures")
def test_a_stopped_profile_resumes(llama, results, noted):
    before, _, output = results
    stop_within(output / "profile.records.jsonl", -1, 50)
    measured = noted(grid, "call")
    chosen = {"modes": ["training", "decoding"], "lengths": [512], "segments": [64], "optimizer": [False, True]}
    again = profile(output, ProfileOptions(configs=[str(llama)], repeats=2, **chosen))
    assert len(measured) == 1
    assert again["points"][:-1] == before["points"][:-1]


@pytest.mark.usefixtures("without_pictures")
def test_the_peer_has_a_bounded_state_too(llama, tmp_path):
    chosen = {"kinds": ["sliding_window"], "modes": ["decoding"], "lengths": [512], "segments": [64], "repeats": 1}
    measured = profile(tmp_path, ProfileOptions(configs=[str(llama)], **chosen))
    # A window of 128 tokens: it keeps the 127 before the next one.
    assert {point["state_bytes"] for point in measured["points"]} == {2 * 2 * 64 * 4 * 127}


@pytest.mark.usefixtures("without_pictures")
def test_out_of_memory_is_a_result(monkeypatch, tmp_path, llama):
    """The system kills the processes of the stock model."""
    real = grid.call

    def call(function, case, environment):
        if case.kind == "stock":
            raise ProcessKilledError
        return real(function, case, environment)

    monkeypatch.setattr(grid, "call", call)
    options = ProfileOptions(configs=[str(llama)], modes=["prefill"], lengths=[64, 128], segments=[64], repeats=1)
    measured = profile(tmp_path, options)
    folded = measured["points"][::2]
    assert [point["out_of_memory"] for point in measured["points"]] == [False, True, False, True]
    assert folded[0]["state_bytes"] == folded[1]["state_bytes"]
    _, table, *_ = tables(measured)
    assert [row[2] for row in table.rows if row[1] == "stock"] == ["OOM", "OOM"] and table.rows[0][-1] == "OOM"


SECONDS = {"seconds": 1.0, "seconds_low": 1.0, "seconds_high": 1.0}


@pytest.mark.parametrize(
    ("sizes", "ratios"), [({None: (2, 9)}, ["4.50x", "-"]), ({False: (2, 9), True: (4, 10)}, ["4.50x", "2.50x"])]
)
def test_ratios_beside_the_papers(sizes, ratios):
    """By the optimizer, which earlier results do not name; without the figures of other shapes."""
    shared = {"mode": "training", "length": 8192, "batch": 1, "attention": "eager", "checkpointing": False}
    shared |= {"out_of_memory": False, "parameters": TABLE_1_PARAMETERS, "before_bytes": 0, "memory_is": "peak"}
    points = [
        {**shared, **SECONDS, "kind": kind, "segment_length": segment, "peak_bytes": size * 2**30}
        | ({} if optimizer is None else {"optimizer": optimizer})
        for optimizer, both in sizes.items()
        for kind, segment, size in (("folded", 256, both[0]), ("stock", None, both[1]))
    ]
    others = [{**point, "model": "other", "parameters": 7, "peak_bytes": 1} for point in points]
    *_, paper = tables({"points": points + others})
    assert paper.rows == [["8,192", 1, "without", "memory", 256, "4.33x", *ratios]]


def test_table_1_is_written_where_the_system_kills_a_point(monkeypatch, tmp_path):
    """A killed process tells nothing of its model. A start that resumes writes the files too."""
    called = []

    def call(function, case, environment):
        called.append(case)
        if case.kind == "stock":
            raise ProcessKilledError
        figures = {"parameters": TABLE_1_PARAMETERS, "out_of_memory": False, "peak_bytes": 2, "before_bytes": 1}
        return figures | SECONDS | {"memory_is": "peak"}

    monkeypatch.setattr(grid, "call", call)
    options = ProfileOptions(preset="table1", lengths=[8192], batches=[1], segments=[256], attentions=["eager"])
    for _ in range(2):
        measured = profile(tmp_path, options)
        assert all((tmp_path / f"profile.{ending}").is_file() for ending in ("json", "csv", "png"))
        *_, paper = tables(measured)
        assert paper.rows == [["8,192", 1, "without", "memory", 256, "4.33x", "OOM", "OOM"]]
    assert len(called) == 4  # without an optimizer and with it


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"kinds": ["folded", "mamba"]},
            r"kinds=\['mamba'\]: choose from folded, stock, stock_chunked_loss, sliding_w",
        ),
        ({"modes": ["sleeping"]}, r"modes=\['sleeping'\]"),
        ({"snapshots": True}, "snapshots come from the CUDA allocator"),
    ],
)
def test_mistakes_are_named(llama, tmp_path, options, words):
    with pytest.raises(ValueError, match=words):
        profile(tmp_path, ProfileOptions(configs=[str(llama)], **{"lengths": [64], **options}))


def test_a_failing_case_says_why(llama, tmp_path, monkeypatch):
    monkeypatch.setattr(grid, "call", process.call)
    with pytest.raises(RuntimeError, match="segment_length=0"):
        profile(tmp_path, ProfileOptions(configs=[str(llama)], modes=["prefill"], lengths=[128], segments=[0]))
    with pytest.raises(ValueError, match="^nothing to profile: pass either --preset"):
        command("profile", "--output", tmp_path)
    with pytest.raises(ValueError, match="^--preset table1 beside a: pass either --preset"):
        ProfileOptions(configs=["a"], preset="table1")


@pytest.mark.usefixtures("without_pictures")
def test_the_states_of_the_optimizer_are_measured(forked_cases, llama, tmp_path):
    """Parameters of 64 MiB and more, of which AdamW keeps two moments."""
    options = ProfileOptions(
        configs=[str(llama)], kinds=["folded"], modes=["training"], lengths=[64], segments=[64], repeats=1,
        vocab_size=2**18, optimizer=[False, True],
    )  # fmt: skip
    without, with_states = profile(tmp_path, options)["points"]
    moments = 2 * 4 * without["parameters"]
    assert moments > 2**27 and with_states["peak_bytes"] - without["peak_bytes"] > 0.6 * moments


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU other schedules are chosen")
@pytest.mark.usefixtures("without_pictures")
def test_the_first_call_moves_the_weights_and_later_ones_do_not(forked_cases, tmp_path):
    """A wavefront stacks the weights of all layers once: 48 MiB beside themselves, which later calls do not need."""
    size = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 4}
    LlamaConfig(vocab_size=100, num_key_value_heads=4, **size).save_pretrained(tmp_path / "deep")
    chosen = {"modes": ["prefill"], "lengths": [256], "segments": [16], "repeats": 1}
    measured = profile(tmp_path / "out", ProfileOptions(configs=[str(tmp_path / "deep")], **chosen))
    folded, stock = measured["points"]
    moved = folded["weight_bytes"]
    assert moved > 48 * 2**20
    assert folded["peak_bytes"] - folded["before_bytes"] > moved
    assert folded["peak_bytes"] - folded["later_peak_bytes"] > 0.5 * moved  # what else the process holds is in both
    assert stock["peak_bytes"] - stock["later_peak_bytes"] < 0.25 * moved
    _, table = tables(measured)
    mine, theirs = (dict(zip(table.columns, row, strict=True)) for row in table.rows)
    for point, row in ((folded, mine), (stock, theirs)):
        first, later = (
            f"{(point[name] - point['before_bytes']) / 2**20:,.0f}" for name in ("peak_bytes", "later_peak_bytes")
        )
        assert row["peak above model [MiB]"] == first and row["after the first call [MiB]"] == later
    ratio = (stock["later_peak_bytes"] - stock["before_bytes"]) / (folded["later_peak_bytes"] - folded["before_bytes"])
    assert mine["stock's later peak above model / own"] == f"{ratio:.2f}x"
    assert "state [MiB, float32]" in table.columns


def test_results_from_before_the_first_call_stood_alone():
    """Their peak is that of all calls, and so is the newer points' that stand beside them."""
    shared = {"mode": "prefill", "length": 64, "batch": 1, "attention": "auto", "checkpointing": False}
    shared |= {"out_of_memory": False, "before_bytes": 0, "state_bytes": 2**20, **SECONDS}
    old = {**shared, "kind": "folded", "segment_length": 64, "peak_bytes": 2 * 2**20}
    stock = {**shared, "kind": "stock", "segment_length": None, "peak_bytes": 8 * 2**20}
    for later in ({}, {"later_peak_bytes": 2**20}):
        _, table = tables({"points": [old, {**stock, **later}]})
        first = dict(zip(table.columns, table.rows[0], strict=True))
        assert first["after the first call [MiB]"] == "-" and first["stock's peak above model / own"] == "4.00x"
    _, table = tables({"points": [{**old, "later_peak_bytes": 0}, {**stock, "later_peak_bytes": 2**20}]})
    assert table.rows[0][-2:] == ["-", "-"]  # nothing to divide by


def test_a_case_in_words(llama):
    """In the progress bar: without hashes and without what is off."""
    models = tuple(read_models(ProfileOptions(configs=[str(llama)])))
    case = BenchmarkCase(
        kind="folded", mode="training", length=2048, segment_length=64, attention="auto", model="llama"
    )
    task = Profile([case], Environment(models, "auto", 1), measure, {})
    assert task.in_words(case) == "folded, segment 64, 2,048 tokens, training step, batch 1, attention auto"


def test_mfu_of_a_step():
    """By hand: 6 per parameter and token, 12 per channel and pair, 6 per weight of remembered keys and values."""
    shape = {"vocab_size": 100, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4, "tie_word_embeddings": True}
    parameters = 100 * 8 + 2 * (4 * 8 * 8 + 3 * 8 * 16 + 2 * 8) + 8
    stock = 6 * parameters * 8 + 2 * 12 * 8 * 36
    folded = 6 * parameters * 8 + 2 * (12 * 8 * (10 + 16 + 10) + 6 * 2 * 8 * 8 * 4)
    for kind, segment, flops in (("stock", None, stock), ("folded", 4, folded)):
        case = BenchmarkCase(kind=kind, mode="training", length=8, batch=3, segment_length=segment)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("condense.eval.benchmark.profile.hardware", lambda: "NVIDIA H100 80GB HBM3")
            assert utilization(case, shape, "bfloat16", 2.0) == {"mfu": pytest.approx(3 * flops / 2 / 989e12)}
            assert utilization(case, shape, "float32", 2.0) == {}
        assert utilization(case, shape, "bfloat16", 2.0) == {} or torch.cuda.is_available()


def test_figures_of_a_gpu_have_columns():
    point = {"kind": "folded", "mode": "training", "length": 64, "batch": 1, "segment_length": 64, "attention": "auto"}
    point |= {"checkpointing": False, "out_of_memory": False, "peak_bytes": 2**20, "before_bytes": 0}
    point |= SECONDS
    on_gpu = {**point, "reserved_bytes": 3 * 2**20, "allocation_retries": 2, "mfu": 0.415}
    _, table = tables({"points": [on_gpu, {**point, "length": 128}]})
    first, second = (dict(zip(table.columns, row, strict=True)) for row in table.rows)
    names = ("reserved [MiB]", "retries", "MFU [%]")
    assert [first[name] for name in names] == ["3", "2", "42"] and [second[name] for name in names] == ["-"] * 3
    _, table = tables({"points": [point]})
    assert not set(names) & set(table.columns)


NEOX = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
MAMBA = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "expand": 2, "conv_kernel": 4}


@pytest.mark.usefixtures("without_pictures")
def test_any_causal_language_model_in_one_table(llama, tmp_path):
    """Shapes of three families and a folded checkpoint; their states are counted by hand."""
    for name, config in (("neox", GPTNeoXConfig(**NEOX)), ("mamba", MambaConfig(**MAMBA))):
        config.save_pretrained(tmp_path / name)
    torch.manual_seed(0)
    CondenseForCausalLM(CondenseConfig.from_pretrained(llama, segment_length=32)).save_pretrained(tmp_path / "folded")
    options = ProfileOptions(
        configs=[f"{name}={tmp_path / name}" for name in ("neox", "mamba")], models=[f"mine={tmp_path / 'folded'}"],
        modes=["decoding"], lengths=[64, 128], repeats=1,
    )  # fmt: skip
    measured = profile(tmp_path / "out", options)
    states = {(point["model"], point["length"]): point["state_bytes"] for point in measured["points"]}
    convolutions_and_states = 2 * (64 * 4 + 64 * 4) * 4
    for length in (64, 128):
        tokens = states["neox", length] / (2 * 2 * 32 * 4)  # keys and values of two layers
        assert tokens == length + WARM_UP_TOKENS + NEW_TOKENS
        assert states["mamba", length] == convolutions_and_states
    assert states["mine", 64] == states["mine", 128]
    models, table, *_ = tables(measured)
    assert [row[:2] for row in models.rows] == [["neox", "gpt_neox"], ["mamba", "mamba"], ["mine", "condense_llama"]]
    assert [row[2] for row in models.rows] == ["random", "random", str(tmp_path / "folded")]
    assert len(table.rows) == 6


def test_a_smaller_vocabulary_leaves_out_special_tokens(tmp_path):
    LlamaConfig(**SHAPE, pad_token_id=90, eos_token_id=[5, 95]).save_pretrained(tmp_path / "llama")
    text = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 16,
    }
    Gemma3Config(text_config=text | {"num_key_value_heads": 1, "vocab_size": 1000}).save_pretrained(tmp_path / "gemma")
    configs = [str(tmp_path / "llama"), str(tmp_path / "gemma")]
    llama, gemma = read_models(ProfileOptions(configs=configs, vocab_size=50))
    for kind in ("folded", "stock", "sliding_window", "stock_chunked_loss"):
        model = build(llama, ModelVariant(kind=kind, attention="auto", segment_length=4), "float32")
        assert model.get_input_embeddings().weight.shape == (50, SHAPE["hidden_size"])
    model = build(gemma, ModelVariant(kind="stock", attention="auto"), "float32")
    assert model.get_input_embeddings().weight.shape == (50, 32)


def test_models_of_one_shape_have_the_same_biases(tmp_path):
    LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True).save_pretrained(tmp_path)
    (llama,) = read_models(ProfileOptions(configs=[str(tmp_path)]))
    built = [
        build(llama, ModelVariant(kind=kind, attention="auto", segment_length=4), "float32")
        for kind in llama.kinds(["folded", "stock", "sliding_window", "stock_chunked_loss"])
    ]
    assert len(built) == 3 and len({model.num_parameters() for model in built}) == 1
    with pytest.raises(ValueError, match=r"sliding_window.* of type 'llama' with biases, which is measured as folded"):
        llama.kinds(["sliding_window"])
