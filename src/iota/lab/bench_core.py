"""How many commands a second the state machine takes, alone: no journal, no network, one thread.

Samples go through three stages as in a run: every result is judged, folded, routed, and answered with the next task; a
member without work polls and is asked again once it is woken. The commands of a run are recorded first and then given
to fresh machines, so only the machine's own work is timed. Same seed, same commands: the machine is deterministic, and
every replay is held against the recording.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from dataclasses import dataclass

from iota.config.load import check
from iota.config.schema import (
    DataConfig,
    LimitsConfig,
    MergeConfig,
    ModelConfig,
    RunConfig,
    StagesConfig,
    SwarmConfig,
    TrainConfig,
)
from iota.core import tasks
from iota.core.machine.machine import Machine, Outcome
from iota.core.values import Checkpoint, sha256

STAGES = 3
NEVER = 1e7
"""Seconds. No phase of a benchmark ends by its deadline."""
PAYLOAD = 8192
"""Bytes of one boundary tensor: 1 x 64 tokens x 64 channels of bfloat16."""
HELD = "held"

Command = tuple[str, str, tasks.Turn, str, float]
"""(turn | again, key, turn, digest of the body, now)."""


def control_config(miners: int, source: str = "python") -> RunConfig:
    """A run whose TRAIN never ends, with boundary tensors of `PAYLOAD` bytes and `miners` members over the stages."""
    return check(
        RunConfig(
            name="bench-control",
            stop="epochs >= 1000",
            model=ModelConfig(width=64, blocks=3, heads=2, kv_heads=2, vocabulary=256, sequence=64),
            stages=StagesConfig(count=STAGES, codec="identity", wire_dtype="bfloat16"),
            data=DataConfig(source=source, heldout_share=0.2, heldout_tokens=1024),
            train=TrainConfig(batch=1, warmup_tokens=1000, lr_tokens=100_000),
            merge=MergeConfig(
                min_batches=10**9,
                members=miners // STAGES,
                epoch_limit=NEVER,
                gather_limit=NEVER,
                phase_limit=NEVER,
            ),
            limits=LimitsConfig(lease=600.0, silence=600.0),
            swarm=SwarmConfig(miners=miners, validators=0),
        )
    )


@dataclass(slots=True)
class _Miner:
    key: str
    stage: int
    seq: int = 0


class _Driver:
    """Plays miners against one machine and writes down what it was given."""

    def __init__(self, config: RunConfig, miners: int) -> None:
        self.now = 1e9
        self.machine = start_machine(config, self.now)
        self.commands: list[Command] = []
        self.outcomes: list[int] = []
        self.miners: list[_Miner] = []
        for number in range(miners):
            key = f"{number:064x}"
            request = tasks.Join(
                role="miner", token="", software="bench", device="cpu", dtype="float32", memory=0, disk=0, owner=""
            )
            member = self.machine.join(key, request, sha256(key.encode()), self.now)
            self.miners.append(_Miner(key, member.stage))

    def turn(self, miner: _Miner, result: tasks.Result | None) -> Outcome:
        miner.seq += 1
        turn = tasks.Turn(session=1, seq=miner.seq, result=result, shown=(), draining=False)
        return self._give(("turn", miner.key, turn, sha256(f"{miner.key} {miner.seq}".encode()), self.now))

    def again(self, miner: _Miner) -> Outcome:
        turn = tasks.Turn(session=1, seq=miner.seq, result=None, shown=(), draining=False)
        return self._give(("again", miner.key, turn, "", self.now))

    def _give(self, command: Command) -> Outcome:
        self.now += 1e-4
        self.commands.append(command)
        outcome = apply(self.machine, command)
        self.outcomes.append(getattr(outcome.task, "task", 0))
        return outcome

    def load(self) -> None:
        """Every miner takes checkpoint 0; TRAIN begins with the last."""
        for miner in self.miners:
            task = self.turn(miner, None).task
            assert isinstance(task, tasks.Load), task
            root = self.machine.state.checkpoints[miner.stage].root()
            self.turn(miner, tasks.Loaded(task=task.task, root=root, seconds=0.1))
        assert self.machine.state.phase == "train", self.machine.state.phase

    def play(self, commands: int) -> None:
        """Round by round: every miner with a task answers it, everyone else holds a poll until woken."""
        stop = len(self.commands) + commands
        ready: deque[tuple[_Miner, Outcome | None]] = deque((miner, None) for miner in self.miners)
        held: dict[int, _Miner] = {}
        soft = self.machine.soft
        while len(self.commands) < stop:
            miner, outcome = ready.popleft()
            outcome = self.turn(miner, None if outcome is None else _result(miner, outcome.task))
            soft.released.clear()
            number = self.machine.state.by_key[miner.key]
            if isinstance(outcome.task, tasks.Wait) and outcome.verdict is not None:
                outcome = self.turn(miner, None)  # the reply brought a verdict only; now it polls
            if isinstance(outcome.task, tasks.Wait):
                held[number] = miner
            else:
                ready.append((miner, outcome))
            for woken in sorted(soft.wake & held.keys()):
                outcome = self.again(held[woken])
                if not isinstance(outcome.task, tasks.Wait):
                    ready.append((held.pop(woken), outcome))
            soft.wake.clear()


def start_machine(config: RunConfig, now: float) -> Machine:
    """A machine at the beginning of a run with a checkpoint of no bytes in every stage."""
    machine = Machine(config, STAGES, (CHUNKLESS,) * STAGES, "00" * 32)
    machine.start("bench", now, tuple(Checkpoint("bench", 0, stage, CHUNKLESS, 0, ()) for stage in range(STAGES)))
    return machine


CHUNKLESS = 1
"""Parameters of a stage that is never merged."""


def apply(machine: Machine, command: Command) -> Outcome:
    kind, key, turn, body, now = command
    outcome = machine.turn(key, turn, body, now) if kind == "turn" else machine.again(key, turn, now)
    machine.take_events()
    return outcome


def _result(miner: _Miner, task: tasks.Task) -> tasks.Result:
    """What a miner reports for a pass; digests are those of nothing in particular, as the machine never looks."""
    assert isinstance(task, tasks.Forward | tasks.Backward), task
    last = miner.stage == STAGES - 1
    digest = miner.key
    return tasks.Passed(
        task=task.task,
        sample=task.sample,
        head=digest,
        inp=digest,
        out=digest,
        cut=None,
        loss=2.0 if last else None,
        seconds=0.05,
        recomputed=False,
    )


def measure_core(miners: int = 12, commands: int = 60_000, repeats: int = 5) -> dict[str, float | int]:
    """Commands per second over `repeats` replays of the same recording: the median, the least and the most.

    A command is one `Machine.turn` (or `again` for a woken poll) with the events taken away after it.
    """
    config = control_config(miners)
    driver = _Driver(config, miners)
    driver.load()
    start = len(driver.commands)
    driver.play(commands)
    rates = sorted(_replay(driver, config, miners, start) for _ in range(repeats))
    passes = sum(m.total for m in driver.machine.state.members)
    return {
        "core_commands_per_s": round(rates[len(rates) // 2]),
        "core_min": round(rates[0]),
        "core_max": round(rates[-1]),
        "core_commands": len(driver.commands) - start,
        "core_backward_passes": passes,
        "core_miners": miners,
    }


def _replay(driver: _Driver, config: RunConfig, miners: int, start: int) -> float:
    """Commands per second of one replay on a fresh machine."""
    fresh = _Driver(config, miners)
    machine = fresh.machine
    for command in driver.commands[:start]:
        apply(machine, command)
    commands = driver.commands[start:]
    machine.take_events()
    soft = machine.soft
    tasks_seen: list[int] = []
    gc.collect()
    began = time.process_time()
    for kind, key, turn, body, now in commands:
        outcome = machine.turn(key, turn, body, now) if kind == "turn" else machine.again(key, turn, now)
        machine.take_events()
        soft.wake.clear()
        soft.released.clear()
        tasks_seen.append(getattr(outcome.task, "task", 0))
    rate = len(commands) / (time.process_time() - began)
    assert tasks_seen == driver.outcomes[start:], "the machine decided otherwise on the same commands"
    return rate
