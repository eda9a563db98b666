"""The Frechet distance between pictures by the normal distributions of their features (FID, Heusel et al. 2017).

    |m1 - m2|^2 + Tr S1 + Tr S2 - 2 Tr (S1 S2)^(1/2)

S1 S2 has the eigenvalues of the symmetric S1^(1/2) S2 S1^(1/2), whose roots make the last trace: no root of a matrix
that is not symmetric, no complex numbers. Everything is float64.

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
"""Eigenvalues of a covariance below zero by more than this share of the largest are no rounding."""
ROUNDING = 1e-12
"""Largest rounding error of a covariance, as a share of the squared length of the mean, whose products are subtracted
from sums of products: the covariance of equal pictures consists of such errors."""


@dataclass(frozen=True)
class FeatureStatistics:
    """Mean and covariance of pictures' features.

    Attributes:
        mean_F, covariance_FF: float64.
    """

    mean_F: NDArray[np.float64]
    covariance_FF: NDArray[np.float64]

    @property
    def features(self) -> int:
        """F."""
        return len(self.mean_F)


class FeatureSums:
    """Sums of features and of their products, float64, which add up over batches and ranks.

    Args:
        features: F.
        device: where they are summed.

    Attributes:
        flat: all of them in one tensor, to be summed over ranks: the sums of features, then those of products.
    """

    def __init__(self, features: int, device: torch.device | str = "cpu") -> None:
        self.flat = torch.zeros(features * (features + 1), dtype=torch.float64, device=device)
        self._sum_F = self.flat[:features]
        self._products_FF = self.flat[features:].view(features, features)

    def clear(self) -> None:
        """Begin anew."""
        self.flat.zero_()

    def add(self, features_NF: Tensor) -> None:
        """Add pictures; waits for nothing.

        Raises:
            ValueError: they have another number of features.
        """
        if features_NF.ndim != 2 or features_NF.shape[1] != len(self._sum_F):
            raise ValueError(f"features {tuple(features_NF.shape)}: (N, {len(self._sum_F)})")
        wide_NF = features_NF.double()
        self._sum_F += wide_NF.sum(0)
        self._products_FF.addmm_(wide_NF.T, wide_NF)

    def arrays(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Sums (F,) and sums of products (F, F) on the host, copies."""
        return self._sum_F.cpu().numpy().copy(), self._products_FF.cpu().numpy().copy()


def statistics_of_sums(sum_F: ArrayLike, products_FF: ArrayLike, count: int) -> FeatureStatistics:
    """Mean and unbiased covariance, with ``count - 1`` below the line.

    Raises:
        DataError: fewer than two pictures, or sums that are not finite.
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
    """Mean and unbiased covariance of features that are all there.

    Raises:
        DataError: as :func:`statistics_of_sums`.
    """
    sums = FeatureSums(features_NF.shape[1], features_NF.device)
    sums.add(features_NF)
    return statistics_of_sums(*sums.arrays(), len(features_NF))


class FrechetDistance:
    """The distance to one reference, of whose covariance the root is taken once.

    Args:
        reference: statistics of the real pictures.
        device: where the eigenvalues are computed.

    Raises:
        DataError: the reference's shapes don't fit, it has values that are not finite, or no covariance.
    """

    def __init__(self, reference: FeatureStatistics, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self.features = reference.features
        self._mean_F, self._covariance_FF = self._checked(reference, "the reference")
        values_F, vectors_FF = torch.linalg.eigh(self._covariance_FF)
        roots_F = _roots(values_F, _rounding(self._mean_F), "the reference")
        self._root_FF, self._largest = (vectors_FF * roots_F) @ vectors_FF.T, float(roots_F[-1]) ** 2

    def __call__(self, statistics: FeatureStatistics) -> float:
        """The distance of ``statistics``, at least 0; waits for the device.

        Raises:
            DataError: they have another number of features, values that are not finite, or no covariance.
        """
        mean_F, covariance_FF = self._checked(statistics, "the generated pictures")
        product_FF = self._root_FF @ covariance_FF @ self._root_FF
        values_F = torch.linalg.eigvalsh((product_FF + product_FF.T) / 2)
        shared = _roots(values_F, self._largest * _rounding(mean_F), "the generated pictures").sum()
        traces = self._covariance_FF.trace() + covariance_FF.trace()
        distance = float((self._mean_F - mean_F).square().sum() + traces - 2 * shared)
        return max(distance, 0.0)  # roots of eigenvalues that are rounding errors of 0 are larger than 0

    def _checked(self, statistics: FeatureStatistics, whose: str) -> tuple[Tensor, Tensor]:
        mean_F, covariance_FF = (
            torch.as_tensor(np.asarray(array, dtype=np.float64)).to(self._device)
            for array in (statistics.mean_F, statistics.covariance_FF)
        )
        width = self.features
        if mean_F.shape != (width,) or covariance_FF.shape != (width, width):
            raise DataError(
                f"FID: {whose} have means {tuple(mean_F.shape)} and covariances {tuple(covariance_FF.shape)}, where "
                f"({width},) and ({width}, {width}) are expected"
            )
        if not (mean_F.isfinite().all() and covariance_FF.isfinite().all()):
            raise DataError(f"FID: statistics of {whose} are not finite")
        return mean_F, covariance_FF


def _rounding(mean_F: Tensor) -> float:
    """Rounding error that a covariance beside this mean may have."""
    return ROUNDING * float(mean_F.square().sum())


def _roots(values_F: Tensor, rounding: float, whose: str) -> Tensor:
    """Square roots of eigenvalues that are at least 0 but for rounding.

    Raises:
        DataError: they are not.
    """
    lowest, highest = float(values_F[0]), float(values_F[-1])
    if lowest < -NEGATIVE * abs(highest) - rounding:
        raise DataError(f"FID: the covariance of {whose} has the eigenvalue {lowest:.3g} beside {highest:.3g}")
    return values_F.clamp(min=0).sqrt()
