"""The end report's pictures: loss curve, one epoch's phases, agreement matrices, pay. Needs matplotlib (extra `plots`).

Figures are made without pyplot: no global state, no display.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from iota.lab.report_text import num, short

COLOURS = {
    "train": "#2a6f97",
    "drain": "#61a5c2",
    "commit": "#e9c46a",
    "upload": "#f4a261",
    "reduce": "#e76f51",
    "sync": "#6a994e",
}
DPI = 120
Facts = Mapping[str, Any]


def draw(facts: Facts, folder: Path) -> list[str]:
    """Write the PNG files that the facts allow; their names. Raises ModuleNotFoundError without matplotlib."""
    figure = importlib.import_module("matplotlib.figure").Figure
    importlib.import_module("matplotlib.backends.backend_agg")
    names = []
    for name, picture in (("loss", loss), ("epoch", epoch), ("agreement", agreement), ("pay", pay)):
        drawn = picture(facts, figure)
        if drawn is not None:
            target, part = folder / f"report_{name}.png", folder / f"report_{name}.png.part"
            drawn.savefig(part, dpi=DPI, format="png")
            part.replace(target)
            names.append(target.name)
    return names


def loss(facts: Facts, figure: Any) -> Any:
    """Held-out and training loss over epochs, with the trigram yardstick and the loss of even guesses."""
    points = [(epoch, value) for epoch, value in enumerate(facts["heldout_loss"]) if value is not None]
    trained = [(epoch, value) for epoch, value in enumerate(facts["train_loss"], start=1) if value is not None]
    if not points and not trained:
        return None
    drawn = figure(figsize=(7.5, 4.5), layout="constrained")
    axes = drawn.subplots()
    if points:
        axes.plot(*zip(*points, strict=True), marker="o", color="#2a6f97", label="held-out text")
        axes.annotate(
            num(points[-1][1]), points[-1], textcoords="offset points", xytext=(0, -14), ha="center", color="#2a6f97"
        )
    if trained:
        axes.plot(*zip(*trained, strict=True), marker=".", color="#61a5c2", linestyle=":", label="while training")
    for value, name, colour in (
        (facts["trigram_loss"], "trigram model", "#e76f51"),
        (facts["ln_vocabulary"], "even guesses, ln(vocabulary)", "#888888"),
    ):
        if value is not None:
            axes.axhline(value, color=colour, linestyle="--", linewidth=1, label=f"{name}: {value:.3f}")
    axes.set_xlabel("epoch (0: untrained)")
    axes.set_ylabel("nats per byte" if facts["bytes_per_token"] == 1.0 else "nats per token")
    axes.set_title(f"Loss of {facts['run']}")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return drawn


def epoch(facts: Facts, figure: Any) -> Any:
    """One epoch's phases as they happened, with the announced deadline of each, and the length of one audit."""
    shown = facts["timeline"]
    if shown is None:
        return None
    phases, audit = shown["phases"], shown["audit"]
    end = max(max(span["end"] for span in phases), 1e-3)
    drawn = figure(figsize=(9, 0.5 * (len(phases) + 1) + 1.8), layout="constrained")
    axes = drawn.subplots()
    names = [span["phase"].upper() for span in phases]
    for row, span in enumerate(phases):
        width = span["end"] - span["begin"]
        axes.barh(row, max(width, end / 400), left=span["begin"], color=COLOURS[span["phase"]])
        after = span["end"] < 0.6 * end
        place = span["end"] + 0.01 * end if after else span["begin"] - 0.01 * end
        inside = not after and span["begin"] < 0.3 * end
        told = f"{width:.1f} s" + (f": {span['why'][:52]}" if span["why"] else "")
        if inside:
            axes.text(0.5 * (span["begin"] + span["end"]), row, told, va="center", ha="center", color="w", fontsize=8)
        else:
            axes.text(place, row, told, va="center", ha="left" if after else "right", fontsize=8)
    if audit is not None and audit.get("seconds"):
        begin = next((span["begin"] for span in phases if span["phase"] == "reduce"), 0.0)
        names.append("AUDIT")
        told = f"miner {short(audit['miner'])}, replay took {audit['seconds']:.1f} s (start not recorded): "
        told += audit.get("verdict") or "still open"
        axes.barh(len(phases), audit["seconds"], left=begin, color="white", edgecolor="#6d597a", hatch="///")
        axes.text(begin - 0.01 * end, len(phases), told, va="center", ha="right", fontsize=8)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("seconds since the epoch opened")
    axes.set_title(f"Epoch {shown['epoch']} of {facts['run']}, and why each phase began")
    axes.set_xlim(0, None)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return drawn


def agreement(facts: Facts, figure: Any) -> Any:
    """One matrix a stage: the share of common shards on which two owners agreed; white where they share none."""
    shown = facts["agreement"]
    stages = [(stage, matrix) for stage, matrix in (shown or {}).get("stages", {}).items() if matrix["members"]][:12]
    if shown is None or not stages:
        return None
    columns = min(4, len(stages))
    rows = -(-len(stages) // columns)
    drawn = figure(figsize=(3.2 * columns + 1, 3.4 * rows + 0.4), layout="constrained")
    grid = drawn.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(stages) :]:
        axes.set_visible(False)
    image = None
    for axes, (stage, matrix) in zip(grid.flat, stages, strict=False):
        count = len(matrix["members"])
        cells = [[_share(matrix, i, j) for j in range(count)] for i in range(count)]
        axes.set_facecolor("white")
        image = axes.imshow(cells, vmin=0, vmax=1, cmap="coolwarm_r")
        keys = [key[:6] for key in matrix["members"]]
        axes.set_xticks(range(count), keys, rotation=90, fontsize=7)
        axes.set_yticks(range(count), keys, fontsize=7)
        axes.set_title(f"stage {stage}", fontsize=10)
        for i in range(count if count <= 12 else 0):
            for j in range(count):
                if i != j and matrix["agree"][i][j] + matrix["disagree"][i][j]:
                    told = f"{matrix['agree'][i][j]}/{matrix['disagree'][i][j]}"
                    colour = "white" if abs(cells[i][j] - 0.5) > 0.3 else "black"
                    axes.text(j, i, told, ha="center", va="center", fontsize=9, color=colour, weight="bold")
    drawn.colorbar(image, ax=grid, shrink=0.7, label="share of common shards that agree")
    drawn.suptitle(f"Agreement in epoch {shown['epoch']} (equal / not equal)", fontsize=11)
    return drawn


def _share(matrix: Mapping[str, Any], i: int, j: int) -> float:
    """NaN (drawn as background) on the diagonal and where two members share no shard."""
    both = matrix["agree"][i][j] + matrix["disagree"][i][j]
    return float("nan") if i == j or not both else matrix["agree"][i][j] / both


def pay(facts: Facts, figure: Any) -> Any:
    """Units by miner, stacked by epoch."""
    rows = list(facts["emissions"].items())[:40]
    epochs = max((len(row["by_epoch"]) for _, row in rows), default=0)
    if not epochs:
        return None
    drawn = figure(figsize=(max(6.0, 0.6 * len(rows) + 2), 4.5), layout="constrained")
    axes = drawn.subplots()
    colours = importlib.import_module("matplotlib").colormaps["viridis"]
    bottom = [0.0] * len(rows)
    for epoch in range(epochs):
        units = [float(row["by_epoch"][epoch]) for _, row in rows]
        label = f"epoch {epoch + 1}" if epochs <= 10 or epoch in (0, epochs - 1) else None
        axes.bar(range(len(rows)), units, bottom=bottom, color=colours(epoch / max(1, epochs - 1)), label=label)
        bottom = [below + more for below, more in zip(bottom, units, strict=True)]
    names = [f"{short(key)}\nstage {row['stage']}" for key, row in rows]
    axes.set_xticks(range(len(rows)), names, fontsize=7, rotation=90 if len(rows) > 12 else 0)
    axes.set_ylabel("units paid")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylim(0, 1.05 * max([*bottom, 1.0]))
    axes.set_title(f"Pay by miner; {sum(facts['burned']):,} units burned")
    drawn.legend(loc="outside right center", frameon=False, fontsize=8)
    return drawn
