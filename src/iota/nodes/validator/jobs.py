"""What the validator asks of whoever holds torch, and the one interface behind which that is: a child process, or the
injected compute.

Commands and replies are plain tagged values; arrays travel beside a command as buffers, in the order its docstring
gives. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from iota.config.schema import RunConfig
from iota.core.tasks import Comparison
from iota.core.values import Digest
from iota.errors import IotaError

Buffer = bytes | bytearray | memoryview
NONE = -1
"""No buffer."""


class _Tagged(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of what crosses between the validator and its child."""


class Setup(_Tagged, frozen=True):
    """First command of a child. `memory`: bytes it may take on top of what it has then (0: no limit)."""

    config: RunConfig
    cuts: tuple[tuple[int, int], ...]
    device: str
    dtype: str
    memory: int


class Shape(msgspec.Struct, frozen=True, array_like=True):
    """Dtype and shape of a tensor whose bytes are a buffer ("int64": token ids or labels)."""

    dtype: str
    shape: tuple[int, ...]


class Operation(msgspec.Struct, frozen=True, array_like=True):
    """One operation to replay. `op`: forward | backward | step. `accepted`: a pass that was not dropped afterwards.
    `x`, `ids`, `grad` index the command's tensors (-1: none; labels follow their ids). `out`, `loss`: what the miner
    committed to."""

    op: str
    sample: int
    accepted: bool
    x: int
    ids: int
    grad: int
    out: Digest
    loss: float | None


class Replay(_Tagged, frozen=True):
    """Replay operations from a state. Buffers: weights, m, v at the start, weights, m, v at the end as the miner shows
    them (float32 bytes), then one for each of `tensors`. Answered by `Replayed`; outputs that differ are kept for a
    `Compare`, until the next command of another kind."""

    stage: int
    t: int
    tokens: int
    tokens_per_step: int
    operations: tuple[Operation, ...]
    tensors: tuple[Shape, ...]
    stop_digest: Digest


class Compare(_Tagged, frozen=True):
    """Compare shown outputs, one buffer each, with those kept of the operations at `places` (of the last `Replay`).
    Answered by `Compared`."""

    places: tuple[int, ...]
    tensors: tuple[Shape, ...]


class Measure(_Tagged, frozen=True):
    """Run one stage forward over the held-out windows. Stages come in order from 0: what stage s hands on is kept for
    stage s + 1. Buffers: the stage's weights, then at the first and the last stage tokens [windows, T + 1] as int64.
    Answered by `MeasuredStage`."""

    stage: int
    windows: int


Command = Setup | Replay | Compare | Measure


class Ready(_Tagged, frozen=True):
    """Set up."""


class Replayed(_Tagged, frozen=True):
    """`differ`: places of operations whose output digest differs from the committed one; `equal`: the state at the end
    has the committed digest; `t`: Adam's step count there; `comparisons`: change, m, v and direction when it has not,
    and losses that differ. `problem`: why an operation could not be replayed on what the miner says it received ("":
    none)."""

    differ: tuple[int, ...]
    equal: bool
    t: int
    comparisons: tuple[Comparison, ...]
    problem: str


class Compared(_Tagged, frozen=True):
    """One comparison for each place asked, in order."""

    comparisons: tuple[Comparison, ...]


class MeasuredStage(_Tagged, frozen=True):
    """`loss`: sum of the predicted tokens' losses in nats (float64), `tokens` how many; both 0 before the last."""

    loss: float
    tokens: int


class Broken(_Tagged, frozen=True):
    """The command failed on this side (out of memory, a bug): it says nothing about the miner."""

    text: str


Answer = Ready | Replayed | Compared | MeasuredStage | Broken


class ReplayFailed(IotaError):
    """Our side could not replay: the process died, ran out of memory or time. Never the miner's fault."""

    def __init__(self, cause: str) -> None:
        super().__init__("replay_failed", cause, "The audit is inconclusive; the next begins with a fresh process.")


class Replayer(Protocol):
    """Runs commands one at a time. After `ReplayFailed` the next command finds a fresh one, without kept outputs."""

    async def ask(self, command: Command, buffers: Sequence[Buffer], limit: float) -> Answer:
        """Carry out a command (never `Setup`) within `limit` seconds. Raises `ReplayFailed`."""
        ...

    async def close(self) -> None:
        """Free everything; a command in progress fails."""
        ...
