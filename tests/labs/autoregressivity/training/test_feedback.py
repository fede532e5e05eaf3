"""Free running against loops that read every prefix anew: no cache, lists of leaves, the same random numbers."""

from bisect import bisect_right
from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F

from condense.labs.autoregressivity.training.feedback import Expected, Tree, free_running_losses, likeliest, read_inputs
from condense.training.recipe import OBJECTIVES, load_recipe
from condense.training.recipe.objectives import next_token_losses
from tests.training.recipes import write_recipe

from .models import ids_of, small_model

KINDS = ("condense", "stock")
ROWS, LENGTH = 3, 13


@pytest.fixture(scope="module", params=KINDS)
def model(request):
    return small_model(request.param)


def random_known(seed=1) -> torch.Tensor:
    """Rows of different patterns, two whole columns among them that every row knows."""
    known = torch.rand(ROWS, LENGTH, generator=torch.Generator().manual_seed(seed)) < 0.5
    known[:, [0, 4, 5]] = True
    return known


def embed(model, tokens: list) -> torch.Tensor:
    """Embeddings [1, N, D] of token ids, and of what already is an embedding."""
    embeddings = model.get_input_embeddings()
    return torch.stack([t if torch.is_tensor(t) else embeddings(torch.tensor(t)) for t in tokens])[None]


@torch.no_grad()
def probabilities_after(model, tokens: list) -> torch.Tensor:
    model.eval()
    probabilities = model(inputs_embeds=embed(model, tokens), use_cache=False).logits[0, -1].softmax(dim=-1)
    model.train()
    return probabilities


def naive_tree(model, ids, known, samples: int, width: int) -> list[list[list[int]]]:
    """The leaves of each text. Random numbers are drawn as the real one does: for all leaves, then for the choice."""
    leaves = [[[]] for _ in ids]
    for column in range(LENGTH):
        if all(row[column] for row in known):
            leaves = [[[*leaf, ids[text][column]] for leaf in leaves[text]] for text in range(len(ids))]
            continue
        count = len(leaves[0])
        drawn = iter(torch.rand(len(ids) * count, samples, dtype=torch.float64).tolist())
        children: list[list[list[int]]] = [[] for _ in ids]
        for text, own in enumerate(leaves):
            for leaf in own:
                sums = list(accumulate(probabilities_after(model, leaf).tolist()))
                for number in next(drawn):
                    token = ids[text][column] if known[text][column] else bisect_right(sums, number)
                    children[text].append([*leaf, token])
        if count * samples > max(width, count):
            keys = torch.rand(len(ids), count * samples).tolist()
            for text, own in enumerate(children):
                kept = sorted(sorted(range(len(own)), key=keys[text].__getitem__)[:width])
                children[text] = [own[n] for n in kept]
        leaves = children
    return leaves


def naive_path(model, ids, known, choose) -> list[list]:
    texts: list[list] = [[] for _ in ids]
    for text, own in enumerate(texts):
        for column in range(LENGTH):
            if known[text][column]:
                own.append(ids[text][column])
            else:
                own.append(choose(probabilities_after(model, own)))
    return texts


@pytest.mark.parametrize("pattern", ["of rows", "every third", "none"])
def test_the_likeliest_tokens_are_those_of_a_loop(model, pattern):
    ids = ids_of(ROWS, LENGTH)
    known = {
        "of rows": random_known(),
        "every third": (torch.arange(LENGTH) % 3 == 0).expand(ROWS, -1),
        "none": (torch.arange(LENGTH) == 0).expand(ROWS, -1),
    }[pattern]
    expected = naive_path(model, ids.tolist(), known.tolist(), lambda probabilities: int(probabilities.argmax()))
    read = read_inputs(model, ids, known, likeliest)
    assert read.tolist() == expected and not torch.equal(read, ids)
    assert model.training and all(module.training for module in model.modules())


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_are_decoded_without_dropout(kind):
    model, ids, known = small_model(kind), ids_of(ROWS, LENGTH), random_known()
    expected = read_inputs(model, ids, known, likeliest)
    model.config.attention_dropout = 0.9
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.9  # where the stock model has it
    assert not torch.equal(model(ids).logits, model(ids).logits)  # the control
    assert torch.equal(read_inputs(model, ids, known, likeliest), expected)


def test_expected_embeddings_are_those_of_a_loop(model):
    ids, known, weight = ids_of(ROWS, LENGTH), random_known(), model.get_input_embeddings().weight.detach()
    texts = naive_path(model, ids.tolist(), known.tolist(), lambda probabilities: probabilities @ weight)
    expected = torch.cat([embed(model, text) for text in texts]).detach()
    read = read_inputs(model, weight[ids], known, Expected(weight))
    torch.testing.assert_close(read, expected, rtol=0, atol=1e-10)
    assert not read.requires_grad


@pytest.mark.parametrize(("samples", "width"), [(1, 1), (2, 1), (2, 3), (3, 2), (2, 100)])
def test_a_tree_is_that_of_a_loop(model, samples, width):
    ids, known = ids_of(ROWS, LENGTH), random_known()
    if width == 100:
        known[:, 6:] = True
    torch.manual_seed(5)
    leaves = naive_tree(model, ids.tolist(), known.tolist(), samples, width)
    torch.manual_seed(5)
    read = read_inputs(model, ids, known, Tree(ROWS, samples, width))
    assert read.tolist() == [leaf for text in leaves for leaf in text]
    assert len(read) == ROWS * min(width, samples ** int((~known.all(dim=0)).sum()))


def test_samples_have_the_models_probabilities():
    logits = torch.tensor([[0.0, 1.0, -torch.inf, 2.0]]).expand(20000, -1)
    torch.manual_seed(0)
    _, tokens = Tree(20000)(logits)
    counts = tokens.bincount(minlength=4) / 20000
    torch.testing.assert_close(counts, logits[0].softmax(dim=-1), atol=0.015, rtol=0)


def test_leaves_are_drawn_uniformly_without_replacement():
    logits = torch.full((2 * 4000, 50), -torch.inf)
    logits[torch.arange(8000), torch.arange(8000) % 2] = 0.0  # leaf 0 writes token 0, leaf 1 token 1
    torch.manual_seed(0)
    rows, tokens = Tree(4000, samples=2, width=3)(logits)
    assert torch.equal(rows % 2, tokens) and torch.equal(rows // 2, torch.arange(4000).repeat_interleave(3))
    number_of_ones = tokens.view(4000, 3).sum(dim=1)
    assert set(number_of_ones.tolist()) == {1, 2}  # of two leaves with two children each, one child is left out
    assert abs((number_of_ones == 1).double().mean() - 0.5) < 0.03


def gradients(model, loss) -> list[torch.Tensor]:
    return torch.autograd.grad(loss, list(model.parameters()))


@pytest.mark.parametrize("feedback", ["argmax", "branch", "expected"])
def test_losses_and_gradients_are_those_of_texts_one_by_one(model, feedback):
    """With a prompt and with padding, whose tokens are given: each leaf alone, without mask and padding."""
    recipe = {"kind": "free_running", "steps": 4, "feedback": feedback}
    recipe |= {"samples": 2, "width": 3} if feedback == "branch" else {}
    objective = OBJECTIVES.parse(recipe)
    ids = ids_of(ROWS, LENGTH)
    labels, lengths, prompts = ids.clone(), [13, 9, 11], [1, 1, 6]
    mask = torch.zeros_like(ids)
    for row, (length, prompt) in enumerate(zip(lengths, prompts, strict=True)):
        labels[row, :prompt] = labels[row, length:] = -100
        mask[row, :length] = 1
    known = (torch.arange(LENGTH) % 4 == 0) | (labels == -100)
    torch.manual_seed(2)
    if feedback == "branch":
        texts = naive_tree(model, ids.tolist(), known.tolist(), 2, 3)
    else:
        weight = model.get_input_embeddings().weight.detach()
        choose = {"argmax": lambda p: int(p.argmax()), "expected": lambda p: p @ weight}[feedback]
        texts = [[text] for text in naive_path(model, ids.tolist(), known.tolist(), choose)]
    total = torch.zeros((), dtype=torch.float64)
    for text, leaves in enumerate(texts):
        for leaf in leaves:
            logits = model(inputs_embeds=embed(model, leaf[: lengths[text]]), use_cache=False).logits[0, :-1]
            target = labels[text, 1 : lengths[text]]
            total = total + F.cross_entropy(logits, target, reduction="sum", ignore_index=-100) / len(leaves)
    torch.manual_seed(2)
    batch = {"input_ids": ids, "labels": labels, "attention_mask": mask}
    losses = objective.losses(model, batch, torch.tensor(100))
    assert losses.loss.item() == pytest.approx(total.item() / 100, rel=1e-6)  # the stock loss is float32
    assert losses.sums_S.sum().item() == pytest.approx(total.item(), rel=1e-6)
    assert losses.targets_S.sum().item() == 12 + 8 + 5 and set(batch) == {"input_ids", "labels", "attention_mask"}
    for own, expected in zip(gradients(model, losses.loss), gradients(model, total / 100), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("feedback", ["argmax", "sample", "branch", "expected"])
def test_validation_is_the_next_token_loss(model, feedback):
    fields = {"kind": "free_running", "steps": 4, "feedback": feedback}
    fields |= {"samples": 2, "width": 3} if feedback == "branch" else {}
    batch = {"input_ids": ids_of(2, 9), "labels": ids_of(2, 9)}
    expected, found = next_token_losses(model, batch, 1), OBJECTIVES.parse(fields).evaluation_losses(model, batch)
    assert torch.equal(found.sums_S, expected.sums_S) and torch.equal(found.targets_S, expected.targets_S)
    assert found.loss.item() != pytest.approx(OBJECTIVES.parse(fields).losses(model, batch, 1).loss.item(), rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("feedback", ["argmax", "expected"])
def test_gradients_survive_autocast_and_checkpointing(kind, feedback):
    """Weights that autocast has copied without gradients would get none; a checkpointed model has no cache."""
    model = small_model(kind, torch.float32)
    ids = ids_of(2, 9)
    batch = {"input_ids": ids, "labels": ids.clone()}
    batch["labels"][:, 0] = -100
    known = (torch.arange(9) % 3 == 0).expand(2, -1)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with torch.autocast("cpu", torch.bfloat16):
        loss = free_running_losses(model, batch, 16, known, feedback).loss
    assert all(bool(gradient.any()) for gradient in gradients(model, loss))


def test_contradictions_are_refused(tmp_path):
    data = {"task": "text", "sources": [{"files": "nothing.txt"}]}
    path = write_recipe(tmp_path, {"kind": "stock", "source": "nowhere"}, [(8, 60)], global_batch=2, data=data)
    for overrides, message in {
        ("steps=0",): "objective.steps",
        ("feedback=beam",): "'argmax', 'sample', 'branch' or 'expected'",
        ("feedback=branch",): "samples=None with feedback=branch",
        ("feedback=branch", "samples=2"): "width=None with feedback=branch",
        ("samples=2",): "samples=2 with feedback=argmax: feedback=branch needs it, and no other",
        ("feedback=sample", "width=2"): "width=2 with feedback=sample: feedback=branch needs it, and no other",
        ("feedback=branch", "samples=0", "width=1"): "objective.samples",
    }.items():
        with pytest.raises(ValueError, match=message):
            load_recipe(path, ["objective.kind=free_running", *(f"objective.{override}" for override in overrides)])
