"""The numbers of a run's end report, computed from its history (`nodes.orchestrator.views.history`).

Pure: dicts in, dicts out. A number that is not defined (nothing measured, nobody there, a division by nothing) is None,
never NaN and never a made-up zero. Each function's docstring is the definition that the report prints in short.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

PHASES = ("train", "drain", "commit", "upload", "reduce", "sync", "finishing")
"""The phases of an epoch, in order. `gather` comes once, before the first."""
History = Mapping[str, Any]


def number(value: Any) -> float | None:
    """A finite number, else None."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if good else None


def ratio(over: float | None, under: float | None) -> float | None:
    """over / under, None when either is unknown or `under` is 0."""
    return None if over is None or not under else over / under


def collect(history: History) -> dict[str, Any]:
    """Everything that the history alone tells."""
    epochs = sorted(history.get("epochs") or (), key=lambda row: row["epoch"])
    end = run_end(history, epochs)
    spans = [phase_spans(row, _next_opened(epochs, i), end) for i, row in enumerate(epochs)]
    miners = [m for m in history.get("members") or () if m.get("role") == "miner" and m.get("stage", -1) >= 0]
    return {
        "run": history.get("run", ""),
        "phase": history.get("phase", ""),
        "why": history.get("why", ""),
        "epochs": len(epochs),
        "restarts": history.get("boots", 0),
        "parameters": list(history.get("parameters") or ()),
        "vocabulary": history.get("vocabulary"),
        "miners": [{"miner": m["key"], "stage": m["stage"], "alive": m.get("alive", False)} for m in miners],
        **losses(history, epochs),
        **speed(history, spans, end),
        "waiting": waiting(history, miners, spans, epochs, end),
        "wire_bytes": history.get("wire_bytes") or 0,
        "uncompressed_bytes": history.get("uncompressed_bytes") or 0,
        "compression": ratio(history.get("uncompressed_bytes"), history.get("wire_bytes")),
        "timeline": timeline(epochs, spans, history),
        "agreement": agreement(epochs),
        "verdicts": verdicts(history, miners),
        "emissions": emissions(history, miners, epochs),
        "burned": list(history.get("burned") or ()),
        "beff": [{str(s): n for s, n in sorted(_by_stage(row, "effective_batch"))} for row in epochs],
        "samples": [dict(row.get("samples") or {}) for row in epochs],
    }


def _by_stage(row: Mapping[str, Any], field: str) -> list[tuple[int, Any]]:
    """(stage, value) pairs; JSON turns stage numbers into text."""
    return sorted((int(stage), value) for stage, value in (row.get(field) or {}).items())


# ------------------------------------------------------------------------------------------------------ time


def run_end(history: History, epochs: list[Any]) -> float | None:
    """When training was over: the last epoch's `finishing`, else the moment of writing."""
    if epochs and history.get("phase") in ("finishing", "finished"):
        finishing = number(epochs[-1].get("began", {}).get("finishing"))
        if finishing is not None:
            return finishing
    return number(history.get("now"))


def _next_opened(epochs: list[Any], i: int) -> float | None:
    return number(epochs[i + 1].get("opened")) if i + 1 < len(epochs) else None


def phase_spans(row: Mapping[str, Any], following: float | None, end: float | None) -> list[dict[str, Any]]:
    """The phases of one epoch that began: name, begin and end (Unix seconds), announced deadline, why it began. A phase
    ends where the next begins; the last at the epoch's close, the next epoch's opening, or the end of training."""
    began = sorted(
        (at, PHASES.index(name), name)
        for name, at in (row.get("began") or {}).items()
        if name in PHASES and name != "finishing" and number(at) is not None
    )
    closed = number(row.get("closed"))
    last = closed if closed is not None else following if following is not None else end
    spans = []
    for i, (at, _, name) in enumerate(began):
        stop = began[i + 1][0] if i + 1 < len(began) else last
        spans.append(
            {
                "phase": name,
                "begin": at,
                "end": max(at, stop) if stop is not None else at,
                "until": number((row.get("until") or {}).get(name)),
                "why": (row.get("why") or {}).get(name) or "",
            }
        )
    return spans


def _seconds(spans: Iterable[list[dict[str, Any]]], *names: str) -> float:
    return sum((span["end"] - span["begin"] for row in spans for span in row if span["phase"] in names), 0.0)


def speed(history: History, spans: list[list[dict[str, Any]]], end: float | None) -> dict[str, Any]:
    """tokens_per_s: training tokens over the seconds of TRAIN (with its drain); tokens_per_s_run: over all seconds from
    the run's start to the end of training."""
    tokens, started = number(history.get("tokens")), number(history.get("started"))
    train = _seconds(spans, "train", "drain")
    whole = end - started if end is not None and started is not None and end > started else None
    return {
        "tokens": tokens,
        "train_seconds": train,
        "run_seconds": whole,
        "tokens_per_s": ratio(tokens, train),
        "tokens_per_s_run": ratio(tokens, whole),
    }


def waiting(
    history: History, miners: list[Any], spans: list[list[dict[str, Any]]], epochs: list[Any], end: float | None
) -> dict[str, Any]:
    """Where the miners' time went, as shares of miners x seconds of all phases. `computing` is the sum of accepted
    passes' compute seconds (the books of it begin again when the orchestrator restarts); `train` and `drain` are the
    rest of those phases; every other phase counts whole, the miners' own hashing, upload and reduction included."""
    started = number(history.get("started"))
    first = number(epochs[0].get("opened")) if epochs else end
    seconds = {name: _seconds(spans, name) for name in PHASES if name != "finishing"}
    seconds["gather"] = max(0.0, first - started) if first is not None and started is not None else 0.0
    total = sum(seconds.values()) * len(miners)
    busy = sum(number(m.get("busy_seconds")) or 0.0 for m in miners)
    working = {name: seconds[name] * len(miners) for name in ("train", "drain")}
    computing = min(busy, sum(working.values()))
    rows = {"computing": computing}
    for name in ("train", "drain"):  # work is done in TRAIN first, and a little in the drain
        share = ratio(working[name], sum(working.values())) or 0.0
        rows[name] = working[name] - computing * share
    rows |= {name: seconds[name] * len(miners) for name in ("gather", "commit", "upload", "reduce", "sync")}
    shares = {name: value / total for name, value in rows.items()} if total > 0 else {}
    return {"miner_seconds": total, "busy_seconds": busy, "shares": shares}


# ------------------------------------------------------------------------------------------------------ loss


def losses(history: History, epochs: list[Any]) -> dict[str, Any]:
    """heldout_loss: nats per token on held-out text, first the untrained model, then each epoch's merged checkpoint.
    Per byte it is divided by the held-out text's bytes per token."""
    per_token = [number(history.get("untrained_loss")), *(number(row.get("heldout_loss")) for row in epochs)]
    width = number(history.get("bytes_per_token")) or None
    vocabulary = number(history.get("vocabulary"))
    uniform = math.log(vocabulary) if vocabulary and vocabulary > 1 else None
    trained = [loss for loss in per_token[1:] if loss is not None]
    trigram, final = number(history.get("trigram_loss")), trained[-1] if trained else None
    return {
        "heldout_loss": per_token,
        "heldout_loss_per_byte": [ratio(loss, width) for loss in per_token],
        "train_loss": [number(row.get("train_loss")) for row in epochs],
        "bytes_per_token": width,
        "untrained_loss": per_token[0],
        "ln_vocabulary": uniform,
        "untrained_ratio": ratio(per_token[0], uniform),
        "final_loss": final,
        "trigram_loss": trigram,
        "beats_trigram": None if trigram is None or final is None else final < trigram,
    }


# ------------------------------------------------------------------------------------------- one epoch, its merge


def timeline(epochs: list[Any], spans: list[list[dict[str, Any]]], history: History) -> dict[str, Any] | None:
    """One real epoch: the last that went through every phase (else the last that began), and the audit of one of its
    miners: the one that took longest."""
    whole = [i for i, row in enumerate(spans) if any(span["phase"] == "sync" for span in row)]
    shown = whole[-1] if whole else len(epochs) - 1
    if shown < 0 or not spans[shown]:
        return None
    row, opened = epochs[shown], spans[shown][0]["begin"]
    audits = [a for a in history.get("audits") or () if a.get("epoch") == row["epoch"]]
    longest = max(audits, key=lambda a: (number(a.get("seconds")) or 0.0, -a.get("audit", 0)), default=None)
    phases = [dict(span, begin=span["begin"] - opened, end=span["end"] - opened) for span in spans[shown]]
    for span in phases:
        span["until"] = None if span["until"] is None else span["until"] - opened
    return {
        "epoch": row["epoch"],
        "phases": phases,
        "passes": dict(row.get("passes") or {}),
        "steps": dict(row.get("steps") or {}),
        "audit": None if longest is None else dict(longest),
    }


def agreement(epochs: list[Any]) -> dict[str, Any] | None:
    """The agreement matrices of the last epoch that merged, by stage: how often two owners' digests of a shard were
    equal, or not; and how the shards were settled."""
    row = next((row for row in reversed(epochs) if row.get("agreement")), None)
    if row is None:
        return None
    stages = {}
    for stage, matrix in _by_stage(row, "agreement"):
        settled: dict[str, int] = {}
        for how in (matrix.get("settled") or {}).values():
            settled[how] = settled.get(how, 0) + 1
        stages[str(stage)] = {**{name: matrix[name] for name in ("members", "agree", "disagree")}, "settled": settled}
    return {"epoch": row["epoch"], "stages": stages}


# ----------------------------------------------------------------------------------------------- verdicts and pay


def verdicts(history: History, miners: list[Any]) -> dict[str, Any]:
    """By miner: how many audits of each verdict, how many are still open, and the worst compared operation (smallest
    cosine between the miner's numbers and the replay's)."""
    rows: dict[str, Any] = {
        m["key"]: {"stage": m["stage"], "valid": 0, "invalid": 0, "inconclusive": 0, "open": 0} for m in miners
    }
    for row in rows.values():
        row.update(worst_cosine=None, worst_kind="", why="")
    for audit in history.get("audits") or ():
        row = rows.get(audit.get("miner"))
        if row is None:
            continue
        judged = audit.get("verdict") in ("valid", "invalid", "inconclusive") and audit.get("state") == "closed"
        row[audit["verdict"] if judged else "open"] += 1
        if judged and audit["verdict"] != "valid":
            row["why"] = f"epoch {audit['epoch']}: {audit.get('why', '')}"
        for kind, _sample, cosine, *_ in audit.get("worst") or ():
            if number(cosine) is not None and (row["worst_cosine"] is None or cosine < row["worst_cosine"]):
                row["worst_cosine"], row["worst_kind"] = cosine, kind
    return rows


def emissions(history: History, miners: list[Any], epochs: list[Any]) -> dict[str, Any]:
    """By miner: units paid in each closed epoch, their sum, and for each zero the reason in words."""
    paid = list(history.get("emissions") or ())
    passes = {row["epoch"]: row.get("passes") or {} for row in epochs}
    rows = {}
    for m in miners:
        key = m["key"]
        by_epoch = [int(units.get(key, 0)) for units in paid]
        zeros: list[dict[str, Any]] = []
        for epoch, units in enumerate(by_epoch, start=1):
            if units:
                continue
            why = zero_reason(history, key, epoch, passes)
            if zeros and zeros[-1]["why"] == why and zeros[-1]["last"] == epoch - 1:
                zeros[-1]["last"] = epoch
            else:
                zeros.append({"first": epoch, "last": epoch, "why": why})
        rows[key] = {"stage": m["stage"], "total": sum(by_epoch), "by_epoch": by_epoch, "zeros": zeros}
    return rows


def zero_reason(history: History, key: str, epoch: int, passes: Mapping[int, Mapping[str, int]]) -> str:
    """Why `key` was paid nothing in `epoch`: an epoch's pay counts all its verified passes up to then. The ledger has
    every term (iota explain)."""
    worked = [e for e in sorted(passes) if e <= epoch and passes[e].get(key)]
    if not worked:
        return "no backward pass of it was accepted up to then"
    audits = [a for a in history.get("audits") or () if a.get("miner") == key and a["epoch"] in worked]
    closed = [a for a in audits if a.get("state") == "closed"]
    invalid = [a for a in closed if a.get("verdict") == "invalid"]
    if invalid and not any(a.get("verdict") == "valid" for a in closed):
        return f"its audits were invalid: {invalid[-1].get('why', '')}"
    if not audits:
        return "none of its passes was drawn for an audit: withheld, then burned for a newcomer"
    if not any(a.get("verdict") == "valid" for a in closed):
        last = closed[-1] if closed else audits[-1]
        return f"withheld, its audits gave no verdict: {last.get('why') or 'still open'}"
    if not passes.get(epoch, {}).get(key):
        return "nothing accepted in that epoch, and older passes no longer count or were not yet verified"
    return "its passes were not verified by then, or its share rounds to zero (see iota explain)"
