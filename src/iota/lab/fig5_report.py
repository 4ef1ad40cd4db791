"""From finished jobs to the rows of the report of `iota lab fig5`: paired gaps, their slopes, interactions.

Only jobs that ended count. Everything is paired: a job is held against the baseline of the same model, data, tokens and
seed, window by window the same held-out text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from iota.core.values import DTYPE_BYTES
from iota.lab.fig5_bytes import message_bytes
from iota.lab.fig5_grid import CELLS, QUICK, cell
from iota.lab.fig5_rows import Results
from iota.lab.fig5_spec import Spec
from iota.lab.stats import gap_percent, interval, slope

Row = dict[str, Any]
DIGITS = 5


@dataclass(frozen=True)
class Group:
    """The finished jobs of one spec by seed; `spec` has seed 0. Jobs that diverged are listed, and in no mean."""

    spec: Spec
    runs: Mapping[int, Results]
    diverged: tuple[int, ...]


def read(folder: Path) -> dict[str, Group]:
    """Every finished job in a folder, grouped over seeds, by the name of the group's seed 0."""
    found: dict[str, dict[int, Results]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        results = Results(path)
        if results.end is not None:
            found.setdefault(seedless(results.spec).name, {})[results.spec.seed] = results
    return {name: _group(runs) for name, runs in found.items()}


def seedless(spec: Spec) -> Spec:
    return msgspec.structs.replace(spec, seed=0)


def _group(runs: dict[int, Results]) -> Group:
    specs = {name: results for name, results in sorted(runs.items())}
    done = {seed: results for seed, results in specs.items() if _outcome(results) == "done"}
    first = next(iter(specs.values()))
    return Group(seedless(first.spec), done, tuple(seed for seed in specs if seed not in done))


def _outcome(results: Results) -> str:
    end = results.end
    return "" if end is None else str(end["outcome"])


# ------------------------------------------------------------------------------------------------------------- gaps


def final_loss(results: Results) -> float:
    return float(results.curve[-1]["heldout_loss"])


def paired(group: Group, base: Group | None) -> list[int]:
    """Seeds that both have."""
    return [] if base is None else sorted(set(group.runs) & set(base.runs))


def gaps(group: Group, base: Group | None) -> list[float]:
    """The final gap in percent of each paired seed."""
    seeds = paired(group, base)
    assert base is not None or not seeds
    return [gap_percent(final_loss(group.runs[s]), final_loss(base.runs[s])) for s in seeds if base is not None]


def at_tokens(curve: Sequence[Row], key: str, tokens: float) -> np.ndarray:
    """A value of the curve (a number, or one number a block) at `tokens`: linear in the logarithm between two rows."""
    places = np.log([row["tokens"] for row in curve])
    values = np.array([row[key] for row in curve], dtype=np.float64).reshape(len(curve), -1)
    return np.array([np.interp(math.log(tokens), places, column) for column in values.T])


def gap_curve(run: Results, base: Results, key: str = "heldout_loss") -> list[tuple[int, np.ndarray]]:
    """(tokens, gap in percent) at each row of the run that lies within the baseline's curve. With `blocks` one gap a
    block of held-out text, in percent of the baseline's whole loss."""
    low, high = base.curve[0]["tokens"], base.curve[-1]["tokens"]
    out = []
    for row in run.curve:
        if low <= row["tokens"] <= high:
            whole = at_tokens(base.curve, "heldout_loss", row["tokens"])[0]
            there = at_tokens(base.curve, key, row["tokens"])
            out.append((row["tokens"], 100.0 * (np.atleast_1d(row[key]) - there) / whole))
    return out


def text_interval(group: Group, base: Group | None) -> list[float] | None:
    """The 95% interval of the mean paired gap over blocks of held-out text, these seeds being given."""
    seeds = paired(group, base)
    if base is None or not seeds:
        return None
    rows = np.array([gap_curve(group.runs[s], base.runs[s], "blocks")[-1][1] for s in seeds])
    return _ends(interval(rows.mean(axis=0)).ends)


def _ends(ends: Sequence[float] | None) -> list[float] | None:
    return None if ends is None else [round(end, DIGITS) for end in ends]


# ------------------------------------------------------------------------------------------------------------- rows


def result_rows(groups: Mapping[str, Group]) -> list[Row]:
    """One row for each spec that has finished jobs."""
    cells = _cells()
    around = message_bytes()
    return [_row(group, groups, cells.get(name, []), around) for name, group in groups.items()]


def _cells() -> dict[str, list[str]]:
    """Cells of the grid by the job's name."""
    out: dict[str, list[str]] = {}
    for name in (*CELLS, QUICK):
        for entry in cell(name):
            for dtype in ("float32", "bfloat16"):
                out.setdefault(msgspec.structs.replace(entry.spec, dtype=dtype).name, []).append(name)
    return out


def baseline_of(group: Group, groups: Mapping[str, Group]) -> Group | None:
    return groups.get(seedless(group.spec.baseline()).name)


def _row(group: Group, groups: Mapping[str, Group], cells: list[str], around: Mapping[str, int]) -> Row:
    spec, base = group.spec, baseline_of(group, groups)
    row: Row = {
        "variant": spec.variant,
        "cells": cells,
        "codec": spec.codec,
        "control": spec.control,
        "channels": spec.width if spec.control == "wide" else spec.channels,
        "wire": spec.wire,
        "width": spec.width,
        "blocks": spec.blocks,
        "boundaries": spec.stages - 1,
        "H": spec.inner_steps,
        "replicas": spec.replicas,
        "optimizer": spec.optimizer,
        "dtype": spec.dtype,
        "tokens": spec.tokens,
        "seeds": sorted(group.runs),
        "diverged": list(group.diverged),
    }
    if not group.runs:
        return row | {"heldout_loss": None}
    losses = interval([final_loss(run) for run in group.runs.values()])
    row |= {"heldout_loss": round(losses.mean, DIGITS), "ci95": _ends(losses.ends)}
    found = gaps(group, base)
    if found:
        gap = interval(found)
        row |= {"gap_percent": round(gap.mean, DIGITS), "gap_ci95": _ends(gap.ends), "gap_seeds": paired(group, base)}
        row["gap_text_ci95"] = text_interval(group, base)
    return row | _size(next(iter(group.runs.values())), spec, around) | _where(group)


def _size(run: Results, spec: Spec, around: Mapping[str, int]) -> Row:
    """Bytes a token of one boundary, mean of both directions, as they crossed; with the message around them once up
    and once down it is what a hop costs on average; and parameters."""
    end = run.end
    assert end is not None
    forward, backward = float(end["bytes_forward"]), float(end["bytes_backward"])
    mean = (forward + backward) / 2
    header = (around["up"] + around["down"]) / 2 / (spec.batch * spec.sequence)
    return {
        "bytes_per_token": mean,
        "bytes_forward": forward,
        "bytes_backward": backward,
        "bytes_per_token_with_headers": round(mean + header, 3) if mean else 0.0,
        "ratio": round(spec.width * DTYPE_BYTES["float32"] / mean, 3) if mean else None,
        "parameters": run.rows[0]["parameters"],
    }


def _where(group: Group) -> Row:
    sessions = [row for run in group.runs.values() for row in run.rows if row.get("row") == "session"]
    seconds = [run.end["seconds"] for run in group.runs.values() if run.end is not None]
    return {
        "machine": sorted({f"{row['machine']}, {row['device']}" for row in sessions}),
        "code": sorted({row["code"] for row in sessions}),
        "seconds": [round(second) for second in seconds],
    }


# ----------------------------------------------------------------------------------------------- slopes, interactions


def slope_rows(groups: Mapping[str, Group]) -> list[Row]:
    """How the gap (in percent) changes with every doubling of tokens, from the curves of one job each."""
    out = []
    for group in groups.values():
        base = baseline_of(group, groups)
        seeds = paired(group, base)
        if base is None or base is group or not seeds:
            continue
        curves = [gap_curve(group.runs[s], base.runs[s]) for s in seeds]
        if min(len(curve) for curve in curves) < 2:
            continue
        slopes = interval([_slope(curve)[0] for curve in curves])
        blocks = np.mean([_slope(gap_curve(group.runs[s], base.runs[s], "blocks")) for s in seeds], axis=0)
        size = _size(group.runs[seeds[0]], group.spec, {"up": 0, "down": 0})
        out.append(
            {
                "variant": group.spec.variant,
                "H": group.spec.inner_steps,
                "optimizer": group.spec.optimizer,
                "width": group.spec.width,
                "boundaries": group.spec.stages - 1,
                "bytes_per_token": size["bytes_per_token"],
                "from_tokens": curves[0][0][0],
                "to_tokens": curves[0][-1][0],
                "points": len(curves[0]),
                "seeds": seeds,
                "slope_per_doubling": round(slopes.mean, DIGITS),
                "ci95": _ends(slopes.ends),
                "text_ci95": _ends(interval(list(blocks)).ends),
                "gaps": [round(float(np.mean([c[i][1][0] for c in curves])), 4) for i in range(len(curves[0]))],
            }
        )
    return out


def _slope(curve: Iterable[tuple[int, np.ndarray]]) -> np.ndarray:
    """Percentage points a doubling of tokens, by column."""
    rows = list(curve)
    places = [math.log2(tokens) for tokens, _ in rows]
    return np.array([slope(places, list(column)) for column in np.array([gap for _, gap in rows]).T])


def interaction_rows(groups: Mapping[str, Group]) -> list[Row]:
    """With local steps: what compression costs there beyond what it costs synchronously, in points of the gap, paired.

    (compressed at H / uncompressed at H) against (compressed synchronous / uncompressed synchronous).
    """
    out = []
    for group in groups.values():
        spec = group.spec
        if not spec.inner_steps or spec.codec == "identity":
            continue
        plain = msgspec.structs.replace(spec, codec="identity", channels=0, wire="float32", control="")
        sync = msgspec.structs.replace(spec, batch=spec.batch * spec.replicas, replicas=1, inner_steps=0)
        others = [groups.get(other.name) for other in (plain, sync, spec.baseline())]
        if any(other is None for other in others):
            continue
        at_h, synchronous, base = (other for other in others if other is not None)
        seeds = sorted(set(group.runs) & set(at_h.runs) & set(synchronous.runs) & set(base.runs))
        if not seeds:
            continue
        local = [gap_percent(final_loss(group.runs[s]), final_loss(at_h.runs[s])) for s in seeds]
        usual = [gap_percent(final_loss(synchronous.runs[s]), final_loss(base.runs[s])) for s in seeds]
        alone = [gap_percent(final_loss(at_h.runs[s]), final_loss(base.runs[s])) for s in seeds]
        extra = interval([a - b for a, b in zip(local, usual, strict=True)])
        out.append(
            {
                "variant": spec.variant,
                "H": spec.inner_steps,
                "seeds": seeds,
                "gap_synchronous": round(interval(usual).mean, DIGITS),
                "gap_at_same_H": round(interval(local).mean, DIGITS),
                "gap_of_local_steps_alone": round(interval(alone).mean, DIGITS),
                "interaction": round(extra.mean, DIGITS),
                "ci95": _ends(extra.ends),
            }
        )
    return out
