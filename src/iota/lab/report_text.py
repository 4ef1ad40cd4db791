"""The end report as text: about 100 lines of at most 100 columns, every number with a one-line definition.

Takes the facts of `lab.report`; prints a dash where a number is not defined.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

WIDTH = 100
BAR = 40
EPOCH_BAR = 28
MAX_EPOCHS = 10
MAX_MINERS = 12
MAX_MATRIX = 12
SAMPLE_LINES = 8
NONE = "-"
Facts = Mapping[str, Any]

WAITS = {
    "computing": "computing passes that were accepted",
    "train": "TRAIN: waiting for work, moving tensors, overhead",
    "drain": "drain: until the last samples came home",
    "gather": "gather: until every stage had its miners",
    "commit": "commit: inner state hashed and committed",
    "upload": "upload: until all uploads had arrived",
    "reduce": "reduce: shards downloaded, averaged, compared",
    "sync": "sync: merged weights downloaded and proved",
}


def text(facts: Facts) -> str:
    """The whole report."""
    parts = [
        head(facts),
        loss(facts),
        speed(facts),
        epoch(facts),
        matrices(facts),
        audits(facts),
        pay(facts),
        samples(facts),
        sample(facts),
        [f"Note: {note}" for note in facts.get("notices", ())],
    ]
    lines = [line for part in parts if part for line in ["", *part]]
    return "\n".join(row for line in lines[1:] for row in _wrapped(line)) + "\n"


def _wrapped(line: str) -> list[str]:
    if len(line) <= WIDTH:
        return [line.rstrip()]
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_on_hyphens=False)


# --------------------------------------------------------------------------------------------------- small pieces


def num(value: float | None, form: str = ".3f") -> str:
    """A number, or a dash when it is not defined."""
    return NONE if value is None else format(value, form)


def size(value: float | None) -> str:
    """Bytes for people: 1.5 MB = 1,500,000 bytes."""
    if value is None:
        return NONE
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{value / scale:.1f} {unit}"
    return f"{value:.0f} bytes"


def short(key: str) -> str:
    """The first digits of a key: enough to tell the miners of a run apart."""
    return key[:8]


def cut(words: str, width: int) -> str:
    """At most `width` characters, on one line."""
    flat = " ".join(str(words).split())
    return flat if len(flat) <= width else flat[: width - 3] + "..."


def elided(rows: Sequence[Any], most: int) -> list[Any]:
    """The first and the last rows of a long list, with None where some were left out."""
    rows = list(rows)
    return rows if len(rows) <= most else [*rows[: most // 2], None, *rows[-(most - most // 2) :]]


def table(header: str, rows: Iterable[str | None]) -> list[str]:
    return [header, *("  ..." if row is None else row for row in rows)]


# -------------------------------------------------------------------------------------------------------- sections


def head(facts: Facts) -> list[str]:
    parameters = facts["parameters"]
    stages = f"{sum(parameters):,} parameters in {len(parameters)} stages" if parameters else "no model yet"
    tokens = "no tokens" if facts["tokens"] is None else f"{facts['tokens']:,.0f} tokens"
    ended = f" Ended because: {facts['why']}." if facts["phase"] in ("finishing", "finished") and facts["why"] else ""
    return [
        f"RUN {facts['run'] or NONE}",
        f"{stages}, {len(facts['miners'])} miners, {facts['epochs']} epochs, {tokens}.{ended}",
    ]


def loss(facts: Facts) -> list[str]:
    by_byte = facts["bytes_per_token"] == 1.0
    unit = "nats per byte" if by_byte else "nats per token"
    lines = [f"LOSS ({unit}; how badly the model predicts text that it never trained on: less is better)"]
    rows: list[str] = []
    per_byte = facts["heldout_loss_per_byte"]
    for number, value in enumerate(facts["heldout_loss"]):
        trained = NONE if number == 0 else num(facts["train_loss"][number - 1])
        other = "" if by_byte else f"{num(per_byte[number]):>12}"
        name = "untrained" if number == 0 else f"epoch {number}"
        rows.append(f"  {name:<10}{num(value):>10}{other}{trained:>16}  {_bar(value, facts)}".rstrip())
    other = "" if by_byte else f"{'per byte':>12}"
    lines += table(f"  {'':<10}{'held-out':>10}{other}{'while training':>16}", elided(rows, MAX_EPOCHS))
    lines.append(
        f"  An untrained model should guess evenly, ln({facts['vocabulary'] or NONE}) = {num(facts['ln_vocabulary'])}: "
        f"measured {num(facts['untrained_loss'])}, {num(facts['untrained_ratio'], '.4f')} of it."
    )
    if facts["trigram_loss"] is not None:
        beaten = {None: "not measured yet", True: "beaten", False: "NOT beaten"}[facts["beats_trigram"]]
        lines.append(f"  A trigram model fitted on the same text reaches {num(facts['trigram_loss'])}: {beaten}.")
    return lines


def _bar(value: float | None, facts: Facts) -> str:
    most = max((v for v in facts["heldout_loss"] if v is not None), default=0.0)
    return "" if value is None or most <= 0 else "#" * max(0, round(BAR * value / most))


def speed(facts: Facts) -> list[str]:
    lines = [
        "SPEED AND TRAFFIC",
        f"  {num(facts['tokens_per_s'], ',.0f'):>9} tokens/s while training ({num(facts['train_seconds'], ',.0f')} s), "
        f"{num(facts['tokens_per_s_run'], ',.0f')} over the whole run ({num(facts['run_seconds'], ',.0f')} s)",
        f"  {size(facts['wire_bytes']):>9} crossed between stages instead of {size(facts['uncompressed_bytes'])} in "
        f"float32: {num(facts['compression'], '.1f')} times less",
        f"  {size(facts['peak_disk_bytes']):>9} of disk at the most, run and node folders together "
        f"({facts['peak_disk_source']})",
        "  Where the miners' time went (share of all miners' seconds):",
    ]
    shares = facts["waiting"]["shares"]
    if not shares:
        return [*lines[:-1], "  Where the miners' time went: nothing to say, no miner has trained."]
    for name, share in sorted(shares.items(), key=lambda row: -row[1]):
        lines.append(f"  {share:>9.1%} {WAITS[name]}")
    return lines


def epoch(facts: Facts) -> list[str]:
    shown = facts["timeline"]
    if shown is None:
        return ["ONE EPOCH: none began."]
    phases = shown["phases"]
    end = max((span["end"] for span in phases), default=0.0)
    lines = [f"EPOCH {shown['epoch']} AS IT HAPPENED (seconds since it opened; # is when the phase ran)"]
    for span in phases:
        begin, stop = (round(EPOCH_BAR * at / end) if end > 0 else 0 for at in (span["begin"], span["end"]))
        bar = (" " * min(begin, EPOCH_BAR - 1) + "#" * max(1, stop - begin))[:EPOCH_BAR]
        line = f"  {span['phase']:<7}{span['begin']:>7.1f} to {span['end']:>6.1f} |{bar:<{EPOCH_BAR}}| "
        why = span["why"] or ("the epoch opened" if span["phase"] == "train" else "")
        lines.append(line + cut(why, WIDTH - len(line)))
    audit = shown["audit"]
    if audit is None:
        return [*lines, "  No miner was audited in this epoch."]
    first, last = (audit.get("steps") or [0, 0])[:2]
    key = audit.get("miner", "")
    lines.append(
        f"  Beside it, the audit of miner {short(key)} (stage {audit.get('stage')}, "
        f"{shown['passes'].get(key, 0)} passes, {shown['steps'].get(key, 0)} steps): drawn when REDUCE began, "
        f"steps {first} to {last} replayed by validator {short(audit.get('validator') or 'nobody')} in "
        f"{num(audit.get('seconds'), '.1f')} s: {audit.get('verdict') or 'still open'}. "
        f"{cut(audit.get('why') or '', 120)}"
    )
    return lines


def matrices(facts: Facts) -> list[str]:
    shown = facts["agreement"]
    if shown is None:
        return ["AGREEMENT: no stage has merged yet."]
    lines = [f"AGREEMENT in epoch {shown['epoch']} (shards on which two owners' digests were equal / not equal)"]
    for stage, matrix in shown["stages"].items():
        members, how = matrix["members"], matrix["settled"]
        settled = ", ".join(f"{count} {name}" for name, count in sorted(how.items())) or "none"
        wrong = [short(key) for key, row in zip(members, matrix["disagree"], strict=True) if any(row)]
        differing = f"; NOT equal: {', '.join(wrong[:MAX_MATRIX])}" if wrong else ""
        lines.append(f"  stage {stage}: {len(members)} merged, shards settled: {settled}{differing}")
        if len(members) == 2:
            both = f"{matrix['agree'][0][1]}/{matrix['disagree'][0][1]}"
            lines.append(f"    {short(members[0])} and {short(members[1])}: {both}")
        elif 2 < len(members) <= MAX_MATRIX:
            lines.append(f"    {'':<9}" + "".join(f"{key[:6]:>7}" for key in members))
            for i, key in enumerate(members):
                cells = [
                    "." if i == j else f"{matrix['agree'][i][j]}/{matrix['disagree'][i][j]}"
                    for j in range(len(members))
                ]
                lines.append(f"    {short(key):<9}" + "".join(f"{cell:>7}" for cell in cells))
    return lines


def audits(facts: Facts) -> list[str]:
    lines = ["AUDITS (a validator replays a drawn piece of a miner's work; cosine 1 means the same numbers)"]
    rows: list[str | None] = []
    for item in elided(list(facts["verdicts"].items()), MAX_MINERS):
        if item is None:
            rows.append(None)
            continue
        key, row = item
        worst = f"{num(row['worst_cosine'], '.6f')} {row['worst_kind']}"
        counts = f"{row['valid']:>7}{row['invalid']:>9}{row['inconclusive']:>14}{row['open']:>6}"
        line = f"  {short(key):<9}{row['stage']:>5}{counts}  {worst:<17}"
        rows.append(f"{line} {cut(row['why'], WIDTH - len(line) - 1)}".rstrip())
    if not rows:
        return [lines[0], "  No miner yet."]
    header = f"  {'miner':<9}{'stage':>5}{'valid':>7}{'invalid':>9}{'inconclusive':>14}{'open':>6}  worst cosine"
    return [lines[0], *table(header, rows)]


def pay(facts: Facts) -> list[str]:
    closed = len(facts["burned"])
    lines = [f"PAY (units over {closed} closed epochs; {sum(facts['burned']):,} units were burned: nobody's)"]
    items = list(facts["emissions"].items())
    if not items or not closed:
        return [lines[0], "  No epoch's books are closed yet." if items else "  No miner yet."]
    total = sum(row["total"] for _, row in items)
    most = max((row["total"] for _, row in items), default=0)
    for item in elided(items, MAX_MINERS):
        if item is None:
            lines.append("  ...")
            continue
        key, row = item
        share = f"{row['total'] / total:.1%}" if total else NONE
        bar = "#" * round(BAR * row["total"] / most) if most else ""
        lines.append(f"  {short(key):<9} stage {row['stage']:<3}{row['total']:>12,}{share:>8}  {bar}".rstrip())
        for zero in row["zeros"][:2]:
            span = (
                f"epoch {zero['first']}" if zero["first"] == zero["last"] else f"epochs {zero['first']}-{zero['last']}"
            )
            lines.append(f"    0 in {span}: {cut(zero['why'], 130)}")
    return lines


def samples(facts: Facts) -> list[str]:
    lines = [
        "SAMPLES (full: trained by every stage; partial: by some; returned: to the next epoch) and B_eff",
        "  (B_eff: accepted passes of the miners that had enough of them to merge, by stage)",
    ]
    rows: list[str | None] = []
    for item in elided(list(enumerate(zip(facts["samples"], facts["beff"], strict=True), start=1)), MAX_EPOCHS):
        if item is None:
            rows.append(None)
            continue
        number, (counts, beff) = item
        row = "".join(f"{counts.get(name, 0):>10}" for name in ("full", "partial", "returned"))
        rows.append(f"  epoch {number:<4}{row}   {', '.join(f'{n}' for n in beff.values()) or NONE}")
    if not rows:
        return [*lines, "  No epoch began."]
    return [*lines, *table(f"  {'':<10}{'full':>10}{'partial':>10}{'returned':>10}   B_eff", rows)]


def sample(facts: Facts) -> list[str]:
    made = facts.get("generated")
    if not made:
        return [f"GENERATED TEXT: none, because {facts.get('generated_why') or 'it was not asked for'}"]
    lines = [f"GENERATED TEXT (epoch {made['epoch']}, seed {made['seed']}; the prompt is in [ ])"]
    body = "[" + made["prompt"] + "]" + made["text"]
    rows = [row for line in body.split("\n") for row in textwrap.wrap(_printable(line), WIDTH - 4) or [""]]
    kept = [row for i, row in enumerate(rows) if row or (i and rows[i - 1])]
    return lines + [f"  | {row}" for row in kept[:SAMPLE_LINES]] + (["  | ..."] if len(kept) > SAMPLE_LINES else [])


def _printable(line: str) -> str:
    """What a terminal shows as it is: an untrained model writes control characters."""
    return "".join(letter if letter.isprintable() else " " if letter == "\t" else "?" for letter in line)
