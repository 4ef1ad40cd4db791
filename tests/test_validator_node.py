"""The validator's loop against a scripted orchestrator over the in-memory transport: results, failures, the end."""

import asyncio

import msgspec
import pytest

from iota.core import queries, tasks
from iota.core.values import CheckpointSheet, Tensor
from iota.errors import Refused
from iota.net.memory import MemoryNetwork
from iota.net.peer import Caller, Outgoing, Receiver
from iota.nodes.validator.engine import Engine
from iota.nodes.validator.inline import InlineReplayer
from iota.nodes.validator.jobs import ReplayFailed
from iota.nodes.validator.node import Validator, ValidatorSettings
from iota.store.manifest import seal_manifest
from iota.wire.message import pack_sheet
from iota.wire.nonces import NonceBook
from validator_case import NOW, ORCHESTRATOR, STAGES, Case, Clock, Inline, Miner, identity, sheet_and_task, train

STANDING = tasks.Standing(
    epoch=1, phase="train", phase_since=NOW, phase_until=None, passes_epoch=0, passes_total=0, last_verdict="",
    paid_total=0,
)  # fmt: skip


class Script:
    """Hands out tasks in order (a callable may raise), then `Leave`; keeps what came back."""

    def __init__(self, case, rows):
        self.case, self.rows, self.results, self.joins = case, list(rows), [], []
        self.receiver = Receiver(
            ORCHESTRATOR, case.run, lambda: NOW, nonces=NonceBook(60.0),
            request_types=tasks.Join | tasks.Turn | queries.Query, limits={"Turn": 1 << 20},
        )  # fmt: skip

    async def answer(self, incoming):
        body = incoming.body
        if isinstance(body, tasks.Join):
            self.joins.append(body)
            sealed = seal_manifest(self.case.manifest, ORCHESTRATOR.sign)
            welcome = tasks.Welcome(session=len(self.joins), token=f"token {len(self.joins)}", stage=-1, time=NOW)
            return Outgoing(welcome, [Tensor("uint8", (len(sealed),), sealed)])
        if isinstance(body, queries.DataLinks):
            links = msgspec.json.encode({name: self.case.get_link(name) for name in body.names})
            return Outgoing(queries.Document(kind="links"), [Tensor("uint8", (len(links),), links)])
        if body.result is not None:
            self.results.append(body.result)
        row = self.rows.pop(0) if self.rows else (tasks.Leave(code="finished", text="the run ended"), ())
        if isinstance(row, Exception):
            raise row
        task, tensors = row
        verdict = None if body.result is None else tasks.Verdict(True, "", "")
        answer = tasks.Answer(
            seq=body.seq, verdict=verdict, step=False, task=task, shows=(), standing=STANDING, time=NOW
        )
        return Outgoing(answer, tensors)


class Broken:
    """A replayer that always fails."""

    async def ask(self, command, buffers, limit):
        raise ReplayFailed("the replay process ended")

    async def close(self):
        self.closed = True


async def judge(case, rows, tmp_path, replayer=None):
    network, script, said = MemoryNetwork(), Script(case, rows), []
    network.listen("o", script.receiver.handler(script.answer))
    caller = Caller(identity("validator"), network.channel("o"), ORCHESTRATOR.key, "", lambda: NOW)
    engine = Engine(case.config, case.cuts, "cpu", "float32")
    node = Validator(
        ValidatorSettings(folder=tmp_path),
        caller,
        case.objects,
        lambda manifest: replayer or InlineReplayer(engine, Inline()),
        clock=Clock(),
        compute=Inline(),
        entropy=lambda count: bytes(count - 2) + len(said).to_bytes(2, "little"),
        report=said.append,
    )
    why = await asyncio.wait_for(node.run(), 60)
    return node, script, why, said


def heldout(case, task=5):
    sheets = [pack_sheet(CheckpointSheet(c, case.urls(c))) for c in case.checkpoints]
    return tasks.Heldout(task=task, epoch=0, deadline=NOW + 100), sheets


async def trained():
    case = Case()
    miners = [Miner(case, stage) for stage in range(STAGES)]
    await train(case, miners)
    return case, miners


async def test_every_task_of_a_validator(tmp_path):
    case, miners = await trained()
    wait = tasks.Wait(code="paused", text="the run is paused", since=NOW, until=None)
    audit, sheet = await sheet_and_task(case, miners[1], 2, 4, miners[1].show(2, 4))
    recompute = tasks.Recompute(task=6, epoch=1, stage=1, deadline=NOW + 100)
    base = case.checkpoints[1]
    shards = (tasks.ShardWork(0, 0, 1, case.put_link("merge/1/1/0/validator.bin")),)
    reduce_sheet = tasks.ReduceSheet((), shards, base, case.urls(base))
    rows = [(wait, ()), (audit, [pack_sheet(sheet)]), heldout(case), (recompute, [pack_sheet(reduce_sheet)])]
    node, script, why, said = await judge(case, rows, tmp_path)
    audited, measured, reduced = script.results
    assert audited.verdict == "valid" and audited.task == audit.task
    assert (measured.epoch, measured.tokens) == (0, 160)
    assert reduced.task == 6 and reduced.bad == () and reduced.shards[0].shard == 0
    kept = case.blobs._objects["merge/1/1/0/validator.bin"]  # nobody contributed: the old value
    assert kept[: 4 * 64] == case.weights[1][:64].tobytes()
    assert why == "finished: the run ended" and node.verdicts == {"valid": 1, "invalid": 0, "inconclusive": 0}
    assert "verdicts: 1 valid" in node.line(NOW)
    assert any("the run is paused" in line for line in said) and script.joins[0].role == "validator"
    assert {file.suffix for file in (tmp_path / "tokens").iterdir()} == {".bin"}


async def test_our_own_failures_are_failed_or_inconclusive_never_a_verdict(tmp_path):
    case, miners = await trained()
    audit, sheet = await sheet_and_task(case, miners[1], 2, 4, miners[1].show(2, 4))
    garbage = Tensor("uint8", (3,), b"\xdd\xff\xff")
    forward = tasks.Forward(task=8, epoch=1, sample=0, attempt=0, deadline=NOW, origin=b"")
    rows = [
        (audit, [pack_sheet(sheet)]),
        heldout(case, 5),
        (audit, [garbage]),
        (audit, []),
        (forward, []),
    ]
    replayer = Broken()
    node, script, _, _ = await judge(case, rows, tmp_path, replayer)
    first, *others = script.results
    assert first.verdict == "inconclusive" and "the replay process ended" in first.why
    assert [type(row) for row in others] == [tasks.Failed] * 4
    assert [row.task for row in others] == [5, 9, 9, 8] and {row.code for row in others} == {"no_memory", "bad_input"}
    assert node.verdicts["inconclusive"] == 1 and replayer.closed


async def test_a_lost_session_is_joined_again_and_a_ban_is_the_end(tmp_path):
    case = Case()
    wait = tasks.Wait(code="no_work", text="nothing", since=NOW, until=None)
    over = Refused("session_over", "another session began", "Join again.")
    rows = [(wait, ()), over, (wait, ()), Refused("banned", "this key is banned", "")]
    with pytest.raises(Refused, match="banned"):
        await judge(case, rows, tmp_path)
    _, script, _, _ = await judge(case, [(wait, ()), over], tmp_path)
    assert [join.token for join in script.joins][1:] == ["token 1"]


async def test_a_result_that_cannot_be_delivered_is_withdrawn(tmp_path):
    case = Case()
    rows = [heldout(case), Refused("too_large", "no", "")]
    _, script, why, _ = await judge(case, rows, tmp_path)
    assert [type(row) for row in script.results] == [tasks.Measured, tasks.Failed] and why.startswith("finished")
