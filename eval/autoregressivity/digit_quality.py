"""The quality of generated digits, by a small classifier that is trained here on the training digits.

Axes: N images, P pixels, F features, C classes.
"""

from functools import cache
from typing import Any

import numpy as np
import scipy.linalg

from condense.training.data.digits import MAX_VALUE, NUM_PIXELS, load_digits, split

NUM_FEATURES = 32
CONFIDENT = 0.9


class DigitClassifier:
    """A network with one hidden layer, whose activations are the features of the Fréchet distance."""

    def __init__(self, seed: int = 0):
        from sklearn.neural_network import MLPClassifier  # takes a second

        values, digits = load_digits()
        training, held_out = split()
        self.network: Any = MLPClassifier(
            (NUM_FEATURES,), activation="tanh", learning_rate_init=1e-2, random_state=seed
        )
        self.network.fit(_inputs(values[training]), digits[training])
        self.accuracy = float(self.network.score(_inputs(values[held_out]), digits[held_out]))

    def features(self, values: np.ndarray) -> np.ndarray:
        """[N, F] of images [N, P] with values from 0 to 16."""
        return np.tanh(_inputs(values) @ self.network.coefs_[0] + self.network.intercepts_[0])

    def probabilities(self, values: np.ndarray) -> np.ndarray:
        """[N, C] of images [N, P] with values from 0 to 16."""
        return self.network.predict_proba(_inputs(values))


@cache
def digit_classifier() -> DigitClassifier:
    return DigitClassifier()


def _inputs(values: np.ndarray) -> np.ndarray:
    return np.asarray(values, dtype=np.float64) / MAX_VALUE


def frechet_distance(one_NF: np.ndarray, other_NF: np.ndarray) -> float:
    """The squared Fréchet distance of the normal distributions with the means and covariances of two sets of features.

    Raises `ValueError` for fewer than two samples.
    """
    if min(len(one_NF), len(other_NF)) < 2:
        raise ValueError(f"{len(one_NF)} and {len(other_NF)} images have no covariance: compare at least 2 of each.")
    one, other = np.cov(one_NF, rowvar=False, ddof=1), np.cov(other_NF, rowvar=False, ddof=1)
    one, other = np.atleast_2d(one), np.atleast_2d(other)
    root = scipy.linalg.sqrtm(one @ other).real  # rounding makes small imaginary parts
    shift = one_NF.mean(axis=0) - other_NF.mean(axis=0)
    return float(shift @ shift + np.trace(one) + np.trace(other) - 2 * np.trace(root))


def digit_quality(values: np.ndarray) -> dict[str, float]:
    """The quality of images [N, P] with values from 0 to 16.

    - `frechet_distance` to the training images, in the classifier's features.
    - `confident`: the share of images that the classifier gives a class with a probability above 0.9. Images without
      a label have no accuracy; this stands in its place.
    - `confidence`: the mean probability of the likeliest class.
    - `class_entropy`: of the mean probabilities of the classes, in nats; ln 10 = 2.303 at equal shares.

    Beside samples, `held_out_quality` says what real images reach.
    """
    classifier = digit_classifier()
    images, _ = load_digits()
    training, _ = split()
    probabilities = classifier.probabilities(values)
    likeliest, shares = probabilities.max(axis=1), probabilities.mean(axis=0)
    return {
        "frechet_distance": frechet_distance(classifier.features(values), classifier.features(images[training])),
        "confident": float((likeliest > CONFIDENT).mean()),
        "confidence": float(likeliest.mean()),
        "class_entropy": float(-(shares * np.log(shares.clip(1e-12))).sum()),
    }


def noise_quality(number: int) -> dict[str, float]:
    """The quality of images whose pixels are drawn uniformly."""
    values = np.random.default_rng(0).integers(0, MAX_VALUE + 1, (number, NUM_PIXELS))
    return digit_quality(values)


def held_out_quality() -> dict[str, float]:
    """The quality of the held-out images, and the classifier's accuracy on them."""
    images, _ = load_digits()
    _, held_out = split()
    return digit_quality(images[held_out]) | {"classifier_accuracy": digit_classifier().accuracy}
