"""Frechet distance between two sets of pictures, from normal distributions of their features (FID, Heusel et al. 2017).

    |m1 - m2|^2 + Tr S1 + Tr S2 - 2 Tr (S1 S2)^(1/2)

S1 S2 has the same eigenvalues as the symmetric S1^(1/2) S2 S1^(1/2). The last trace is the sum of their square roots,
so no square root of a non-symmetric matrix and no complex numbers are needed. Everything is float64.

Legend: N pictures, F features.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from common.errors import DataError

NEGATIVE = 1e-6
"""Tolerance for negative eigenvalues of a covariance, as a fraction of the largest eigenvalue."""
ROUNDING = 1e-12
"""Largest rounding error of a covariance, as a fraction of the squared length of the mean. The covariance is a
difference of sums of products, so equal pictures leave such errors only.
"""


@dataclass(frozen=True)
class FeatureStatistics:
    """Mean and covariance of the features of a set of pictures, float64."""

    mean_F: NDArray[np.float64]
    covariance_FF: NDArray[np.float64]

    @property
    def features(self) -> int:
        """Return F."""
        return len(self.mean_F)


class FeatureSums:
    """Sums of features and of their products, float64; they can be added over batches and ranks.

    Args:
        features: F.

    Attributes:
        flat: all sums as one tensor, for the reduction over ranks: sums of features, then sums of products.
    """

    def __init__(self, features: int, device: torch.device | str = "cpu") -> None:
        self.flat = torch.zeros(features * (features + 1), dtype=torch.float64, device=device)
        self._sum_F = self.flat[:features]
        self._products_FF = self.flat[features:].view(features, features)

    def clear(self) -> None:
        """Set all sums to zero."""
        self.flat.zero_()

    def add(self, features_NF: Tensor) -> None:
        """Add pictures, without waiting for the device."""
        features_NF = features_NF.double()
        self._sum_F += features_NF.sum(0)
        self._products_FF.addmm_(features_NF.T, features_NF)

    def arrays(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return copies of the sums (F,) and the sums of products (F, F) on the host."""
        return self._sum_F.cpu().numpy().copy(), self._products_FF.cpu().numpy().copy()


def statistics_of_sums(sum_F: ArrayLike, products_FF: ArrayLike, count: int) -> FeatureStatistics:
    """Return mean and unbiased covariance (divided by ``count - 1``).

    Raises:
        DataError: ``count`` is less than 2, or the sums are not finite.
    """
    if count < 2:
        raise DataError(f"FID of {count} pictures: a covariance needs two")
    total_F, products = np.asarray(sum_F, dtype=np.float64), np.asarray(products_FF, dtype=np.float64)
    if not (np.isfinite(total_F).all() and np.isfinite(products).all()):
        raise DataError("the features of generated pictures are not finite: have the weights diverged?")
    mean_F = total_F / count
    covariance_FF = (products - count * np.outer(mean_F, mean_F)) / (count - 1)
    return FeatureStatistics(mean_F, (covariance_FF + covariance_FF.T) / 2)


def statistics_of_features(features_NF: Tensor) -> FeatureStatistics:
    """Return mean and unbiased covariance of all features at once.

    Raises:
        DataError: fewer than two pictures, or features that are not finite.
    """
    sums = FeatureSums(features_NF.shape[1], features_NF.device)
    sums.add(features_NF)
    return statistics_of_sums(*sums.arrays(), len(features_NF))


class FrechetDistance:
    """Function that computes the distance to a fixed reference; the root of the reference covariance is computed once.

    Args:
        reference: statistics of the real pictures.
        device: device of the eigenvalue computation.

    Raises:
        DataError: the reference has inconsistent shapes, values that are not finite, or an invalid covariance.
    """

    def __init__(self, reference: FeatureStatistics, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self.features = reference.features
        self._mean_F, self._covariance_FF = self._checked(reference, "the reference")
        values_F, vectors_FF = torch.linalg.eigh(self._covariance_FF)
        roots_F = _roots(values_F, _rounding(self._mean_F), "the reference")
        self._root_FF, self._largest = (vectors_FF * roots_F) @ vectors_FF.T, float(roots_F[-1]) ** 2

    def __call__(self, statistics: FeatureStatistics) -> float:
        """Return the distance of ``statistics``, at least 0; waits for the device.

        Raises:
            DataError: ``statistics`` have wrong shapes, values that are not finite, or an invalid covariance.
        """
        mean_F, covariance_FF = self._checked(statistics, "the generated pictures")
        product_FF = self._root_FF @ covariance_FF @ self._root_FF
        values_F = torch.linalg.eigvalsh((product_FF + product_FF.T) / 2)
        shared = _roots(values_F, self._largest * _rounding(mean_F), "the generated pictures").sum()
        traces = self._covariance_FF.trace() + covariance_FF.trace()
        distance = float((self._mean_F - mean_F).square().sum() + traces - 2 * shared)
        return max(distance, 0.0)  # rounding errors can make the result negative

    def _checked(self, statistics: FeatureStatistics, whose: str) -> tuple[Tensor, Tensor]:
        mean_F, covariance_FF = (
            torch.as_tensor(np.asarray(array, dtype=np.float64)).to(self._device)
            for array in (statistics.mean_F, statistics.covariance_FF)
        )
        width = self.features
        if mean_F.shape != (width,) or covariance_FF.shape != (width, width):
            raise DataError(
                f"FID: {whose} have means {tuple(mean_F.shape)} and covariances {tuple(covariance_FF.shape)}, "
                f"expected ({width},) and ({width}, {width})"
            )
        if not (mean_F.isfinite().all() and covariance_FF.isfinite().all()):
            raise DataError(f"FID: statistics of {whose} are not finite")
        return mean_F, covariance_FF


def _rounding(mean_F: Tensor) -> float:
    """Return the largest expected rounding error of a covariance with this mean."""
    return ROUNDING * float(mean_F.square().sum())


def _roots(values_F: Tensor, rounding: float, whose: str) -> Tensor:
    """Return square roots of eigenvalues; those that rounding made negative count as 0.

    Raises:
        DataError: an eigenvalue is more negative than rounding explains.
    """
    lowest, highest = float(values_F[0]), float(values_F[-1])
    if lowest < -NEGATIVE * abs(highest) - rounding:
        raise DataError(f"FID: the covariance of {whose} has the eigenvalue {lowest:.3g} beside {highest:.3g}")
    return values_F.clamp(min=0).sqrt()
