"""The Fréchet distance against its closed form, and measures of real and of wrong images."""

import numpy as np
import pytest

from condense.labs.autoregressivity.study.digit_quality import digit_quality, frechet_distance, held_out_quality
from condense.training.data.digits import load_digits, split


def test_the_distance_of_diagonal_normal_distributions():
    """The squared distance is a sum over axes: squared differences of means and of standard deviations."""
    generator = np.random.default_rng(0)
    means, deviations = generator.normal(size=(2, 4)), generator.uniform(0.5, 2.0, (2, 4))
    samples = generator.normal(size=(1000, 4))
    samples -= samples.mean(axis=0)
    samples = samples @ np.linalg.inv(np.linalg.cholesky(np.cov(samples, rowvar=False))).T  # with unit covariance
    one, other = (samples * deviations[n] + means[n] for n in (0, 1))
    expected = ((means[0] - means[1]) ** 2).sum() + ((deviations[0] - deviations[1]) ** 2).sum()
    assert frechet_distance(one, other) == pytest.approx(expected)
    turn = np.linalg.qr(generator.normal(size=(4, 4)))[0]  # rotating both changes nothing
    assert frechet_distance(one @ turn, other @ turn) == pytest.approx(expected)
    assert frechet_distance(one, one) == pytest.approx(0, abs=1e-6)


def test_single_images_are_refused():
    with pytest.raises(ValueError, match="1 and 5 images have no covariance: compare at least 2"):
        frechet_distance(np.zeros((1, 3)), np.zeros((5, 3)))


def test_real_images_are_better_than_wrong_ones():
    images, digits = load_digits()
    _, held_out = split()
    real = held_out_quality()
    assert real["classifier_accuracy"] > 0.95 and real["confident"] > 0.8 and real["class_entropy"] > 2.2
    noise = digit_quality(np.random.default_rng(0).integers(0, 17, (360, 64)))
    assert noise["frechet_distance"] > 5 * real["frechet_distance"]
    zeros = digit_quality(images[held_out][digits[held_out] == 0])  # good images, but only of one digit
    assert zeros["class_entropy"] < 0.3 and zeros["confident"] > 0.8
    assert zeros["frechet_distance"] > 5 * real["frechet_distance"]
