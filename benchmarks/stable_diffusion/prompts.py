"""Data of the evaluation: captions to generate pictures from, and feature statistics of the real pictures."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np

from benchmarks.stable_diffusion.fid import FeatureStatistics
from benchmarks.stable_diffusion.prepared import PROMPTS, STATISTICS
from common.errors import DataError
from common.untrusted.array_file import read_npz
from common.untrusted.regular_file import TEXT_BYTES, line_not_utf8, open_file
from common.untrusted.strict_json import DIGITS

COLUMNS = ("image_id", "id", "caption")
"""Columns of the table, which is sorted by ``id``."""
MEAN, COVARIANCE = "mu", "sigma"
"""Names of the arrays of the statistics, float64 (F,) and (F, F)."""
MOST_BYTES = 2**28
"""Largest accepted array in bytes; the covariance of 2,048 features has 34 MB."""


def read_prompts(root: Path) -> list[str]:
    """Read the captions of the evaluation from prepared data, in order.

    The table is tab-separated; captions with quotation marks are quoted as pandas does.

    Raises:
        DataError: the table is missing or damaged, has other columns, is not sorted by id, or has an empty caption.
    """
    path = root / PROMPTS
    captions: list[str] = []
    before = -1
    try:
        with open_file(path) as whole:
            content = whole.read(TEXT_BYTES)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    try:
        rows = csv.reader(io.StringIO(content.decode("utf-8"), newline=""), delimiter="\t", strict=True)
        if tuple(found := next(rows, [])) != COLUMNS:
            raise DataError(f"{path} begins with the columns {found}, not {list(COLUMNS)}")
        for row in rows:
            where = f"{path}, line {rows.line_num}"
            if len(row) != len(COLUMNS):
                raise DataError(f"{where}: {len(row)} columns, not {len(COLUMNS)}")
            picture, number, caption = row
            if not (picture.isdecimal() and number.isdecimal() and len(number) <= DIGITS):
                raise DataError(f"{where}: the ids are {picture!r} and {number!r}, no numbers")
            if int(number) <= before:
                raise DataError(f"{where}: id {number} follows {before}, and they have to rise")
            if not caption.strip():
                raise DataError(f"{where}: the caption of picture {picture} is empty")
            before = int(number)
            captions.append(caption)
    except UnicodeDecodeError as error:
        line = line_not_utf8(io.BytesIO(content))
        raise DataError(f"{path} cannot be read: {error}, in line {line}") from error
    except csv.Error as error:
        raise DataError(f"{path} cannot be read: {error}, in line {rows.line_num}") from error
    return captions


def read_reference(root: Path) -> FeatureStatistics:
    """Read mean and covariance of the features of the real pictures from prepared data.

    Raises:
        DataError: the file is missing or damaged, or its arrays have wrong shapes or dtypes or values that are not
            finite.
    """
    path = root / STATISTICS
    try:
        mean_F, covariance_FF = read_npz(path, (MEAN, COVARIANCE), MOST_BYTES)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as arrays {MEAN} and {COVARIANCE}: {error}") from error
    features = mean_F.size
    for name, array, shape in ((MEAN, mean_F, (features,)), (COVARIANCE, covariance_FF, (features, features))):
        if array.dtype != np.float64 or array.shape != shape:
            raise DataError(f"{path}: {name} is {array.dtype} {array.shape} where float64 {shape} is expected")
        if not np.isfinite(array).all():
            raise DataError(f"{path}: {name} has values that are not finite")
    return FeatureStatistics(mean_F, covariance_FF)
