"""The child process: the same verdicts as inline, and nothing that happens to it reaches the validator."""

import asyncio
import os
import signal
import sys

import msgspec
import pytest

from iota.nodes.real import RealClock
from iota.nodes.validator import child as child_module
from iota.nodes.validator.audit import Auditor
from iota.nodes.validator.child import ChildReplayer, Frame
from iota.nodes.validator.jobs import Measure, ReplayFailed, Setup
from iota.nodes.validator.segment import build_replay
from validator_case import STAGES, Case, Clock, Inline, Miner, sheet_and_task, train

ANYTHING = Measure(stage=0, windows=0)


class Watched(ChildReplayer):
    """Says when a command goes to a child."""

    def __init__(self, case, **how):
        super().__init__(case.config, case.cuts, RealClock(), **how)
        self.busy = asyncio.Event()

    async def _exchange(self, command, buffers, limit):
        self.busy.set()
        return await super()._exchange(command, buffers, limit)


def is_gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_a_killed_child_is_inconclusive_and_the_next_audit_works():
    case = Case()
    miners = [Miner(case, stage) for stage in range(STAGES)]
    await train(case, miners)
    replayer = Watched(case, memory=256 << 20)
    judge = Auditor(case.manifest, case.objects, case.train, replayer, Inline(), Clock())
    work = await sheet_and_task(case, miners[1], 2, 4, miners[1].show(2, 4))
    try:
        first = await judge.audit(*work)
        assert first.verdict == "valid" and "equal to the bit" in first.why, first
        pid = replayer.pid
        assert replayer.started == 1 and pid is not None

        os.kill(pid, signal.SIGSTOP)  # so that the replay is surely under way when it dies
        replayer.busy.clear()
        auditing = asyncio.ensure_future(judge.audit(*work))
        await replayer.busy.wait()
        os.kill(pid, signal.SIGKILL)
        killed = await auditing
        assert killed.verdict == "inconclusive" and "replay_failed" in killed.why, killed
        assert replayer.pid is None and is_gone(pid)

        again = await judge.audit(*work)
        assert again.verdict == "valid" and replayer.started == 2 and replayer.pid != pid

        with pytest.raises(ReplayFailed, match=r"MemoryError|memory|ended"):  # more than it may have
            await replayer.ask(ANYTHING, [bytearray(512 << 20)], 60.0)
        assert replayer.pid is None
    finally:
        await replayer.close()


@pytest.mark.parametrize(
    "program, why",
    [
        ("import time; time.sleep(60)", "did not answer within"),
        ("import sys; sys.exit(3)", "ended"),
        ("import sys; sys.stdin.buffer.read(9); sys.stdout.write('garbage' * 99)", "ended"),
        ("import sys; sys.stdin.buffer.read(9); sys.stdout.buffer.write(bytes([3, 0, 0, 0, 1, 2, 3]))", "ended"),
    ],
)
async def test_a_child_that_misbehaves_is_replaced(program, why, monkeypatch):
    monkeypatch.setattr(child_module, "START_LIMIT", 0.2 if "sleep" in program else 30.0)
    replayer = Watched(Case())
    replayer.arguments = (sys.executable, "-S", "-c", program)
    for attempt in (1, 2):
        with pytest.raises(ReplayFailed, match=why):
            await replayer.ask(ANYTHING, [bytes(1 << 20)], 60.0)
        assert replayer.started == attempt and replayer.pid is None
    await replayer.close()


async def test_cancelling_a_command_ends_the_child():
    replayer = Watched(Case())
    replayer.arguments = (sys.executable, "-S", "-c", "import time; time.sleep(60)")
    asking = asyncio.ensure_future(replayer.ask(ANYTHING, [b""], 60.0))
    await replayer.busy.wait()
    pid = replayer.pid
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert replayer.pid is None and is_gone(pid)


def test_commands_survive_the_pipe():
    case = Case()
    setup = Setup(config=case.config, cuts=case.cuts, device="cpu", dtype="float32", memory=5)
    command, buffers = build_replay([], {}, stage=0, load=Miner(case, 0).load, t=4, start_step=2, stop_digest="a" * 64)
    assert buffers == [] and command.t == 4 and command.tokens == 2 * 64
    for frame in (Frame(setup, ()), Frame(command, (1, 2))):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(frame), type=Frame) == frame
