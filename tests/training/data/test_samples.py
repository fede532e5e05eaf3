"""Texts that a model samples from itself: whose they are, that they are drawn once, and that training reads them."""

import json
import shutil

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from condense import CondenseForCausalLM
from condense.training.data import samples
from condense.training.data.samples import first_token, sample_store
from condense.training.data.tasks import make_examples
from condense.training.planning.dry_run import dry_run
from condense.training.preflight import check_run
from condense.training.recipe import SampleData, load_recipe
from condense.training.small_llama import save_small_llama
from condense.training.train import train

from ..recipes import write_recipe
from ..runs import log_lines


def recipe_in(folder):
    data = {"task": "samples", "prepared": str(folder / "prepared")}
    fields = {"data": data, "objective": {"kind": "distill"}, "evaluation": {"sequences": 3, "every": 6}}
    fields |= {"optimizer": {"learning_rate": 3e-3, "warmup_steps": 1}, "micro_batch": 2}
    start = {"source": str(folder / "start"), "segment_length": 8}
    return write_recipe(folder, start, [(24, 4), (32, 2)], global_batch=4, **fields)


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A model whose next tokens are far from uniform, and its tokenizer."""
    folder = tmp_path_factory.mktemp("model") / "start"
    model = save_small_llama(folder, width=16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(12)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(start):
    return PreTrainedTokenizerFast.from_pretrained(start)


def drawn(store) -> np.ndarray:
    return np.stack([store[number].input_ids for number in range(len(store))])


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch):
    monkeypatch.setattr(samples, "TOKENS_AT_ONCE", 2**11)


def test_texts_follow_the_stock_model(start, tokenizer, tmp_path):
    """The second and the tenth token, by the probabilities that full attention gives them."""
    data = SampleData(task="samples", prepared=tmp_path, temperature=0.3)
    texts_BN = drawn(sample_store(data, str(start), tokenizer, 12, 512))[:512]
    assert texts_BN.shape == (512, 12) and set(texts_BN[:, 0]) == {first_token(tokenizer)}
    model = LlamaForCausalLM.from_pretrained(start)
    with torch.no_grad():
        p_BNV = (model(torch.tensor(texts_BN)).logits / 0.3).softmax(-1).numpy()
    for column in (1, 9):
        expected_V = p_BNV[:, column - 1].sum(0)  # of each token, over the texts as they are up to here
        variance_V = (p_BNV[:, column - 1] * (1 - p_BNV[:, column - 1])).sum(0)
        counts_V = np.bincount(texts_BN[:, column], minlength=len(expected_V))
        assert np.all(np.abs(counts_V - expected_V) <= 5 * np.sqrt(variance_V) + 1)
        assert expected_V.max() > 3 * expected_V.mean()  # not uniform


def test_texts_are_drawn_once_and_resumed(start, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(samples, "TOKENS_AT_ONCE", 9 * 64 + 5)
    data = SampleData(task="samples", prepared=tmp_path)
    texts_BN = drawn(sample_store(data, str(start), tokenizer, 9, 150))
    assert len(texts_BN) == 3 * 64 and len(np.unique(texts_BN, axis=0)) > 180
    (folder,) = tmp_path.iterdir()
    (folder / "part-00002.arrow").unlink()  # as after a kill
    numbers, draw = [], samples.draw
    monkeypatch.setattr(samples, "draw", lambda *arguments: numbers.append(arguments[-1]) or draw(*arguments))
    again_BN = drawn(sample_store(data, str(start), tokenizer, 9, 150))
    assert numbers == [2] and np.array_equal(again_BN, texts_BN)
    sample_store(data, str(start), tokenizer, 9, 100)
    assert numbers == [2]
    other_BN = drawn(sample_store(data.model_copy(update={"seed": 1}), str(start), tokenizer, 9, 10))
    assert not np.array_equal(other_BN, texts_BN[:64])


def test_a_folded_model_writes_as_its_stock_model(start, tokenizer, tmp_path):
    folded = tmp_path / "folded"
    CondenseForCausalLM.from_pretrained(start, segment_length=4).save_pretrained(folded)
    data = SampleData(task="samples", prepared=tmp_path / "prepared")
    stores = [sample_store(data, str(source), tokenizer, 12, 1) for source in (start, folded)]
    assert stores[0].folder != stores[1].folder  # other weights may be there
    assert np.array_equal(*map(drawn, stores))


def test_settings_of_generate_do_not_change_the_texts(start, tokenizer, tmp_path):
    data = SampleData(task="samples", prepared=tmp_path / "prepared")
    other = tmp_path / "other"
    shutil.copytree(start, other)
    GenerationConfig(do_sample=True, repetition_penalty=20.0, min_p=0.5).save_pretrained(other)
    stores = [sample_store(data, str(source), tokenizer, 12, 1) for source in (start, other)]
    assert np.array_equal(*map(drawn, stores))


def test_training_without_data(start, tmp_path):
    (tmp_path / "start").symlink_to(start)
    train(load_recipe(recipe_in(tmp_path)))
    assert len(log_lines(tmp_path / "output")) == 6
    first, *_, last = log_lines(tmp_path / "output", "eval_loss_distill")
    assert last["eval_loss_distill"] < first["eval_loss_distill"]
    (folder,) = (tmp_path / "prepared").iterdir()
    settings = json.loads((folder / "settings.json").read_text())
    assert settings["tokens"] == 32 and len(list(folder.glob("part-*.arrow"))) == 1  # 3 + 4 x 4 x 24/32 + 2 x 4 texts


@pytest.mark.parametrize(("texts", "expected"), [("", 4 * 4 * 24 // 32 + 2 * 4), ("data.texts=5", 5)])
def test_as_many_texts_as_the_run_reads(start, tokenizer, tmp_path, texts, expected):
    (tmp_path / "start").symlink_to(start)
    path = recipe_in(tmp_path)
    training, held_out = make_examples(load_recipe(path, [texts] if texts else []), tokenizer)
    assert (held_out.first, held_out.last) == (0, 3)
    assert (training.first, training.last) == (3, 3 + expected)
    figures, printed = dry_run(load_recipe(path, [texts] if texts else []))
    assert figures["plan"]["samples"] == 3 + expected
    assert f"first the model writes {3 + expected} texts of 32 tokens" in printed


def test_refusals(start, tokenizer, tmp_path):
    path = recipe_in(tmp_path)
    with pytest.raises(ValueError, match=r"evaluation.sources: data.task=samples has its own texts"):
        load_recipe(path, ["evaluation.sources=[{files: x}]"])
    with pytest.raises(ValueError, match=r"data.temperature"):
        load_recipe(path, ["data.temperature=0"])
    without = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(ValueError, match="neither bos_token nor eos_token"):
        sample_store(SampleData(task="samples", prepared=tmp_path), str(start), without, 8, 1)
    shutil.copytree(start, tmp_path / "start")
    LlamaConfig.from_pretrained(start, max_position_embeddings=31).save_pretrained(tmp_path / "start")
    with pytest.raises(
        ValueError, match="writes its texts and reads texts of up to 32 tokens .*=31: set stages.1.total_length=31, or"
    ):
        check_run(load_recipe(path), 1, None)
    without.save_pretrained(tmp_path / "start")
    with pytest.raises(ValueError, match="neither bos_token nor eos_token"):
        check_run(load_recipe(path), 1, None)
    assert not (tmp_path / "prepared").exists()


def test_a_deleted_part_is_drawn_again(start, tokenizer, tmp_path):
    data = SampleData(task="samples", prepared=tmp_path)
    before = drawn(sample_store(data, str(start), tokenizer, 512, 12))
    (folder,) = tmp_path.iterdir()
    _, second, third = sorted(folder.glob("part-*.arrow"))
    second.unlink()
    assert np.array_equal(drawn(sample_store(data, str(start), tokenizer, 512, 12)), before)
    third.write_bytes(third.read_bytes()[:-8])
    with pytest.raises(ValueError, match=f"{third} is damaged"):
        sample_store(data, str(start), tokenizer, 512, 12)
