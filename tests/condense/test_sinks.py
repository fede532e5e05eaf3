"""A sink in place of the memory's first row; `MEMORIES` has models with one, for the tests of every way to run."""

import pytest
import torch

from condense import CondenseForCausalLM, FoldedCache, to_stock
from condense.labs.depth.model.initialization import layer_states
from condense.reference import reference_loss

from .models import (
    assert_same_gradients,
    expected_logits,
    gradients,
    gradients_of,
    in_float64,
    logits_in_parts,
    random_adapters,
    random_durations,
    random_ids,
    reference_gradients,
    tiny_config,
    tiny_model,
    torch_checkpoint,
    weights,
)

pytestmark = pytest.mark.unit

SINK = {"sink_token_id": 7}


@torch.no_grad()
def test_a_text_of_one_segment_does_not_see_it():
    ids = random_ids(2, 5)
    assert torch.equal(tiny_model(**SINK)(ids).logits, tiny_model()(ids).logits)
    stock = in_float64(to_stock(tiny_model(**SINK)))
    torch.testing.assert_close(tiny_model(**SINK)(ids).logits, stock(ids).logits, atol=1e-10, rtol=0)


@torch.no_grad()
def test_a_text_that_begins_with_it_sees_it_unless_the_memory_shows_the_rest():
    """With the share 0 the first row of the second segment's memory is the input of the text's first token."""
    ids = random_ids(1, 10)
    ids[0, 0] = 7
    with_sink, without = (tiny_model(memory_source="layer_input", **fields) for fields in (SINK, {}))
    torch.testing.assert_close(with_sink(ids).logits, without(ids).logits, atol=1e-10, rtol=0)
    other = random_ids(1, 10, seed=1)
    assert (with_sink(other).logits - without(other).logits).abs().max() > 1e-2


@pytest.mark.parametrize("anchor", ["end", "start"])
@torch.no_grad()
def test_it_has_one_unit_of_time(anchor):
    model, ids, durations = tiny_model(position_anchor=anchor, **SINK), random_ids(2, 23), random_durations(2, 23)
    durations[:, 5] = 0  # of a token in whose place it stands
    logits = model(ids, durations=durations).logits
    torch.testing.assert_close(logits, expected_logits(model, ids, durations), atol=1e-10, rtol=0)
    assert torch.equal(model(ids, durations=torch.ones(2, 23)).logits, model(ids).logits)
    in_parts, _ = logits_in_parts(model, ids, [3, 9, 11], durations)
    torch.testing.assert_close(in_parts, logits, atol=1e-10, rtol=0)


def test_noise_on_embeddings_leaves_it_alone():
    """As NEFTune's, whose hook asks for the training mode."""
    model, ids = tiny_model(**SINK).train(), random_ids(1, 13)
    seen = []
    model.model.embed_tokens.register_forward_hook(lambda module, given, out: seen.append((module.training, out.shape)))
    model(ids)
    assert sorted(seen, key=str) == [(False, (1, 1, 24)), (True, (1, 13, 24))]
    assert model.model.embed_tokens.training


@pytest.mark.parametrize("span", [1, 2])
@pytest.mark.parametrize("memory", [{}, {"memory_share": [1.0, 0.0, 0.3]}], ids=str)
def test_it_learns_under_truncated_gradients(memory, span):
    """The memory is detached, the sink is not: the embedding of its token has a gradient in a text without it."""
    model, ids = tiny_model(bptt_segments=span, **memory, **SINK), random_ids(1, 23)
    ids[ids == 7] = 8
    found = gradients(model, ids)
    assert_same_gradients(found, reference_gradients(model, ids, detach_after=span), 1e-10)
    assert found[1]["model.embed_tokens.weight"][7].abs().max() > 1e-6


def test_it_learns_in_calls_that_keep_their_gradients():
    """Each call that begins a memory computes it again; the gradients of all of them are those of one call."""
    model, ids = tiny_model(memory_share=0.3, **SINK), random_ids(2, 23)
    expected = reference_gradients(model, ids)
    logits, _ = logits_in_parts(model, ids, [3, 1, 8, 11])
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    assert_same_gradients((loss.detach(), gradients_of(model)), expected, 1e-10)


def test_adapters_learn_from_it():
    """LoRA on the embedding and on linear maps: gradients of A and B through W + s B A in the equations."""
    peft = pytest.importorskip("peft")
    model, ids = tiny_model(memory_share=0.3, **SINK), random_ids(2, 18)
    ids[ids == 7] = 8
    own = weights(model)
    options = {"r": 2, "lora_alpha": 6, "target_modules": ["embed_tokens", "q_proj", "v_proj", "down_proj"]}
    adapted = random_adapters(peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **options)))
    adapted.double().train()
    adapted(ids, labels=ids).loss.backward()
    trained = {name: parameter for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    leaves = {name: parameter.detach().clone().requires_grad_() for name, parameter in trained.items()}
    for name in own:
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if (b := leaves.get(f"{module}.lora_B.default.weight")) is not None:
            own[name] = own[name] + 3 * b @ leaves[f"{module}.lora_A.default.weight"]
        elif (b := leaves.get(f"{module}.lora_embedding_B.default")) is not None:
            own[name] = own[name] + 3 * (b @ leaves[f"{module}.lora_embedding_A.default"]).T
    (sum(reference_loss(own, model.config, row) for row in ids) / 2).backward()
    found, expected = ({name: one.grad for name, one in named.items()} for named in (trained, leaves))
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)
    (of_tokens,) = (one for name, one in found.items() if "lora_embedding_A" in name)
    assert of_tokens[:, 7].abs().max() > 1e-6


@pytest.mark.parametrize("segments", [1, 2, 8])
def test_checkpoints_compute_it_once(segments):
    model, ids = tiny_model(**SINK).train(), random_ids(2, 33)
    expected = gradients(model, ids)
    model._set_gradient_checkpointing(True, torch_checkpoint(checkpoint_segments=segments))
    assert_same_gradients(gradients(model, ids), expected, 1e-12)


@torch.no_grad()
def test_hidden_states_are_those_of_the_text():
    model, ids = tiny_model(**SINK), random_ids(2, 13)
    output = model(ids, output_hidden_states=True)
    assert [tuple(hidden.shape) for hidden in output.hidden_states] == [(2, 13, 24)] * 4
    assert torch.equal(output.hidden_states[0], model.model.embed_tokens(ids))
    assert torch.equal(model.lm_head(output.hidden_states[-1]), model(ids, use_cache=False).logits)
    states = layer_states(model, ids, 0, 3)
    by_segment = torch.cat([part.flatten(0, 1) for part in output.hidden_states[1].split(5, dim=1)])
    torch.testing.assert_close(states[1], by_segment)


@torch.no_grad()
def test_caches_of_another_sink_are_refused():
    model, other = tiny_model(**SINK), tiny_model(sink_token_id=8)
    cache = FoldedCache(model.config)
    model(random_ids(1, 7), cache=cache)
    with pytest.raises(ValueError, match="the cache was made for sink_token_id=7 and the model has 8"):
        other(random_ids(1, 3), cache=cache)


@pytest.mark.parametrize("wrong", [-1, 61, 1.0, True, "7"])
def test_wrong_tokens_are_refused(wrong):
    with pytest.raises(ValueError, match=r"sink_token_id=.* is not a token of a vocabulary of 61: pass"):
        tiny_config(sink_token_id=wrong)


@torch.no_grad()
def test_without_its_embedding_it_is_refused():
    """Of the whole model, or of the token."""
    model, ids = tiny_model(sink_token_id=60), random_ids(1, 13) % 50
    embeddings = model.model.embed_tokens(ids)
    model.resize_token_embeddings(50)
    with pytest.raises(ValueError, match="sink_token_id=60 is not a token of a vocabulary of 50"):
        model(ids)
    base = tiny_model(**SINK).model
    del base.embed_tokens
    with pytest.raises(ValueError, match="sink_token_id=7 and the model has no embedding for it: keep embed_tokens"):
        base(inputs_embeds=embeddings)
    base.config.sink_token_id = None
    assert base(inputs_embeds=embeddings).last_hidden_state.shape == (1, 13, 24)


def test_it_is_saved_and_loaded(tmp_path):
    tiny_model(torch.float32, **SINK).save_pretrained(tmp_path)
    assert CondenseForCausalLM.from_pretrained(tmp_path).config.sink_token_id == 7
    assert CondenseForCausalLM.from_pretrained(tmp_path, sink_token_id=3).config.sink_token_id == 3
