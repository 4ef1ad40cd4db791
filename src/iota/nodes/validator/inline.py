"""The replayer of the simulator and of tests: the same engine, run in the injected compute."""

from __future__ import annotations

from collections.abc import Sequence

from iota.nodes.effects import Compute
from iota.nodes.validator.engine import Engine
from iota.nodes.validator.jobs import Answer, Buffer, Command


class InlineReplayer:
    """`Replayer` without a process of its own. Errors of the engine are bugs and are raised as they are; limits of time
    and memory are those of the compute."""

    def __init__(self, engine: Engine, compute: Compute) -> None:
        self._engine = engine
        self._compute = compute

    async def ask(self, command: Command, buffers: Sequence[Buffer], limit: float) -> Answer:
        return await self._compute.run(self._engine.handle, command, buffers)

    async def close(self) -> None:
        return None
