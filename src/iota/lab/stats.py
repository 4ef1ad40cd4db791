"""Small-sample statistics of the lab: Student's t, paired intervals, slopes, least squares. numpy only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


def t_probability(t: float, df: int) -> float:
    """P(|T| <= t) of Student's t with `df` degrees of freedom (>= 1), by the finite trigonometric series."""
    theta = math.atan2(t, math.sqrt(df))
    cosine, total = math.cos(theta), 0.0
    if df % 2:
        term = cosine
        for odd in range(3, df + 1, 2):
            total += term
            term *= cosine * cosine * (odd - 1) / odd
        return 2.0 / math.pi * (theta + math.sin(theta) * total)
    term = 1.0
    for even in range(2, df + 1, 2):
        total += term
        term *= cosine * cosine * (even - 1) / even
    return math.sin(theta) * total


def t_quantile(df: int, level: float = 0.95) -> float:
    """The t with P(|T| <= t) = `level`: 12.706 for one degree of freedom, 1.960 for very many. Raises ValueError for
    no degree of freedom or a level outside (0, 1)."""
    if df < 1 or not 0.0 < level < 1.0:
        raise ValueError(f"no t quantile for {df} degrees of freedom at level {level}")
    low, high = 0.0, 1.0
    while t_probability(high, df) < level:
        high *= 2.0
    for _ in range(200):
        middle = 0.5 * (low + high)
        if t_probability(middle, df) < level:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)


@dataclass(frozen=True)
class Interval:
    """A mean and its 95% t interval; `half` is half of its width, None when there was one value only."""

    mean: float
    half: float | None
    count: int

    @property
    def ends(self) -> list[float] | None:
        """[low, high], or None."""
        return None if self.half is None else [self.mean - self.half, self.mean + self.half]


def interval(values: Sequence[float]) -> Interval:
    """The mean of independent values with its t interval; at least one value."""
    array = np.asarray(values, dtype=np.float64)
    if array.size == 0:
        raise ValueError("no values")
    if array.size == 1:
        return Interval(float(array[0]), None, 1)
    error = float(array.std(ddof=1)) / math.sqrt(array.size)
    return Interval(float(array.mean()), t_quantile(array.size - 1) * error, int(array.size))


def gap_percent(loss: float, baseline: float) -> float:
    """How much higher a loss is than its baseline, in percent of the baseline."""
    return 100.0 * (loss - baseline) / baseline


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """The slope of the least-squares line; at least two different x."""
    a, b = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    spread = a - a.mean()
    if a.size < 2 or not bool(spread.any()):
        raise ValueError("a slope needs two different places")
    return float((spread * (b - b.mean())).sum() / (spread * spread).sum())


@dataclass(frozen=True)
class Fit:
    """y = X b + noise by least squares. `covariance` of b, `sigma` the noise's standard deviation, `df` its degrees of
    freedom (rows - columns, at least 1)."""

    coefficients: tuple[float, ...]
    covariance: np.ndarray
    sigma: float
    df: int

    def coefficient(self, column: int) -> Interval:
        """A coefficient with its 95% interval."""
        error = math.sqrt(max(0.0, float(self.covariance[column, column])))
        return Interval(self.coefficients[column], t_quantile(self.df) * error, self.df)

    def predict(self, row: Sequence[float]) -> Interval:
        """What a new observation at `row` would be, with its 95% prediction interval (noise included)."""
        x = np.asarray(row, dtype=np.float64)
        variance = float(x @ self.covariance @ x) + self.sigma**2
        return Interval(float(x @ np.asarray(self.coefficients)), t_quantile(self.df) * math.sqrt(variance), self.df)


def least_squares(rows: Sequence[Sequence[float]], y: Sequence[float]) -> Fit | None:
    """Ordinary least squares, or None when the rows do not determine every coefficient and the noise (too few, or
    columns that depend on each other)."""
    x, target = np.asarray(rows, dtype=np.float64), np.asarray(y, dtype=np.float64)
    if x.ndim != 2 or x.shape[0] <= x.shape[1] or np.linalg.matrix_rank(x) < x.shape[1]:
        return None
    solution = np.linalg.lstsq(x, target, rcond=None)[0]
    df = x.shape[0] - x.shape[1]
    variance = float(((target - x @ solution) ** 2).sum()) / df
    covariance = variance * np.linalg.inv(x.T @ x)
    return Fit(tuple(float(value) for value in solution), covariance, math.sqrt(variance), df)
