"""Folded block diffusion against plain loops: the noisy stream, the bound, and generation block by block."""

from itertools import combinations

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from condense import CondenseForCausalLM, FoldedCache
from condense.labs.autoregressivity.model import (
    BlockDiffusionForCausalLM,
    Corruption,
    likelihood_bound,
    to_block_diffusion,
)
from condense.reference import decoder_layer, linear, rms_norm, rotate, sink_inputs
from tests.condense.models import random_ids, tiny_model
from tests.refusals import assert_refused

SEGMENT = 6


def block_model(block_length, **fields) -> BlockDiffusionForCausalLM:
    model = to_block_diffusion(tiny_model(segment_length=SEGMENT, **fields), block_length).eval()
    with torch.no_grad():
        model.mask_embedding.copy_(torch.randn(24, generator=torch.Generator().manual_seed(9)))
    return model


def random_masks(ids_BN, block_length, seed=1):
    masked_BN = torch.rand(ids_BN.shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    masked_BN[:, torch.arange(ids_BN.shape[1]) % SEGMENT % block_length == 0] = False
    return masked_BN


def reference_noisy_logits(model, ids_N, masked_N, block_length):
    """The logits [N, V] of the noisy stream: every block alone, every query and head alone."""
    config, weights = model.config, model.state_dict()
    embedding, layers = weights["model.embed_tokens.weight"], range(config.num_hidden_layers)
    by_layer = [
        {name.split(f"layers.{n}.")[1]: tensor for name, tensor in weights.items() if f"layers.{n}." in name}
        for n in layers
    ]
    sinks = None if config.sink_token_id is None else sink_inputs(weights, by_layer, config)
    logits, memories = [], [None] * config.num_hidden_layers
    for start in range(0, len(ids_N), SEGMENT):
        positions = torch.arange(max(start - SEGMENT, 0), min(start + SEGMENT, len(ids_N))).double()
        clean, inputs = embedding[ids_N[start : start + SEGMENT]], []
        old_memories, ones = list(memories), torch.ones(len(positions)).double()
        for n in layers:
            inputs.append(clean)
            context = clean if memories[n] is None else torch.cat([memories[n], clean])
            clean = decoder_layer(by_layer[n], config, clean, context, positions, ones)
            memories[n] = inputs[n] + config.memory_share * (clean - inputs[n])
            if sinks:
                memories[n] = torch.cat([sinks[n], memories[n][1:]])
        for first in range(0, len(inputs[0]), block_length):
            block = slice(start + first, start + min(first + block_length, len(inputs[0])))
            x = torch.where(masked_N[block, None], model.mask_embedding.detach(), embedding[ids_N[block]])
            for n in layers:
                before = [inputs[n][:first]] if old_memories[n] is None else [old_memories[n], inputs[n][:first]]
                x = bidirectional_layer(by_layer[n], config, x, torch.cat([*before, x]), positions)
            logits.append(rms_norm(x, weights["model.norm.weight"], config) @ weights["lm_head.weight"].T)
    return torch.cat(logits)


def bidirectional_layer(w, config, x_TD, context_KD, positions):
    num_queries, num_keys = len(x_TD), len(context_KD)
    normed = rms_norm(context_KD, w["input_layernorm.weight"], config)
    q, k, v = (linear(w, f"self_attn.{name}_proj", normed).unflatten(-1, (-1, config.head_dim)) for name in "qkv")
    heads = []
    for head in range(config.num_attention_heads):
        group = head // (config.num_attention_heads // config.num_key_value_heads)
        key = rotate(k[:, group], positions[:num_keys], config)
        query = rotate(q[:, head], positions[:num_keys], config)[-num_queries:]
        heads.append((query @ key.T / config.head_dim**0.5).softmax(-1) @ v[:, group])
    x_TD = x_TD + linear(w, "self_attn.o_proj", torch.cat(heads, dim=-1))
    normed = rms_norm(x_TD, w["post_attention_layernorm.weight"], config)
    gate = F.silu(linear(w, "mlp.gate_proj", normed))
    return x_TD + linear(w, "mlp.down_proj", gate * linear(w, "mlp.up_proj", normed))


@pytest.mark.parametrize("block_length", [1, 2, 3, 6])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("memory", [{}, {"memory_share": 0.3, "sink_token_id": 7}], ids=["output", "sink, share"])
def test_the_noisy_stream_is_every_block_alone(block_length, attention, memory):
    model, ids = block_model(block_length, attn_implementation=attention, **memory), random_ids(2, 17)
    masked = random_masks(ids, block_length)
    logits = model(ids, masked=masked).logits
    for row in range(2):
        expected = reference_noisy_logits(model, ids[row], masked[row], block_length)
        torch.testing.assert_close(logits[row], expected, rtol=0, atol=1e-10)
    if block_length > 1:
        assert not torch.allclose(logits, model(ids, masked=torch.zeros_like(masked)).logits)


def test_a_block_of_one_is_the_autoregressive_model():
    llama, model = tiny_model(segment_length=SEGMENT), block_model(1)
    ids = random_ids(2, 17)
    nothing = torch.zeros_like(ids, dtype=torch.bool)
    torch.testing.assert_close(model(ids, masked=nothing).logits, llama(ids).logits, rtol=0, atol=1e-10)
    bound = likelihood_bound(model, ids, ids).sum(1)
    log_probs = llama(ids).logits[:, :-1].log_softmax(-1)
    torch.testing.assert_close(bound, -log_probs.gather(2, ids[:, 1:, None]).sum((1, 2)), rtol=0, atol=1e-10)
    # ... and so are its gradients.
    (bound.sum() / 32).backward()
    llama(ids, labels=ids).loss.backward()
    for name, parameter in llama.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad, rtol=0, atol=1e-10)


@pytest.mark.parametrize("sink", [None, 7])
def test_a_block_of_one_writes_what_the_autoregressive_model_writes(sink):
    llama, model = tiny_model(segment_length=SEGMENT, sink_token_id=sink), block_model(1, sink_token_id=sink)
    ids = random_ids(3, 8)
    expected = llama.generate(ids, max_new_tokens=15, do_sample=False)
    assert torch.equal(model.generate(ids, max_new_tokens=15, do_sample=False), expected)


def test_the_bound_is_the_mean_over_all_subsets():
    """MDLM's bound, with its time integrated out: for k of n targets the weight n / k, all k and subsets alike."""
    model, ids = block_model(3), random_ids(1, 4)
    expected = 0.0
    for number in (1, 2, 3):
        subsets = list(combinations(range(3), number))
        for hidden in subsets:
            masked = torch.tensor([[False, 0 in hidden, 1 in hidden, False]])
            log_probs = model(ids, masked=masked).logits[0].log_softmax(-1)
            loss = -sum(log_probs[t, ids[0, t + 1]] for t in hidden)
            expected += loss * 3 / number / len(subsets) / 3
    many = ids.expand(4000, -1)
    with torch.no_grad():
        draws = likelihood_bound(model, many, many, torch.Generator().manual_seed(0)).sum(1)
    assert (draws.mean() - expected).abs() < 4 * draws.std() / 4000**0.5


def test_draws_never_hide_what_is_given():
    target = random_ids(500, 17)
    target[:, :2] = target[:, -1] = -100
    drawn = Corruption.draw(target, SEGMENT, 3, torch.Generator().manual_seed(0))
    assert not drawn.masked_BN[:, [0, 3, 6, 9, 12, 15]].any()  # the first token of a block is known
    assert not drawn.masked_BN[:, :3].any() and not drawn.weight_BN[:, [0, 1, 16]].any()
    is_target = (target != -100)[0]
    means, deviations = drawn.weight_BN.mean(0)[is_target], drawn.weight_BN.std(0)[is_target]
    assert ((means - 1).abs() < 4 * deviations / 500**0.5 + 1e-6).all()
    # A masked input is one whose target has a weight, in the token before.
    for t in (4, 5, 7, 8):
        assert torch.equal(drawn.masked_BN[:, t], drawn.weight_BN[:, t - 1] > 0)
    assert set(drawn.weight_BN[:, 3:6].sum(1).round().tolist()) == {3.0}  # n / k, k times
    assert set(drawn.weight_BN[:, :3].sum(1).tolist()) == {1.0}  # the only target of its block
    hidden = (drawn.weight_BN[:, 3:6] > 0).sum(1)
    assert (torch.bincount(hidden, minlength=4)[1:] - 500 / 3).abs().max() < 50  # k is uniform


@pytest.mark.parametrize(("block_length", "steps"), [(3, 1), (3, 2), (3, None), (6, 2), (2, None)])
def test_generation_is_a_plain_loop_over_the_noisy_stream(block_length, steps):
    model, prompt = block_model(block_length), random_ids(2, 8)
    written = model.generate(prompt, max_new_tokens=13, max_denoising_steps=steps, do_sample=False)
    assert written.shape == (2, 21)
    for row in range(2):
        text = prompt[row].tolist()
        while len(text) < 21:
            start = len(text) - 1  # the last known token: the first query of the block
            width = block_length - start % SEGMENT % block_length
            block = [None] * width
            number_of_steps = min(steps or width, width)
            for step in range(number_of_steps):
                ids = torch.tensor([text + [token or 0 for token in block[:-1]]])
                masked = torch.zeros_like(ids, dtype=torch.bool)
                masked[0, start + 1 :] = torch.tensor([token is None for token in block[:-1]], dtype=torch.bool)
                # The whole text through the noisy stream: also the prompt's tokens of the first block.
                logits = model(ids, masked=masked).logits[0, start:].detach()
                best = [(float(logits[i].softmax(-1).max()), i) for i in range(width) if block[i] is None]
                best.sort(reverse=True)
                for _, i in best[: -(-len(best) // (number_of_steps - step))]:
                    block[i] = int(logits[i].argmax())
            text += block
        assert written[row].tolist() == text[:21]


def test_padded_prompts_equal_prompts_alone():
    model = block_model(3)
    long, short = random_ids(1, 8), random_ids(1, 5, seed=4)
    ids = torch.cat([long, F.pad(short, (3, 0))])
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    both = model.generate(ids, attention_mask=mask, max_new_tokens=7, do_sample=False)
    for row, prompt in enumerate((long, short)):
        alone = model.generate(prompt, max_new_tokens=7, do_sample=False)
        assert torch.equal(both[row, 8:], alone[0, prompt.shape[1] :])
    with pytest.raises(ValueError, match="row 1 of the prompts is only padding: leave the row out"):
        model.generate(ids, attention_mask=mask * torch.tensor([[1], [0]]), max_new_tokens=7)


def test_a_text_ends_at_its_last_token_and_is_streamed_by_blocks():
    model, prompt = block_model(3), random_ids(1, 7)
    written = model.generate(prompt, max_new_tokens=12, do_sample=False)[0, 7:]

    class Streamer:
        parts, ended = [], False

        def put(self, ids):
            self.parts.append(ids)

        def end(self):
            self.ended = True

    streamer, end = Streamer(), int(written[4])
    first = written.tolist().index(end)
    ended = model.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=end, streamer=streamer)
    assert ended[0, 7:].tolist() == written[: first + 1].tolist()
    assert torch.equal(torch.cat([part.flatten() for part in streamer.parts]), ended[0]) and streamer.ended
    # The text of 7 tokens ends in the first place of a block: the first block that is written is a whole one.
    assert [len(part.flatten()) for part in streamer.parts[1:-1]] == [3] * (len(streamer.parts) - 2)


def test_a_streamer_takes_one_text():
    """It would end after the first row of a padded batch, and receive the first row of another."""
    model, mask = block_model(3), torch.ones(2, 7, dtype=torch.long)
    for padding in (0, 2):
        mask[1, :padding] = 0
        with pytest.raises(ValueError, match="a streamer takes one text, and the batch has 2"):
            model.generate(random_ids(2, 7), attention_mask=mask, max_new_tokens=3, streamer=object())


def test_sampling_follows_the_distribution():
    model, prompt = block_model(3), random_ids(1, 7)
    torch.manual_seed(0)
    drawn = model.generate(prompt.expand(3000, -1), max_new_tokens=1, do_sample=True, max_denoising_steps=1, top_k=0)
    ids = torch.cat([prompt, torch.zeros(1, 2, dtype=torch.long)], dim=1)
    expected = model(ids, masked=torch.arange(9)[None] > 6).logits[0, 6].softmax(-1)
    share = torch.bincount(drawn[:, -1], minlength=61) / 3000
    assert (share - expected).abs().max() < 4 * 0.5 / 3000**0.5


@pytest.mark.parametrize(("order", "holds"), [(None, True), ("confidence", False)])
def test_sampling_over_several_steps(monkeypatch, order, holds):
    """If tokens are independent, each has its probability; not so if unlikely draws are repeated."""
    model, prompt = block_model(6), random_ids(1, 7)
    logits = torch.zeros(61, dtype=torch.float64)
    logits[7] = 4.0  # with a probability of 0.476
    monkeypatch.setattr(type(model), "look_ahead", lambda self, tokens, *_: logits.expand(*tokens.shape, -1))
    torch.manual_seed(0)
    drawn = model.generate(prompt.expand(500, -1), max_new_tokens=6, do_sample=True, top_k=0, order=order)[:, 7:]
    share, expected = float((drawn == 7).double().mean()), float(logits.softmax(0)[7])
    assert (abs(share - expected) < 4 * (expected * (1 - expected) / 3000) ** 0.5) is holds


def test_rows_end_as_in_transformers():
    """Without a padding token, a text that has ended is filled with its end token; no column is left over."""
    llama, model, ids = tiny_model(segment_length=SEGMENT), block_model(1), random_ids(4, 8)
    written = llama.generate(ids, max_new_tokens=9, do_sample=False)
    for end in {int(written[0, 10]), int(written[1, 9]), int(written[2, 14])}:
        for pad in (None, 0, end):
            for one in (llama, model):
                one.generation_config.pad_token_id = pad
            options = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": end}
            assert torch.equal(model.generate(ids, **options), llama.generate(ids, **options))


def test_the_auto_class_loads_it(tmp_path):
    model, ids = block_model(3).float(), random_ids(1, 9)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    masked = torch.arange(9)[None] % 3 > 0
    assert isinstance(loaded, BlockDiffusionForCausalLM) and loaded.config.block_length == 3
    assert torch.equal(loaded(ids, masked=masked).logits, model(ids, masked=masked).logits)


def test_a_llama_is_no_block_diffusion_model(tmp_path):
    tiny_model(torch.float32, segment_length=32).save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("condense_llama", "llama"))
    with pytest.raises(ValueError, match="lacks mask_embedding"):
        BlockDiffusionForCausalLM.from_pretrained(tmp_path)


def test_refusals():
    model, ids = block_model(3), random_ids(1, 9)
    with pytest.raises(ValueError, match="block_length=4 does not divide segment_length=6: choose a divisor"):
        to_block_diffusion(tiny_model(segment_length=SEGMENT), 4)
    for wrong in (2.0, True, 0):
        with pytest.raises(ValueError, match=f"block_length={wrong!r} does not divide"):
            to_block_diffusion(tiny_model(segment_length=SEGMENT), wrong)
    labels = ids.clone()
    labels[0, 5] = -100
    assert_refused(r"a token without a label \(-100\) follows a labelled token", likelihood_bound, model, ids, labels)
    assert_refused("BlockDiffusionForCausalLM can't be converted", to_block_diffusion, model)
    with pytest.raises(ValueError, match="masked is true at the first token of a block"):
        model(ids, masked=torch.ones_like(ids, dtype=torch.bool))
    assert_refused("labels: the noisy stream only accepts masked", model, ids, masked=ids > 99, labels=ids)
    with pytest.raises(ValueError, match="attn_implementation='flex_attention' does not support block masks"):
        model.set_attn_implementation("flex_attention")
    for options, message in (
        ({"num_beams": 3}, "num_beams=3: generation by blocks does not support it"),
        ({"max_denoising_steps": 0}, "max_denoising_steps=0: pass a whole number of at least 1"),
        ({"max_denoising_steps": 1.5}, "max_denoising_steps=1.5: pass a whole number of at least 1"),
        ({"guidance_scale": 2.0}, "guidance_scale=2.0: generation by blocks does not support it"),
        ({"begin_suppress_tokens": [5]}, r"begin_suppress_tokens=\[5\]: generation by blocks does not support it"),
        ({"order": "left"}, "order='left' is not known: choose one of confidence, random"),
        ({"durations": ids}, "durations: generation by blocks does not accept it"),
        (
            {"past_key_values": FoldedCache(model.config)},
            "(cache|past_key_values): generation by blocks does not accept it",
        ),
        ({"repetition_penalty": 1.3}, "repetition_penalty=1.3: generation by blocks does not support it"),
        ({"min_new_tokens": 2}, "min_new_tokens=2: generation by blocks does not support it"),
    ):
        assert_refused(message, model.generate, ids, max_new_tokens=3, **options)


def test_the_weights_are_those_of_the_folded_model():
    folded = tiny_model(segment_length=SEGMENT)
    model = to_block_diffusion(folded, 3)
    assert isinstance(model, CondenseForCausalLM)
    assert model.lm_head.weight.data_ptr() == folded.lm_head.weight.data_ptr()
    ids = random_ids(1, 9)
    assert torch.equal(model(ids).logits, folded(ids).logits)
    torch.testing.assert_close(model.mask_embedding, folded.model.embed_tokens.weight.mean(0))
