"""Distillation against the formula over all logits, in runs of the real trainer, and on two ranks of ZeRO-2."""

import copy
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, LlamaForCausalLM

from condense import CondenseForCausalLM, to_stock
from condense.configuration import IGNORE_INDEX
from condense.labs.depth.model import convert_to_depth
from condense.training.distillation import Distillation
from condense.training.preflight import check_run
from condense.training.recipe import load_recipe
from condense.training.recipe.models import CondenseModel
from condense.training.small_llama import save_small_llama
from condense.training.train import train

from ..condense.models import in_float64, padded_batch, random_ids, tiny_model
from .recipes import text_data, write_digits, write_recipe
from .runs import copy_checkpoint, log_lines, logged, run, same_weights

PLAIN = SimpleNamespace(dtype="float32", lora=None)


def prepared(model, **fields) -> Distillation:
    objective = Distillation(**fields)
    assert objective.prepare_model(model, PLAIN) is model
    return objective


def naive(model, teacher, ids, mask, labels, weight, temperature, hidden_weight):
    """The sum of the objective over all targets, target by target, from all logits."""
    read = model(ids, attention_mask=mask, output_hidden_states=True)
    with torch.no_grad():
        known = teacher(ids, attention_mask=mask, output_hidden_states=True)
    losses = []
    for row in range(len(ids)):
        for column in range(ids.shape[1] - 1):
            target = labels[row, column + 1]
            if target == IGNORE_INDEX:
                continue
            p = (known.logits[row, column] / temperature).softmax(-1)
            q = (read.logits[row, column] / temperature).softmax(-1)
            loss = weight * temperature**2 * (p * (p.log() - q.log())).sum()
            loss = loss - (1 - weight) * read.logits[row, column].softmax(-1)[target].log()
            for ours, theirs in zip(read.hidden_states[1:], known.hidden_states[1:], strict=True):
                difference = (ours[row, column] - theirs[row, column]).square().sum()
                distance = difference / theirs[row, column].square().sum()
                loss = loss + hidden_weight / (len(read.hidden_states) - 1) * distance
            losses.append((column // model.config.segment_length, loss))
    return losses


@pytest.mark.parametrize(
    ("weight", "temperature", "hidden_weight"), [(1.0, 1.0, 0.0), (0.6, 2.0, 0.0), (0.6, 0.5, 0.3)]
)
@pytest.mark.parametrize("at_once", [2**26, 100], ids=["at once", "in blocks"])
def test_losses_and_gradients_follow_the_formula(weight, temperature, hidden_weight, at_once, monkeypatch):
    monkeypatch.setattr("condense.loss.MAX_LOGITS", at_once)  # of a vocabulary of 61: one target at once
    model = tiny_model().train()
    _, ids, mask = padded_batch([13, 6], "right")
    labels = ids.masked_fill(mask == 0, IGNORE_INDEX)
    labels[0, 3:7] = IGNORE_INDEX
    objective = prepared(model, weight=weight, temperature=temperature, hidden_weight=hidden_weight)
    found = objective.losses(model, {"input_ids": ids, "attention_mask": mask, "labels": labels}, 5)
    found.loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    teacher = to_stock(copy.deepcopy(model))
    expected = naive(model, teacher, ids, mask, labels, weight, temperature, hidden_weight)
    (sum(loss for _, loss in expected) / 5).backward()
    torch.testing.assert_close(found.loss, sum(loss for _, loss in expected) / 5, atol=1e-6, rtol=1e-6)
    for segment in range(3):
        own = [loss.detach() for number, loss in expected if number == segment]
        torch.testing.assert_close(found.sums_S[segment], sum(own), atol=1e-5, rtol=1e-5)
        assert found.targets_S[segment] == len(own)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-5, rtol=1e-4, msg=name)


def test_within_one_segment_there_is_nothing_to_learn():
    model, ids = tiny_model(segment_length=13).train(), random_ids(2, 13)
    objective = prepared(model, hidden_weight=1.0)
    in_float64(objective._teacher)
    found = objective.losses(model, {"input_ids": ids, "labels": ids}, 24)
    found.loss.backward()
    assert abs(found.loss.item()) < 1e-12
    assert all(parameter.grad.abs().max() < 1e-9 for parameter in model.parameters())


def test_the_teacher_does_not_learn():
    model, ids = tiny_model().train(), random_ids(2, 13)
    objective = prepared(model)
    before = {name: tensor.clone() for name, tensor in objective._teacher.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = objective.losses(model, {"input_ids": ids, "labels": ids}, 24).loss
    first.backward()
    optimizer.step()
    assert all(torch.equal(tensor, before[name]) for name, tensor in objective._teacher.state_dict().items())
    assert objective.losses(model, {"input_ids": ids, "labels": ids}, 24).loss < first


def test_no_tensor_of_all_logits(monkeypatch):
    monkeypatch.setattr("condense.loss.MAX_LOGITS", 8 * 61)
    model, ids = tiny_model().train(), random_ids(2, 33)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            nonlocal largest
            result = function(*arguments, **(options or {}))
            for one in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(one, torch.Tensor) and one.shape[-1:] == (61,):
                    largest = max(largest, one.numel())
            return result

    objective = prepared(model, weight=0.5)
    with Watch():
        objective.losses(model, {"input_ids": ids, "labels": ids}, 64).loss.backward()
    assert largest == 61 * 24  # the weight of the head; its logits are 64 x 61


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_teacher_in_bfloat16_has_the_frequencies_of_its_student(dtype):
    """DeepSpeed casts the student's weights and leaves its buffers in float32."""
    model, ids = tiny_model(torch.float32, segment_length=40).train(), random_ids(2, 40)
    objective = prepared(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    found = objective.losses(model, {"input_ids": ids, "labels": ids}, 78).loss.item()
    assert objective._teacher.dtype == dtype and objective._teacher.model.rotary_emb.inv_freq.dtype == torch.float32
    assert abs(found) < (1e-5 if dtype == torch.float32 else 2e-3)  # within one segment both read the same


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    model = save_small_llama(folder / "start", width=16)
    with torch.no_grad():  # a new model's memory changes nothing: its outputs are uniform
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6)
    model.save_pretrained(folder / "start")
    write_digits(folder, range(40, 96, 7))
    fields = {"objective": {"kind": "distill"}, "data": text_data(folder, "pack")}
    fields |= {"optimizer": {"learning_rate": 3e-3, "warmup_steps": 1}, "checkpoints": {"every": 4, "keep": 3}}
    fields |= {"evaluation": {"sequences": 4, "every": 8}}
    start = {"source": str(folder / "start"), "segment_length": 10}
    write_recipe(folder, start, [(40, 8)], global_batch=4, **fields)
    return folder


@pytest.fixture(scope="module")
def finished(folder):
    train(load_recipe(folder / "recipe.yaml", [f"output={folder / 'done'}"]))
    return folder / "done"


def test_a_run_closes_the_distance_to_its_teacher(folder, finished):
    first, *_, last = log_lines(finished, "eval_loss")
    assert 0 < last["eval_loss_distill"] < 0.9 * first["eval_loss_distill"]
    names = set(load_file(finished / "model.safetensors"))
    assert names == set(load_file(folder / "start" / "model.safetensors"))
    assert type(AutoModelForCausalLM.from_pretrained(finished)) is CondenseForCausalLM


def test_a_resumed_run_has_the_same_teacher(folder, finished, tmp_path):
    copy_checkpoint(finished, tmp_path, 4)
    train(load_recipe(folder / "recipe.yaml", [f"output={tmp_path}"]))
    assert logged(tmp_path) == logged(finished)
    assert same_weights(tmp_path, finished)


def test_the_weights_named_as_teacher_are_the_default_teacher(folder, finished, tmp_path):
    options = [f"output={tmp_path}", f"objective.teacher={folder / 'start'}"]
    train(load_recipe(folder / "recipe.yaml", options))
    assert logged(tmp_path) == logged(finished)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["model={kind: stock, source: start}"], "a folded model, not model.kind='stock': set model.kind=condense"),
        (["objective.hidden_weight=1", "gradient_checkpointing=true"], "which neither gradient checkpointing"),
        (["objective.hidden_weight=1", "model.schedule=wavefront"], "model.schedule=sequential, or hidden"),
        (["objective.weight=1.5"], "objective.weight"),
        (["objective.temperature=0"], "objective.temperature"),
        (["objective.teacher=FOLDED"], "is of type 'condense_llama'"),
        (["objective.teacher=WIDE"], "or logits for another number"),
        (["objective.teacher=GPT"], "is of type 'gpt2': name a stock model"),
        (["objective.teacher=OTHER"], "has other tokens than the model"),
        (["objective.teacher=DEEP", "objective.hidden_weight=1"], "has 3 layers of width 16 while the model has 2"),
        (
            ["objective.teacher=SHORT"],
            "SHORT' reads texts of up to .* max_position_embeddings=16: set stages.0.tot.*=16, or",
        ),
        (
            ["model.source=SHORT"],
            "the stock model of the same weights, reads texts of up to .* max_position_embeddings=16: set "
            "stages.0.total_length=16, or use another model",
        ),
        (["model={source: HYBRID, segment_length: null}"], "a depth block has no stock model of the same weights"),
    ],
)
def test_refusals_come_before_the_weights(folder, options, words, tmp_path, monkeypatch):
    start = folder / "start"
    if "FOLDED" in str(options):
        shutil.copytree(start, tmp_path / "FOLDED")
        CondenseForCausalLM.from_pretrained(start).save_pretrained(tmp_path / "FOLDED")
    if "WIDE" in str(options) or "DEEP" in str(options):
        fields = {"vocab_size": 70} if "WIDE" in str(options) else {"num_hidden_layers": 3}
        config = LlamaConfig.from_pretrained(start, **fields)
        name = "WIDE" if "WIDE" in str(options) else "DEEP"
        shutil.copytree(start, tmp_path / name)
        LlamaForCausalLM(config).save_pretrained(tmp_path / name)
    if "SHORT" in str(options):
        shutil.copytree(start, tmp_path / "SHORT")
        LlamaConfig.from_pretrained(start, max_position_embeddings=16).save_pretrained(tmp_path / "SHORT")
    if "GPT" in str(options):
        GPT2Config(vocab_size=60).save_pretrained(tmp_path / "GPT")
    if "OTHER" in str(options):
        shutil.copytree(start, tmp_path / "OTHER")
        vocabulary = tmp_path / "OTHER" / "tokenizer.json"
        content = json.loads(vocabulary.read_text())
        words_by_id = {number: word for word, number in content["model"]["vocab"].items()}
        words_by_id[10], words_by_id[11] = words_by_id[11], words_by_id[10]
        content["model"]["vocab"] = {word: number for number, word in words_by_id.items()}
        vocabulary.write_text(json.dumps(content))
    if "HYBRID" in str(options):
        shutil.copytree(start, tmp_path / "HYBRID")
        convert_to_depth(CondenseForCausalLM.from_pretrained(start), 0, 1).save_pretrained(tmp_path / "HYBRID")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(CondenseModel, "load", lambda *_, **__: pytest.fail("the weights were read"))
    with pytest.raises(ValueError, match=words):
        check_run(load_recipe(folder / "recipe.yaml", options), 1, None)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks_of_zero_2_distil_as_one_process(folder, finished, dtype, tmp_path):
    losses, _ = run(folder / "recipe.yaml", tmp_path, f"dtype={dtype}", launcher=True)
    expected = logged(finished)
    assert losses == pytest.approx(expected, abs=1e-4 if dtype == "float32" else 3e-2)
