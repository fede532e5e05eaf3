"""Shapes of models, and recipes that train them, which several tests of the planning share."""

from condense.training.recipe import Recipe

SMALL = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 97, "tie_word_embeddings": True}
LLAMA_1B = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
LLAMA_1B |= {"num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "tie_word_embeddings": True}
LLAMA_3B = LLAMA_1B | {"hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24, "head_dim": 128}
PLAIN = {"zero_optimization": {"stage": 0}}


def recipe(total_length, rows=2, dtype="bfloat16", attention="sdpa", checkpointing=False, kind="condense", **fields):
    """A recipe on text; `segment_length` and the other `keys` are those of its model."""
    fields = {"global_batch": rows, "stages": [{"total_length": total_length, "steps": 100}]} | fields
    keys = ("segment_length", "bptt_segments", "schedule", "checkpoint_segments", "offload_memories")
    model = {name: fields.pop(name) for name in keys if name in fields}
    if kind == "condense":
        model.setdefault("checkpoint_segments", 1)
    return Recipe(
        model={"kind": kind, "source": "m", **model},
        output="o",
        data={"task": "text", "sources": [{"files": "x"}], "fit": "cut"},
        micro_batch=rows,
        dtype=dtype,
        attention=attention,
        gradient_checkpointing=checkpointing,
        **fields,
    )
