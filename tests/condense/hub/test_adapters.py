"""Adapters merged into weights: the model that PEFT computes, whatever they adapt; what is damaged or runs code."""

import copy
import json
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from condense import CondenseForCausalLM
from condense.hub.adapters import check_adapters, merge_adapters
from condense.hub.loading import load_model

from ...refusals import assert_refused
from ..models import random_ids, tiny_model

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")  # of PEFT
SHAPE = {"hidden_size": 32, "intermediate_size": 64}  # multiples of what each method needs
LINEAR = ["q_proj", "v_proj", "down_proj"]
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def save_adapters(model, settings, folder):
    """Adapters of random weights for a model, as PEFT saves them."""
    torch.manual_seed(2)
    adapted = peft.get_peft_model(copy.deepcopy(model), settings)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    adapted.save_pretrained(folder)


@torch.no_grad()
def assert_merged_as_adapted(model, folder, ids):
    """The merged model, saved and loaded, has the logits of PEFT's model, which the adapters have changed."""
    expected = peft.PeftModel.from_pretrained(copy.deepcopy(model), folder).eval()(input_ids=ids).logits
    assert (expected - model(ids).logits).abs().max() > 0.1
    merge_adapters(copy.deepcopy(model), folder).save_pretrained(folder.parent / "merged")
    merged = CondenseForCausalLM.from_pretrained(folder.parent / "merged", dtype="auto")
    # The norms of a Llama round to float32.
    torch.testing.assert_close(merged(ids).logits, expected, atol=1e-4, rtol=1e-4)
    return merged


def change(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def lora(*targets, **settings):
    return peft.LoraConfig(r=4, target_modules=list(targets) or LINEAR, task_type="CAUSAL_LM", **settings)


TIED = {"ensure_weight_tying": True}
ADAPTED = {  # settings, and whether the head is still tied; None: the same weights up to rounding, tied or not
    "layers": (lora, True),
    "head": (lambda: lora("lm_head", "q_proj"), False),
    "head by a pattern": (lambda: peft.LoraConfig(r=4, target_modules=r".*(head|q_proj)"), False),
    "embedding": (lambda: lora("embed_tokens", "q_proj"), False),
    "both": (lambda: lora("embed_tokens", "lm_head"), False),
    "both, tied": (lambda: lora("embed_tokens", "lm_head", **TIED), None),
    "embedding, tied": (lambda: lora("embed_tokens", **TIED), None),
    "saved head": (lambda: lora(modules_to_save=["lm_head"]), False),
    "saved embedding": (lambda: lora(modules_to_save=["embed_tokens"]), False),
    "saved embedding, tied": (lambda: lora(modules_to_save=["embed_tokens"], **TIED), True),
    "tokens": (lambda: lora(trainable_token_indices=[24, 50]), True),
    "DoRA of the head": (lambda: lora("lm_head", use_dora=True), False),
    "PiSSA": (lambda: lora(init_lora_weights="pissa"), True),
    "layers twice": (lambda: lora(layer_replication=[(0, 2), (1, 3)]), True),
}


@pytest.mark.parametrize("name", ADAPTED)
def test_the_merged_model_of_a_tied_one_is_the_adapted_one(name, tmp_path):
    make, tied = ADAPTED[name]
    model = tiny_model(torch.float32, tie_word_embeddings=True, **SHAPE)
    save_adapters(model, make(), tmp_path / "adapters")
    merged = assert_merged_as_adapted(model, tmp_path / "adapters", random_ids(2, 17))
    assert merged.config.tie_word_embeddings == tied or tied is None
    assert merged.config.tie_word_embeddings == (merged.lm_head.weight is merged.model.embed_tokens.weight)


METHODS = {  # of PEFT, with settings that suit so small a model
    "AdaLoraConfig": {"total_step": 10, "target_modules": LINEAR},
    "BOFTConfig": {"target_modules": LINEAR},
    "FourierFTConfig": {"n_frequency": 10, "target_modules": LINEAR},
    "IA3Config": {"feedforward_modules": ["down_proj"], "target_modules": LINEAR},
    "LNTuningConfig": {"target_modules": ["input_layernorm", "post_attention_layernorm"]},
    "LoHaConfig": {"target_modules": LINEAR},
    "LoKrConfig": {"target_modules": LINEAR},
    "OFTConfig": {"target_modules": LINEAR},
    "TrainableTokensConfig": {"token_indices": [24, 50]},
    "VBLoRAConfig": {"vector_length": 8, "num_vectors": 16, "target_modules": LINEAR},
    "VeraConfig": {"target_modules": LINEAR},
}


@pytest.mark.parametrize("name", METHODS)
def test_other_methods_than_lora(name, tmp_path):
    model = tiny_model(torch.float32, **SHAPE)
    save_adapters(model, getattr(peft, name)(task_type="CAUSAL_LM", **METHODS[name]), tmp_path / "adapters")
    assert_merged_as_adapted(model, tmp_path / "adapters", random_ids(2, 17))


@pytest.mark.parametrize(
    ("make", "method"),
    [
        (lambda: lora(alora_invocation_tokens=[3]), "LORA"),
        (lambda: lora(lora_bias=True), "LORA"),
        (lambda: peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"), "PROMPT_TUNING"),
    ],
)
def test_adapters_that_are_more_than_weights(make, method, tmp_path):
    model = tiny_model(torch.float32, **SHAPE)
    save_adapters(model, make(), tmp_path)
    assert_refused(f"adapters of {method} with these settings can't be merged", merge_adapters, model, tmp_path)


@pytest.mark.parametrize("layers", [2, 4])
def test_adapters_of_more_or_fewer_layers(layers, tmp_path):
    save_adapters(tiny_model(torch.float32), lora(), tmp_path)
    with pytest.raises(ValueError, match="belong to layers that the model does not have|do not fit the model"):
        merge_adapters(tiny_model(torch.float32, num_hidden_layers=layers), tmp_path)


ADDED = {  # adapters of a model with more tokens: of the layers alone, of the new tokens, of the whole embedding
    "layers": lora,
    "saved": lambda: lora("q_proj", modules_to_save=["embed_tokens", "lm_head"]),
    "embedding": lambda: lora("q_proj", "embed_tokens"),
    "tokens": lambda: lora("q_proj", trainable_token_indices=[60, 62]),
}


@pytest.mark.parametrize("name", ADDED)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@torch.no_grad()
def test_adapters_trained_after_tokens_were_added(name, tied, tmp_path):
    """The error's remedy gives the model that PEFT trained."""
    torch.manual_seed(0)
    shape = {"vocab_size": 61, "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.2, **SHAPE}
    LlamaForCausalLM(LlamaConfig(**shape, tie_word_embeddings=tied)).save_pretrained(tmp_path / "llama")
    trained = LlamaForCausalLM.from_pretrained(tmp_path / "llama")
    trained.resize_token_embeddings(63)
    trained.save_pretrained(tmp_path / "resized")
    adapted = peft.get_peft_model(trained, ADDED[name]()).eval()
    for parameter in adapted.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter) if parameter.requires_grad else 0)
    adapted.save_pretrained(tmp_path / "adapters")
    small, resized = (
        load_model(CondenseForCausalLM, str(tmp_path / name), segment_length=8) for name in ("llama", "resized")
    )
    with pytest.raises(
        ValueError, match=r"trained with at least 63 tokens, and the model has 61.*embeddings\(63\), save"
    ):
        merge_adapters(small, tmp_path / "adapters")
    ids = random_ids(2, 8)  # within a segment
    ids[:, 3:5] = torch.tensor([60, 62])
    torch.testing.assert_close(
        merge_adapters(resized, tmp_path / "adapters")(ids).logits, adapted(ids).logits, atol=1e-4, rtol=1e-4
    )


def test_adapters_in_a_pickle(llama, tmp_path, error_line, capsys):
    """They could run code. PEFT writes them as safetensors."""
    model = CondenseForCausalLM.from_pretrained(llama)
    save_adapters(model, lora(), tmp_path / "safe")
    adapted = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "safe")
    adapted.save_pretrained(tmp_path / "pickled", safe_serialization=False)
    capsys.readouterr()
    line = error_line("convert", llama, tmp_path / "merged", "--merge", tmp_path / "pickled")
    assert "it has no adapter_model.safetensors" in line
    peft.PeftModel.from_pretrained(copy.deepcopy(model), str(tmp_path / "pickled")).save_pretrained(tmp_path / "other")
    merged = [merge_adapters(copy.deepcopy(model), tmp_path / name).state_dict() for name in ("safe", "other")]
    assert all(torch.equal(merged[0][name], merged[1][name]) for name in merged[0])


@pytest.mark.parametrize(
    ("value", "dtype"), [(float("nan"), torch.float32), (1e38, torch.float32), (600.0, torch.float16)]
)
def test_weights_are_finite_after_merging(value, dtype, tmp_path):
    """In the dtype that is written: float16 ends at 65,504, although each matrix of the adapters is finite."""
    model = tiny_model(dtype)
    save_adapters(model, lora(), tmp_path)
    weights = load_file(tmp_path / WEIGHTS)
    save_file({name: torch.full_like(tensor, value).float() for name, tensor in weights.items()}, tmp_path / WEIGHTS)
    assert_refused(r"q_proj.weight holds values that are not finite. Use an", merge_adapters, model, tmp_path)


def test_the_merged_model_has_the_dtype_of_the_model(tmp_path):
    """PEFT keeps saved modules in float32; the rotary tables are float32 in every model."""
    model = tiny_model(torch.bfloat16, tie_word_embeddings=True)
    model.model.rotary_emb.float()
    save_adapters(model, lora(modules_to_save=["lm_head"]), tmp_path)
    merged = merge_adapters(model, tmp_path)
    assert {parameter.dtype for parameter in merged.parameters()} == {torch.bfloat16}
    assert merged.model.rotary_emb.inv_freq.dtype == torch.float32


@pytest.fixture(scope="module")
def saved(llama, tmp_path_factory):
    """Adapters of the small Llama."""
    folder = tmp_path_factory.mktemp("adapters")
    save_adapters(CondenseForCausalLM.from_pretrained(llama), lora(), folder)
    return folder


@pytest.fixture
def refused(llama, saved, tmp_path, error_line):
    """The message of `condense convert --merge` for adapters after a damage; it writes nothing."""

    def refused(damage):
        adapters = shutil.copytree(saved, tmp_path / "adapters")
        damage(adapters)
        line = error_line("convert", llama, tmp_path / "merged", "--merge", adapters)
        assert str(adapters) in line and not (tmp_path / "merged").exists()
        return line

    return refused


POINTER = b"version https://git-lfs.github.com/spec/v1\n"
DAMAGES = {
    "no JSON": (lambda folder: (folder / CONFIG).write_text("{"), "adapter_config.json is damaged: it is not JSON"),
    "a list": (lambda folder: (folder / CONFIG).write_text("[]"), "adapter_config.json is damaged"),
    "bytes": (lambda folder: (folder / CONFIG).write_bytes(b"\xff\xfe"), "adapter_config.json is damaged"),
    "empty": (lambda folder: (folder / CONFIG).write_text("{}"), "peft_type=None is not a method of peft"),
    "method": (lambda folder: change(folder / CONFIG, peft_type="LORRA"), "peft_type='LORRA' is not a method of peft"),
    "task": (lambda folder: change(folder / CONFIG, task_type="CHAT"), "Invalid task type: 'CHAT'"),
    "rank": (lambda folder: change(folder / CONFIG, r="four"), "the adapters do not fit the model"),
    "rank 3": (lambda folder: change(folder / CONFIG, r=3), "the adapters do not fit the model"),
    "targets": (lambda folder: change(folder / CONFIG, target_modules=5), "the adapters do not fit the model"),
    "pattern": (lambda folder: change(folder / CONFIG, target_modules="("), "the adapters do not fit the model"),
    "newer": (lambda folder: change(folder / CONFIG, use_magic=True), "has use_magic, which peft"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "it has no adapter_model.safetensors"),
    "cut": (lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-8]), "is damaged"),
    "empty weights": (lambda folder: (folder / WEIGHTS).write_bytes(b""), "is damaged or incomplete"),
    "pointer": (lambda folder: (folder / WEIGHTS).write_bytes(POINTER), "is a Git LFS pointer"),
    "other models": (lambda folder: change(folder / CONFIG, peft_type="XLORA"), "loads other models that"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_adapters(name, refused):
    damage, words = DAMAGES[name]
    assert words in refused(damage)


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """The name of a module that leaves a file when it is imported, and that file."""
    (tmp_path / "hostile_module.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "hostile_module", tmp_path / "ran"
    sys.modules.pop("hostile_module", None)


def test_a_module_that_adapters_name_is_not_imported(hostile, refused):
    module, ran = hostile
    line = refused(lambda folder: change(folder / CONFIG, megatron_config={"hidden_size": 8}, megatron_core=module))
    assert f"megatron_core={module!r}, so PEFT would import a module: it could run code" in line
    assert module not in sys.modules and not ran.exists()


def test_adapters_without_a_task_name_a_module_that_is_not_imported(hostile, llama, tmp_path):
    """PEFT's AutoPeftModel imports it; such adapters are merged, since PEFT writes the field into each of them."""
    module, ran = hostile
    model, adapters = CondenseForCausalLM.from_pretrained(llama), tmp_path / "adapters"
    save_adapters(model, peft.LoraConfig(r=4, target_modules=LINEAR), adapters)
    assert json.loads((adapters / CONFIG).read_text())["auto_mapping"]["base_model_class"] == "CondenseForCausalLM"
    change(adapters / CONFIG, auto_mapping={"base_model_class": "Model", "parent_library": module})
    check_adapters(adapters, "test")
    assert_merged_as_adapted(model, adapters, random_ids(1, 30) % 50)
    assert module not in sys.modules and not ran.exists()


def test_adapters_beside_a_model_are_refused(llama, saved, tmp_path):
    """transformers would load them with the model."""
    both = shutil.copytree(llama, tmp_path / "both")
    shutil.copytree(saved, both, dirs_exist_ok=True)
    with pytest.raises(ValueError, match="holds adapters .* beside a model: move them to a folder of their own"):
        load_model(CondenseForCausalLM, both)


HARNESS = {
    "condense": lambda harness, arguments: harness.CondenseLM(**arguments, device="cpu"),
    "stock": lambda harness, arguments: harness.StockLM(**arguments, device="cpu"),
    "hf": lambda harness, arguments: harness.main(command_of("hf", arguments)),
    "steered": lambda harness, arguments: harness.main(command_of("steered", arguments | {"steer_path": "none.csv"})),
}


def command_of(name, arguments):
    given = ",".join(f"{field}={value}" for field, value in arguments.items())
    return ["--model", name, "--model_args", given, "--tasks", "wikitext", "--device", "cpu"]


@pytest.mark.parametrize("name", HARNESS)
@pytest.mark.parametrize("beside_the_model", [False, True])
def test_the_harness_checks_the_adapters_that_it_is_given(
    name, beside_the_model, hostile, folded, saved, tmp_path, monkeypatch
):
    """Also of the harness's own models in our command, and those that transformers loads from a model's folder."""
    harness = pytest.importorskip("condense.eval.harness")
    monkeypatch.setattr("lm_eval.tasks.TaskManager.__init__", lambda self, *_, **__: None)  # reads 14,000 files
    monkeypatch.setattr("lm_eval.tasks.TaskManager.match_tasks", lambda *_: ["wikitext"])
    module, ran = hostile
    folder = shutil.copytree(folded, tmp_path / "model")
    adapters = shutil.copytree(saved, folder if beside_the_model else tmp_path / "adapters", dirs_exist_ok=True)
    change(adapters / CONFIG, megatron_config={"hidden_size": 8}, megatron_core=module)
    given = {"pretrained": str(folder)} | ({} if beside_the_model else {"peft": str(adapters)})
    words = "could run code|holds adapters" if name == "condense" and beside_the_model else "it could run code"
    assert_refused(words, HARNESS[name], harness, given)
    assert not ran.exists()
