"""What a miner's owner sees: one line at any time."""

from __future__ import annotations

from dataclasses import dataclass

from iota.core import tasks


@dataclass
class MinerStatus:
    """`task` in words and since when (Unix seconds), `waiting` for what ("" when working)."""

    key: str = ""
    run: str = ""
    stage: int = -1
    session: int = 0
    device: str = ""
    dtype: str = ""
    task: str = "starting"
    since: float = 0.0
    waiting: str = ""
    refused: str = ""
    standing: tasks.Standing | None = None

    def begin(self, task: str, now: float, waiting: str = "") -> None:
        if (task, waiting) != (self.task, self.waiting):
            self.task, self.waiting, self.since = task, waiting, now

    def line(self, now: float) -> str:
        """For example: stage 1 on cpu float32 | epoch 3 train | forward 118 | 40 passes now, 212 in all | audit valid
        | paid 166,667."""
        parts = [f"stage {self.stage} on {self.device} {self.dtype}" if self.stage >= 0 else f"miner {self.key[:8]}"]
        s = self.standing
        if s is not None:
            left = "" if s.phase_until is None else f", {max(0.0, s.phase_until - now):.0f} s left"
            parts.append(f"epoch {s.epoch} {s.phase}{left}")
        if self.waiting:
            parts.append(f"waiting {max(0.0, now - self.since):.0f} s: {self.waiting}")
        else:
            parts.append(self.task)
        if s is not None:
            parts.append(f"{s.passes_epoch} passes now, {s.passes_total} in all")
            parts.append(f"audit {s.last_verdict}")
            parts.append(f"paid {s.paid_total:,}")
        return " | ".join(parts)
