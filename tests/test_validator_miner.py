"""The miner node's own evidence, through its own code for keeping and showing it, is valid to the validator."""

import pytest

from iota.core import tasks
from iota.nodes.miner.show import evidence_for, note_drawn
from iota.nodes.miner.stage import Given, StageWorker
from iota.wire.message import seal
from test_validator_audit import make_auditor
from validator_case import NOW, ORCHESTRATOR, SEGMENT, SESSION, STAGES, Case, identity, sheet_and_task

SAMPLES = 5


class Driven:
    """A `StageWorker` with a scripted orchestrator in front."""

    def __init__(self, case, stage, folder, accumulate):
        self.case, self.stage, self.identity = case, stage, identity(f"miner {stage}")
        self.worker = StageWorker(
            case.manifest, self.identity.key, stage, SESSION, "cpu", "float32", folder / str(stage)
        )  # fmt: skip
        self.accumulate, self.pending, self.number = accumulate, 0, 1
        self.heads, self.accepted, self.outs, self.losses, self.verdict = [], [], [], [], (False, False)
        self.load = tasks.Load(
            task=1, epoch=0, stage=stage, tokens=0, tokens_per_step=64, t=0, segment_steps=SEGMENT,
            deadline=NOW + 99, why="",
        )  # fmt: skip
        checkpoint = case.checkpoints[stage]
        self.turn(self.load, Given(checkpoint=checkpoint, arrays={"weights": case.weights[stage].copy()}))

    def turn(self, task, given=None):
        (accepted, step), self.verdict = self.verdict, (False, False)
        work = self.worker.turn(accepted, step, task, given or Given())
        assert not isinstance(work.result, tasks.Failed) and not work.notices, work
        return work

    def do(self, kind, sample, received=(), ids=None, labels=None, refuse=False, with_input=False):
        """A pass, and what its verdict will be; what is handed on: (tensor, head, origin)."""
        self.number += 1
        origins = [row[2] for row in received] + [b"", b""]
        common = dict(task=self.number, epoch=1, sample=sample, attempt=0, deadline=NOW + 99, origin=origins[0])
        if kind == "forward":
            task = tasks.Forward(**common)
        else:
            task = tasks.Backward(**common, with_input=with_input, input_origin=origins[1])
        given = Given(tuple(row[0] for row in received), tuple(row[1] for row in received), ids, labels)
        work = self.turn(task, given)
        result = work.result
        counts = kind == "backward" or self.stage == STAGES - 1
        if not refuse:
            self.heads.append(result.head)
            self.outs.append(result.out)
            self.losses.append(result.loss)
            if counts:
                self.accepted.append(sample)
                self.pending += 1
            step = counts and self.pending == self.accumulate
            self.pending = 0 if step else self.pending
            self.verdict = (True, step)
        turn = tasks.Turn(session=SESSION, seq=self.number, result=result, shown=(), draining=False)
        if not work.tensors:
            return None
        first = bytes(
            seal(
                self.identity, recipient=ORCHESTRATOR.key, run=self.case.run, session=SESSION, time=NOW,
                nonce=self.number, id=str(self.number), body=turn, tensors=work.tensors,
            )[0]
        )  # fmt: skip
        return work.tensors[0], work.heads[0], first[:64] + first[68:]

    def commit(self):
        if self.pending:
            self.verdict = (self.verdict[0], True)
        result = self.turn(tasks.Commit(task=99, epoch=1, deadline=NOW + 99)).result
        self.heads.append(result.head)
        self.cuts, self.root = result.cuts, result.root

    def facts(self):
        return tasks.MinerFacts(
            key=self.identity.key, session=SESSION, stage=self.stage, heads=tuple(self.heads),
            accepted=tuple(self.accepted), cuts=tuple(self.cuts), upload_root=self.root, outs=tuple(self.outs),
            losses=tuple(self.losses),
        )  # fmt: skip

    def show(self, start, stop):
        final = self.cuts[-1].step
        show = tasks.Show(
            audit=4, epoch=1, session=SESSION, start_step=start, stop_step=stop, transcript_url="transcript",
            start_url="start" if start else "", stop_url="stop", final_url="final" if stop != final else "",
            inputs_url="inputs", outputs_url="outputs", deadline=NOW + 99,
        )  # fmt: skip
        note_drawn(self.worker.retention, SESSION, show)
        shown = evidence_for(self.worker.retention, SESSION, show)
        files = {url: b"".join(bytes(part) for part in parts) for url, parts in shown}
        return {"start": b"", "final": b"", **files}


async def drive(case, miners):
    """Two samples in flight; a refused forward and a refused backward; sample 3's forward was somebody else's."""
    waiting = {}
    for number in range(SAMPLES + 1):
        if number < SAMPLES:
            ids, labels = await case.train.batch_windows(number)
            hidden = miners[0].do("forward", number, ids=ids)
            if number == 2:
                miners[1].do("forward", number, [hidden], refuse=True)
            waiting[number] = (hidden, miners[1].do("forward", number, [hidden]), labels)
        if number > 0:
            hidden, onward, labels = waiting.pop(number - 1)
            gradient = miners[2].do("forward", number - 1, [onward], labels=labels)
            if number - 1 == 1:
                miners[1].do("backward", 1, [gradient], refuse=True)
            again = number - 1 == 3
            received = [gradient, hidden] if again else [gradient]
            gradient = miners[1].do("backward", number - 1, received, with_input=again)
            miners[0].do("backward", number - 1, [gradient])
    for miner in miners:
        miner.commit()


@pytest.mark.parametrize("accumulate, outer, inner", [(1, "nesterov", "merge"), (2, "assign", "carry")])
async def test_the_miner_nodes_evidence_is_valid_to_the_bit(tmp_path, accumulate, outer, inner):
    case = Case(accumulate=accumulate, outer=outer, inner_state=inner)
    miners = [Driven(case, stage, tmp_path, accumulate) for stage in range(STAGES)]
    await drive(case, miners)
    audited = 0
    for miner in miners:
        for start, stop in zip(miner.cuts, miner.cuts[1:], strict=False):
            files = miner.show(start.step, stop.step)
            task, sheet = await sheet_and_task(case, miner, start.step, stop.step, files)
            result = await make_auditor(case).audit(task, sheet)
            assert result.verdict == "valid" and "to the bit" in result.why, (miner.stage, result)
            audited += 1
        miner.worker.close()
    assert audited == sum(len(miner.cuts) - 1 for miner in miners) >= 6
