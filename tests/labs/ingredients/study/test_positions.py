"""Llamas with learned positions and without positions, against the stock Llama that is told to rotate nothing."""

import pytest
import torch

from condense.labs.continuity.model import ContinuousLM, Sentence
from condense.labs.ingredients.study.positions import PositionsForCausalLM, without_rotary
from condense.state.cache_argument import CACHE, cache_of
from tests.labs.continuity.study.models import llama

pytestmark = [pytest.mark.usefixtures("no_grad"), pytest.mark.unit]

TABLE = 16


@pytest.fixture(scope="module")
def stock():
    return llama(range(40)).double()


def twin(stock, num_positions):
    torch.manual_seed(3)
    return without_rotary(stock, num_positions).double().eval()


def ids(rows=2, length=9):
    return torch.randint(4, 40, (rows, length), generator=torch.Generator().manual_seed(1))


def unrotated(stock, embeddings_BND, mask=None):
    """Returns the stock Llama with all tokens at position 0, where rotary embeddings rotate nothing."""
    zeros = torch.zeros(embeddings_BND.shape[:2], dtype=torch.long)
    mask = torch.ones_like(zeros) if mask is None else mask
    return stock(inputs_embeds=embeddings_BND, position_ids=zeros, attention_mask=mask, use_cache=False).logits


with_and_without = pytest.mark.parametrize("num_positions", [None, TABLE])


@with_and_without
def test_logits(stock, num_positions):
    model, ids_BN = twin(stock, num_positions), ids()
    embeddings_BND = stock.get_input_embeddings()(ids_BN)
    if num_positions:
        embeddings_BND = embeddings_BND + model.model.wpe.weight[: ids_BN.shape[1]]
    found, expected = model(ids_BN).logits, unrotated(stock, embeddings_BND)
    assert torch.allclose(found, expected, atol=1e-12)
    assert not torch.allclose(found, stock(ids_BN).logits, atol=1e-3)


@with_and_without
def test_token_by_token(stock, num_positions):
    model, ids_BN = twin(stock, num_positions), ids()
    whole, cache = model(ids_BN).logits, None
    for token in range(ids_BN.shape[1]):
        output = model(ids_BN[:, token : token + 1], use_cache=True, **{CACHE: cache})
        cache = cache_of(output)
        assert torch.allclose(output.logits[:, 0], whole[:, token], atol=1e-12)


@with_and_without
def test_fractions_of_tokens(stock, num_positions):
    """Weights are logarithms of durations in the mask; rows of the table are those between two positions."""
    model, (ids_N,) = twin(stock, num_positions), ids(rows=1)
    found = ContinuousLM(model, "end").logits(Sentence(ids_N).shrink([3, 4], 0.25))
    positions = [0, 1, 2, 2.25, 2.5, 3.5, 4.5, 5.5, 6.5]
    embeddings_ND = stock.get_input_embeddings()(ids_N)
    if num_positions:
        table, positions_N = model.model.wpe.weight, torch.tensor(positions, dtype=torch.float64)
        below_N, part_N1 = positions_N.long(), (positions_N % 1)[:, None]
        embeddings_ND = embeddings_ND + (1 - part_N1) * table[below_N] + part_N1 * table[below_N + 1]
    durations_N = torch.ones(len(ids_N), dtype=torch.float64)
    durations_N[[3, 4]] = 0.25
    mask_NN = durations_N.log().expand(len(ids_N), -1).masked_fill(~torch.ones(9, 9).tril().bool(), -torch.inf)
    assert torch.allclose(found, unrotated(stock, embeddings_ND[None], mask_NN[None, None])[0], atol=1e-10)


def test_without_positions_the_order_of_a_bag_is_unknown(stock):
    """One layer sees the tokens before as a set."""
    model = twin(llama(range(40), layers=1).double(), None)
    ids_BN = ids(rows=1)
    turned = ids_BN[:, [3, 1, 2, 0, *range(4, 9)]]
    assert torch.allclose(model(ids_BN).logits[:, 4:], model(turned).logits[:, 4:], atol=1e-12)


def test_saved_and_loaded(stock, tmp_path):
    model = twin(stock, TABLE)
    model.save_pretrained(tmp_path)
    loaded = PositionsForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert loaded.config.learned_positions and len(loaded.model.wpe.weight) == TABLE
    assert torch.allclose(model(ids()).logits, loaded(ids()).logits, atol=1e-12)
