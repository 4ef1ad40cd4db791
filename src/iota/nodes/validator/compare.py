"""How a shown tensor is held against a replayed one: cosine and norm ratio, in float64 (design section 6 "Audit").

Cosine alone passes a scaled output, the norm alone passes noise: both are needed. Pure numpy.
"""

from __future__ import annotations

import math

import numpy as np

from iota.config.schema import AuditConfig
from iota.core.tasks import Comparison

RATIO_LIMIT = 1e9
"""Norm ratios are cut off here, so that every number of a verdict is finite."""
LOSS_TOLERANCE = 0.01
_BLOCK = 1 << 20


def compare(
    kind: str, sample: int, theirs: np.ndarray, ours: np.ndarray, start: np.ndarray | None = None
) -> Comparison:
    """Compare flat arrays of equal length; with `start`, what was added to it. Both zero: equal; one of them zero or
    anything not finite: cosine 0. Block by block, so that no float64 copy of the whole is made."""
    assert theirs.shape == ours.shape, (theirs.shape, ours.shape)
    dot = a_norm = b_norm = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for at in range(0, len(ours), _BLOCK):
            a = theirs[at : at + _BLOCK].astype(np.float64)
            b = ours[at : at + _BLOCK].astype(np.float64)
            if start is not None:
                a -= start[at : at + _BLOCK]
                b -= start[at : at + _BLOCK]
            dot += float(a @ b)
            a_norm += float(a @ a)
            b_norm += float(b @ b)
    if a_norm == 0.0 and b_norm == 0.0:
        return Comparison(kind, sample, 1.0, 1.0, True)
    if not math.isfinite(a_norm + b_norm + dot):
        return Comparison(kind, sample, 0.0, RATIO_LIMIT, False)
    if a_norm == 0.0 or b_norm == 0.0:
        return Comparison(kind, sample, 0.0, 0.0 if a_norm == 0.0 else RATIO_LIMIT, False)
    ratio = min(math.sqrt(a_norm / b_norm), RATIO_LIMIT)
    return Comparison(kind, sample, dot / math.sqrt(a_norm) / math.sqrt(b_norm), ratio, False)


def compare_loss(sample: int, theirs: float, ours: float) -> Comparison:
    """A loss as a comparison of kind "loss": its ratio counts, its cosine is 1."""
    if theirs == ours:
        return Comparison("loss", sample, 1.0, 1.0, True)
    ratio = theirs / ours if ours > 0.0 and math.isfinite(theirs) else RATIO_LIMIT
    return Comparison("loss", sample, 1.0, max(0.0, min(ratio, RATIO_LIMIT)), False)


def holds(comparison: Comparison, audit: AuditConfig) -> bool:
    """Whether a comparison lies within the run's thresholds; losses within 1%, whatever these say."""
    c = comparison
    if c.equal:
        return True
    if c.kind == "loss":
        return abs(c.norm_ratio - 1.0) <= LOSS_TOLERANCE
    return c.cosine >= audit.cosine and audit.ratio_low <= c.norm_ratio <= audit.ratio_high


def badness(comparison: Comparison) -> float:
    """How far a comparison lies from equality; only for sorting the worst to the front."""
    c = comparison
    if c.equal:
        return 0.0
    ratio = c.norm_ratio if c.norm_ratio >= 1.0 else 1.0 / max(c.norm_ratio, 1.0 / RATIO_LIMIT)
    return (1.0 - c.cosine) + (ratio - 1.0)
