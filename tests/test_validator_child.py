"""The child process: the same verdicts as inline, and nothing that happens to it reaches the validator."""

import asyncio
import os
import signal
import time

import msgspec
import pytest

from iota.nodes.real import RealClock
from iota.nodes.validator.audit import Auditor
from iota.nodes.validator.child import ChildReplayer, Frame
from iota.nodes.validator.jobs import Measure, MeasuredStage, ReplayFailed, Setup
from iota.nodes.validator.segment import build_replay
from validator_case import STAGES, Case, Clock, Inline, Miner, sheet_and_task, train


def auditor(case, replayer):
    return Auditor(case.manifest, case.objects, case.train, replayer, Inline(), Clock())


def child(case, **how):
    return ChildReplayer(case.config, case.cuts, RealClock(), **how)


async def test_a_killed_child_is_inconclusive_and_the_next_audit_works():
    case = Case()
    miners = [Miner(case, stage) for stage in range(STAGES)]
    await train(case, miners)
    replayer = child(case, memory=1 << 30)
    judge = auditor(case, replayer)
    work = await sheet_and_task(case, miners[1], 2, 4, miners[1].show(2, 4))
    try:
        first = await judge.audit(*work)
        assert first.verdict == "valid" and "equal to the bit" in first.why, first
        pid = replayer.pid
        assert replayer.started == 1 and pid is not None

        os.kill(pid, signal.SIGSTOP)  # so that the replay is surely under way, and then dies
        auditing = asyncio.ensure_future(judge.audit(*work))
        while replayer._turn.locked() is False:
            await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        killed = await auditing
        assert killed.verdict == "inconclusive" and "replay_failed" in killed.why, killed
        assert replayer.pid is None

        again = await judge.audit(*work)
        assert again.verdict == "valid" and replayer.started == 2 and replayer.pid != pid

        os.kill(replayer.pid, signal.SIGSTOP)  # does not answer in time
        with pytest.raises(ReplayFailed, match="did not answer within"):
            await replayer.ask(Measure(stage=0, windows=0), [], 0.05)
        assert replayer.pid is None
    finally:
        await replayer.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_what_breaks_the_child_breaks_nothing_else():
    case = Case()
    replayer = child(case, memory=256 << 20)
    try:
        with pytest.raises(ReplayFailed, match="ValueError|RuntimeError"):  # buffers that are no weights
            await replayer.ask(Measure(stage=0, windows=1), [bytes(3), bytes(8)], 60.0)
        assert replayer.pid is None
        weights = case.weights[0].tobytes()
        with pytest.raises(ReplayFailed, match="MemoryError|memory|ended"):  # more than it may have
            await replayer.ask(Measure(stage=0, windows=1), [weights, bytearray(512 << 20)], 60.0)
        tokens = bytes(8 * 33)
        answer = await replayer.ask(Measure(stage=0, windows=1), [weights, tokens], 60.0)
        assert answer == MeasuredStage(loss=0.0, tokens=0) and replayer.started == 3
    finally:
        await replayer.close()


async def test_cancelling_a_command_ends_the_child():
    case = Case()
    replayer = child(case)
    asking = asyncio.ensure_future(replayer.ask(Measure(stage=0, windows=0), [b"", b""], 60.0))
    while replayer.pid is None:
        await asyncio.sleep(0.001)
    pid = replayer.pid
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert replayer.pid is None
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_commands_survive_the_pipe():
    case = Case()
    setup = Setup(config=case.config, cuts=case.cuts, device="cpu", dtype="float32", memory=5)
    command, buffers = build_replay(
        [], {}, stage=0, stages=3, load=Miner(case, 0).load, t=4, start_step=2, stop_digest="a" * 64
    )
    assert buffers == [] and command.t == 4 and command.tokens == 2 * 64
    for frame in (Frame(setup, ()), Frame(command, (1, 2))):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(frame), type=Frame) == frame
    assert time.time() > 0
