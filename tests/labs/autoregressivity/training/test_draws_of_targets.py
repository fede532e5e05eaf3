"""Missing targets and masked logits: the same ones in every epoch and on any division of the batches, and their losses.

The data are real documents through the real batches.
"""

import math

import pytest
import torch
from transformers import AutoTokenizer

from condense.training.data.batches import StageBatches
from condense.training.data.tasks import make_examples
from condense.training.draws import uniform
from condense.training.recipe import OBJECTIVES, load_recipe
from condense.training.recipe.objectives import next_token_losses
from condense.training.small_llama import save_small_llama
from tests.training.recipes import text_data, write_digits, write_recipe

from .models import VOCABULARY, ids_of, small_model

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("documents")
    save_small_llama(folder / "start", width=8)
    write_digits(folder, [18, 38, 58] * 2)
    stock = {"kind": "stock", "source": str(folder / "start")}
    return write_recipe(folder, stock, [(20, 6), (10, 12)], global_batch=4, data=text_data(folder))


def batches_of(recipe, objective: str, ranks: int = 1, *overrides):
    loaded = load_recipe(recipe, [f"objective={objective}", *overrides])
    tokenizer = AutoTokenizer.from_pretrained(loaded.model.source)
    return loaded, StageBatches(loaded, make_examples(loaded, tokenizer)[0], ranks)


def targets_by_place(recipe, rate: float, *overrides, ranks: int = 1) -> dict[int, list[bool]]:
    """Whether the target at each place was missing, each time that it was trained on."""
    loaded, batches = batches_of(recipe, f"{{kind: missing_targets, rate: {rate}, seed: 3}}", ranks, *overrides)
    found: dict[int, list[bool]] = {}
    for batch in (batches[number] for number in range(len(batches))):
        missing = loaded.objective.missing(batch)
        for row, place in enumerate(batch["places"].tolist()):
            for n, label in enumerate(batch["labels"][row].tolist()):
                if label != -100:
                    found.setdefault(place + n, []).append(bool(missing[row, n]))
                else:
                    assert not missing[row, n]
    return found


def test_the_same_targets_are_missing_in_every_epoch_and_division(recipe):
    """Also at another total length, which cuts the documents at other places. A resumed run takes batches by number."""
    once = targets_by_place(recipe, 0.5)
    assert all(len(set(seen)) == 1 for seen in once.values())
    assert min(map(len, once.values())) >= 2 and max(map(len, once.values())) == 4  # two epochs at each of two lengths
    for ranks, micro in ((1, 4), (2, 1), (2, 2), (4, 1)):
        assert targets_by_place(recipe, 0.5, f"micro_batch={micro}", ranks=ranks) == once
    missing = {place: seen[0] for place, seen in once.items()}
    assert missing == {place: uniform(3, torch.tensor(place)).item() < 0.5 for place in missing}
    assert 0.4 < sum(missing.values()) / len(missing) < 0.6
    more = targets_by_place(recipe, 0.9)
    assert all(more[place][0] for place in missing if missing[place])  # what is missing at 0.5 is missing at 0.9


def test_targets_that_are_missing_anew(recipe):
    """Another choice in each call, the same one after a resume, which restores torch's generator; as many of them."""
    loaded, batches = batches_of(recipe, "{kind: missing_targets, rate: 0.5, fixed: false}")
    batch = {name: tensor for name, tensor in batches[0].items() if name != "name"}
    torch.manual_seed(0)
    draws = [loaded.objective.missing(batch) for _ in range(200)]
    assert not torch.equal(draws[0], draws[1])
    torch.manual_seed(0)
    assert torch.equal(loaded.objective.missing(batch), draws[0])
    labelled = batch["labels"] != -100
    shares = torch.stack(draws).double().mean(dim=0)[labelled]
    assert shares.min() > 0.3 and shares.max() < 0.7
    expected = loaded.objective.num_targets(batch)
    assert expected == (labelled.sum() * 0.5).round() == loaded.objective.num_targets(batch)
    model = small_model("stock").to(torch.float32)
    model.resize_token_embeddings(200)
    losses_BN = (
        -model(batch["input_ids"]).logits.log_softmax(-1)[:, :-1].gather(-1, batch["labels"][:, 1:, None].clamp(0))
    )
    kept_BN = (labelled & ~draws[0])[:, 1:]
    torch.manual_seed(0)
    found = loaded.objective.losses(model, batch, expected).loss
    torch.testing.assert_close(found, losses_BN[..., 0][kept_BN].sum() / expected)


def test_the_loss_is_the_mean_over_the_targets_that_remain(recipe):
    """For any division into micro-batches and ranks: Trainer counts the targets of all, the parts are summed."""
    model = small_model("stock").to(torch.float32)
    model.resize_token_embeddings(200)
    totals = []
    for ranks, micro in ((1, 4), (2, 1), (4, 1)):
        loaded, batches = batches_of(recipe, "{kind: missing_targets, rate: 0.7}", ranks, f"micro_batch={micro}")
        parts = [
            {n: v for n, v in batches[i].items() if n != "name"} for i in range(loaded.accumulation(ranks) * ranks)
        ]
        num_targets = sum(loaded.objective.num_targets(part) for part in parts)
        totals.append(sum(loaded.objective.losses(model, part, num_targets).loss.item() for part in parts))
        logits = [model(part["input_ids"]).logits.log_softmax(-1) for part in parts]
        by_hand = [
            -logits[i][row, n - 1, label].item()
            for i, part in enumerate(parts)
            for row, labels in enumerate(part["labels"].tolist())
            for n, label in enumerate(labels)
            if label != -100 and uniform(0, part["places"][row] + n).item() >= 0.7
        ]
        assert 4 < len(by_hand) == num_targets < 50
        assert totals[-1] == pytest.approx(sum(by_hand) / len(by_hand), rel=1e-5)
    assert totals == pytest.approx(totals[:1] * 3, rel=1e-6)


def test_unknown_tokens_are_read_as_the_likeliest_ones():
    """Against a loop that reads every prefix anew; the loss is that of the known targets."""
    model = small_model("condense")
    ids = ids_of(2, 12)
    batch = {"input_ids": ids, "labels": ids.clone(), "places": torch.tensor([40, 7])}
    batch["labels"][:, 0] = -100
    objective = OBJECTIVES.parse({"kind": "missing_targets", "rate": 0.5, "unknown": "free_run"})
    missing = [[n > 0 and uniform(0, torch.tensor(p + n)).item() < 0.5 for n in range(12)] for p in (40, 7)]
    assert 4 < sum(map(sum, missing)) < 20
    total, count = 0.0, 0
    for row, own in enumerate(missing):
        text: list[int] = []
        for n, is_missing in enumerate(own):
            if n:
                logits = model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]
            text.append(int(logits.argmax()) if is_missing else int(ids[row, n]))
            if n and not is_missing:
                total, count = total - logits.log_softmax(-1)[ids[row, n]].item(), count + 1
    assert objective.num_targets(batch) == count
    assert objective.losses(model, batch, count).loss.item() == pytest.approx(total / count, rel=1e-9)
    assert torch.equal(batch["labels"][:, 1:], ids[:, 1:])


@pytest.mark.parametrize("kind", ["condense", "stock"])
def test_the_softmax_is_over_the_logits_that_are_not_masked(kind):
    """Against sums over lists, with padding; masked logits get no gradient."""
    model = small_model(kind)
    ids = ids_of(2, 12)
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, 0] = -100
    places = [40, 7]
    batch = {"input_ids": ids, "labels": labels, "attention_mask": mask, "places": torch.tensor(places)}
    objective = OBJECTIVES.parse({"kind": "partial_logits", "rate": 0.6, "seed": 5})
    by_segment, counts, hidden = [0.0] * 3, [0] * 3, 0
    for row in range(2):
        logits = model(input_ids=ids[row : row + 1], use_cache=False).logits[0].tolist()
        for n in range(1, 12 if row == 0 else 8):
            label, kept = int(ids[row, n]), []
            for token in range(VOCABULARY):
                drawn = uniform(5, torch.tensor(places[row] + n), torch.tensor(token)).item()
                if token == label or drawn >= 0.6:
                    kept.append(logits[n - 1][token])
            hidden += VOCABULARY - len(kept)
            segment = (n - 1) // 5 if kind == "condense" else 0
            by_segment[segment] += math.log(sum(map(math.exp, kept))) - logits[n - 1][label]
            counts[segment] += 1
    assert 0.5 < hidden / (sum(counts) * (VOCABULARY - 1)) < 0.7
    losses = objective.losses(model, batch, torch.tensor(50))
    number = 3 if kind == "condense" else 1
    assert losses.sums_S.tolist() == pytest.approx(by_segment[:number], rel=1e-9)
    assert losses.targets_S.tolist() == counts[:number]
    assert losses.loss.item() == pytest.approx(sum(by_segment) / 50, rel=1e-9) and "places" in batch
    unmasked = next_token_losses(model, {n: t for n, t in batch.items() if n != "places"}, torch.tensor(50))
    assert losses.targets_S.tolist() == unmasked.targets_S.tolist()  # the same segments
    assert losses.loss < unmasked.loss - 0.01


def test_masked_logits_get_no_gradient_and_the_mask_is_that_of_the_place():
    objective = OBJECTIVES.parse({"kind": "partial_logits", "rate": 0.6})
    logits = torch.randn(6, VOCABULARY, requires_grad=True)
    target, places = torch.arange(6), torch.tensor([3, 9, 3, 10**12, 9, 4])
    hidden = objective.hidden_logits(places, target, VOCABULARY)
    objective.cross_entropy(logits, target, places).sum().backward()
    assert torch.equal(logits.grad == 0, hidden) and not hidden[target, target].any()
    same = torch.arange(VOCABULARY) > 5  # none of the labels
    assert torch.equal(hidden[0, same], hidden[2, same]) and torch.equal(hidden[1, same], hidden[4, same])
    assert not torch.equal(hidden[0, same], hidden[5, same])


def test_large_batches_of_logits_are_masked_in_parts(monkeypatch):
    from condense.labs.autoregressivity.training import partial_logits

    objective = OBJECTIVES.parse({"kind": "partial_logits", "rate": 0.6})
    arguments = torch.randn(7, VOCABULARY), torch.arange(7), torch.arange(7)
    whole = objective.cross_entropy(*arguments)
    monkeypatch.setattr(partial_logits, "LOGITS_AT_ONCE", 3 * VOCABULARY)
    assert torch.equal(objective.cross_entropy(*arguments), whole)


@pytest.mark.parametrize("kind", ["missing_targets", "partial_logits"])
def test_rates_outside_the_range_and_data_without_places_are_refused(recipe, kind):
    for rate in (-0.1, 1.0, 1.5):
        with pytest.raises(ValueError, match=r"objective\.rate"):
            load_recipe(recipe, [f"objective={{kind: {kind}, rate: {rate}}}"])
    with pytest.raises(ValueError, match="data.task=passkey are generated anew: choose a task that reads documents"):
        load_recipe(recipe, [f"objective={{kind: {kind}, rate: 0.5}}", "data={task: passkey}"])


def test_a_step_without_targets_has_the_loss_0():
    model = small_model("stock")
    batch = {"input_ids": ids_of(1, 5), "labels": torch.full((1, 5), -100), "places": torch.tensor([0])}
    losses = OBJECTIVES.parse({"kind": "missing_targets", "rate": 0.9}).losses(model, batch, torch.tensor(0))
    assert losses.loss.item() == 0
