"""Test FID against closed forms, SciPy's matrix root and NumPy's covariance."""

import numpy as np
import pytest
import scipy.linalg
import torch

from benchmarks.stable_diffusion.fid import (
    FeatureStatistics,
    FeatureSums,
    FrechetDistance,
    statistics_of_features,
    statistics_of_sums,
)
from common.errors import DataError


def features(count, width, seed, scale=1.0):
    """Return correlated float64 features with a nonzero mean."""
    generator = np.random.default_rng(seed)
    return scale * (generator.standard_normal((count, width)) @ generator.standard_normal((width, width))) + seed


def by_scipy(first, second):
    """Return the distance by definition, with the root of a non-symmetric product."""
    means, covariances = ([function(x) for x in (first, second)] for function in (lambda x: x.mean(0), covariance))
    root = scipy.linalg.sqrtm(covariances[0] @ covariances[1])
    return np.square(means[0] - means[1]).sum() + np.trace(covariances[0] + covariances[1]) - 2 * np.trace(root).real


def distance(first, second):
    """Return the distance of two pairs of mean and covariance."""
    return FrechetDistance(FeatureStatistics(*first))(FeatureStatistics(*second))


def covariance(x):
    return np.cov(x, rowvar=False, ddof=1)


@pytest.mark.parametrize(
    "x",
    [
        features(200, 20, 3),
        features(30, 300, 3),
        features(2, 40, 3),
        np.full((200, 20), 0.3),
        np.full((30, 5), -7e4),
        np.zeros((4, 3)),
        features(300, 64, 3) * 1e-6 + 1e3,
        np.maximum(features(30, 300, 3), 0),
    ],
    ids=["full", "few", "two", "equal", "equal and large", "zeros", "hardly different", "not negative"],
)
def test_the_distance_of_equal_statistics_is_zero(x):
    """This also holds for singular covariances, and covariances of rounding errors only."""
    found = statistics_of_features(torch.from_numpy(x))
    distance = FrechetDistance(found)(found)
    assert 0 <= distance <= 1e-9 * (np.trace(found.covariance_FF) + np.square(found.mean_F).sum())


@pytest.mark.parametrize(("first", "second"), [(500, 400), (60, 500), (500, 60)], ids=["full", "few real", "few made"])
def test_the_distance_equals_the_definition(first, second):
    """With fewer pictures than features, covariances are singular."""
    real, made = features(first, 80, 1), features(second, 80, 2, scale=0.7)
    one, other = (statistics_of_features(torch.from_numpy(x)) for x in (real, made))
    assert FrechetDistance(one)(other) == pytest.approx(by_scipy(real, made), rel=1e-7)
    assert FrechetDistance(other)(one) == pytest.approx(by_scipy(real, made), rel=1e-7)


def test_the_distance_equals_pytorch_fids():
    score = pytest.importorskip("pytorch_fid.fid_score")
    one, other = (statistics_of_features(torch.from_numpy(features(500, 40, seed))) for seed in (1, 2))
    expected = score.calculate_frechet_distance(one.mean_F, one.covariance_FF, other.mean_F, other.covariance_FF)
    assert FrechetDistance(one)(other) == pytest.approx(expected, rel=1e-6)


def test_statistics_equal_numpys():
    x = features(90, 30, 5) + 100
    sums = FeatureSums(30)
    for part in np.array_split(x, 7):
        sums.add(torch.from_numpy(part))
    found = statistics_of_sums(*sums.arrays(), len(x))
    np.testing.assert_allclose(found.mean_F, x.mean(0), rtol=1e-13)
    np.testing.assert_allclose(found.covariance_FF, covariance(x), rtol=1e-10, atol=1e-8)


def test_features_of_half_precision_are_summed_in_float64():
    x = torch.full((4096, 2), 0.1, dtype=torch.bfloat16)
    sums = FeatureSums(2)
    sums.add(x)
    value = float(x[0, 0].double())
    assert sums.arrays()[0].tolist() == [4096 * value] * 2
    assert sums.arrays()[1].ravel().tolist() == [4096 * value**2] * 4
    sums.clear()
    assert not sums.flat.any()


def test_statistics_of_another_width_are_an_error():
    reference = FrechetDistance(FeatureStatistics(np.zeros(3), np.eye(3)))
    with pytest.raises(DataError, match=r"generated pictures have means \(4,\).*expected \(3,\) and \(3, 3\)"):
        reference(FeatureStatistics(np.zeros(4), np.eye(4)))
    with pytest.raises(DataError, match=r"the reference have means \(3,\) and covariances \(3, 4\)"):
        FrechetDistance(FeatureStatistics(np.zeros(3), np.zeros((3, 4))))


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_pictures_are_an_error(count):
    with pytest.raises(DataError, match=f"FID of {count} pictures"):
        statistics_of_sums(np.zeros(2), np.zeros((2, 2)), count)


def test_values_that_are_not_finite_are_an_error():
    with pytest.raises(DataError, match="diverged"):
        statistics_of_sums([float("nan"), 0], np.eye(2), 5)
    with pytest.raises(DataError, match="statistics of the reference are not finite"):
        FrechetDistance(FeatureStatistics(np.zeros(2), np.array([[1, np.inf], [np.inf, 1]])))


def test_a_matrix_with_negative_eigenvalues_is_an_error():
    with pytest.raises(DataError, match="eigenvalue -1 beside 1"):
        FrechetDistance(FeatureStatistics(np.zeros(2), np.diag([1.0, -1.0])))
