"""Masks are made once: for a call where they depend on the numbers of keys alone, else for all layers of a chunk."""

import torch

from condense import CondenseConfig, CondenseForCausalLM
from condense.attention.mask import AttentionMask


def made_in(monkeypatch, ids_BN, **options):
    """The masks that a call makes, by the function that makes them."""
    made = {"bias": 0, "visible": 0}
    for name, function in (("bias", "_additive"), ("visible", "_visible")):
        run = getattr(AttentionMask, function)

        def counted(mask, *arguments, name=name, run=run):
            made[name] += 1
            return run(mask, *arguments)

        monkeypatch.setattr(AttentionMask, function, counted)
    torch.manual_seed(0)
    model = CondenseForCausalLM(
        CondenseConfig(vocab_size=50, hidden_size=16, intermediate_size=20, num_hidden_layers=3, num_attention_heads=2,
                       num_key_value_heads=1, segment_length=4, schedule="sequential")
    )  # fmt: skip
    if options.pop("checkpointing", False):
        model.train().gradient_checkpointing_enable({"use_reentrant": False})
    model(ids_BN, use_cache=False, **options)
    monkeypatch.undo()
    return made


def test_once_a_call_a_chunk_or_a_layer(monkeypatch):
    ids_BN = torch.arange(16).reshape(1, 16)
    assert made_in(monkeypatch, ids_BN) == {"bias": 1, "visible": 0}  # all segments with a memory have one mask
    durations_BN = torch.full((1, 16), 0.5)
    assert made_in(monkeypatch, ids_BN, durations=durations_BN) == {"bias": 4, "visible": 0}  # one for each segment
    checkpointed = made_in(monkeypatch, ids_BN, labels=ids_BN, checkpointing=True)
    assert checkpointed == {"bias": 0, "visible": 0}  # boolean ones, a quarter of the size, that are not kept


def test_rows_at_other_offsets(monkeypatch):
    """A cache whose rows are at other places of their segments: one mask serves the layers of a chunk."""
    mask_BN = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1]])
    ids_BN = torch.arange(12).reshape(2, 6)
    torch.manual_seed(0)
    model = CondenseForCausalLM(
        CondenseConfig(vocab_size=50, hidden_size=16, intermediate_size=20, num_hidden_layers=3, num_attention_heads=2,
                       num_key_value_heads=1, segment_length=4)
    )  # fmt: skip
    cache = model(ids_BN, attention_mask=mask_BN, use_cache=True).past_key_values
    made, visible = [], AttentionMask._visible
    monkeypatch.setattr(AttentionMask, "_visible", lambda *arguments: made.append(1) or visible(*arguments))
    model(ids_BN[:, :2], attention_mask=torch.ones(2, 8, dtype=torch.long) * torch.cat([mask_BN, mask_BN[:, -2:]], 1),
          past_key_values=cache)  # fmt: skip
    assert 1 <= len(made) <= 2  # not once a layer
