"""Fits a linear probe: logistic regression on hidden states.

Axes: N examples, D features.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

PENALTY = 1e-2  # times the squared weights of standardised features
ITERATIONS = 200


def probe_accuracy(
    train_ND: torch.Tensor, train_labels_N: torch.Tensor, test_ND: torch.Tensor, test_labels_N: torch.Tensor
) -> float:
    """Trains a probe and returns the share of test examples with the correct label, 0 or 1."""
    train_ND, test_ND = standardise(train_ND, test_ND)
    weight_D, bias = fit_logistic(train_ND, train_labels_N)
    return float(((test_ND @ weight_D + bias > 0) == (test_labels_N > 0)).double().mean())


def standardise(train_ND: torch.Tensor, test_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Standardises both with the mean and deviation of the training examples; a constant feature becomes 0."""
    train_ND, test_ND = train_ND.double(), test_ND.double()
    mean_D, deviation_D = train_ND.mean(0), train_ND.std(0, correction=0).clamp(min=1e-9)
    return (train_ND - mean_D) / deviation_D, (test_ND - mean_D) / deviation_D


def fit_logistic(features_ND: torch.Tensor, labels_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns weights [D] and bias that minimise mean log loss + `PENALTY` |w|^2 / 2."""
    targets_N = labels_N.to(features_ND)
    weight_D = features_ND.new_zeros(features_ND.shape[1], requires_grad=True)
    bias = features_ND.new_zeros((), requires_grad=True)

    def loss() -> torch.Tensor:
        log_loss = F.binary_cross_entropy_with_logits(features_ND @ weight_D + bias, targets_N)
        return log_loss + PENALTY / 2 * weight_D.square().sum()

    minimise(loss, [weight_D, bias])
    return weight_D.detach(), bias.detach()


def minimise(loss: Callable[[], torch.Tensor], variables: list[torch.Tensor]) -> None:
    """Minimises a loss over the variables with L-BFGS."""
    optimizer = torch.optim.LBFGS(variables, max_iter=ITERATIONS, tolerance_grad=1e-7, line_search_fn="strong_wolfe")

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward(inputs=variables)
        return value

    optimizer.step(step)
