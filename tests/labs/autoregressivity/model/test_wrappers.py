"""k heads and k models around a folded and a stock base, against loops that read the whole text for each prediction."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, DynamicCache, GraniteConfig, GraniteForCausalLM

from condense import to_stock
from condense.hub.loading import load_model
from condense.labs.autoregressivity.model import LateCache, MultiTokenForCausalLM, PositionExpertsForCausalLM
from condense.labs.autoregressivity.model.wrapper import positions_of, real_tokens
from tests.condense.models import padded_batch, random_ids, tiny_model
from tests.conftest import ROOT

pytestmark = pytest.mark.process

KINDS = ("heads", "interval", "modulo")
BASES = ("folded", "stock")
LENGTH = 12  # of the texts whose positions are divided; generation goes beyond it


def make_base(base):
    folded = tiny_model(segment_length=5, tie_word_embeddings=base == "stock")
    return folded if base == "folded" else to_stock(folded)


def make_model(base, kind, k=3):
    """Heads and experts that differ, as after training."""
    base = make_base(base)
    if kind == "heads":
        model = MultiTokenForCausalLM.from_base(base, k)
        changed = model.heads
    else:
        model = PositionExpertsForCausalLM.from_base(base, k, kind, LENGTH if kind == "interval" else None)
        changed = model.experts[1:]
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def models():
    return {(base, kind): make_model(base, kind) for base in BASES for kind in KINDS}


def naive_logits(model, text_N, first=0) -> torch.Tensor:
    """Returns logits after columns `first`, ..., without cache and mask: [n, k, V] for heads, [n, 1, V] for experts."""
    if isinstance(model, MultiTokenForCausalLM):
        hidden_ND = model.base.model(text_N[None], use_cache=False).last_hidden_state[0]
        weights = [model.base.lm_head.weight, *(head.weight for head in model.heads)]
        return torch.stack([hidden_ND[first:] @ weight.T for weight in weights], dim=1)
    owners = [owner(model, t) for t in range(first, len(text_N))]
    logits = {n: model.experts[n](text_N[None], use_cache=False, logits_to_keep=0).logits[0] for n in set(owners)}
    return torch.stack([logits[n][first + t] for t, n in enumerate(owners)])[:, None]


def owner(model, position):
    k = len(model.experts)
    return position % k if model.config.split == "modulo" else min(position * k // LENGTH, k - 1)


def naive_text(model, prompt_N, num_tokens, choose) -> list[int]:
    """Writes by reading the whole text again for each step."""
    text_N = prompt_N
    while len(text_N) < len(prompt_N) + num_tokens:
        for logits_V in naive_logits(model, text_N, len(text_N) - 1)[0]:
            text_N = torch.cat([text_N, choose(logits_V)[None]])
    return text_N[len(prompt_N) : len(prompt_N) + num_tokens].tolist()


def naive_losses(model, text_N, supervised="all_heads") -> list[float]:
    losses = []
    for t, logits_kV in enumerate(naive_logits(model, text_N)):
        for head, logits_V in enumerate(logits_kV):
            counts = {"all_heads": True, "first_head": head == 0, "as_generated": t % len(logits_kV) == 0}
            if t + 1 + head < len(text_N) and counts[supervised]:
                losses.append(F.cross_entropy(logits_V, text_N[t + 1 + head]).item())
    return losses


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("base", BASES)
@torch.no_grad()
def test_generate_writes_as_a_loop_without_cache(models, base, kind):
    """Greedily in a padded batch, whose rows have other owners in the same column; sampled; with a streamer."""
    model = models[base, kind]
    rows, ids, mask = padded_batch([3, 7, 4], "left")
    written = model.generate(ids, attention_mask=mask, max_new_tokens=11, do_sample=False)[:, ids.shape[1] :]
    assert written.tolist() == [naive_text(model, row, 11, torch.argmax) for row in rows]

    torch.manual_seed(3)
    expected = naive_text(model, rows[1], 8, lambda logits: (logits.float() / 0.7).softmax(-1).multinomial(1)[0])
    torch.manual_seed(3)
    sampled = model.generate(rows[1][None], max_new_tokens=8, do_sample=True, temperature=0.7, top_k=0)
    assert sampled[0, len(rows[1]) :].tolist() == expected != written[1, :8].tolist()


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_a_stored_setting_of_other_caches_has_no_effect(kind):
    model, ids = make_model("folded", kind), random_ids(1, 4)
    expected = model.generate(ids, max_new_tokens=5, do_sample=False)
    model.generation_config.use_cache, model.generation_config.cache_implementation = False, "static"
    assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), expected)


def test_a_text_ends_at_its_end_token_and_the_others_go_on(models):
    model = models["folded", "heads"]
    rows, ids, mask = padded_batch([3, 7], "left")
    free = [naive_text(model, row, 9, torch.argmax) for row in rows]
    # Within a step of 3 tokens, whose last one is then not written.
    at, end = next((n, token) for n, token in enumerate(free[0]) if n % 3 == 1 and token not in free[0][:n] + free[1])
    streamed = []

    class Streamer:
        put = staticmethod(lambda tokens: streamed.append(tokens.tolist()))
        end = staticmethod(lambda: None)

    written = model.generate(
        ids, attention_mask=mask, max_new_tokens=9, do_sample=False, eos_token_id=end, pad_token_id=0, streamer=Streamer
    )[:, 7:]
    assert written.tolist() == [free[0][: at + 1] + [0] * (8 - at), free[1]]
    assert torch.tensor(streamed[1:]).T.tolist() == written.tolist()
    alone = model.generate(rows[0][None], max_new_tokens=9, do_sample=False, eos_token_id=end, pad_token_id=0)
    assert alone[0, 3:].tolist() == free[0][: at + 1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("base", BASES)
@torch.no_grad()
def test_a_cache_continues_where_generation_ended(models, base, kind):
    """Alone, as without the stop, also within a step; after further text, as after one prompt."""
    model, ids = models[base, kind], random_ids(1, 4)
    first = model.generate(ids, max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
    cache = first.past_key_values
    written = model.generate(first.sequences, past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert written[0, 4:].tolist() == naive_text(model, ids[0], 9, torch.argmax)
    longer = torch.cat([written, random_ids(1, 3, seed=5)], dim=1)
    after = model.generate(longer, past_key_values=cache, max_new_tokens=4, do_sample=False)
    assert after[0, longer.shape[1] :].tolist() == naive_text(model, longer[0], 4, torch.argmax)


@torch.no_grad()
def test_the_base_of_k_heads_runs_once_in_k_tokens(models):
    model, calls = models["folded", "heads"], []
    handle = model.base.model.register_forward_hook(lambda *arguments: calls.append(1))
    model.generate(random_ids(1, 4), max_new_tokens=9, do_sample=False)
    handle.remove()
    assert len(calls) == 3


@torch.no_grad()
def test_an_expert_reads_only_when_its_turn_comes(models):
    model, calls = models["folded", "interval"], []
    handles = [
        expert.model.register_forward_hook(
            lambda _, __, options, ___, n=n: calls.append((n, options["input_ids"].shape[1])), with_kwargs=True
        )
        for n, expert in enumerate(model.experts)
    ]
    model.generate(random_ids(1, 3), max_new_tokens=8, do_sample=False)
    for handle in handles:
        handle.remove()
    assert calls == [(0, 3), (0, 1), (1, 5), (1, 1), (1, 1), (1, 1), (2, 9), (2, 1)]


def test_a_mask_on_the_host_counts_tokens_on_their_device():
    _, ids, mask = padded_batch([3, 7, 4], "left")
    assert real_tokens(ids.to("meta"), mask).is_meta and positions_of(ids.to("meta"), mask).is_meta


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("base", BASES)
@torch.no_grad()
def test_the_loss_is_the_mean_over_all_predictions(models, base, kind):
    model = models[base, kind]
    for side in ("left", "right"):
        rows, ids, mask = padded_batch([4, 12, 9], side)
        labels = ids.masked_fill(mask == 0, -100)
        for supervised in ("all_heads", "first_head", "as_generated") if kind == "heads" else ("all_heads",):
            options = {"supervised": supervised} if kind == "heads" else {}
            output = model(ids, attention_mask=mask, labels=labels, **options)
            expected = [loss for row in rows for loss in naive_losses(model, row, supervised)]
            assert output.loss.item() == pytest.approx(sum(expected) / len(expected), rel=1e-6)
            assert output.segment_targets.sum() == len(expected)
            assert output.segment_losses.sum().item() == pytest.approx(sum(expected), rel=1e-5)
            assert len(output.segment_targets) == (3 if base == "folded" else 1)
            whole = model(ids, attention_mask=mask, labels=labels, num_items_in_batch=7, **options).loss
            assert whole.item() == pytest.approx(sum(expected) / 7, rel=1e-6)


@torch.no_grad()
def test_segments_have_the_losses_of_the_predictions_in_them(models):
    model, ids = models["folded", "modulo"], random_ids(1, 12)
    losses = naive_losses(model, ids[0])
    output = model(ids, labels=ids)
    assert output.segment_targets.tolist() == [5, 5, 1]
    assert output.segment_losses.tolist() == pytest.approx([sum(losses[:5]), sum(losses[5:10]), losses[10]], rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_logits_are_those_of_each_position(models, kind):
    model, ids = models["folded", kind], random_ids(1, 12)
    expected = naive_logits(model, ids[0])
    torch.testing.assert_close(model(ids).logits[0], expected[:, 0])
    torch.testing.assert_close(model(ids, logits_to_keep=2).logits[0], expected[-2:, 0])
    if kind == "heads":
        torch.testing.assert_close(model(ids, future_logits=True).future_logits[0], expected[:, 1:])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("base", BASES)
def test_gradient_checkpointing_gives_the_same_gradients(models, base, kind):
    model, ids, replays = models[base, kind].train(), random_ids(2, 12), []
    model(ids, labels=ids).loss.backward()
    plain = [parameter.grad.clone() for parameter in model.parameters()]
    assert all(grad.abs().max() > 0 for grad in plain)
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    layers = [each.model.layers[0] for each in model.bases]
    counted = layers if base == "folded" else [layer.self_attn for layer in layers]
    calls = [module.register_forward_pre_hook(lambda *_: replays.append(1)) for module in counted]
    loss = model(ids, labels=ids).loss
    once = len(replays)
    loss.backward()
    assert len(replays) == 2 * once > 0
    for call in calls:
        call.remove()
    assert "call eval()" in refusal(model.generate, ids, max_new_tokens=2)
    model.gradient_checkpointing_disable()
    for parameter, grad in zip(model.parameters(), plain, strict=True):
        torch.testing.assert_close(parameter.grad, grad)
    model.zero_grad(set_to_none=True)
    model.eval()


@pytest.mark.parametrize("kind", KINDS)
def test_all_parameters_have_a_gradient_in_a_short_text(models, kind):
    """Ranks add their gradients: a rank whose texts are short must not lack any."""
    model, ids = models["folded", kind], random_ids(1, 2)
    model(ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.zero_grad(set_to_none=True)


def test_models_start_from_the_weights_of_the_base():
    base, ids = make_base("stock"), random_ids(1, 12)
    heads = MultiTokenForCausalLM.from_base(base, 3)
    assert heads.config.base is base.config  # what a run changes and restores in one is so in the other
    output = heads(ids, future_logits=True)
    torch.testing.assert_close(output.logits, base(ids).logits)
    assert output.future_logits.shape == (1, 12, 2, 61) and not output.future_logits.any()
    experts = PositionExpertsForCausalLM.from_base(base, 3, "modulo")
    torch.testing.assert_close(experts(ids).logits, base(ids).logits)
    with torch.no_grad():  # nothing but the configuration is shared
        experts.experts[1].lm_head.weight.zero_()
    assert base.lm_head.weight.abs().max() > 0 and experts.experts[2].config is base.config is experts.config.base


FRESH = """
import sys, torch
from transformers import AutoModelForCausalLM
from condense.hub.loading import load_model
torch.set_num_threads(1)
for number, folder in enumerate(sys.argv[1:]):
    # The first one finds the package by its model type, and registers it with the Auto classes.
    load = load_model if number == 0 else lambda auto, folder: auto.from_pretrained(folder)
    model = load(AutoModelForCausalLM, folder)
    written = model.generate(torch.arange(2, 9)[None], max_new_tokens=9, do_sample=False)
    print(type(model).__name__, written[0].tolist())
"""


@pytest.fixture(scope="module")
def saved(models, tmp_path_factory):
    folders = {key: tmp_path_factory.mktemp("-".join(key)) for key in models}
    for key, model in models.items():
        model.save_pretrained(folders[key])
    return folders


@torch.no_grad()
def test_what_was_saved_loads_through_the_auto_classes(models, saved):
    for key, model in models.items():
        loaded, ids = load_model(AutoModelForCausalLM, saved[key]), random_ids(1, 12)
        assert type(loaded) is type(model) and loaded.dtype == torch.float64
        assert type(loaded.bases[-1]) is type(model.bases[-1])
        assert loaded.state_dict().keys() == model.state_dict().keys()
        # Not bit by bit: products on a CPU depend on where the weights lie.
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, atol=1e-12, rtol=0)


@pytest.mark.slow
@torch.no_grad()
def test_a_fresh_process_loads_what_was_saved(models, saved):
    expected, folders = [], [str(folder) for folder in saved.values()]
    for model in models.values():
        written = model.generate(torch.arange(2, 9)[None], max_new_tokens=9, do_sample=False)
        expected.append(f"{type(model).__name__} {written[0].tolist()}")
    done = subprocess.run([sys.executable, "-c", FRESH, *folders], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines() == expected, done.stderr[-3000:]


def refusal(function, *arguments, **options):
    with pytest.raises(ValueError, match=r".") as refused:
        function(*arguments, **options)
    return str(refused.value)


def test_what_does_not_fit_is_refused_by_name(models):
    model, ids = models["folded", "heads"], random_ids(2, 4)
    base = make_base("folded")
    assert "num_tokens=0" in refusal(MultiTokenForCausalLM.from_base, base, 0)
    assert "already" in refusal(MultiTokenForCausalLM.from_base, model, 2)
    scaled = GraniteForCausalLM(GraniteConfig(vocab_size=9, hidden_size=8, num_attention_heads=1, num_hidden_layers=1))
    assert "'granite'" in refusal(MultiTokenForCausalLM.from_base, scaled, 2)
    assert "num_experts=0" in refusal(PositionExpertsForCausalLM.from_base, base, 0)
    assert "split='thirds'" in refusal(PositionExpertsForCausalLM.from_base, base, 3, "thirds")
    assert "length=10 does not divide into 3" in refusal(PositionExpertsForCausalLM.from_base, base, 3, "interval", 10)
    assert "already" in refusal(PositionExpertsForCausalLM.from_base, model, 2, "modulo")
    assert "BEAM_SEARCH" in refusal(model.generate, ids, num_beams=2, max_new_tokens=2)
    assert "use_cache=False" in refusal(model.generate, ids, use_cache=False, max_new_tokens=2)
    assert "prefill_chunk_size=2" in refusal(model.generate, ids, prefill_chunk_size=2, max_new_tokens=2)
    assert "cache_implementation='static'" in refusal(
        model.generate, ids, cache_implementation="static", max_new_tokens=2
    )
    assert "DynamicCache" in refusal(model, ids, past_key_values=DynamicCache())
    assert "without a cache" in refusal(model, ids, past_key_values=LateCache(1), labels=ids)
    assert "future_logits" in refusal(model, ids, past_key_values=LateCache(1), future_logits=True)
    assert "position_ids" in refusal(model, ids, position_ids=ids)
    cache = model(ids, use_cache=True).past_key_values
    assert "holds 2 texts and the input 1" in refusal(model, ids[:1], past_key_values=cache)
