"""Every evaluation takes any causal model of transformers, and gives what a pass without a cache gives."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from condense.eval.decoding import decodes_together, reads_in_parts
from condense.eval.models import generate, load_evaluated
from condense.eval.tasks import evaluate
from condense.eval.tasks.passkey import first_number
from condense.eval.tasks.perplexity import Perplexity
from condense.eval.tasks.windows import segment_losses
from condense.training.data.passkey import PasskeyTask

from .rivals import RIVALS, rival, rival_tokenizer, save_rival
from .tasks.documents import TEXT, made_documents, write_lines

NEW = 5
GREEDY = {"do_sample": False, "max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(scope="module")
def tokenizer():
    return rival_tokenizer()


@pytest.fixture(scope="module")
def folders(tokenizer, tmp_path_factory):
    root = tmp_path_factory.mktemp("rivals")
    return {name: save_rival(root / name, name, tokenizer) for name in RIVALS}


@pytest.fixture(scope="module", params=RIVALS)
def model(request, tokenizer):
    return rival(request.param, tokenizer)


def random_ids(model, *shape):
    return torch.randint(4, model.config.vocab_size, shape, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def greedy(model, ids_N, num_new=NEW):
    """Returns what follows a text, each token by a pass over all before it."""
    for _ in range(num_new):
        ids_N = torch.cat([ids_N, model(ids_N[None], use_cache=False).logits[0, -1].argmax()[None]])
    return ids_N[-num_new:]


def test_a_padded_batch_gets_what_each_row_gets_alone(model):
    ids_BN, mask_BN = random_ids(model, 3, 30), torch.ones(3, 30, dtype=torch.long)
    mask_BN[0, :11], mask_BN[2, :4] = 0, 0
    ids_BN[mask_BN == 0] = model.config.pad_token_id
    found_BN, _ = generate(model, ids_BN, mask_BN, **GREEDY)
    assert torch.equal(found_BN[:, :30], ids_BN)
    for ids_N, mask_N, found_N in zip(ids_BN, mask_BN, found_BN, strict=True):
        assert torch.equal(found_N[30:], greedy(model, ids_N[mask_N.bool()]))


def test_long_prompts_are_read_as_in_one_call(model, monkeypatch):
    """In chunks where a model reads these."""
    monkeypatch.setattr("condense.eval.models.PREFILL_TOKENS", 10)
    ids_BN = random_ids(model, 1, 37)
    found_BN, _ = generate(model, ids_BN, torch.ones_like(ids_BN), **GREEDY)
    assert torch.equal(found_BN[0, 37:], greedy(model, ids_BN[0]))


def test_losses_are_those_of_a_pass_over_the_whole_text(model):
    ids_WN = random_ids(model, 2, 4 * 9 + 1)
    with torch.no_grad():
        logits_WNV = torch.stack([model(ids_N[None, :-1], use_cache=False).logits[0] for ids_N in ids_WN])
    expected = F.cross_entropy(logits_WNV.flatten(0, 1), ids_WN[:, 1:].flatten(), reduction="none")
    found_WSL = segment_losses(model, ids_WN, 9)
    assert found_WSL.shape == (2, 4, 9)
    np.testing.assert_allclose(found_WSL.ravel(), expected.numpy(), atol=1e-4, rtol=1e-4)


def test_what_a_trial_says(tokenizer):
    """RWKV of transformers mixes the rows of a batch up, and knows no padding."""
    together = {name: decodes_together(rival(name, tokenizer)) for name in ("mamba", "mamba2", "rwkv", "gpt2")}
    assert together == {"mamba": True, "mamba2": True, "rwkv": False, "gpt2": True}
    assert [reads_in_parts(rival(name, tokenizer)) for name in ("mamba", "jamba", "gpt2")] == [False, False, True]


def state(model, num_tokens):
    ids_BN = random_ids(model, 2, num_tokens)
    return generate(model, ids_BN, torch.ones_like(ids_BN), **GREEDY | {"max_new_tokens": 1})[1] / 2


def test_the_bytes_of_a_state_are_counted_in_any_cache(tokenizer):
    """By hand: float32, of one row."""
    inner, layers, window = 2 * 32, 4, 4 * 2 * 8 * 15
    for name, num_bytes in {
        "mamba": lambda n: 4 * layers * inner * (4 + 4),  # kernel of 4, state of 4
        "rwkv": lambda n: 4 * layers * 5 * 32,
        "llama": lambda n: 4 * layers * 2 * 2 * 8 * n,
        "jamba": lambda n: 4 * 2 * (inner * (4 + 4) + 2 * 2 * 8 * n),  # two layers of each kind
        "recurrent_gemma": lambda n: 4 * 2 * (32 * 3 + 32) + window,  # two recurrent layers hold their state themselves
    }.items():
        model = rival(name, tokenizer)
        assert [state(model, n) for n in (20, 90)] == [num_bytes(n) for n in (20, 90)]


@pytest.mark.usefixtures("without_pictures")
@pytest.mark.parametrize("name", ["mamba", "rwkv", "gpt_neox"])
def test_every_evaluation_takes_it(name, folders, tokenizer, tmp_path):
    models = [str(folders[name])]
    found = evaluate("passkey", tmp_path, models=models, lengths=[80], depths=(0.0, 1.0), num_prompts=3)
    model = load_evaluated(models[0]).model
    for cell, depth in zip(found["cells"], (0.0, 1.0), strict=True):
        generator = np.random.default_rng([0, 80, [0.0, 1.0].index(depth)])
        passkeys = PasskeyTask(tokenizer).batch(3, 80, generator, depth)
        said = [tokenizer.decode(greedy(model, ids_N, 4)) for ids_N in passkeys.prompt_ids_BN]
        assert cell["correct"] == sum(first_number(one) == key for one, key in zip(said, passkeys.keys, strict=True))
    assert evaluate("facts", tmp_path, models=models, lengths=[100], kinds=["one_fact"], num_prompts=2)["cells"]
    assert evaluate("recall", tmp_path, models=models, lengths=[64], pairs=[1, 2], num_prompts=2)["cells"]
    (tmp_path / "text.txt").write_text(f"{TEXT} " * 20)
    given = {"data": [str(tmp_path / "text.txt")], "num_segments": 3, "segment_length": 16}
    found = evaluate("perplexity", tmp_path, models=models, **given)
    assert [curve["curve"] for curve in found["curves"]] == ["cut_off", "full_attention"]
    label = "full attention" if name == "gpt_neox" else "the model's own state"
    assert [row[1] for row in Perplexity.tables(found)[0].rows] == ["memory cut off", label, label]
    data = write_lines(tmp_path / "data.jsonl", made_documents(3))
    fields = {"text_field": "source", "summary_field": "target", "new_tokens": 6, "temperature": 0.0}
    found = evaluate("summarization", tmp_path, models=models, data=str(data), **fields)
    assert len(found["documents"]) == 3 and json.loads((tmp_path / "summarization.json").read_text())


@pytest.mark.parametrize("name", ["mamba", "rwkv", "jamba", "gpt2"])
def test_the_harness_scores_and_writes_what_the_model_does(name, folders, tokenizer):
    """Contexts of different lengths in one batch; of Mamba also ones that are longer than the harness's default."""
    pytest.importorskip("lm_eval", reason="needs the extra harness")
    from lm_eval.api.instance import Instance

    from condense.eval.harness import StockLM

    lm = StockLM(str(folders[name]), batch_size=2)
    words, model = TEXT.split(), lm.model
    contexts = [" ".join(words[:5]), " ".join(words[2:17])]
    asked = [Instance("loglikelihood", {}, (context, " the sea"), n) for n, context in enumerate(contexts)]
    for (found, _), context in zip(lm.loglikelihood(asked, disable_tqdm=True), contexts, strict=True):
        ids_N = torch.tensor(tokenizer(context + " the sea").input_ids)
        with torch.no_grad():
            scores_NV = model(ids_N[None, :-1], use_cache=False).logits[0].log_softmax(-1)[-2:]
        assert found == pytest.approx(float(scores_NV.gather(1, ids_N[-2:, None]).sum()), abs=1e-3)
    options = {"until": [], "max_gen_toks": NEW}
    asked = [Instance("generate_until", {}, (context, options), n) for n, context in enumerate(contexts)]
    for found, context in zip(lm.generate_until(asked, disable_tqdm=True), contexts, strict=True):
        written_n = greedy(model, torch.tensor(tokenizer(context).input_ids))
        ended = (written_n == tokenizer.eos_token_id).nonzero()
        expected = tokenizer.decode(written_n[: int(ended[0])] if len(ended) else written_n)
        assert found.strip() == expected.replace("<pad>", "").strip()
    if name == "mamba":
        assert lm.max_length > 10**9
        with pytest.raises(ValueError, match="batch_size=auto needs a longest text, and the model has none"):
            lm._detect_batch_size()
