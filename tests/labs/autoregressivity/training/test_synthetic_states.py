"""Synthetic states against a loop over tokens and states; what a prediction may not depend on."""

import pytest
import torch
import torch.nn.functional as F

from condense.labs.autoregressivity.training.synthetic_states import SyntheticStates
from condense.training.recipe import OBJECTIVES, load_recipe
from condense.training.recipe.objectives import next_token_losses
from condense.training.small_llama import save_small_llama

from .models import VOCABULARY, ids_of, small_model

pytestmark = pytest.mark.unit

KINDS = ("condense", "stock")


def read_by_loop(embed, ids: list[int], states: int, path: str) -> tuple[list[torch.Tensor], list[int]]:
    """What is read of one text, state by state, and the number of the token that each state leads to."""
    inputs, tokens = [], []
    for t, token in enumerate(ids):
        before = ids[t - 1] if t and path == "line" else token
        for j in range(1, states + 2):
            inputs.append(embed[before] + j / (states + 1) * (embed[token] - embed[before]))
            tokens.append(t)
    return inputs, tokens


def some_batch() -> dict[str, torch.Tensor]:
    """The second text is padded, and its first two tokens have no label."""
    ids = ids_of(2, 7)
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[:, 0], labels[1, :2], labels[1, 5:], mask[1, 5:] = -100, -100, -100, 0
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("states", "path"), [(1, "line"), (3, "line"), (2, "repeat")])
def test_losses_equal_a_loop_over_tokens_and_states(kind, states, path):
    model, batch = small_model(kind), some_batch()
    embed = model.get_input_embeddings().weight
    every, last = [], []
    for ids, labels, mask in zip(*(batch[name].tolist() for name in ("input_ids", "labels", "attention_mask")),
                                 strict=True):  # fmt: skip
        inputs, tokens = read_by_loop(embed, ids[: sum(mask)], states, path)
        logits = model(inputs_embeds=torch.stack(inputs)[None], use_cache=False).logits[0]
        for place, t in enumerate(tokens):
            if t + 1 < sum(mask) and labels[t + 1] != -100:
                every.append(F.cross_entropy(logits[place], torch.tensor(labels[t + 1])))
                if place % (states + 1) == states:
                    last.append(every[-1])
    objective = SyntheticStates(states=states, path=path)
    number = objective.num_targets(batch)
    assert number == len(every) == (states + 1) * len(last) == (states + 1) * 9
    expected = sum(every) / len(every)
    found = objective.losses(model, batch, number).loss
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    gradients = [torch.autograd.grad(loss, embed, retain_graph=True)[0] for loss in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-8)
    evaluated = objective.evaluation_losses(model, batch)
    assert evaluated.sums_S.sum().item() == pytest.approx(sum(last).item(), rel=1e-6)
    assert evaluated.targets_S.sum() == len(last)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", ["line", "repeat"])
def test_nothing_at_or_before_a_prediction_depends_on_its_target(kind, path):
    """Another token at t + 1, and others after it, change no output with token t + 1 or an earlier one as target."""
    model, states, objective = small_model(kind).eval(), 3, SyntheticStates(states=3, path=path)
    ids = ids_of(1, 6)
    plain = objective.read(model, {"input_ids": ids, "labels": ids})
    logits = model(inputs_embeds=plain["inputs_embeds"]).logits[0]
    targets = plain["labels"][0, 1:].tolist()
    for t in range(5):
        other = ids.clone()
        other[:, t + 1 :] = (other[:, t + 1 :] + 1) % VOCABULARY
        changed = objective.read(model, {"input_ids": other, "labels": other})
        # Groups of states have labels of one token: those of token t + 1 are the outputs of the states of token t.
        places = [place for place in range(len(targets)) if place // (states + 1) == t]
        assert all(targets[place] == ids[0, t + 1] for place in places)
        assert all(changed["labels"][0, place + 1] == other[0, t + 1] for place in places)
        end = places[-1] + 1
        assert torch.equal(plain["inputs_embeds"][:, :end], changed["inputs_embeds"][:, :end])
        after = model(inputs_embeds=changed["inputs_embeds"]).logits[0]
        torch.testing.assert_close(after[:end], logits[:end], rtol=0, atol=1e-12)
        assert not torch.allclose(after[end], logits[end])  # the first state on the way to token t + 1 holds it


@pytest.mark.parametrize("kind", KINDS)
def test_no_states_are_the_next_token(kind):
    model, batch = small_model(kind), some_batch()
    objective = SyntheticStates(states=0)
    number = objective.num_targets(batch)
    assert torch.equal(objective.losses(model, batch, number).loss, next_token_losses(model, batch, number).loss)


def test_without_a_line_two_states_are_two_tokens():
    """Repeated tokens are a text in which each token stands twice."""
    model, ids = small_model("stock"), ids_of(1, 5)
    read = SyntheticStates(states=1, path="repeat").read(model, {"input_ids": ids, "labels": ids})
    twice = ids.repeat_interleave(2, dim=1)
    torch.testing.assert_close(model(inputs_embeds=read["inputs_embeds"]).logits, model(twice).logits)


def test_refusals(tmp_path):
    save_small_llama(tmp_path / "start", width=8)
    (tmp_path / "a.txt").write_text("some words")
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"model: {{kind: condense, source: {tmp_path}/start, segment_length: 10}}\noutput: {tmp_path}/out\n"
        f"data: {{task: text, sources: [{{files: {tmp_path}/a.txt}}]}}\n"
        "stages: [{total_length: 20, steps: 6}]\nglobal_batch: 4\noptimizer: {warmup_steps: 1}\n"
        "objective: {kind: synthetic_states, states: 1}\n"
    )
    load_recipe(path)
    with pytest.raises(ValueError, match="model.segment_length=10 counts states, 3 for each token"):
        load_recipe(path, ["objective.states=2"])
    with pytest.raises(ValueError, match="model.segment_length=5 counts states"):
        SyntheticStates(states=1).check_model(small_model("condense").config, None, None)
    with pytest.raises(ValueError, match=r"data.task=passkey\) is counted without"):
        load_recipe(path, ["data={task: passkey}"])
    with pytest.raises(ValueError, match="greater than or equal to 0"):
        OBJECTIVES.parse({"kind": "synthetic_states", "states": -1})
    assert "outside of the model" in SyntheticStates(states=1).obstacle_to_zero_3()
    assert SyntheticStates(states=0).obstacle_to_zero_3() is None
