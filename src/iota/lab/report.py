"""A run's end report: what it learned, how fast, what it waited for, who was checked, who was paid and why.

    iota report RUN        (also written by `iota up` when a run ends)

Reads the run's folder only (history.json, the newest merged weights, file sizes), so it works while the swarm runs
and long after. Writes report.txt, report.json and, with matplotlib, report_*.png into the folder. What is missing is
said in a line, never made up.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from iota.errors import IotaError
from iota.lab import report_facts, report_plots, report_text
from iota.model.generate import Sampling
from iota.nodes import checkpoint as run_folder
from iota.nodes.export import open_run, prompt_ids
from iota.store.files import disk_error, write_atomic

DISK = "disk.json"
"""Written by `iota up`: {"samples": [[Unix seconds, bytes of run and node folders], ...]}."""
PROMPT = "The "
SAMPLE = Sampling(tokens=400, temperature=0.6, top_k=40, seed=0)


class _Disk(msgspec.Struct):
    samples: list[tuple[float, int]]


def write_report(folder: Path) -> dict[str, Any]:
    """Write the report of the run in `folder` and return it (the content of report.json); `text` is the printed one.

    Raises IotaError `no_history` before the orchestrator wrote any, `corrupt` for a damaged history, `disk_full`.
    """
    history = run_folder.history_of(folder)
    if history is None:
        raise IotaError(
            "no_history",
            f"{folder / run_folder.HISTORY} does not exist",
            "It is written while the run goes on; try later",
        )
    facts = build(history, folder)
    written = report_text.text(facts)
    write_atomic(folder / "report.txt", [written.encode("utf-8")])
    write_atomic(folder / "report.json", [msgspec.json.format(msgspec.json.encode(facts), indent=2)])
    return {**facts, "text": written}


def build(history: report_facts.History, folder: Path) -> dict[str, Any]:
    """All facts, pictures written."""
    facts = report_facts.collect(history)
    notices: list[str] = []
    if facts["restarts"]:
        notices.append(
            f"the orchestrator restarted {facts['restarts']} times: computing time counts from its last start only"
        )
    facts["peak_disk_bytes"], facts["peak_disk_source"] = peak_disk(folder, notices)
    facts["generated"], facts["generated_why"] = generated(folder)
    try:
        facts["pictures"] = report_plots.draw(facts, folder)
    except OSError as error:
        raise disk_error(error, folder / "report_loss.png", None) from error
    except ModuleNotFoundError as error:
        facts["pictures"] = []
        notices.append(f"no pictures, {error.name} is not installed: pip install 'iota-train[plots]'")
    if facts["pictures"]:
        notices.append(f"pictures: {', '.join(facts['pictures'])} in {folder}")
    facts["notices"] = notices
    return facts


# ------------------------------------------------------------------------------------------------------------ disk


def peak_disk(folder: Path, notices: list[str]) -> tuple[int, str]:
    """Most bytes that run and node folders took, over the samples of `iota up` and now; and where that is from."""
    now = folder_bytes(folder)
    path = folder / DISK
    if not path.is_file():
        return now, "size now; no samples were taken"
    try:
        samples = msgspec.json.decode(path.read_bytes(), type=_Disk).samples
    except (OSError, msgspec.DecodeError) as error:
        notices.append(f"{path} cannot be read ({error}): the disk's size now is used")
        return now, "size now"
    return max([now, *(size for _, size in samples)]), f"largest of {len(samples)} samples and now"


def folder_bytes(folder: Path) -> int:
    """Bytes that the files under `folder` take on disk; files that vanish meanwhile count nothing."""
    total = 0
    for path in folder.rglob("*"):
        try:
            if path.is_file() and not path.is_symlink():
                total += path.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


# ---------------------------------------------------------------------------------------------------------- sample


def generated(folder: Path) -> tuple[dict[str, Any] | None, str]:
    """A text that the newest merged model writes after `PROMPT`, and "" ; or None and why."""
    try:
        model = open_run(folder)
        ids = prompt_ids(model.tokenizer, PROMPT)
        text = model.tokenizer.decode(model.chain.generate(ids, SAMPLE, model.tokenizer.size))
    except IotaError as error:
        return None, str(error)
    return {"prompt": PROMPT, "text": text, "epoch": model.epoch, "seed": SAMPLE.seed}, ""
