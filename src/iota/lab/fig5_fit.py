"""The gap over width, bytes a token, boundaries and tokens: least squares, and what it says of the paper's cases.

Two models of the same points, one job's final gap each, because the form is not known and far from the data they part:
    linear   gap = a + sum of b_i * log2(x_i / x_i0)
    power    ln gap = a + sum of b_i * log2(x_i / x_i0)        only when every gap is above zero
A quantity that the points do not vary has no coefficient, and a case that differs in it has no prediction. Jobs of one
seed share their baseline, so their points are not quite independent and the intervals a little too narrow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from iota.lab.fig5_report import Group, Row, baseline_of, gaps
from iota.lab.stats import Fit, Interval, least_squares

QUANTITIES = ("width", "bytes_per_token", "boundaries", "tokens")
CENTRE = {"width": 512.0, "bytes_per_token": 16.0, "boundaries": 3.0, "tokens": 1_228_800.0}
"""Where the constant is read off: the minimum grid at 128x."""
CASES: dict[str, dict[str, float]] = {
    "1.5B, three bottlenecks, 400M tokens": {"width": 2048, "bytes_per_token": 64, "boundaries": 3, "tokens": 4e8},
    "15B in five stages, 100B tokens": {"width": 5120, "bytes_per_token": 160, "boundaries": 4, "tokens": 1e11},
    "70B, eight bottlenecks, 100B tokens": {"width": 8192, "bytes_per_token": 256, "boundaries": 8, "tokens": 1e11},
}
"""The paper's section 4, all at 128x."""


def fit_rows(groups: Mapping[str, Group]) -> list[dict[str, Any]]:
    """A fit for each codec that has jobs in more than one place."""
    points: dict[str, list[tuple[dict[str, float], float]]] = {}
    for group in groups.values():
        spec = group.spec
        if spec.codec == "identity" or spec.control or spec.inner_steps or spec.optimizer != "adamw" or not group.runs:
            continue
        where = _where(group)
        found = gaps(group, baseline_of(group, groups))
        points.setdefault(spec.codec, []).extend((where, gap) for gap in found)
    return [row for codec, rows in sorted(points.items()) if (row := _fit(codec, rows)) is not None]


def _where(group: Group) -> dict[str, float]:
    end = next(iter(group.runs.values())).end
    assert end is not None
    return {
        "width": float(group.spec.width),
        "bytes_per_token": (float(end["bytes_forward"]) + float(end["bytes_backward"])) / 2,
        "boundaries": float(group.spec.stages - 1),
        "tokens": float(group.spec.tokens),
    }


def _fit(codec: str, points: Sequence[tuple[dict[str, float], float]]) -> Row | None:
    varied = [name for name in QUANTITIES if len({where[name] for where, _ in points}) > 1]
    if not varied:
        return None
    rows = [_columns(where, varied) for where, _ in points]
    values = [gap for _, gap in points]
    models = {"linear": least_squares(rows, values)}
    if min(values) > 0:
        models["power"] = least_squares(rows, [math.log(gap) for gap in values])
    fits = {name: fit for name, fit in models.items() if fit is not None}
    if not fits:
        return None
    ranges = {name: [min(w[name] for w, _ in points), max(w[name] for w, _ in points)] for name in QUANTITIES}
    return {
        "codec": codec,
        "points": len(points),
        "ranges": ranges,
        "not_varied": [name for name in QUANTITIES if name not in varied],
        "models": {name: _model(fit, varied) for name, fit in fits.items()},
        "cases": {title: _case(case, fits, varied, ranges) for title, case in CASES.items()},
    }


def _columns(where: Mapping[str, float], varied: Sequence[str]) -> list[float]:
    return [1.0, *(math.log2(where[name] / CENTRE[name]) for name in varied)]


def _model(fit: Fit, varied: Sequence[str]) -> Row:
    """Coefficients are points of the gap (linear), or of its logarithm (power), a doubling."""
    names = ["constant", *(f"per doubling of {name}" for name in varied)]
    rows = {name: _numbers(fit.coefficient(column)) for column, name in enumerate(names)}
    return {"coefficients": rows, "sigma": round(fit.sigma, 5), "degrees_of_freedom": fit.df}


def _numbers(found: Interval) -> Row:
    ends = found.ends
    return {"value": round(found.mean, 5), "ci95": None if ends is None else [round(end, 5) for end in ends]}


def _case(
    case: Mapping[str, float], fits: Mapping[str, Fit], varied: Sequence[str], ranges: Mapping[str, Sequence[float]]
) -> Row:
    """The gap in percent that each model predicts, how far outside of the data that is, and what is missing."""
    missing = [name for name in QUANTITIES if name not in varied and case[name] != ranges[name][0]]
    beyond = {name: round(case[name] / ranges[name][1], 1) for name in QUANTITIES if case[name] > ranges[name][1]}
    row: Row = {"beyond_the_data_by": beyond, "not_supported": missing}
    if missing:
        return row
    for name, fit in fits.items():
        found = fit.predict(_columns(case, varied))
        ends = found.ends or [found.mean, found.mean]
        values = [found.mean, *ends] if name == "linear" else [_exp(v) for v in (found.mean, *ends)]
        row[name] = {"gap_percent": values[0], "prediction95": values[1:]}
    return row


def _exp(value: float) -> float:
    """Kept finite: a prediction far outside of the data may be beyond any number."""
    return math.exp(min(value, 100.0))
