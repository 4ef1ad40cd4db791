"""The results of `iota lab fig5` as a table for people, and as files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from iota.lab.fig5_fit import fit_rows
from iota.lab.fig5_plot import draw
from iota.lab.fig5_report import Row, interaction_rows, read, result_rows, slope_rows
from iota.lab.fig5_speed import FLOPS, PRESET, ROUND_TRIP_MS, speed_rows
from iota.store.files import write_atomic

Facts = dict[str, Any]


def assemble(results: Path, command: str, overheads: Sequence[Row]) -> Facts:
    """Everything that finished jobs in `results` say. `overheads`: as `fig5_overhead` measured, if it did."""
    groups = read(results)
    rows = sorted(result_rows(groups), key=_order)
    return {
        "figure": "fig5",
        "command": command,
        "rows": rows,
        "slopes": slope_rows(groups),
        "interactions": interaction_rows(groups),
        "fits": fit_rows(groups),
        "speed": {
            "preset": PRESET,
            "flops": FLOPS,
            "round_trip_ms": ROUND_TRIP_MS,
            "rows": speed_rows(rows),
        },
        "overheads": list(overheads),
    }


def _order(row: Row) -> tuple[Any, ...]:
    return (
        row["width"], row["blocks"], row["boundaries"], row["tokens"], row["optimizer"], row["H"],
        row["codec"] != "identity" or bool(row["control"]), row["control"], row["codec"], row["channels"], row["wire"],
    )  # fmt: skip


def write(results: Path, command: str, overheads: Sequence[Row]) -> tuple[Facts, list[Path]]:
    """Write `<results>.json`, `.txt` and, with matplotlib, `.png` beside the folder; the facts and the files. Raises
    ConfigError for a damaged file of rows."""
    facts = assemble(results, command, overheads)
    files = [results.with_name(f"{results.name}.json"), results.with_name(f"{results.name}.txt")]
    write_atomic(files[0], [msgspec.json.format(msgspec.json.encode(facts), indent=1), b"\n"], durable=False)
    write_atomic(files[1], [text(facts).encode("utf-8")], durable=False)
    picture = results.with_name(f"{results.name}.png")
    if draw(read(results), facts, picture):
        files.append(picture)
    return facts, files


# ---------------------------------------------------------------------------------------------------------- the text


def text(facts: Mapping[str, Any]) -> str:
    """All tables, one below the other."""
    parts = [f"iota lab fig5: {facts['command']}"]
    if facts["rows"]:
        parts.append(_results(facts["rows"]))
    if facts["slopes"]:
        parts.append(_slopes(facts["slopes"]))
    if facts["interactions"]:
        parts.append(_interactions(facts["interactions"]))
    parts += [_fit(row) for row in facts["fits"]]
    if facts["speed"]["rows"]:
        parts.append(_speed(facts["speed"]))
    if facts["overheads"]:
        parts.append(_overheads(facts["overheads"]))
    return "\n\n".join(parts) + "\n"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of equal width, the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in [heads, *rows]) for column in range(len(heads))]
    lines = []
    for row in (heads, *rows):
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells[1:]]).rstrip())
    return "\n".join(lines)


def _number(value: float | None, digits: int = 2, sign: bool = False) -> str:
    if value is None:
        return "-"
    return f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}"


def _range(ends: Sequence[float] | None, digits: int = 2) -> str:
    return "-" if ends is None else f"{ends[0]:+.{digits}f}..{ends[1]:+.{digits}f}"


def _label(row: Mapping[str, Any]) -> str:
    more = [f"H={row['H']}"] if row["H"] else []
    more += [row["optimizer"]] if row["optimizer"] != "adamw" else []
    return " ".join([row["variant"], *more])


def _results(rows: Sequence[Row]) -> str:
    heads = (
        "variant",
        "width",
        "cut",
        "Mtok",
        "ratio",
        "B/tok",
        "Mparam",
        "n",
        "loss",
        "gap%",
        "gap ci95",
        "text ci95",
    )
    lines = [
        (
            _label(row),
            str(row["width"]),
            f"{row['blocks']}/{row['boundaries'] + 1}",
            _number(row["tokens"] / 1e6, 3),
            _number(row.get("ratio"), 1),
            _number(row.get("bytes_per_token"), 1),
            _number(row["parameters"] / 1e6 if "parameters" in row else None, 3),
            str(len(row["seeds"])) + (f"+{len(row['diverged'])} diverged" if row["diverged"] else ""),
            _number(row["heldout_loss"], 4),
            _number(row.get("gap_percent"), 2, sign=True),
            _range(row.get("gap_ci95")),
            _range(row.get("gap_text_ci95")),
        )
        for row in rows
    ]
    return (
        "Held-out loss (nats a token) and gap to the baseline of the same seeds. ci95: paired t interval over seeds; "
        "text ci95: over blocks of held-out text, these seeds being given. cut: blocks/stages.\n" + table(heads, lines)
    )


def _slopes(rows: Sequence[Row]) -> str:
    heads = ("variant", "width", "bounds", "B/tok", "Mtok", "n", "points/doubling", "ci95", "text ci95", "gaps %")
    lines = [
        (
            _label(row),
            str(row["width"]),
            str(row["boundaries"]),
            _number(row["bytes_per_token"], 1),
            f"{row['from_tokens'] / 1e6:.2f}-{row['to_tokens'] / 1e6:.2f}",
            str(len(row["seeds"])),
            _number(row["slope_per_doubling"], 3, sign=True),
            _range(row["ci95"], 3),
            _range(row["text_ci95"], 3),
            " ".join(f"{gap:.2f}" for gap in row["gaps"]),
        )
        for row in rows
    ]
    return "Slope of the gap, in percentage points a doubling of tokens, within a job's own schedule.\n" + table(
        heads, lines
    )


def _interactions(rows: Sequence[Row]) -> str:
    heads = ("variant", "H", "n", "gap sync %", "gap at H %", "H alone %", "interaction", "ci95")
    lines = [
        (
            row["variant"],
            str(row["H"]),
            str(len(row["seeds"])),
            _number(row["gap_synchronous"]),
            _number(row["gap_at_same_H"]),
            _number(row["gap_of_local_steps_alone"]),
            _number(row["interaction"], 2, sign=True),
            _range(row["ci95"]),
        )
        for row in rows
    ]
    return (
        "Local steps: the gap of compression at the same H against the synchronous one; their difference is the "
        "interaction.\n" + table(heads, lines)
    )


def _fit(row: Row) -> str:
    lines = [f"Fit of {row['codec']}'s gap, {row['points']} jobs; ranges {_ranges(row['ranges'])}"]
    if row["not_varied"]:
        lines.append(f"  not varied, so not fitted: {', '.join(row['not_varied'])}")
    for name, model in row["models"].items():
        shown = "; ".join(
            f"{key} {c['value']:+.3f} ({_range(c['ci95'], 3)})" for key, c in model["coefficients"].items()
        )
        lines.append(f"  {name}: {shown}; sigma {model['sigma']:.3f}, {model['degrees_of_freedom']} degrees of freedom")
    for title, case in row["cases"].items():
        if case["not_supported"]:
            lines.append(f"  {title}: no prediction, {', '.join(case['not_supported'])} not varied in the data")
            continue
        beyond = ", ".join(f"{name} {times:g}x" for name, times in case["beyond_the_data_by"].items())
        shown = "; ".join(
            f"{name} {case[name]['gap_percent']:.3g}% ({_ends(case[name]['prediction95'])})" for name in row["models"]
        )
        lines.append(f"  {title}: {shown}; beyond the data by {beyond or 'nothing'}")
    return "\n".join(lines)


def _ends(ends: Sequence[float]) -> str:
    return f"{ends[0]:.3g} to {ends[1]:.3g}"


def _ranges(ranges: Mapping[str, Sequence[float]]) -> str:
    return ", ".join(f"{name} {low:g} to {high:g}" for name, (low, high) in ranges.items())


def _speed(speed: Mapping[str, Any]) -> str:
    rows = speed["rows"]
    mbits = [key.removeprefix("tokens_per_s_") for key in rows[0] if key.startswith("tokens_per_s_")]
    heads = ("codec", "ratio", "channels", *(f"{mbit} Mbit/s" for mbit in mbits))
    lines = [
        (
            row["codec"],
            _number(row["ratio"], 1),
            str(row["channels"]),
            *(f"{row[f'tokens_per_s_{mbit}']:,.0f} ({row[f'binds_{mbit}']})" for mbit in mbits),
        )
        for row in rows
    ]
    return (
        f"Tokens/s of the {speed['preset']} preset by the plan's cost model (not measured): one miner a stage of "
        f"{speed['flops']:.3g} operations/s, round trip {speed['round_trip_ms']:g} ms; in brackets what binds.\n"
        + table(heads, lines)
    )


def _overheads(rows: Sequence[Row]) -> str:
    heads = ("codec", "channels", "s block", "s codec", "time %", "parameters", "of stage %")
    lines = [
        (
            row["codec"],
            str(row["channels"]),
            _number(row["seconds_block"], 4),
            _number(row["seconds_codec"], 4),
            _number(row["time_share_percent"]),
            f"{row['parameters_codec']:,}",
            _number(row["parameter_share_percent"], 3),
        )
        for row in rows
    ]
    title = f"Overhead of each codec in a middle stage of the {PRESET} preset ({rows[0]['blocks']} blocks of width "
    return title + f"{rows[0]['width']}).\n" + table(heads, lines)
