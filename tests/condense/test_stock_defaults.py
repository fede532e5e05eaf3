"""The memory that a stock checkpoint gets where none is given, and what is said of an untrained one."""

import json
import shutil

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Trainer, TrainingArguments

from condense import CondenseConfig, CondenseForCausalLM
from condense.generation.prefill import prefill
from condense.reference import reference_logits
from condense.state.cache_argument import CACHE
from condense.training.recipe.models import CondenseModel
from condense.utils import notices
from tests.commands import printed
from tests.condense.models import PAPERS_MEMORY, random_adapters, random_ids, tiny_config, weights
from tests.refusals import assert_refused

SHAPE = {
    "vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 40,
}  # fmt: skip


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """A Llama with large random weights."""
    folder = tmp_path_factory.mktemp("stock")
    torch.manual_seed(0)
    tokens = {"bos_token_id": 5, "eos_token_id": 6, "pad_token_id": 0}
    LlamaForCausalLM(LlamaConfig(**SHAPE, **tokens, initializer_range=0.25)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("given", "share", "sink"),
    [
        ({}, 0.2, 5),
        ({"memory_share": 1.0}, 1.0, 5),
        ({"memory_share": [1, 0]}, [1, 0], 5),
        ({"memory_source": "layer_input"}, 1.0, 5),
        ({"memory_source": "layer_output"}, 0.2, 5),
        ({"sink_token_id": None}, 0.2, None),
        ({"sink_token_id": 0}, 0.2, 0),
        (PAPERS_MEMORY, 1.0, None),
    ],
)
def test_fields_that_are_not_given_have_the_defaults(stock, given, share, sink):
    for config in (CondenseConfig.from_pretrained(stock, **given), CondenseForCausalLM.from_pretrained(stock, **given)):
        config = getattr(config, "config", config)
        assert (config.memory_share, config.sink_token_id) == (share, sink)


@pytest.mark.parametrize(
    ("fields", "sink"),
    [
        ({"bos_token_id": 9, "eos_token_id": 7}, 9),
        ({"bos_token_id": None, "eos_token_id": 7}, 7),
        ({"bos_token_id": None, "eos_token_id": [8, 7]}, 8),
        ({"bos_token_id": None, "eos_token_id": None}, None),
        ({"bos_token_id": 128000, "eos_token_id": 7}, 7),
        ({"bos_token_id": None, "eos_token_id": []}, None),
    ],
)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_sink_begins_the_texts_or_ends_them(tmp_path, family, fields, sink):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **SHAPE, **fields}))
    assert CondenseConfig.from_pretrained(tmp_path).sink_token_id == sink


@pytest.mark.parametrize(("config", "sink"), [(LlamaConfig, 1), (Qwen3Config, None)])
def test_a_file_leaves_out_its_familys_own_tokens(tmp_path, config, sink):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": config.model_type, **SHAPE}))
    assert config().bos_token_id == sink
    assert CondenseConfig.from_pretrained(tmp_path).sink_token_id == sink


@torch.no_grad()
def test_the_fold_is_the_equations(stock):
    model, ids = CondenseForCausalLM.from_pretrained(stock, segment_length=5, dtype=torch.float64), random_ids(1, 17)
    config = CondenseConfig.from_pretrained(stock, segment_length=5, memory_share=0.2, sink_token_id=5)
    torch.testing.assert_close(model(ids).logits[0], reference_logits(weights(model), config, ids[0]))
    paper = CondenseForCausalLM.from_pretrained(stock, segment_length=5, dtype=torch.float64, **PAPERS_MEMORY)
    assert not torch.allclose(model(ids).logits, paper(ids).logits, atol=1e-2)
    llama = LlamaForCausalLM.from_pretrained(stock, dtype=torch.float64)
    torch.testing.assert_close(model(ids[:, :5]).logits, llama(ids[:, :5]).logits, atol=1e-5, rtol=1e-3)


def test_a_folded_checkpoint_and_a_configuration_by_hand_are_the_papers(stock, tmp_path):
    made = CondenseForCausalLM(tiny_config())
    assert (made.config.memory_share, made.config.sink_token_id) == (1.0, None)
    CondenseForCausalLM.from_pretrained(stock, **PAPERS_MEMORY).save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())  # of a former version, which knew no sink
    (tmp_path / "config.json").write_text(json.dumps({name: stored[name] for name in stored.keys() - {*PAPERS_MEMORY}}))
    loaded = CondenseConfig.from_pretrained(tmp_path)
    assert (loaded.memory_share, loaded.sink_token_id) == (1.0, None)
    of_stock = CondenseForCausalLM.from_pretrained(stock, config=CondenseConfig(**SHAPE)).config
    assert (of_stock.memory_share, of_stock.sink_token_id) == (1.0, None)


def test_defaults_are_said_once_for_each_checkpoint(stock, said, tmp_path, monkeypatch):
    for _ in range(2):
        CondenseForCausalLM.from_pretrained(stock)
        CondenseConfig.from_pretrained(stock)
    both = f"{str(stock)!r} is folded with memory_share=0.2 and sink_token_id=5, the defaults for a stock checkpoint;"
    measured = " condense convert --measure finds its own."
    assert said() == [both + measured]
    other = shutil.copytree(stock, tmp_path / "other")
    CondenseConfig.from_pretrained(other, memory_share=0)
    one = f"{str(other)!r} is folded with sink_token_id=5, the default for a stock checkpoint;"
    assert said() == [both + measured, one + measured]
    CondenseConfig.from_pretrained(other, **PAPERS_MEMORY)
    with notices.without_notices():
        CondenseConfig.from_pretrained(other, sink_token_id=None)
    monkeypatch.setenv("RANK", "1")
    CondenseConfig.from_pretrained(other)
    assert len(said()) == 2


def test_a_stock_configuration_is_refused(stock):
    words = r"config is a LlamaConfig: leave it out, or pass a CondenseConfig, such as CondenseConfig.from_pretrained"
    assert_refused(words, CondenseForCausalLM.from_pretrained, stock, config=LlamaConfig.from_pretrained(stock))


FIGURES = "costs 0.92 nats a token above full attention with a sink and 1.40 without, and diverges after"


def test_share_1_is_warned_of_with_its_figure_except_in_training(stock, said):
    CondenseModel(source=str(stock), **PAPERS_MEMORY).load("auto", 0.0)
    CondenseForCausalLM.from_pretrained(stock, memory_share=[1.0, 0.0], sink_token_id=None)
    CondenseForCausalLM.from_pretrained(stock, memory_share=0.8, sink_token_id=None)
    CondenseForCausalLM(tiny_config())
    assert not said()
    for share in (1, [1, 1], [0.9, 1]):
        CondenseForCausalLM.from_pretrained(stock, memory_share=share, sink_token_id=5)
    (line,) = said()
    assert FIGURES in line and "its memory is not trained" in line and str(stock) in line


def test_commands_warn_of_share_1(llama, said, tmp_path):
    printed("convert", llama, tmp_path / "stock", "--to", "stock")
    assert not said()
    printed("convert", llama, tmp_path / "folded", "--memory-share", 1, "--sink-token-id", "none")
    (line,) = said()
    assert FIGURES in line
    printed("generate", "--model", tmp_path / "folded", "--prompt", "The", "--max-new-tokens", 2)
    assert len(said()) == 1  # its segments have 512 tokens
    printed("generate", "--model", tmp_path / "folded", "--prompt", "The", "--max-new-tokens", 4, "--segment-length", 4)
    assert FIGURES in said()[1] and str(tmp_path / "folded") in said()[1]


UNTRAINED = "is folded and its memory is not trained: text beyond a segment of 5 tokens"


@pytest.fixture
def untrained(stock):
    return CondenseForCausalLM.from_pretrained(stock, segment_length=5, memory_share=0.2, sink_token_id=5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reading_with_an_untrained_memory_is_said_once(untrained, said, tmp_path, dtype):
    untrained.save_pretrained(tmp_path)
    loaded = CondenseForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    for model in (untrained, loaded):
        model.generate(random_ids(1, 3), max_new_tokens=2)
        prefill(model, random_ids(1, 5))
    assert not said()
    for number, model in enumerate((untrained, loaded), 1):
        cache = prefill(model, random_ids(1, 6))
        assert len(said()) == number
        model.generate(random_ids(1, 2), max_new_tokens=9, attention_mask=torch.ones(1, 2), **{CACHE: cache})
        assert len(said()) == number and UNTRAINED in said()[-1]
        assert "trains it." in said()[-1] and "SmolLM2" not in said()[-1]
    assert said()[1].startswith(repr(str(tmp_path)))


def trained(model, folder):
    """A step of Trainer."""
    texts = [{"input_ids": row, "labels": row} for row in random_ids(4, 17)]
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=1, per_device_train_batch_size=2, report_to="none", use_cpu=True,
        learning_rate=1e-4, disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    Trainer(model, args=arguments, train_dataset=texts).train()
    return model.eval()


def test_a_trained_memory_is_not_said_to_be_untrained(untrained, said, tmp_path):
    model = trained(untrained, tmp_path)
    model.save_pretrained(tmp_path / "saved")
    loaded = CondenseForCausalLM.from_pretrained(tmp_path / "saved")
    for one in (model, loaded):
        one.generate(random_ids(1, 12), max_new_tokens=2)
        assert one.config.folded_weights is None
    assert not said()


def test_adapters_train_a_memory(untrained, said):
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(untrained, peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    random_adapters(adapted).generate(input_ids=random_ids(1, 12), max_new_tokens=2)
    assert not said()


def test_a_memory_that_needs_no_training_is_not_warned_of(stock, said):
    model = CondenseForCausalLM.from_pretrained(stock, segment_length=5, memory_source="layer_input", sink_token_id=5)
    model.generate(random_ids(1, 12), max_new_tokens=2)
    CondenseForCausalLM(tiny_config()).generate(random_ids(1, 12), max_new_tokens=2)
    assert not said()
