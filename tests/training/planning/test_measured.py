"""The plan against stored measurements of GPUs and of a CPU."""

import pytest

from condense import CondenseConfig
from condense.ops.kernels.availability import has_triton
from condense.training.planning.memory import estimate
from scripts.benchmarks.gpu_memory import FOLDED_FILES, STOCK_FILES, planned_bytes, training_steps

from .shapes import recipe

pytestmark = pytest.mark.process

needs_triton = pytest.mark.skipif(not has_triton(), reason="without Triton plain operations are planned")
FOLDED = [(file, point) for file in FOLDED_FILES for point in training_steps(file)]
# A step of an earlier version: 512 MiB of logits at a time, where now there are up to 1 GiB.
FEWER_LOGITS = ("step, Table I, 1 x 4,096", "wavefront")


def has_leftovers(file, point):
    """Whether a process of small steps reserves more for earlier ones than a tenth: two processes differ by 1 GiB."""
    return "peak_bytes" not in point and point["hidden_size"] == 512 and "second" not in file


@pytest.mark.parametrize("file", STOCK_FILES)
def test_steps_of_stock_models(file):
    """Eager attention and gradient checkpointing included."""
    for point in training_steps(file):
        assert planned_bytes(point)[0] == pytest.approx(point["peak_bytes"], rel=0.01), point["row"]


@needs_triton
@pytest.mark.parametrize(
    ("file", "point"),
    [
        pytest.param(file, point, id=f"{file}, {point['row']}, {point['schedule']}")
        for file, point in FOLDED
        if not has_leftovers(file, point)
    ],
)
def test_steps_of_folded_models(file, point):
    """As waves the peak of the allocator, and as graphs what it has reserved."""
    within = 0.12 if (point["row"], point["schedule"]) == FEWER_LOGITS else 0.1
    assert planned_bytes(point)[0] == pytest.approx(point.get("peak_bytes") or point["reserved_bytes"], rel=within)


SMOLLM2 = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
SMOLLM2 |= {"num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152, "tie_word_embeddings": True}
RESIDENT = 9_900_945_408  # most bytes of a rank in ten steps, OMP_NUM_THREADS=2


def test_what_a_training_held_on_a_cpu():
    """SmolLM2-135M by distillation from itself, all weights, with AdamW under ZeRO-2 on two ranks."""
    config = CondenseConfig(**SMOLLM2, segment_length=256, memory_share=0.2, sink_token_id=1)
    trained = recipe(2048, 1, "float32", "auto", global_batch=2, segment_length=256, objective={"kind": "distill"})
    zero = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 5_000_000}}
    assert estimate(config, trained, zero, 2, "cpu").total == pytest.approx(RESIDENT, rel=0.1)
