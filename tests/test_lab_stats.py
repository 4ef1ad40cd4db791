"""Small-sample statistics against values worked out by hand or taken from a t table."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from iota.lab.stats import gap_percent, interval, least_squares, slope, t_probability, t_quantile


@pytest.mark.parametrize(
    ("df", "value"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (10, 2.2281), (30, 2.0423), (1000, 1.9623)]
)
def test_t_table(df, value):
    assert t_quantile(df) == pytest.approx(value, abs=1e-4)


def test_t_at_another_level():
    assert t_quantile(2, 0.90) == pytest.approx(2.91999, abs=1e-4)
    assert t_probability(1.0, 1) == pytest.approx(0.5)  # Cauchy


@pytest.mark.parametrize(("df", "level"), [(0, 0.95), (3, 0.0), (3, 1.0)])
def test_t_refuses(df, level):
    with pytest.raises(ValueError, match="no t quantile"):
        t_quantile(df, level)


def test_interval_by_hand():
    found = interval([1.0, 2.0, 3.0])  # standard deviation 1, error 1/sqrt(3), t = 4.3027
    assert found.mean == 2.0
    assert found.half == pytest.approx(4.30265 / math.sqrt(3), abs=1e-4)
    assert found.ends == pytest.approx([2 - 2.48414, 2 + 2.48414], abs=1e-4)


def test_one_value_has_no_interval():
    assert interval([7.0]).ends is None
    with pytest.raises(ValueError):
        interval([])


def test_gap_and_slope():
    assert gap_percent(5.1, 5.0) == pytest.approx(2.0)
    assert slope([0, 1, 2], [1, 3, 5]) == 2.0
    assert slope([0, 1, 2], [0, 1, 0]) == 0.0
    with pytest.raises(ValueError, match="two different"):
        slope([1, 1], [0, 5])


@given(st.floats(-5, 5), st.floats(-5, 5), st.lists(st.floats(-10, 10), min_size=4, max_size=9, unique=True))
def test_least_squares_finds_a_line(a, b, places):
    if max(places) - min(places) < 0.1:
        return
    fit = least_squares([[1.0, x] for x in places], [a + b * x for x in places])
    assert fit is not None
    assert fit.coefficients == pytest.approx((a, b), abs=1e-6)
    assert fit.predict([1.0, 100.0]).mean == pytest.approx(a + 100 * b, abs=1e-4)


def test_least_squares_by_hand():
    """y = 0, 1, 1, 2 at x = 0, 1, 2, 3: slope 0.6, intercept 0.1, residual sum 0.2, two degrees of freedom."""
    fit = least_squares([[1, 0], [1, 1], [1, 2], [1, 3]], [0, 1, 1, 2])
    assert fit is not None
    assert fit.coefficients == pytest.approx((0.1, 0.6))
    assert (fit.df, fit.sigma) == (2, pytest.approx(math.sqrt(0.1)))
    error = math.sqrt(0.1 / 5)  # sum of squares of x around its mean is 5
    assert fit.coefficient(1).half == pytest.approx(4.30265 * error, abs=1e-4)
    noise = math.sqrt(0.1 * (1 + 1 / 4 + 1.5**2 / 5))
    assert fit.predict([1, 3]).half == pytest.approx(4.30265 * noise, abs=1e-4)


def test_what_cannot_be_fitted_is_not():
    assert least_squares([[1, 1], [1, 2]], [1, 2]) is None  # no degree of freedom left
    assert least_squares([[1, 1], [1, 1], [1, 1]], [1, 2, 3]) is None  # the second column says nothing
