"""A stock model through a window in a grid: what its answers depend on, and what is refused."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from condense.eval.models import EvaluatedModel
from condense.eval.tasks import evaluate
from condense.eval.tasks.options import PasskeyOptions
from condense.eval.tasks.passkey import Passkey
from condense.eval.tasks.window_model import WindowModel
from condense.training.facts_data import write_facts_llama

from ...refusals import assert_refused

NEW = 3


@pytest.fixture(scope="module")
def stock(folders):
    model = AutoModelForCausalLM.from_pretrained(folders / "llama").eval()
    return EvaluatedModel("stock", str(folders / "llama"), model, AutoTokenizer.from_pretrained(folders / "llama"))


def prompts_of(stock, length):
    return torch.randint(stock.config.vocab_size, (3, length), generator=torch.Generator().manual_seed(0))


def test_a_window_longer_than_the_text_changes_nothing(stock):
    prompt_ids_BN = prompts_of(stock, 40)
    found_BN, num_bytes = WindowModel(stock, 64).complete(prompt_ids_BN, NEW)
    expected_BN = stock.model.generate(
        prompt_ids_BN, attention_mask=torch.ones_like(prompt_ids_BN), do_sample=False, max_new_tokens=NEW,
        min_new_tokens=NEW,
    )  # fmt: skip
    assert torch.equal(found_BN, expected_BN[:, 40:])
    config = stock.config
    assert num_bytes == 2 * config.num_hidden_layers * 64 * config.num_key_value_heads * config.head_dim * 4


def test_answers_depend_on_the_sinks_and_on_what_the_windows_of_all_layers_reach(stock):
    window, layers = 10, stock.config.num_hidden_layers
    reach = layers * (window - 4 - 1) + 1  # the last token, and in each layer the keys before it that are no sinks
    model, before_BN = WindowModel(stock, window), prompts_of(stock, 6 * reach)
    scores = []
    hook = stock.model.register_forward_hook(lambda _, __, output: scores.append(output.logits[0, -1]))
    for changed in (None, slice(4, -reach), slice(-reach, -reach + 1), slice(0, 1)):
        ids_BN = before_BN[:1].clone()
        if changed is not None:
            ids_BN[:, changed] = (ids_BN[:, changed] + 7) % stock.config.vocab_size
        model.complete(ids_BN, 1)
    hook.remove()
    assert torch.allclose(scores[0], scores[1], atol=1e-5)  # far tokens are never read
    assert not torch.allclose(scores[0], scores[2], atol=1e-5) and not torch.allclose(scores[0], scores[3], atol=1e-5)


def check_grid(results, models, window):
    cells = {cell["model"]: cell for cell in results["cells"]}
    name = f"stock, window of {window} keys, 4 of them sinks"
    assert list(cells) == ["stock", name, *models[1:]] and results["window"] == window
    assert cells[name]["correct"] == cells["stock"]["correct"] and cells[name]["total"] == 2


def test_a_grid_of_passkeys_has_the_window_beside_the_stock_model(folders, tmp_path):
    models = [f"stock={folders / 'llama'}", f"folded={folders / 'folded'}"]
    given = {"lengths": [256], "num_prompts": 2, "depths": [0.5], "window": 400}
    check_grid(evaluate("passkey", tmp_path / "out", models=models, **given), ["stock", "folded"], 400)


def test_a_grid_of_facts_has_it_too(tmp_path):
    write_facts_llama(tmp_path, width=16, layers=1)
    (tmp_path / "llama").rename(tmp_path / "stock")
    given = {"lengths": [128], "num_prompts": 2, "kinds": ["one_fact"], "num_facts": 2, "window": 200}
    check_grid(evaluate("facts", tmp_path / "out", models=[str(tmp_path / "stock")], **given), ["stock"], 200)


def test_refusals(folders, tmp_path):
    given = {"models": [f"folded={folders / 'folded'}"], "lengths": [256], "num_prompts": 1}
    assert_refused("all are folded: add --model STOCK", evaluate, "passkey", tmp_path / "a", **given, window=16)
    given["models"] = [f"stock={folders / 'llama'}"]
    chats = PasskeyOptions(models=["stock"], chat=["stock"], window=16)
    assert_refused("--window 16 has no chats", Passkey, chats, [])
    assert_refused("--window 4 has 4 sinks: give it more keys", evaluate, "passkey", tmp_path / "b", **given, window=4)
