"""A share of the output in the memory: the names of its ends, what it changes, and where it is kept."""

import pytest
import torch

from condense import CondenseConfig, CondenseForCausalLM
from condense.labs.depth.model import convert_to_depth
from condense.state.cache_argument import CACHE

from .models import random_ids, tiny_model

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("schedule", ["sequential", "wavefront"])
@pytest.mark.parametrize(
    ("share", "other"),
    [
        (0.0, {"memory_source": "layer_input"}),
        (0, {"memory_source": "layer_input"}),
        ([0.0, 0.0, 0.0], {"memory_source": "layer_input"}),
        (1.0, {}),
        ([1.0, 1.0, 1.0], {}),
        ([0.2, 0.2, 0.2], {"memory_share": 0.2}),
    ],
    ids=str,
)
@torch.no_grad()
def test_equal_shares_have_the_same_numbers(share, other, schedule):
    ids, both = random_ids(2, 23), ({"memory_share": share}, other)
    model, twin = (tiny_model(torch.float32, schedule=schedule, **fields) for fields in both)
    assert torch.equal(model(ids, use_cache=False).logits, twin(ids, use_cache=False).logits)


@torch.no_grad()
def test_each_share_matters():
    ids, seen = random_ids(1, 23), []
    for share in (0.0, 0.2, 1.0, [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]):
        logits = tiny_model(memory_share=share)(ids, use_cache=False).logits
        assert all((logits - other).abs().max() > 1e-4 for other in seen)
        assert not seen or torch.equal(logits[:, :5], seen[0][:, :5])  # there is no memory yet
        seen.append(logits)


@torch.no_grad()
def test_one_share_above_0_carries_further_than_the_layers():
    """The first token reaches the sixth segment of a model of three layers, unless all shares are 0."""
    ids = random_ids(1, 30)
    changed = ids.clone()
    changed[0, 0] += 1
    for share, reaches in ((0.0, False), ([1.0, 0.0, 0.0], True), ([0.0, 0.0, 0.1], True)):
        model = tiny_model(memory_share=share)
        last = [model(each, use_cache=False).logits[0, -1] for each in (ids, changed)]
        assert bool((last[0] - last[1]).abs().max() > 1e-9) == reaches, share


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize(
    ("field", "said"),
    [
        ({"memory_share": 0.3}, r"layer 0 was made with the memory share 1.0, and .* pass memory_share"),
        ({"memory_share": [1.0, 1.0, 0.0]}, r"layer 2 was made with the memory share 1.0, and .* pass memory_share"),
        ({"memory_source": "layer_input"}, r"layer 0 was made with the memory share 1.0, and .* pass memory_share"),
        ({"memory_share": [1.0, 1.0]}, "one for each of 3 layers"),
        ({"segment_length": 0}, "segment_length=0 is not a number of at least 1"),
        ({"schedule": "other"}, "schedule='other'"),
    ],
    ids=str,
)
def test_what_is_set_after_the_layers_are_made_is_refused_by_calls_and_not_saved(field, said, head, tmp_path):
    """The layers keep their share, and the folder would hold another model."""
    model = tiny_model() if head else tiny_model().model
    vars(model.config).update(field)
    with pytest.raises(ValueError, match=said):
        model(random_ids(1, 7))
    with pytest.raises(ValueError, match=said):
        model.save_pretrained(tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("fields", "others"),
    [
        ({"memory_share": 1}, {"memory_share": [1.0, 1.0, 1.0]}),
        ({"memory_share": 0.2}, {"memory_share": [0.2, 0.2, 0.2]}),
        ({"memory_source": "layer_input"}, {"memory_share": 0}),
    ],
    ids=str,
)
@torch.no_grad()
def test_equal_shares_continue_each_others_caches(fields, others):
    ids, model, twin = random_ids(2, 23), tiny_model(**fields), tiny_model(**others)
    first = model(ids[:, :12])
    found = twin(ids[:, 12:], cache=first[CACHE]).logits
    torch.testing.assert_close(found, model(ids, use_cache=False).logits[:, 12:], atol=1e-10, rtol=0)
    with pytest.raises(ValueError, match=r"made for memory_shares=.* and the model has \(0.5, 0.5, 0.5\)"):
        tiny_model(memory_share=0.5)(ids[:, 12:], cache=first[CACHE])


def test_it_is_saved_and_loaded(tmp_path):
    tiny_model(torch.float32, memory_share=[1, 0, 0.3]).save_pretrained(tmp_path)
    loaded = CondenseForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.memory_shares == (1.0, 0.0, 0.3)
    assert [layer.memory_share.share for layer in loaded.model.layers] == [1.0, 0.0, 0.3]
    assert "a = 1, 0, 0.3" in (tmp_path / "README.md").read_text()
    other = CondenseForCausalLM.from_pretrained(tmp_path, memory_share=0.5)
    assert "changed in memory" in other.config.name_or_path
    with pytest.raises(ValueError, match="pass memory_source='layer_output' to use the share"):
        CondenseForCausalLM.from_pretrained(tmp_path, memory_source="layer_input")


def test_shares_follow_the_layers_that_a_block_replaces():
    model = tiny_model(num_hidden_layers=4, memory_share=[1.0, 0.2, 0.2, 0.0])
    with pytest.raises(ValueError, match=r"memory shares 0.2, 1.0, and a block has one"):
        convert_to_depth(model, 0, 2, field="mlp")
    convert_to_depth(model, 1, 3, field="layer")
    assert model.config.memory_share == [1.0, 0.2, 0.0]
    members = [getattr(layer, "field", layer) for layer in model.model.layers]
    assert [member.memory_share.share for member in members] == [1.0, 0.2, 0.0]
    CondenseConfig(**model.config.to_dict())
