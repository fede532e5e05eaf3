"""transformers' Trainer on a folded Llama: smoothed labels, metrics and predictions as with a stock one."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

from condense.labs.depth.model import convert_to_depth
from tests.condense.models import both, random_ids, tiny_model

pytestmark = pytest.mark.process

SMOOTHING = 0.1


class Rows(torch.utils.data.Dataset):
    """Rows of ids with the same labels; the first labels of every other row are not predicted."""

    def __init__(self, rows: int, length: int, vocab_size: int = 50):
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(5, vocab_size, (rows, length), generator=generator)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, n):
        labels = self.ids[n].clone()
        labels[: 4 * (n % 2)] = -100
        return {"input_ids": self.ids[n], "labels": labels}


def trainer(model, folder, data, compute_metrics=None, **options) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to="none", save_strategy="no", logging_steps=1, seed=0,
        per_device_train_batch_size=2, per_device_eval_batch_size=2, **options,
    )  # fmt: skip
    return Trainer(model, args=arguments, train_dataset=data, eval_dataset=data, compute_metrics=compute_metrics)


def smoothed_cross_entropy(logits_BNV, labels_BN, epsilon: float):
    """The definition, target by target: the wrong tokens share `epsilon` with the right one evenly."""
    losses = []
    for logits_NV, labels_N in zip(logits_BNV, labels_BN, strict=True):
        for logits_V, label in zip(logits_NV[:-1], labels_N[1:].tolist(), strict=True):
            if label != -100:
                target_V = torch.full_like(logits_V, epsilon / len(logits_V))
                target_V[label] += 1 - epsilon
                losses.append(-(target_V * F.log_softmax(logits_V, dim=-1)).sum())
    return torch.stack(losses).mean()


def test_smoothed_labels_train_as_on_a_stock_llama(llama, tmp_path):
    found = []
    for model in both(llama):
        options = {"max_steps": 3, "learning_rate": 1e-2, "label_smoothing_factor": SMOOTHING}
        job = trainer(model, tmp_path, Rows(8, 40), **options)
        job.train()
        found.append([(line["loss"], line["grad_norm"]) for line in job.state.log_history if "loss" in line])
        found[-1].append((job.evaluate()["eval_loss"], 0.0))
    stock, folded = map(torch.tensor, found)
    assert len(stock) == 4 and stock[3, 0] < stock[0, 0]
    torch.testing.assert_close(folded, stock, atol=1e-4, rtol=1e-4)


def test_smoothed_labels_of_several_segments(tmp_path):
    """The loss is that of the definition, and not that of labels that aren't shifted."""
    model, data = tiny_model(torch.float32, segment_length=5), Rows(2, 23)
    batch = {name: torch.stack([row[name] for row in data]) for name in ("input_ids", "labels")}
    with torch.no_grad():
        logits = model(batch["input_ids"]).logits
    expected = smoothed_cross_entropy(logits.double(), batch["labels"], SMOOTHING)
    job = trainer(model, tmp_path, data, label_smoothing_factor=SMOOTHING)
    assert job.evaluate()["eval_loss"] == pytest.approx(expected.item(), rel=1e-5)
    loss, output = job.compute_loss(model, dict(batch), return_outputs=True)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert output.logits.requires_grad and output.loss is None


def test_metrics_and_predictions_are_those_of_a_stock_llama(llama, tmp_path):
    def accuracy(prediction):
        assert isinstance(prediction.predictions, np.ndarray)
        said, labels = prediction.predictions[:, :-1].argmax(-1), prediction.label_ids[:, 1:]
        return {"accuracy": (said == labels)[labels != -100].mean()}

    found, data = [], Rows(6, 40)
    for model in both(llama):
        job = trainer(model, tmp_path, data, compute_metrics=accuracy)
        metrics, predicted = job.evaluate(), job.predict(data)
        found.append((metrics, predicted))
        assert predicted.predictions.shape == (6, 40, model.config.vocab_size)
        assert predicted.metrics["test_accuracy"] == metrics["eval_accuracy"] > 0
    (stock, stock_predicted), (folded, predicted) = found
    assert folded["eval_loss"] == pytest.approx(stock["eval_loss"], rel=1e-4)
    assert folded["eval_accuracy"] == stock["eval_accuracy"]
    np.testing.assert_allclose(predicted.predictions, stock_predicted.predictions, atol=1e-4)
    assert (predicted.label_ids == stock_predicted.label_ids).all()


def test_predictions_of_a_hybrid_are_its_logits(llama, tmp_path):
    """The evaluations of its vector field are not predictions."""
    hybrid = convert_to_depth(LlamaForCausalLM.from_pretrained(llama), 0, 1, solver="euler", steps=2)
    predicted = trainer(hybrid, tmp_path, Rows(2, 20)).predict(Rows(2, 20))
    assert predicted.predictions.shape == (2, 20, hybrid.config.vocab_size)


def test_trainers_evaluation_may_be_without_logits(tmp_path):
    """Predictions of several segments are those of a call without labels; without them no logits are computed."""
    model, data = tiny_model(torch.float32), Rows(2, 23)
    with torch.no_grad():
        expected = model(data.ids).logits
    job = trainer(model, tmp_path, data)
    np.testing.assert_allclose(job.predict(data).predictions, expected, atol=1e-5)
    loss = job.evaluate()["eval_loss"]
    model.logits_in_evaluation = False
    with torch.no_grad():
        assert model(data.ids, labels=data.ids, num_items_in_batch=44).logits is None
    assert job.evaluate()["eval_loss"] == pytest.approx(loss, rel=1e-6)


def test_evaluation_outside_of_trainer_has_no_logits():
    model, ids = tiny_model(), random_ids(1, 12)
    with torch.no_grad():
        assert model(ids, labels=ids).logits is None
    assert model(ids, labels=ids, num_items_in_batch=11).logits is None  # with gradients
