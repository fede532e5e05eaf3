"""Prompts, words and ways to steer: no leak, plain loops, formulas, and what is trained."""

import shutil
from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from condense.labs.depth.study import steered
from condense.labs.depth.study.interventions import Intervention, difference_of_means, intervene
from condense.labs.depth.study.lexicon import DIMENSIONS, PAPER_PAIR, PAPER_PROMPT, lexicon
from condense.labs.depth.study.models import SMALL, block_of, build
from condense.labs.depth.study.pretraining import pretrain
from condense.labs.depth.study.words import encode_prompt, encode_word, paired_log_probs, word_log_probs

PROMPTS = [(5, 6, 7), (8, 9), (5, 6, 7, 8, 9)]
WORDS = [(10,), (11, 12), (11, 13, 14), (11, 13)]
CONTROL = torch.tensor([[1.0], [-1.0], [0.5]])


@pytest.fixture
def model():
    """A hybrid that reacts to its control strongly."""
    model = build("hybrid", SMALL, seed=0).eval().requires_grad_(False)
    block = block_of(model)
    block.alpha.fill_(1.0)
    for name in ("up_proj", "control_proj", "down_proj"):
        getattr(block.field, name).weight.mul_(30)
    return model


def naive_log_prob(model, prompt, word, control):
    total, ids = 0.0, list(prompt)
    for token in word:
        total = total + F.log_softmax(model(torch.tensor([ids]), control=control[None]).logits[0, -1], dim=-1)[token]
        ids.append(token)
    return total


def after_the_block(model, ids):
    """The last token's state, layer by layer."""
    hidden = model.transformer.wte(torch.tensor([ids])) + model.transformer.wpe(torch.arange(len(ids)))
    for layer in model.transformer.h[:3]:
        hidden = layer(hidden)
    return hidden[0, -1]


def test_the_lexicon_is_large_and_neutral():
    found = lexicon()
    prompts = [prompt for own in found.subjects.values() for prompt in own]
    words = [word for pair in found.pairs for word in pair]
    assert len(set(prompts)) == len(prompts) >= 40
    assert len(set(words)) == len(words) >= 20
    joint = [word for own in found.cells.values() for word in own]
    assert len(set(joint)) == len(joint) == 32
    for prompt in (*prompts, *found.prompts):
        assert not set(prompt.lower().split()) & {*words, *joint}
    length = list(DIMENSIONS).index("length")
    for signs, own in found.cells.items():
        assert all(len(word) >= 8 if signs[length] > 0 else len(word) <= 6 for word in own)


@pytest.mark.parametrize("found", [lexicon(), lexicon().small()], ids=["whole", "small"])
def test_nothing_held_out_is_trained(found):
    splits = [found.split(seed) for seed in range(5)]
    for parts in splits:
        assert not set(parts.train_prompts) & set(parts.test_prompts)
        words, new = ({word for pair in pairs for word in pair} for pairs in (parts.train_pairs, parts.test_pairs))
        assert words and new and not words & new
        for own in found.subjects.values():  # a subject is trained wholly or not at all
            assert len(set(own) & set(parts.test_prompts)) in (0, len(own))
        assert PAPER_PROMPT in parts.train_prompts and PAPER_PAIR in parts.train_pairs
        assert {*parts.train_prompts, *parts.test_prompts} == {p for own in found.subjects.values() for p in own}
    assert any(one != other for one, other in pairwise(splits))
    joint = found.joint_split(0)
    assert joint.test_prompts and not set(joint.train_prompts) & set(joint.test_prompts)
    for signs in found.cells:
        assert joint.test_words[signs] and joint.train_words[signs]
        assert not set(joint.train_words[signs]) & set(joint.test_words[signs])


def test_examples(setup):
    tokenizer = setup.corpus.tokenizer
    own, swapped = (
        steered.sentiment_examples([PAPER_PROMPT], [PAPER_PAIR], tokenizer, labels) for labels in ("own", "swapped")
    )
    assert [tokenizer.decode(example.word) for example in own] == [" good", " bad"]
    assert [example.control for example in own] == [(1.0,), (-1.0,)]
    assert [(e.word, e.control) for e in swapped] == [(own[0].word, (-1.0,)), (own[1].word, (1.0,))]
    assert steered.parts_of("paper", 0, setup).train_prompts == (PAPER_PROMPT,)
    assert PAPER_PROMPT not in steered.parts_of("paper", 0, setup).test_prompts


def test_probabilities_of_words_equal_a_plain_loop(model):
    expected = torch.tensor(
        [[naive_log_prob(model, p, w, c) for w in WORDS] for p, c in zip(PROMPTS, CONTROL, strict=True)]
    )
    torch.testing.assert_close(word_log_probs(model, PROMPTS, WORDS, CONTROL), expected)
    chosen = [2, 0, 1]
    paired = paired_log_probs(model, PROMPTS, [WORDS[number] for number in chosen], CONTROL)
    torch.testing.assert_close(paired, expected[range(3), chosen])
    assert (word_log_probs(model, PROMPTS, WORDS, -CONTROL) - expected).abs().max() > 0.1  # the control counts


@pytest.mark.parametrize("scales", [False, True])
def test_bias_and_film_by_formula(scales):
    model = build("baseline", SMALL, seed=0).eval().requires_grad_(False)
    ids, position = torch.tensor([[1, 2, 3], [4, 5, 6]]), 3
    plain = model(ids).logits
    made = Intervention(SMALL.width, control_size=2, scales=scales)
    assert sum(p.numel() for p in made.parameters()) == SMALL.width * 2 * (1 + scales)
    intervene(model, position, made)
    control = torch.tensor([[1.0, -0.5], [2.0, 0.0]])
    torch.testing.assert_close(model(ids, control=control).logits, plain)  # it starts as the identity
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_()
    torch.testing.assert_close(model(ids).logits, plain)

    scale, shift = torch.zeros(2, SMALL.width), torch.zeros(2, SMALL.width)
    for row, (a, b) in enumerate(control.tolist()):
        shift[row] = a * made.shift_CD[0] + b * made.shift_CD[1]
        if scales:
            scale[row] = a * made.scale_CD[0] + b * made.scale_CD[1]
    other = build("baseline", SMALL, seed=0).eval().requires_grad_(False)
    other.transformer.h[position].register_forward_hook(
        lambda layer, inputs, output: output * (1 + scale[:, None]) + shift[:, None]
    )
    torch.testing.assert_close(model(ids, control=control).logits, other(ids).logits)


def test_activation_steering_adds_the_best_multiple_of_the_difference(model, setup):
    tokenizer = setup.corpus.tokenizer
    parts = steered.parts_of("many", 0, setup)
    examples = steered.sentiment_examples(parts.train_prompts, parts.train_pairs, tokenizer)
    means = []
    for side in (0, 1):
        states = []
        for prompt, pair in product(parts.train_prompts, parts.train_pairs):
            ids = encode_prompt(tokenizer, prompt) + encode_word(tokenizer, pair[side])
            states.append(after_the_block(model, ids))
        means.append(torch.stack(states).mean(0))
    direction = means[0] - means[1]
    assert direction.abs().max() > 1e-3
    shift_CD = steered.activation_steered(model, parts, examples, tokenizer).transformer.h[2].intervention.shift_CD
    found, losses = shift_CD[0].clone(), {}
    for coefficient in steered.COEFFICIENTS:
        shift_CD.copy_(coefficient * direction)
        losses[coefficient] = steered.example_loss(model, examples)
    assert len({round(loss, 6) for loss in losses.values()}) > 1
    torch.testing.assert_close(found, min(losses, key=losses.get) * direction, rtol=1e-4, atol=1e-4)


def test_difference_of_means_takes_the_last_token(model):
    texts = [(1, 2, 3), (4, 5)]
    states = [after_the_block(model, text) for text in texts]
    torch.testing.assert_close(difference_of_means(model, 2, texts[:1], texts[1:]), states[0] - states[1])


@pytest.mark.parametrize("labels", ["own", "swapped"])
def test_the_block_alone_learns_to_steer(labels, setup):
    model, before = (build("hybrid", SMALL, seed=0) for _ in range(2))
    block, tokenizer = block_of(model), setup.corpus.tokenizer
    block.alpha.data.fill_(1.0)
    for each in (model, before):
        each.lm_head.weight.data.mul_(50)  # a random head, but one that can give large probabilities
    examples = steered.sentiment_examples([PAPER_PROMPT], [PAPER_PAIR], tokenizer, labels)
    losses = steered.fit(model, block.parameters(), examples, steps=60, rate=3e-2, seed=0, description="")
    assert losses[-1] < 0.2 * losses[0]
    words = [encode_word(tokenizer, word) for word in PAPER_PAIR]
    prompt = encode_prompt(tokenizer, PAPER_PROMPT)
    log_good_bad = word_log_probs(model, [prompt] * 2, words, torch.tensor([[1.0], [-1.0]]))
    odds = (log_good_bad[:, 0] - log_good_bad[:, 1]) * (1 if labels == "own" else -1)
    assert odds[0] > 1 and odds[1] < -1
    old = dict(before.named_parameters())
    for name, parameter in model.named_parameters():
        assert ("h.2." in name) or torch.equal(parameter, old[name]), name
    assert block.alpha != 1 and not any(parameter.requires_grad for parameter in model.parameters())


def test_another_number_of_controls_keeps_the_flow(model):
    ids = torch.tensor([[1, 2, 3]])
    plain = model(ids).logits
    steered.widen_control(block_of(model), 3, seed=0)
    torch.testing.assert_close(model(ids).logits, plain)
    torch.testing.assert_close(model(ids, control=torch.zeros(1, 3)).logits, plain)
    assert not torch.allclose(model(ids, control=torch.tensor([[0.0, 0.0, 1.0]])).logits, plain)


def test_a_steered_block_is_kept(setup, tmp_path, monkeypatch):
    monkeypatch.setattr(steered, "STEPS", 2)
    made = steered.train_steered(0, setup, tmp_path, prompts="many")
    swapped = steered.train_steered(0, setup, tmp_path, labels="swapped", prompts="many")
    monkeypatch.setattr(steered, "fit", None)
    found = steered.train_steered(0, setup, tmp_path, prompts="many")
    for kept, parameter in zip(found.parameters(), made.parameters(), strict=True):
        assert torch.equal(kept, parameter)
    assert any(not torch.equal(a, b) for a, b in zip(made.parameters(), swapped.parameters(), strict=True))
    monkeypatch.setattr(steered, "STEPS", 3)
    with pytest.raises(ValueError, match="other prompts or steps"):
        steered.train_steered(0, setup, tmp_path, prompts="many")


@pytest.mark.parametrize("change", ["size", "weights"])
def test_a_block_of_another_model_is_refused(change, setup, tmp_path, monkeypatch):
    """The model below the block is another one, and its examples are the same."""
    monkeypatch.setattr(steered, "STEPS", 2)
    setup = setup._replace(size=replace(setup.size, steps=2))
    steered.train_steered(0, setup, tmp_path)
    if change == "weights":  # as if the folder held the model of another machine
        path = tmp_path / "models" / "hybrid-0" / "model.safetensors"
        weights = load_file(path)
        weights["transformer.ln_f.bias"] += 1e-3
        save_file(weights, path)
    else:
        shutil.rmtree(tmp_path / "models" / "hybrid-0")
        setup = setup._replace(size=replace(setup.size, learning_rate=1e-3))
    with pytest.raises(ValueError, match="trained in another model"):
        steered.train_steered(0, setup, tmp_path)


@pytest.mark.parametrize(
    ("method", "frozen"),
    [("unfrozen", {"transformer.wte.weight", "transformer.wpe.weight", "lm_head.weight"}), ("everything", set())],
)
def test_more_than_the_block_is_trained(method, frozen, setup, tmp_path, monkeypatch):
    setup = setup._replace(size=replace(setup.size, steps=2))
    before = dict(pretrain("hybrid", 0, setup, tmp_path).named_parameters())
    monkeypatch.setitem(steered.LEARNING_RATE, method, 1e-2)
    model = steered.steered_by(method, 0, setup, tmp_path, "paper")
    same = {name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])}
    # A key's bias adds the same to all scores of a query: its gradient is zero up to rounding, and Adam may move it.
    assert {name for name in same if "c_attn.bias" not in name} == frozen
