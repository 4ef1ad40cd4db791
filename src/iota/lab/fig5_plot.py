"""The picture of `iota lab fig5`: curves, gaps over tokens, gaps over bytes. Needs matplotlib (extra `plots`).

Bands and bars are 95% t intervals over seeds; one seed has none.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from iota.lab.fig5_report import Group, Row, baseline_of, gap_curve, paired
from iota.lab.stats import Interval, interval

DPI = 120


def draw(groups: Mapping[str, Group], facts: Mapping[str, Any], path: Path) -> bool:
    """Write the PNG; False without matplotlib or without anything to draw."""
    try:
        figure = importlib.import_module("matplotlib.figure").Figure
    except ModuleNotFoundError:
        return False
    shown = main_groups(groups)
    if not shown:
        return False
    drawn = figure(figsize=(16, 5.2), layout="constrained")
    left, middle, right = drawn.subplots(1, 3)
    colours = importlib.import_module("matplotlib").colormaps["tab20"]
    for number, group in enumerate(shown):
        colour = colours(number % 20)
        _curve(left, group, colour)
        _gap(middle, group, baseline_of(group, groups), colour)
    _bytes(right, facts["rows"], colours)
    spec = shown[0].spec
    drawn.suptitle(f"width {spec.width}, {spec.blocks} blocks in {spec.stages} stages; bands: 95% over seeds")
    part = path.with_name(path.name + ".part")
    drawn.savefig(part, dpi=DPI, format="png")
    part.replace(path)
    return True


def main_groups(groups: Mapping[str, Group]) -> list[Group]:
    """The groups to draw together: synchronous AdamW jobs of the model and length that has most of them."""
    kinds: dict[tuple[int, ...], list[Group]] = {}
    for group in groups.values():
        spec = group.spec
        if group.runs and not spec.inner_steps and spec.optimizer == "adamw":
            kinds.setdefault((spec.width, spec.blocks, spec.stages, spec.steps), []).append(group)
    return max(kinds.values(), key=len) if kinds else []


def _curve(axes: Any, group: Group, colour: Any) -> None:
    runs = list(group.runs.values())
    length = min(len(run.curve) for run in runs)
    rows = [
        (runs[0].curve[i]["tokens"], interval([run.curve[i]["heldout_loss"] for run in runs])) for i in range(length)
    ]
    _band(axes, rows, group.spec.variant, colour)
    axes.set_xlabel("tokens")
    axes.set_ylabel("held-out loss, nats a token")
    axes.set_title("Loss")
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=7)


def _gap(axes: Any, group: Group, base: Group | None, colour: Any) -> None:
    seeds = paired(group, base)
    if base is None or base is group or not seeds:
        return
    curves = [gap_curve(group.runs[s], base.runs[s]) for s in seeds]
    length = min(len(curve) for curve in curves)
    rows = [(curves[0][i][0], interval([float(curve[i][1][0]) for curve in curves])) for i in range(length)]
    _band(axes, rows, group.spec.variant, colour)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xlabel("tokens")
    axes.set_ylabel("gap to the baseline of the same seed, %")
    axes.set_title("Gap over tokens")
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)


def _band(axes: Any, rows: Sequence[tuple[float, Interval]], label: str, colour: Any) -> None:
    places = [place for place, _ in rows]
    axes.plot(places, [found.mean for _, found in rows], marker=".", color=colour, label=label)
    ends = [found.ends for _, found in rows]
    if all(end is not None for end in ends):
        low, high = ([end[side] for end in ends if end is not None] for side in (0, 1))
        axes.fill_between(places, low, high, color=colour, alpha=0.15, linewidth=0)


def _bytes(axes: Any, rows: Sequence[Row], colours: Any) -> None:
    """Final gaps over bytes a token, one line for each codec, width and length that has several."""
    lines: dict[str, list[Row]] = {}
    for row in rows:
        plain = not row["control"] and not row["H"] and row["optimizer"] == "adamw"
        if plain and row["codec"] != "identity" and row["wire"] != "float32" and row.get("gap_percent") is not None:
            name = f"{row['codec']}, width {row['width']}, {row['tokens'] / 1e6:.1f}M, {row['boundaries']} bounds"
            lines.setdefault(name, []).append(row)
    for number, (name, points) in enumerate(sorted(lines.items())):
        points.sort(key=lambda row: row["bytes_per_token"])
        places, means = [row["bytes_per_token"] for row in points], [row["gap_percent"] for row in points]
        halves = [0.0 if row["gap_ci95"] is None else row["gap_ci95"][1] - row["gap_percent"] for row in points]
        axes.errorbar(places, means, halves, marker="o", capsize=3, color=colours(number % 20), label=name)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("bytes a token and boundary, mean of both directions")
    axes.set_ylabel("gap at the end, %")
    axes.set_title("Gap over bytes")
    axes.grid(alpha=0.3)
    if lines:
        axes.legend(frameon=False, fontsize=7)
