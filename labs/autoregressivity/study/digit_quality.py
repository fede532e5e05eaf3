"""The quality of generated digits, judged by a small classifier that is trained here on the training digits.

Axes: N images, P pixels, F features, C classes.
"""

from functools import cache
from typing import Any

import numpy as np
import scipy.linalg

from condense.training.data.digits import MAX_VALUE, NUM_PIXELS, load_digits, split

NUM_FEATURES = 32
CONFIDENT = 0.9


@cache
def digit_classifier() -> Any:
    """Trains a network with one hidden layer, whose activations are the features of the Fréchet distance."""
    from sklearn.neural_network import MLPClassifier  # takes a second

    (values, digits), (training, _) = load_digits(), split()
    network = MLPClassifier((NUM_FEATURES,), activation="tanh", learning_rate_init=1e-2, random_state=0)
    return network.fit(_inputs(values[training]), digits[training])


def features(values: np.ndarray) -> np.ndarray:
    """Returns the features [N, F] of images [N, P] with values from 0 to 16."""
    network = digit_classifier()
    return np.tanh(_inputs(values) @ network.coefs_[0] + network.intercepts_[0])


def _inputs(values: np.ndarray) -> np.ndarray:
    return np.asarray(values, dtype=np.float64) / MAX_VALUE


def frechet_distance(one_NF: np.ndarray, other_NF: np.ndarray) -> float:
    """Returns the squared Fréchet distance |m - m'|² + tr(C + C' - 2 (C C')^½) of two sets with means m, m' and
    covariances C, C'.

    It takes both as normally distributed. Raises `ValueError` for fewer than two samples.
    """
    if min(len(one_NF), len(other_NF)) < 2:
        raise ValueError(f"{len(one_NF)} and {len(other_NF)} images have no covariance: compare at least 2 of each.")
    one, other = np.cov(one_NF, rowvar=False), np.cov(other_NF, rowvar=False)
    root = scipy.linalg.sqrtm(one @ other).real  # rounding makes small imaginary parts
    shift = one_NF.mean(axis=0) - other_NF.mean(axis=0)
    return float(shift @ shift + np.trace(one) + np.trace(other) - 2 * np.trace(root))


def digit_quality(values: np.ndarray) -> dict[str, float]:
    """Measures images [N, P] with values from 0 to 16.

    - `frechet_distance` to the training images, in the classifier's features.
    - `confident`: the share of images whose likeliest class has a probability above 0.9. It replaces the accuracy,
      which images without a label do not have.
    - `confidence`: the mean probability of the likeliest class.
    - `class_entropy` of the mean probabilities of the classes, in nats: ln 10 = 2.303 at equal shares.

    For comparison, `held_out_quality` measures real images.
    """
    (images, _), (training, _) = load_digits(), split()
    probabilities = digit_classifier().predict_proba(_inputs(values))  # [N, C]
    likeliest, shares = probabilities.max(axis=1), probabilities.mean(axis=0)
    return {
        "frechet_distance": frechet_distance(features(values), features(images[training])),
        "confident": float((likeliest > CONFIDENT).mean()),
        "confidence": float(likeliest.mean()),
        "class_entropy": float(-(shares * np.log(shares.clip(1e-12))).sum()),
    }


def noise_quality(number: int) -> dict[str, float]:
    """Measures images whose pixels are drawn uniformly."""
    values = np.random.default_rng(0).integers(0, MAX_VALUE + 1, (number, NUM_PIXELS))
    return digit_quality(values)


def held_out_quality() -> dict[str, float]:
    """Measures the held-out images, and the classifier's accuracy on them."""
    (images, digits), (_, held_out) = load_digits(), split()
    accuracy = float(digit_classifier().score(_inputs(images[held_out]), digits[held_out]))
    return digit_quality(images[held_out]) | {"classifier_accuracy": accuracy}
