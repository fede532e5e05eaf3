"""The base model and its hidden states, as other libraries ask a causal language model of transformers for them."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModel, LlamaForCausalLM

from condense import CondenseModel

from ..refusals import assert_refused
from .models import in_float64, padded_batch, random_ids, tiny_model

pytestmark = pytest.mark.usefixtures("no_grad")


def test_hidden_states_are_those_of_a_stock_llama_within_a_segment():
    folded = tiny_model(segment_length=16).eval()
    stock = LlamaForCausalLM(folded.config).to(torch.float64).eval()
    stock.load_state_dict(folded.state_dict())
    ids = random_ids(2, 16)
    ours, theirs = (model(ids, output_hidden_states=True).hidden_states for model in (folded, in_float64(stock)))
    assert len(ours) == len(theirs) == folded.config.num_hidden_layers + 1
    torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=0)


def test_hidden_states_of_several_segments():
    """They equal those of the same text in several calls, and each layer's module maps one to the next."""
    model, ids = tiny_model().eval(), random_ids(2, 23)
    output = model(ids, output_hidden_states=True, use_cache=True)
    assert torch.equal(model.lm_head(output.hidden_states[-1]), output.logits)
    assert torch.equal(output.hidden_states[0], model.model.embed_tokens(ids))
    cache, parts = None, []
    for part in ids.split([3, 9, 11], dim=1):
        read = model(part, past_key_values=cache, output_hidden_states=True, use_cache=True)
        cache = read.past_key_values
        parts.append(read.hidden_states)
    joined = tuple(torch.cat(pieces, dim=1) for pieces in zip(*parts, strict=True))
    torch.testing.assert_close(joined, output.hidden_states, atol=1e-12, rtol=0)


def test_hidden_states_of_padded_rows_are_those_of_rows_alone():
    model = tiny_model().eval()
    _, ids, mask = padded_batch([7, 18, 12], side="left")
    hidden = model(ids, attention_mask=mask, output_hidden_states=True).hidden_states
    for row, real in enumerate(mask.bool()):
        alone = model(ids[row, real][None], output_hidden_states=True).hidden_states
        torch.testing.assert_close([one[row, real][None] for one in hidden], list(alone), atol=1e-12, rtol=0)


@torch.enable_grad()
def test_hidden_states_have_gradients_and_need_the_sequential_order():
    model, ids = tiny_model(schedule="auto").train(), random_ids(1, 60)
    model(ids, output_hidden_states=True).hidden_states[1].sum().backward()
    assert model.model.layers[0].mlp.up_proj.weight.grad is not None
    assert model.model.layers[1].mlp.up_proj.weight.grad is None  # the control
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_refused("with gradient checkpointing", model, ids, output_hidden_states=True)
    assert_refused("schedule='wavefront'", tiny_model(schedule="wavefront"), ids, output_hidden_states=True)
    assert not model.model.layers[0]._forward_pre_hooks


@pytest.mark.parametrize("drafts", [{}, {"assistant_early_exit": 1}, {"prompt_lookup_num_tokens": 2}], ids=str)
def test_generate_returns_hidden_states(drafts):
    """Of all layers, also if drafts come from the first ones."""
    model, ids = tiny_model().eval(), random_ids(1, 8)
    options = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    output = model.generate(ids, output_hidden_states=True, **options, **drafts)
    expected = model(output.sequences[:, :-1], output_hidden_states=True).hidden_states
    found = [torch.cat(parts, dim=1) for parts in zip(*output.hidden_states, strict=True)]
    torch.testing.assert_close(found, list(expected), atol=1e-10, rtol=0)


def test_an_early_exit_returns_the_hidden_states_of_its_layers():
    model, ids = tiny_model().eval(), random_ids(2, 13)
    every = model(ids, output_hidden_states=True).hidden_states
    model.config.num_hidden_layers = 2  # as transformers does for drafts
    found = model(ids, output_hidden_states=True).hidden_states
    torch.testing.assert_close(found, (*every[:2], model.model.norm(every[2])), atol=1e-10, rtol=0)


def test_auto_model_is_the_base_of_the_checkpoint(tmp_path):
    model, ids = tiny_model(torch.float32).eval(), random_ids(2, 23)
    model.save_pretrained(tmp_path / "causal")
    base = AutoModel.from_pretrained(tmp_path / "causal").eval()
    assert type(base) is CondenseModel
    assert torch.equal(model.lm_head(base(ids).last_hidden_state), model(ids).logits)
    rest = base(ids[:, 9:], past_key_values=base(ids[:, :9], use_cache=True).past_key_values).last_hidden_state
    torch.testing.assert_close(rest, base(ids).last_hidden_state[:, 9:], atol=1e-5, rtol=1e-5)
    base.save_pretrained(tmp_path / "base")
    again = AutoModel.from_pretrained(tmp_path / "base")
    assert torch.equal(again(ids).last_hidden_state, base(ids).last_hidden_state)
    position_ids = torch.cat([torch.arange(10), torch.arange(13)])[None]
    packed = base(ids, position_ids=position_ids).last_hidden_state
    alone = torch.cat([base(ids[:, :10]).last_hidden_state, base(ids[:, 10:]).last_hidden_state], dim=1)
    torch.testing.assert_close(packed, alone, atol=1e-5, rtol=1e-5)


def test_hidden_states_of_calls_in_several_threads():
    model = tiny_model().eval()
    texts = [random_ids(1, 7 + 8 * number, seed=number) for number in range(4)]
    expected = [model(ids, output_hidden_states=True).hidden_states for ids in texts]
    barrier = threading.Barrier(4)

    def read(ids):
        barrier.wait()
        with torch.no_grad():
            return model(ids, output_hidden_states=True).hidden_states

    with ThreadPoolExecutor(4) as pool:
        torch.testing.assert_close(list(pool.map(read, texts)), expected, atol=1e-12, rtol=0)


def test_embeddings_are_read_without_an_embedding():
    """As by PEFT's Shadow, whose copy of the model has none."""
    model, ids = tiny_model().model, random_ids(2, 17)
    expected, embeddings = model(ids).last_hidden_state, model.embed_tokens(ids)
    del model.embed_tokens
    torch.testing.assert_close(model(inputs_embeds=embeddings).last_hidden_state, expected)


def test_the_configuration_asks_for_hidden_states_too():
    model, ids = tiny_model(torch.float32, output_hidden_states=True).eval(), random_ids(1, 8)
    model.fixed_decoding = True
    first = model(ids, use_cache=True)
    second = model(ids[:, :1], past_key_values=first.past_key_values)
    assert len(first.hidden_states) == len(second.hidden_states) == 4
    assert model(ids, output_hidden_states=False).hidden_states is None


def test_hooks_of_the_base_model_are_called():
    """FSDP's hooks gather the weights that the base model itself holds."""
    model, called = tiny_model(), []
    model.model.register_forward_pre_hook(lambda *_: called.append("before"))
    model.model.register_forward_hook(lambda *_: called.append("after"))
    model(random_ids(1, 8))
    assert called == ["before", "after"]


@pytest.mark.usefixtures("group_of_one")
@torch.enable_grad()
def test_the_base_model_is_sharded_on_its_own():
    mesh, ids = init_device_mesh("cpu", (1,)), random_ids(2, 23)
    model = tiny_model(torch.float32)
    expected = model(ids, labels=ids).loss
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model.model, mesh=mesh, reshard_after_forward=True)
    loss = model(ids, labels=ids).loss
    loss.backward()
    torch.testing.assert_close(loss, expected)
    assert model.model.embed_tokens.weight.grad is not None
    embeddings = model.model.embed_tokens.weight.full_tensor().detach()[ids].requires_grad_()
    loss = model(inputs_embeds=embeddings, labels=ids).loss
    loss.backward()
    torch.testing.assert_close(loss, expected)
    assert embeddings.grad.abs().sum() > 0
    model.lm_head.register_forward_hook(lambda *_: None)  # its logits are computed again
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    assert model.model.embed_tokens.weight.grad is not None
