"""The plan against what the real model and DeepSpeed hold on the CPU."""

import gc
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig

from condense import CondenseConfig, CondenseForCausalLM
from condense.training import distributed
from condense.training.planning import pass_memory as measured
from condense.training.planning.allocations import HOST, on_device
from condense.training.planning.checkpoint_groups import with_checkpoint_segments
from condense.training.planning.memory import estimate
from condense.training.planning.pass_memory import pass_memory
from condense.training.planning.passes import Pass, parameter_shapes, passes
from condense.training.planning.stand_in import WORKSPACE
from condense.training.recipe import Recipe

from ...products import half_of
from ..ranks import run_ranks
from .held import Held, held_by_pass
from .shapes import LLAMA_1B, PLAIN, SMALL, recipe

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[3]
DTYPES, ATTENTIONS = ("float32", "bfloat16"), ("sdpa", "eager")
SHAPES = {
    "small": {},
    "untied, no groups": {"tie_word_embeddings": False, "num_key_value_heads": 4},
    "wide": {"hidden_size": 96, "intermediate_size": 128, "num_key_value_heads": 1, "head_dim": 32},
    "large vocabulary": {"vocab_size": 3000},
    "logits narrower than hidden states": {"vocab_size": 120, "hidden_size": 128, "intermediate_size": 32},
}


def check_pass(config, trained, within=0.01, zero_stage=0):
    """Compares the peaks of both passes with the real model's; roundings to 64 bytes, and copies of targets to a
    device, are up to 0.5 % in models as small as these."""
    (a_pass,) = passes(config, trained, 1)
    planned = pass_memory(config, trained, a_pass, "cpu", zero_stage)
    held = held_by_pass(config, trained, is_gathered=zero_stage == 3)
    for parts, peak in zip(planned, held, strict=True):
        assert on_device(parts) - parts["heap"] == pytest.approx(peak, rel=within)


def folded(**fields):
    return CondenseConfig(**SMALL | {"segment_length": 32} | fields)


@half_of(shape=SHAPES, dtype=DTYPES, attention=ATTENTIONS, segments=[(32, 128, 1), (24, 110, None), (64, 64, None)])
def test_a_folded_pass(shape, dtype, attention, segments):
    length, total, span = segments
    config = folded(**SHAPES[shape], segment_length=length, bptt_segments=span)
    check_pass(config, recipe(total, 2, dtype, attention, segment_length=length, bptt_segments=span))


@half_of(shape=SHAPES, dtype=DTYPES, group=(1, 3, 8))
def test_checkpoints_of_groups_of_segments(shape, dtype, group):
    trained = recipe(256, 2, dtype, "sdpa", True, segment_length=32, checkpoint_segments=group)
    check_pass(folded(**SHAPES[shape]), trained)


@half_of(shape=SHAPES, dtype=DTYPES, attention=ATTENTIONS, checkpointing=(False, True))
def test_a_stock_pass(shape, dtype, attention, checkpointing):
    check_pass(LlamaConfig(**SMALL | SHAPES[shape]), recipe(96, 2, dtype, attention, checkpointing, kind="stock"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "fields",
    [{"memory_share": 0.2, "sink_token_id": 7}, {"memory_share": [1.0, 0.0, 0.3]}, {"schedule": "wavefront"}],
    ids=str,
)
def test_memories_of_other_kinds_and_waves(fields, dtype):
    own = {"schedule": fields.pop("schedule")} if "schedule" in fields else {}
    check_pass(folded(**fields), recipe(256, 2, dtype, segment_length=32, **own))


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["k_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]])
@pytest.mark.parametrize("kind", ["condense", "stock"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_adapters(dtype, kind, targets):
    config, fields = (folded(), {"segment_length": 32}) if kind == "condense" else (LlamaConfig(**SMALL), {})
    trained = recipe(128, 2, dtype, kind=kind, lora={"rank": 4, "targets": targets}, **fields)
    check_pass(config, trained)


@half_of(shape=("small", "large vocabulary"), dtype=DTYPES, checkpointing=(False, True), lora=(None, {"rank": 4}))
def test_distillation(shape, dtype, checkpointing, lora):
    """The teacher's own weights count, too; beside adapters it has the model's."""
    config, fields = folded(**SHAPES[shape]), {"segment_length": 32, "lora": lora}
    trained = recipe(128, 2, dtype, checkpointing=checkpointing, objective={"kind": "distill"}, **fields)
    check_pass(config, trained)
    plain = estimate(config, recipe(128, 2, dtype, checkpointing=checkpointing, **fields), PLAIN, 1)
    assert estimate(config, trained, PLAIN, 1).weights == (2 if lora is None else 1) * plain.weights


@pytest.mark.parametrize("kind", ["condense", "stock"])
def test_weights_that_are_gathered_for_each_use(kind):
    """As under ZeRO-3: no sums in float32, of weights that are most of the peak here, and autograd's loss."""
    shape = {"intermediate_size": 1024}
    config = folded(**shape) if kind == "condense" else LlamaConfig(**SMALL | shape)
    fields = {"segment_length": 32} if kind == "condense" else {}
    check_pass(config, recipe(64, 1, kind=kind, checkpointing=True, **fields), zero_stage=3)


def test_gradients_that_leave_the_pass():
    """Here the gradients of all layers are most of the peak, and one layer's are left."""
    config, trained = LlamaConfig(**SMALL | {"num_hidden_layers": 8}), recipe(8, 1, "float32", kind="stock")
    kept, freed = (
        on_device(pass_memory(config, trained, Pass(1, [8]), "cuda", 0, frees)[1]) for frees in (False, True)
    )
    weights = 4 * sum(shape.numel() for shape in parameter_shapes(config))
    assert kept > weights and freed < 0.4 * kept


def test_memories_that_wait_on_the_host():
    """Keys and values of every layer before each of the groups except the first."""
    config, fields = folded(), {"checkpointing": True, "segment_length": 32, "checkpoint_segments": 2}
    here, there = (recipe(256, 2, offload_memories=where, **fields) for where in (False, True))
    (kept, _), (forward, _) = (pass_memory(config, each, Pass(2, [32] * 8), "cpu") for each in (here, there))
    memories = 3 * 2 * 3 * 2 * 32 * 2 * 16 * 2  # groups, keys and values, layers, rows, tokens, heads, width, bytes
    assert kept[HOST] == 0 and memories <= forward[HOST] <= memories + 40_000  # and rotary tables
    # Those of the last group are in use at the worst moment.
    assert kept["activations"] - forward["activations"] == pytest.approx(2 / 3 * memories, rel=0.05)
    assert estimate(config, there, PLAIN, 1, "cpu").host == forward[HOST]


LONG = {
    "as graphs": ({}, {}, "cuda", 0.01),
    "checkpoints": (
        {"num_hidden_layers": 1, "num_key_value_heads": 4, "head_dim": 128},  # memories are most of it
        {"checkpointing": True, "checkpoint_segments": 4, "schedule": "sequential"}, "cpu", 0.03,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("shape", "fields", "device", "within"), LONG.values(), ids=LONG)
def test_a_long_text_is_extrapolated(shape, fields, device, within, monkeypatch):
    """The last segment is shorter."""
    config, trained = folded(**shape), recipe(32 * 180 - 7, 4, segment_length=32, **fields)
    (a_pass,) = passes(config, trained, 1)
    lengths = [len(segments) for segments in measured._measured_lengths(config, trained, a_pass)]
    assert lengths == [52, 84]
    found = pass_memory(config, trained, a_pass, device)
    monkeypatch.setattr(measured, "_measured_lengths", lambda config, recipe, a_pass: [a_pass.segments])
    for parts, expected in zip(found, pass_memory(config, trained, a_pass, device), strict=True):
        assert on_device(parts) == pytest.approx(on_device(expected), rel=within)


def test_graphs_hold_their_activations_and_the_sums_of_weights():
    """Those of a text of 16 segments. A shape is captured at its second use; without memory for it there are waves."""
    config, trained = folded(num_hidden_layers=4), recipe(512, 2, segment_length=32)
    (forward, _), (waves, _) = (
        pass_memory(config, trained, Pass(2, [32] * 16), "cuda", captures=captures) for captures in (True, False)
    )
    assert waves["captured"] == waves["graphs"] == 0 and forward["activations"] < 0.1 * waves["activations"]
    assert waves["activations"] < forward["captured"] < 2 * waves["activations"]
    sums = 4 * (sum(shape.numel() for shape in parameter_shapes(config)) - 97 * 64 - 64)
    hidden = 2 * 512 * 64 * 2  # in bfloat16: inputs, gradients of the outputs, and what their copies are made of
    buffers = forward["graphs"] - 4 * WORKSPACE  # of three warm-ups and the captures
    assert sums + 2 * hidden <= buffers <= sums + 4 * hidden
    with_graphs, without = (estimate(config, trained, PLAIN, 1, captures=captures) for captures in (True, False))
    assert with_graphs.graphs >= forward["graphs"] + forward["captured"] > without.graphs == 0
    by_name = recipe(512, 2, segment_length=32, schedule="graph")
    assert [estimate(config, by_name, PLAIN, 1, captures=captures) for captures in (True, False)] == [
        with_graphs,
        without,
    ]
    on_cpu = estimate(config, trained, PLAIN, 1, "cpu")
    assert on_cpu.graphs == 0 and on_cpu.activations > 1.1 * without.activations  # kernels keep less
    assert on_cpu.process > 500 * 2**20 and on_cpu.heap > 0 == without.heap


@pytest.mark.parametrize(("segments", "chosen"), [(2, 1), (16, 1), (2048, 8)])
def test_auto_takes_the_group_that_needs_least(segments, chosen):
    """The 1.2 B shape: the 16 MiB of a segment's memories against some 700 MiB of its activations."""
    config = CondenseConfig(**LLAMA_1B, segment_length=512)
    auto = recipe(512 * segments, 1, checkpointing=True, segment_length=512, checkpoint_segments="auto")
    assert with_checkpoint_segments(config, auto, 1).model.checkpoint_segments == chosen
    assert with_checkpoint_segments(config, recipe(64), 1).model.checkpoint_segments == 1


def test_no_group_needs_much_less_than_the_one_of_auto():
    """Gradients, the same for all groups, are not among what is compared."""
    with_groups = partial(recipe, 32 * 16, 2, checkpointing=True, segment_length=32, schedule="sequential")
    chosen = with_checkpoint_segments(folded(), with_groups(checkpoint_segments="auto"), 1).model.checkpoint_segments
    needed = {
        group: max(
            map(on_device, pass_memory(folded(), with_groups(checkpoint_segments=group), Pass(2, [32] * 16), "cpu"))
        )
        for group in (1, 2, 4, 16)
    }
    assert needed[chosen] <= 1.1 * min(needed.values()) < 0.3 * needed[16]


@pytest.mark.parametrize(
    ("rows", "segments", "fields", "chosen"),
    [
        (1, 16, {}, 8),
        (1, 4, {}, 4),
        (8, 16, {}, 1),
        (1, 16, {"schedule": "wavefront"}, 8),
        (1, 16, {"schedule": "sequential"}, 1),
        (1, 16, {"deepspeed": "zero3"}, 1),
        (1, 16, {"lora": {"rank": 4}}, 1),
    ],
)
def test_groups_fill_a_gpu_unless_they_are_set(rows, segments, fields, chosen):
    """4,096 tokens, where a graph can be captured; a model's own default is the same number."""
    config = CondenseConfig(**LLAMA_1B, segment_length=512)
    free = recipe(512 * segments, rows, checkpointing=True, segment_length=512, checkpoint_segments=None, **fields)
    assert with_checkpoint_segments(config, free, 1).model.checkpoint_segments == chosen


def test_parameters_of_llama_3_2_1b():
    assert sum(shape.numel() for shape in parameter_shapes(LlamaConfig(**LLAMA_1B))) == 1_235_814_400
    folded = CondenseConfig(**LLAMA_1B, segment_length=512)
    assert sum(shape.numel() for shape in parameter_shapes(folded)) == 1_235_814_400


def test_zero_2_comes_down_to_the_weights_and_what_is_owned():
    config = CondenseConfig(**LLAMA_1B, segment_length=512)
    trained = recipe(4096, 1, segment_length=512, global_batch=2**14)
    zero = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 50_000_000, "overlap_comm": True}}
    on = {ranks: estimate(config, trained, zero, ranks) for ranks in (1, 8, 4096)}
    assert on[1].weights == on[4096].weights == 2 * 1_235_814_400
    assert on[1].master_weights == 4 * 1_235_814_400 and on[1].moments == 8 * 1_235_814_400
    assert on[8].master_weights == pytest.approx(on[1].master_weights / 8, rel=1e-6)
    assert on[4096].master_weights + on[4096].moments < 0.002 * on[1].weights
    assert on[4096].reduce_buckets == 2 * 2 * 50_000_000
    # Not its 4096th part: a rank that owns any of the embedding gets its whole gradient, here twice, as it accumulates.
    assert on[4096].gradients == pytest.approx(2 * 2 * 128256 * 2048, rel=0.1)


def test_the_curriculums_length_that_needs_most():
    """The longest texts keep most, and checkpoints of the shortest, which have most rows."""
    curriculum = {"steps": 100, "tokens_per_step": 2048, "first_segments": 2, "last_segments": 16}
    model = {"source": "m", "segment_length": 32, "checkpoint_segments": 1}
    fields = {"model": model, "output": "o", "data": {"task": "passkey"}, "curriculum": curriculum}
    recipes = [Recipe(**fields, gradient_checkpointing=checkpointing) for checkpointing in (False, True)]
    parts = [estimate(folded(), each, PLAIN, 2, "cpu") for each in recipes]
    short = estimate(folded(), recipe(64, 16, segment_length=32, checkpointing=True), PLAIN, 1, "cpu")
    long = estimate(folded(), recipe(512, 2, segment_length=32), PLAIN, 1, "cpu")
    assert parts[0].activations == pytest.approx(long.activations, rel=0.1)
    assert parts[1].in_pass == short.in_pass
    with pytest.raises(ValueError, match="allow at least 2560"):
        estimate(folded(), Recipe(**fields), PLAIN, 5)


ENGINE = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6, "num_attention_heads": 8}
ENGINE |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 4000, "tie_word_embeddings": True}
FILES = {name: ROOT / "deepspeed_configs" / f"{name}.json" for name in ("zero1", "zero2", "zero2_offload", "zero3")}


def check_engines(settings, tmp_path, most=1.1):
    """Two ranks of real engines, 5,180,672 parameters: what stays between steps, and the peak of a step.

    What stays within 2 %; the peak is not missed by more than 3 %, and overestimated up to `most`: parts are counted
    as if they met. Of the fuller rank; CPU ranks offload from CPU to CPU.
    """
    succeeded, printed = run_ranks(measure_engines, settings, tmp_path)
    assert succeeded, printed[-5000:]
    measured = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    for number, setting in enumerate(settings):
        parts = estimate(
            CondenseConfig(**ENGINE, segment_length=32), engine_recipe(setting), zero_of(setting), 2, "cpu"
        )
        total = parts.total - parts.process - parts.heap + parts.host
        stays, peak = (max(rank[number][what] for rank in measured) for what in ("stays", "peak"))
        persistent = parts.weights + parts.master_weights + parts.moments + parts.host
        zero = zero_of(setting)["zero_optimization"]
        if zero["stage"] == 3 or "offload_optimizer" in zero:  # whose buffers live between steps
            persistent += parts.gradients
        if zero["stage"] == 3:  # and so do weights below a threshold: here all but the MLPs' and the embedding
            persistent += 2_000_000 * (1 if setting["bf16"] else 2)
        print(
            setting,
            f"stays {stays:,} {persistent / stays - 1:+.1%}",
            f"peak {peak:,} {total / peak - 1:+.1%}",
        )
        assert persistent == pytest.approx(stays, rel=0.02)
        assert 0.97 * peak <= total <= most * peak


def zero_of(setting) -> dict:
    config = json.loads(FILES[setting["config"]].read_text())
    config["zero_optimization"]["reduce_bucket_size"] = 500_000
    return config


def engine_recipe(setting) -> Recipe:
    dtype, rows = ("bfloat16" if setting["bf16"] else "float32"), setting["rows"]
    batch = {"global_batch": 2 * rows * setting["accumulation"]}
    fields = {"segment_length": 32, "schedule": "sequential", **batch}
    return recipe(128, rows, dtype, checkpointing=setting["checkpointing"], **fields)


def engine_settings(configs, dtypes=(True,), accumulations=(1,), rows=4, checkpointing=(False,)):
    return [
        {"config": config, "bf16": bf16, "accumulation": accumulation, "rows": rows, "checkpointing": checkpoints}
        for config in configs
        for bf16 in dtypes
        for accumulation in accumulations
        for checkpoints in checkpointing
    ]


def test_engines_hold_what_is_estimated(tmp_path):
    check_engines(engine_settings(["zero2"]), tmp_path)


@pytest.mark.slow
def test_all_engines_hold_what_is_estimated(tmp_path):
    check_engines(engine_settings(list(FILES), (True, False), (1, 2), 4, (False, True)), tmp_path, most=1.12)


def held() -> int:
    """Bytes of all tensors of this process."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                if tensor is not None and tensor.device.type != "meta":
                    storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def measure_engine(setting) -> dict[str, int]:
    import deepspeed

    trained, config = engine_recipe(setting), zero_of(setting)
    model = CondenseForCausalLM(CondenseConfig(**ENGINE, segment_length=32, schedule="sequential")).train()
    if trained.gradient_checkpointing:
        model._set_gradient_checkpointing(True, partial(checkpoint, use_reentrant=False))
    groups = [[p for p in model.parameters() if (p.dim() > 1) == decays] for decays in (True, False)]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], fused=True)
    config |= {"bf16": {"enabled": setting["bf16"]}, "gradient_accumulation_steps": setting["accumulation"]}
    config |= {"train_micro_batch_size_per_gpu": setting["rows"], "train_batch_size": trained.global_batch}
    config |= {"gradient_clipping": 1.0, "zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
    before = held() - sum(parameter.nbytes for parameter in model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    ids = torch.zeros(setting["rows"], 128, dtype=torch.long)

    def step():
        for _ in range(setting["accumulation"]):
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()

    step()
    del groups, model, optimizer
    stays = held() - before
    known = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    allocations = Held(known)
    del known
    with allocations:
        step()
    engine.destroy()
    return {"stays": stays, "peak": stays + allocations.peak}


def measure_engines(settings, folder: Path) -> None:
    """One rank of engines that measure themselves."""
    distributed.join()
    torch.manual_seed(0)
    figures = [measure_engine(setting) for setting in settings]
    rank = torch.distributed.get_rank()
    (folder / f"rank{rank}.json").write_text(json.dumps(figures))
    distributed.leave()
