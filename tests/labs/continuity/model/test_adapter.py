"""`ContinuousLM` against the stock models with masks and positions that plain loops compute.

Weights are float64. Rotary tables are float32 as in the stock models, so the tolerance is 1e-5 if positions are
summed in another order.

Axes: N samples of a sentence, P rows of a table of learned positions, D hidden size.
"""

import functools

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from condense import to_stock
from condense.labs.continuity.model import ContinuousLM, Sentence
from condense.labs.continuity.model.adapter import OutsideTable
from condense.reference import reference_logits
from tests.condense.models import VOCAB, random_durations, random_ids, tiny_model, weights

LENGTH, WINDOW, LEARNED = 14, 4, 32
SMALL = {"vocab_size": VOCAB, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ROTARY = {**SMALL, **TOKENS, "intermediate_size": 40, "num_key_value_heads": 2, "initializer_range": 0.25}
GPT2_FIELDS = {"vocab_size": VOCAB, "n_embd": 24, "n_layer": 2, "n_head": 4, "initializer_range": 0.25, **TOKENS}
WINDOW_FROM_THE_SECOND_LAYER = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
STOCK = {  # model types of transformers, and fields of their configurations
    "llama": ("llama", ROTARY),
    "mistral": ("mistral", {**ROTARY, "sliding_window": WINDOW}),
    "phi3": ("phi3", ROTARY),
    "phi3 window": ("phi3", {**ROTARY, "sliding_window": WINDOW}),
    "gemma": ("gemma", {**ROTARY, "head_dim": 8}),
    "gemma2": ("gemma2", {**ROTARY, "head_dim": 8, "sliding_window": WINDOW}),
    "qwen2": ("qwen2", {**ROTARY, **WINDOW_FROM_THE_SECOND_LAYER}),
    "gpt2": ("gpt2", {**GPT2_FIELDS, "n_positions": LEARNED}),
}
ROTATING = [name for name in STOCK if name != "gpt2"]
WINDOWED = ["mistral", "phi3 window", "gemma2", "qwen2"]
EVERY = [*STOCK, "folded"]
ATTENTIONS = [(name, attention) for name in EVERY for attention in ("eager", "sdpa")]
ATTENTIONS.remove(("gemma2", "sdpa"))  # transformers refuses it, because sdpa has no soft cap


def build(kind, attention="eager", **fields):
    model_type, own = kind
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**own, **fields})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def any_model(name, **fields):
    return tiny_model(**fields) if name == "folded" else build(STOCK[name], **fields)


shared_model = functools.cache(any_model)  # of tests that do not change it


def random_sentence(seed=0, length=LENGTH, first=1.0, **parts):
    durations = random_durations(1, length, seed)[0]
    durations[0] = first  # at least one unit: at the anchor "end", smaller first durations have no learned position
    return Sentence(random_ids(1, length, seed)[0], durations=durations, **parts)


def assert_close(logits, expected, tolerance=1e-5):
    torch.testing.assert_close(logits.double(), expected.double(), atol=tolerance, rtol=tolerance)


# The stock model's own attention, with explicit masks and positions


def explicit_mask(durations_N, rule, window=None, times_N=None):
    """[1, 1, N, N]: logarithms of weights; -inf above the diagonal and outside the window of `window` units of time."""
    durations, num_samples = durations_N.tolist(), len(durations_N)
    mask = torch.full((1, 1, num_samples, num_samples), -torch.inf, dtype=torch.float64)
    times = durations_N.cumsum(0).tolist() if times_N is None else times_N.tolist()
    for i in range(num_samples):
        for k in range(i + 1):
            if window is not None and times[i] - times[k] >= window:
                continue
            weight = durations[k]
            if rule == "trapezoid":
                weight = (durations[k] if k == 0 else durations[k] / 2) + (durations[k + 1] / 2 if k < i else 0)
            mask[0, 0, i, k] = torch.tensor(weight, dtype=torch.float64).log()
    return mask


def explicit_positions(durations_N, anchor):
    elapsed, positions = 0.0, []
    for duration in durations_N.tolist():
        positions.append(elapsed + duration - 1 if anchor == "end" else elapsed)
        elapsed += duration
    return torch.tensor([positions], dtype=torch.float64)


def interpolated_rows(table_PD, positions_N):
    rows = []
    for position in positions_N.tolist():
        below = min(int(position), len(table_PD) - 2)
        rows.append(table_PD[below] * (1 - position + below) + table_PD[below + 1] * (position - below))
    return torch.stack(rows)[None]


def explicit_logits(model, ids_N, durations_N, anchor="end", rule="rectangle", positions_1N=None, times_N=None):
    window = getattr(model.config, "sliding_window", None)
    mask = explicit_mask(durations_N, rule, window, times_N)
    if model.config.model_type in ("gemma2", "qwen2"):  # layers of both types
        mask = {"full_attention": explicit_mask(durations_N, rule), "sliding_attention": mask}
    positions_1N = explicit_positions(durations_N, anchor) if positions_1N is None else positions_1N
    if model.config.model_type != "gpt2":
        return model(input_ids=ids_N[None], attention_mask=mask, position_ids=positions_1N, use_cache=False).logits[0]
    table_PD = model.transformer.wpe.weight
    embeddings = model.transformer.wte(ids_N[None]) + interpolated_rows(table_PD, positions_1N[0]) - table_PD[0]
    at_zero = torch.zeros(1, len(ids_N), dtype=torch.long)
    return model(inputs_embeds=embeddings, attention_mask=mask, position_ids=at_zero, use_cache=False).logits[0]


@pytest.mark.parametrize("anchor", ["end", "start"])
@pytest.mark.parametrize(("name", "attention"), ATTENTIONS)
@torch.no_grad()
def test_unit_durations_give_the_models_own_logits(name, anchor, attention):
    model = any_model(name, **({"position_anchor": anchor} if name == "folded" else {}))
    model.config._attn_implementation = attention
    ids = random_ids(1, LENGTH)
    expected = model(input_ids=ids).logits[0]
    assert_close(ContinuousLM(model, anchor).logits(Sentence(ids[0])), expected, 1e-10)


@pytest.mark.parametrize("rule", ["rectangle", "trapezoid"])
@pytest.mark.parametrize("anchor", ["end", "start"])
@pytest.mark.parametrize(("name", "attention"), [pair for pair in ATTENTIONS if pair[0] != "folded"])
@torch.no_grad()
def test_durations_are_weights_and_positions(name, anchor, rule, attention):
    model, sentence = any_model(name), random_sentence()
    expected = explicit_logits(model, sentence.ids_N, sentence.durations_N, anchor, rule)
    model.config._attn_implementation = attention
    logits = ContinuousLM(model, anchor, rule).logits(sentence)
    assert_close(logits, expected)
    assert not torch.allclose(logits, model(input_ids=sentence.ids_N[None]).logits[0], atol=1e-2)


@pytest.mark.parametrize("anchor", ["end", "start"])
@torch.no_grad()
def test_a_llama_follows_the_equations(anchor):
    """The reference shares no code with the model: it computes one head and one query at a time."""
    folded = tiny_model(segment_length=LENGTH, position_anchor=anchor)
    sentence = random_sentence(first=0.3)
    expected = reference_logits(weights(folded), folded.config, sentence.ids_N, sentence.durations_N)
    assert_close(ContinuousLM(to_stock(folded), anchor).logits(sentence), expected)
    assert_close(ContinuousLM(folded, anchor).logits(sentence), expected)


@pytest.mark.parametrize("anchor", ["end", "start"])
@torch.no_grad()
def test_a_folded_model_receives_the_durations(anchor):
    model, sentence = tiny_model(position_anchor=anchor), random_sentence(first=0.3)
    lm = ContinuousLM(model)
    assert lm.folded and lm.position_anchor == anchor
    expected = model(input_ids=sentence.ids_N[None], durations=sentence.durations_N[None]).logits[0]
    assert_close(lm.logits(sentence), expected, 1e-10)
    assert_close(
        lm.logits(sentence), reference_logits(weights(model), model.config, sentence.ids_N, sentence.durations_N)
    )


@torch.no_grad()
def test_the_anchors_give_different_logits():
    model, sentence = shared_model("llama"), random_sentence()
    ends, starts = (ContinuousLM(model, anchor).logits(sentence) for anchor in ("end", "start"))
    assert not torch.allclose(ends, starts, atol=1e-2)
    assert ContinuousLM(model).position_anchor == "end" and ContinuousLM(model).rule == "rectangle"
    assert torch.equal(ContinuousLM(model).logits(sentence), ends)


@pytest.mark.parametrize("name", EVERY)
@torch.no_grad()
def test_embeddings_give_the_logits_of_their_tokens(name):
    lm, sentence = ContinuousLM(shared_model(name)), random_sentence(integration_start=2)
    embedded = lm.embed(sentence)
    assert embedded.ids_N is None and embedded.integration_start == 2 and lm.embed(embedded) is embedded
    assert torch.equal(embedded.embeddings_ND, lm.model.get_input_embeddings()(sentence.ids_N))
    assert torch.equal(embedded.durations_N, sentence.durations_N)
    assert_close(lm.logits(embedded), lm.logits(sentence), 1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.2)])
@pytest.mark.parametrize("name", EVERY)
@torch.no_grad()
def test_narrow_dtypes_give_almost_the_same_logits(name, dtype, tolerance):
    model, sentence = any_model(name), random_sentence()
    expected = ContinuousLM(model).logits(sentence)
    logits = ContinuousLM(model.to(dtype)).logits(sentence)
    assert logits.dtype == dtype and ((logits - expected).norm() / expected.norm()) < tolerance
    assert ContinuousLM(model).next_logits([sentence]).dtype == torch.float32


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@torch.no_grad()
def test_a_pretrained_llama_follows_explicit_masks(stories, attention):
    model = LlamaForCausalLM.from_pretrained(stories, attn_implementation=attention).eval()
    ids = torch.randint(0, 512, (40,), generator=torch.Generator().manual_seed(0))
    sentence = Sentence(ids, durations=random_durations(1, 40)[0])
    assert_close(ContinuousLM(model).logits(Sentence(ids)), model(input_ids=ids[None]).logits[0], 1e-4)
    expected = explicit_logits(model.double(), ids, sentence.durations_N)
    assert_close(ContinuousLM(model.float()).logits(sentence), expected, 1e-3)


# Sliding windows


@pytest.mark.parametrize("name", ["mistral", "phi3 window"])
@torch.no_grad()
def test_a_window_of_tokens_becomes_a_window_of_time(name):
    """In one layer, the last token attends to twice as many tokens if their durations are half a unit."""
    lm, ids = ContinuousLM(shared_model(name, num_hidden_layers=1)), random_ids(1, LENGTH)[0]
    for duration in (1.0, 0.5, 2.0):
        sentence = lm.embed(Sentence(ids, durations=[duration] * LENGTH))
        logits, seen = lm.logits(sentence)[-1], []
        for k in range(LENGTH):
            embeddings = sentence.embeddings_ND.clone()
            embeddings[k] = embeddings[k].flip(0)
            seen.append(not torch.equal(lm.logits(sentence.with_embeddings(embeddings))[-1], logits))
        assert seen == [(LENGTH - 1 - k) * duration < WINDOW for k in range(LENGTH)]


# Batches of sentences


def variants(lm, length=LENGTH, at=9, factors=(0.1, 0.4, 0.7, 1.0, 1.6)):
    sentence = random_sentence(length=length)
    return [sentence.shrink([at], factor) for factor in factors]


def one_by_one(lm, sentences):
    return torch.stack([lm.logits(sentence)[-1] for sentence in sentences])


@functools.cache
def mixed_batch(name):
    """Mixes two lengths, a sentence without a common prefix and a sentence of one token; each with its logits alone."""
    lm = ContinuousLM(shared_model(name))
    long, short = variants(lm), variants(lm, length=11, at=6)
    sentences = [long[0], short[0], *long[1:], Sentence([5]), *short[1:], random_sentence(seed=3, length=11)]
    return lm, sentences, one_by_one(lm, sentences)


@pytest.mark.parametrize("reuse_prefix", [True, False])
@pytest.mark.parametrize("tokens_at_once", [1, 11, 8192])
@pytest.mark.parametrize("name", EVERY)
@torch.no_grad()
def test_a_batch_gives_the_logits_of_each_sentence_alone(name, tokens_at_once, reuse_prefix):
    lm, sentences, alone = mixed_batch(name)
    done = []
    logits = lm.next_logits(sentences, reuse_prefix, tokens_at_once, done.append)
    assert logits.dtype == torch.float32 and logits.shape == (12, VOCAB)
    assert_close(logits, alone)
    assert sum(done) == 12 and (tokens_at_once > 1 or done == [1] * 12)


@pytest.mark.parametrize("rule", ["rectangle", "trapezoid"])
@pytest.mark.parametrize("anchor", ["end", "start"])
@pytest.mark.parametrize("name", STOCK)
@torch.no_grad()
def test_a_common_prefix_does_not_change_logits(name, anchor, rule):
    lm = ContinuousLM(shared_model(name), anchor, rule)
    sentences = variants(lm)
    assert_close(lm.next_logits(sentences), one_by_one(lm, sentences))


def batch_shapes(model, run):
    """(rows, samples) of every forward pass."""
    shapes = []
    layer = model.get_input_embeddings() if model.config.model_type == "gpt2" else model.model.layers[0]
    handle = layer.register_forward_pre_hook(lambda module, inputs: shapes.append(tuple(inputs[0].shape[:2])))
    run()
    handle.remove()
    return shapes


@torch.no_grad()
def test_the_common_prefix_is_run_once():
    lm = ContinuousLM(shared_model("llama"))
    sentences = variants(lm)
    assert batch_shapes(lm.model, lambda: lm.next_logits(sentences)) == [(1, 9), (5, 5)]
    assert batch_shapes(lm.model, lambda: lm.next_logits(sentences, tokens_at_once=2 * 14)) == [
        (1, 9),
        (2, 5),
        (2, 5),
        (1, 5),
    ]
    assert batch_shapes(lm.model, lambda: lm.next_logits(sentences, reuse_prefix=False)) == [(5, LENGTH)]
    assert batch_shapes(lm.model, lambda: lm.next_logits(sentences[:1])) == [(1, LENGTH)]
    assert batch_shapes(lm.model, lambda: lm.next_logits(sentences[:1] * 3)) == [(1, LENGTH - 1), (3, 1)]
    shifted = [sentences[0], sentences[0].shift(1)]
    assert batch_shapes(lm.model, lambda: lm.next_logits(shifted)) == [(2, LENGTH)]
    no_prefix = [Sentence([1, 2, 3]), Sentence([9, 2, 3])]
    assert batch_shapes(lm.model, lambda: lm.next_logits(no_prefix)) == [(2, 3)]


@pytest.mark.parametrize("name", EVERY)
@torch.no_grad()
def test_only_logits_of_last_samples_are_computed(name):
    lm, shapes = ContinuousLM(any_model(name)), []
    lm.model.lm_head.register_forward_pre_hook(lambda module, inputs: shapes.append(tuple(inputs[0].shape[:2])))
    lm.next_logits(variants(lm))
    assert shapes == [(1, 1), (5, 1)]


@torch.no_grad()
def test_a_folded_model_runs_the_common_prefix_once():
    """With segments of 5, the prefix ends within the second segment; each row continues from a copy of its state."""
    lm = ContinuousLM(tiny_model())
    sentences = variants(lm)
    segments = batch_shapes(lm.model, lambda: lm.next_logits(sentences))
    assert segments == [(1, 5), (1, 4), (5, 1), (5, 4)]
    assert_close(lm.next_logits(sentences, tokens_at_once=10), one_by_one(lm, sentences))


@torch.no_grad()
def test_the_common_prefix_ends_where_any_part_differs():
    """The part is a duration, an embedding or a fixed position."""
    lm, sentence = ContinuousLM(shared_model("llama")), random_sentence()
    embedded = lm.embed(sentence)
    embeddings = embedded.embeddings_ND.clone()
    embeddings[4, 0] += 0.1
    positions = sentence.time_steps_N.clone()
    positions[6] += 0.3
    other = lm.embed(Sentence(sentence.ids_N, durations=sentence.durations_N, positions=sentence.time_steps_N))
    moved = lm.embed(Sentence(sentence.ids_N, durations=sentence.durations_N, positions=positions))
    for sentences, prefix in (
        ([embedded, embedded.with_embeddings(embeddings)], 4),
        ([embedded, embedded.set_duration([5], 7)], 5),
        ([embedded, embedded.set_duration([3], 7), embedded.set_duration([5], 7)], 3),
        ([other, moved], 6),
        ([embedded, other], 0),
    ):
        shapes = batch_shapes(lm.model, lambda sentences=sentences: lm.next_logits(sentences))
        assert shapes == [(1, prefix)] * (prefix > 0) + [(len(sentences), LENGTH - prefix)]
        assert_close(lm.next_logits(sentences), one_by_one(lm, sentences))


# Density


def split(sentence, at, copies, positions):
    """Replaces token `at` by `copies` samples of equal duration."""
    counts = torch.ones(len(sentence), dtype=torch.long)
    counts[at] = copies
    return Sentence(
        sentence.ids_N.repeat_interleave(counts),
        durations=(sentence.durations_N / counts).repeat_interleave(counts),
        positions=sentence.time_steps_N.repeat_interleave(counts) if positions == "equal" else None,
    )


@pytest.mark.parametrize("name", STOCK)
@torch.no_grad()
def test_copies_at_one_position_equal_one_token_in_one_layer(name):
    """The last copy and all later samples have the token's logits with one layer; with two layers they do not."""
    layers = "n_layer" if name == "gpt2" else "num_hidden_layers"
    sentence, at, copies = random_sentence(), 5, 3
    for depth, same in ((1, True), (2, False)):
        lm = ContinuousLM(shared_model(name, **{layers: depth}), "end")
        whole = lm.logits(sentence)[at:]
        equal, spread = (lm.logits(split(sentence, at, copies, how))[at + copies - 1 :] for how in ("equal", "spread"))
        if same:
            assert_close(equal, whole)
        else:
            assert (equal - whole)[1:3].abs().max() > 1e-3
        assert (spread - whole)[1:3].abs().max() > 1e-3


@pytest.mark.parametrize("density", [2, 5])
@pytest.mark.parametrize("name", ["llama", "gemma", "gpt2"])
@torch.no_grad()
def test_a_denser_sentence_at_equal_positions_has_the_same_logits(name, density):
    layers = "n_layer" if name == "gpt2" else "num_hidden_layers"
    sentence = random_sentence(integration_start=0.5)
    lm = ContinuousLM(shared_model(name, **{layers: 1}), "end")
    dense = lm.logits(sentence.densify(density, positions="equal"))[density - 1 :: density]
    assert_close(dense, lm.logits(sentence))


@pytest.mark.parametrize("name", STOCK)
@torch.no_grad()
def test_fixed_positions_replace_those_of_the_intervals(name):
    """Time step 1 is position 0 for both anchors; windows are measured between fixed positions."""
    model, sentence = shared_model(name), random_sentence()
    positions = torch.arange(LENGTH).double() * 0.83 + 1.5
    fixed = Sentence(sentence.ids_N, durations=sentence.durations_N, positions=positions)
    expected = explicit_logits(
        model, sentence.ids_N, sentence.durations_N, positions_1N=positions[None] - 1, times_N=positions
    )
    for anchor in ("end", "start"):
        assert_close(ContinuousLM(model, anchor).logits(fixed), expected)


# Shifts and scales


@pytest.mark.parametrize("amount", [0.5, -3, 100.25])
@pytest.mark.parametrize("name", [*ROTATING, "folded"])
@torch.no_grad()
def test_shifts_do_not_change_logits_of_relative_positions(name, amount):
    lm = ContinuousLM(shared_model(name))
    sentence = random_sentence()
    assert_close(lm.logits(sentence.shift(amount)), lm.logits(sentence), 1e-3 if amount > 10 else 1e-4)
    scaled = lm.logits(sentence.scale(0.5))
    assert not torch.allclose(scaled, lm.logits(sentence), atol=1e-2)


@pytest.mark.parametrize("amount", [0.1, 0.7])
@pytest.mark.parametrize("name", WINDOWED)
@torch.no_grad()
def test_shifts_do_not_move_a_window(name, amount):
    lm, sentence = ContinuousLM(shared_model(name)), Sentence(random_ids(1, LENGTH)[0])
    assert_close(lm.logits(sentence.shift(amount)), lm.logits(sentence), 1e-3)


@pytest.mark.parametrize("name", ["mistral", "phi3 window"])
@torch.no_grad()
def test_density_does_not_move_a_window(name):
    """A window of 4 units contains 12 samples of a third of a unit; rounding at its edge must not add a thirteenth."""
    lm = ContinuousLM(shared_model(name, num_hidden_layers=1))
    dense = lm.embed(Sentence(random_ids(1, LENGTH)[0]).densify(3))
    embeddings = dense.embeddings_ND.clone()
    logits = lm.logits(dense)
    for k in range(len(dense) - 3 * WINDOW):
        changed = embeddings.clone()
        changed[k] = changed[k].flip(0)
        last = k + 3 * WINDOW - 1
        differs = (lm.logits(dense.with_embeddings(changed)) != logits).any(1)
        assert differs[last] and not differs[last + 1 :].any()


@torch.no_grad()
def test_learned_positions_are_interpolated():
    model = shared_model("gpt2")
    lm, sentence = ContinuousLM(model, "end"), random_sentence()
    durations = sentence.durations_N
    for amount in (0.0, 0.25, 3.7):
        positions = explicit_positions(durations, "end") + amount
        expected = explicit_logits(model, sentence.ids_N, durations, positions_1N=positions)
        assert_close(lm.logits(sentence.shift(amount)), expected, 1e-10)
    assert not torch.allclose(lm.logits(sentence.shift(0.25)), lm.logits(sentence), atol=1e-3)


@torch.no_grad()
def test_whole_learned_positions_are_rows_of_the_table():
    model, ids = shared_model("gpt2"), random_ids(1, LENGTH)
    lm = ContinuousLM(model)
    for first in (0, 5, LEARNED - LENGTH):
        expected = model(input_ids=ids, position_ids=torch.arange(first, first + LENGTH)[None]).logits[0]
        assert_close(lm.logits(Sentence(ids[0]).shift(first)), expected, 1e-12)


@torch.no_grad()
def test_positions_outside_the_table_are_refused():
    model, sentence = shared_model("gpt2"), Sentence(random_ids(1, LENGTH)[0])
    lm, before = ContinuousLM(model, "end"), model(input_ids=sentence.ids_N[None]).logits
    for outside, words in (
        (sentence.shift(-0.5), "sample 0 has position -0.5, and the model learned positions from 0 to 31"),
        (sentence.set_duration([0], 0.25), "sample 0 has position -0.75.*position_anchor='start'"),
        (sentence.shift(LEARNED - LENGTH + 0.5), "sample 13 has position 31.5"),
        (sentence.set_duration([3], LEARNED), "sample 3 has position 34"),
    ):
        with pytest.raises(ValueError, match=words):
            lm.logits(outside)
        with pytest.raises(OutsideTable, match=words):
            lm.check_positions(outside)
        with pytest.raises(ValueError, match="has position"):
            lm.next_logits([outside, outside.set_duration([13], 2)])
    lm.logits(sentence.shift(2.5))
    assert torch.equal(model(input_ids=sentence.ids_N[None]).logits, before)
    lm.check_positions(sentence.shift(2.5))
    learned = ContinuousLM(model)  # reads a short first token: the default for learned positions
    assert learned.position_anchor == "start"
    short = sentence.set_duration([0], 0.25)
    assert torch.equal(learned.logits(short), ContinuousLM(model, "start").logits(short))


@torch.no_grad()
def test_refusals_count_samples_from_the_start_of_the_sentence():
    sentence = Sentence([3] * LENGTH)
    with pytest.raises(ValueError, match="sample 13 has position 42"):
        ContinuousLM(shared_model("gpt2"), "end").next_logits([sentence.set_duration([13], far) for far in (30, 40)])
