"""`iota bench curve RUN.toml`: held-out loss against tokens for any run file, in a simulated swarm in one process.

The same node code under virtual time, so the curve does not depend on how fast or busy this machine is: made for
comparing settings. Audits are off; validators measure every checkpoint.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from iota.config.load import check
from iota.config.schema import RunConfig
from iota.sim import loop as virtual
from iota.sim.swarm import Swarm

LOOK_SECONDS = 5.0
FOREVER = 1e7
"""Virtual seconds: computing is charged a fixed virtual time, so no limit of the run file should end anything."""


def prepare(config: RunConfig, tokens: int) -> RunConfig:
    """The run with a stop at `tokens`, audits off, and limits that virtual time never reaches."""
    replace = msgspec.structs.replace
    return check(
        replace(
            config,
            stop=f"tokens >= {tokens}",
            merge=replace(config.merge, epoch_limit=1e5, phase_limit=1e4),
            audit=replace(config.audit, share=0.0, audit_limit=1e6, final_wait=1e3),
        )
    )


def measure(
    config: RunConfig, tokens: int, miners: int, show: Callable[[dict[str, Any]], None] = lambda row: None
) -> list[dict[str, Any]]:
    """Train; rows of epoch, tokens, steps (of the member with most), heldout_loss, train_loss. `show` gets each row as
    it is measured. Raises ConfigError for a run file that cannot be."""
    config = prepare(config, tokens)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="iota-curve-") as folder:

        async def main(loop: virtual.VirtualLoop) -> None:
            swarm = Swarm(loop, config, Path(folder), miners=miners, validators=1)
            await swarm.start()
            while swarm.orchestrator is None or not swarm.orchestrator.finished:
                await asyncio.sleep(LOOK_SECONDS)
                _look(swarm, rows, show)
            await swarm.close()

        virtual.run(main, limit=FOREVER, leaks_ok=True)
    return rows


def _look(swarm: Swarm, rows: list[dict[str, Any]], show: Callable[[dict[str, Any]], None]) -> None:
    state = swarm.state
    for epoch, record in sorted(state.epochs.items()):
        loss = record.heldout_loss()
        if loss is None or any(row["epoch"] == epoch for row in rows):
            continue
        after = state.epochs.get(epoch + 1)
        rows.append(
            {
                "epoch": epoch,
                "tokens": after.tokens if after else state.tokens,
                "steps": max(record.steps.values(), default=0),
                "heldout_loss": loss,
                "train_loss": record.loss_sum / max(1, record.losses),
            }
        )
        show(rows[-1])
