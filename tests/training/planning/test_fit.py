"""The micro-batch that fills a GPU, the number of ranks, and waves in a plan."""

import pytest
from transformers import LlamaConfig

from condense import CondenseConfig
from condense.training.deepspeed_file import deepspeed_settings
from condense.training.planning.fit import GIB, UNCOUNTED, default_ranks, propose, reasons_without_waves
from condense.training.planning.memory import estimate
from condense.training.recipe import Recipe, load_recipe

from .shapes import LLAMA_1B, LLAMA_3B, PLAIN, SMALL, recipe

# Kernels keep less than plain operations did, for which the recipes were written.
LARGE = {"passkey_pretrain_1b": 8, "passkey_finetune_1b": 2, "summarize_pretrain_3b": 2, "summarize_finetune_a": 4}
LARGE |= {"summarize_finetune_b": 2, "summarize_llama_baseline": 4}


def config_of(large: Recipe) -> LlamaConfig:
    shape = LLAMA_1B if "1b" in str(large.output) else LLAMA_3B
    return CondenseConfig(**shape, segment_length=512) if large.model.has_segments else LlamaConfig(**shape)


@pytest.mark.parametrize("name", LARGE)
def test_large_recipes_have_a_micro_batch_that_fits_into_80_gib_on_8_gpus(name):
    large = load_recipe(name)
    without, _ = propose(config_of(large), large, deepspeed_settings(large), 8, 80)
    assert without["micro_batch"] == LARGE[name] >= large.micro_batch and not large.gradient_checkpointing
    assert set(without["without_waves"].values()) == {None} or not large.model.has_segments


def test_the_largest_that_fits_and_divides():
    """Twelve sequences on two ranks: 6, 3, 2 or 1 each. The proposals are what the estimate of each says."""
    trained = recipe(256, 1, segment_length=32, global_batch=12)
    config = CondenseConfig(**SMALL, segment_length=32)

    def needs(rows, checkpointing):
        tried = recipe(256, rows, segment_length=32, global_batch=12, checkpointing=checkpointing)
        return estimate(config, tried, PLAIN, 2, captures=False).total + UNCOUNTED

    for rows in (6, 3, 2, 1):
        for memory in (needs(rows, False), needs(rows, False) - 1):
            for row in propose(config, trained, PLAIN, 2, memory / GIB):
                checkpointing = row["gradient_checkpointing"]
                fitting = [each for each in (6, 3, 2, 1) if needs(each, checkpointing) <= memory]
                if not fitting:
                    assert "the smallest needs" in row["error"]
                    continue
                assert row["micro_batch"] == fitting[0] and row["needed"] == needs(fitting[0], checkpointing)
                expected = [f"gradient_checkpointing={str(checkpointing).lower()}", f"micro_batch={fitting[0]}"]
                assert row["overrides"] == expected


def test_proposals_keep_to_what_the_recipe_allows():
    packed = Recipe.model_validate(
        recipe(128, 1, segment_length=32, global_batch=4).model_dump()
        | {"data": {"task": "text", "sources": [{"files": "x"}], "fit": "pack"}}
    )
    config = CondenseConfig(**SMALL, segment_length=32)
    assert [row["micro_batch"] for row in propose(config, packed, PLAIN, 1, 80)] == [1, 1]
    curriculum = Recipe(
        model={"source": "m", "segment_length": 32, "offload_memories": True},
        output="o",
        data={"task": "passkey"},
        curriculum={"steps": 100, "tokens_per_step": 2048},
        gradient_checkpointing=True,
    )
    without, checkpointed = propose(config, curriculum, PLAIN, 2, 80)
    assert "model.offload_memories is for gradient checkpointing" in without["error"]
    assert checkpointed["overrides"] == ["gradient_checkpointing=true"] and checkpointed["micro_batch"] is None


def test_ranks_that_a_recipe_divides_by():
    config = LlamaConfig(**SMALL)
    trained = recipe(128, 2, segment_length=32, global_batch=12)
    assert [default_ranks(config, trained, gpus) for gpus in (0, 1, 2, 3, 4, 6, 8)] == [6, 1, 2, 3, 6, 6, 6]
    assert default_ranks(config, recipe(128, 8, segment_length=32, global_batch=64), 16) == 8
    assert default_ranks(config, recipe(128, 3, segment_length=32, global_batch=4), 0) == 1
    curriculum = {"steps": 100, "tokens_per_step": 5120, "last_segments": 16}
    short = Recipe(
        model={"source": "m", "segment_length": 64}, output="o", data={"task": "passkey"}, curriculum=curriculum
    )
    assert default_ranks(config, short, 0) == 5


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, None),
        ({"rows": 16}, "16 rows x 512 tokens of a segment are more than 4,096 tokens"),
        ({"checkpointing": True}, "computes each segment again alone"),
        ({"checkpointing": True, "checkpoint_segments": 8}, None),
        ({"checkpointing": True, "checkpoint_segments": 8, "rows": 16}, "which fill a GPU without a wave"),
        ({"total_length": 600}, "1 segments in 16 layers are too few"),
        ({"schedule": "sequential"}, "model.schedule=sequential"),
        ({"schedule": "wavefront", "checkpointing": True, "checkpoint_segments": "auto"}, None),
        ({"stage": 3}, "ZeRO-3 gathers"),
        ({"kind": "stock"}, "reads a text as a whole"),
    ],
)
def test_why_a_plan_has_no_waves(fields, words):
    fields = {"total_length": 4096, "rows": 8, "stage": 2} | fields
    zero = {"zero_optimization": {"stage": fields.pop("stage")}}
    trained = recipe(**fields, **({} if "kind" in fields else {"segment_length": 512}))
    config = CondenseConfig(**LLAMA_1B, segment_length=512)
    ((length, reason),) = reasons_without_waves(config, trained, zero, 1).items()
    assert length == fields["total_length"] and (reason is None if words is None else words in reason)
