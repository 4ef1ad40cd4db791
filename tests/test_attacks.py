"""Attacks on the protocol that once worked, or nearly: each test states the aim and what stops it.

Cheats that are caught by the replay alone are in test_cheats.py and test_validator_audit.py.
"""

import msgspec
import pytest

import machine_swarm
from iota.config.schema import PayConfig
from iota.core import queries, tasks
from iota.core.machine import auditing
from iota.core.machine import events as ev
from iota.core.machine.state import AuditRecord, Facts
from iota.core.payload import FORWARD, boundary_tensor
from iota.core.values import Cut, Tensor
from iota.net.memory import MemoryNetwork
from iota.net.peer import Caller, PeerRefused
from iota.nodes.evidence import ACTIVATION, GRADIENT
from iota.nodes.link import Heard, _with_shows
from iota.nodes.orchestrator.create import create_run
from iota.nodes.orchestrator.node import Orchestrator
from iota.nodes.orchestrator.relay import Held
from iota.store.blobs import MemoryBlobs
from iota.store.journal import MemoryJournal
from iota.store.links import check_link
from iota.store.manifest import OBJECT
from swarm_case import tiny
from test_validator_audit import audit, check_invalid
from validator_case import NOW, ORCHESTRATOR, STAGES, Case, Miner, Sent, identity, train

URLS = ("transcript_url", "start_url", "stop_url", "final_url", "inputs_url", "outputs_url")
ANSWERS = tasks.Answer | tasks.Welcome | queries.Document


class Clock:
    """Moves when told."""

    def __init__(self):
        self.at = NOW

    def now(self):
        return self.at

    async def sleep(self, seconds):
        self.at += seconds


# --------------------------------------------------------------------------- what the books bind: inputs and samples


class Booked(Miner):
    """A miner with the whole of what the hub's books say of it: kind, sample and tensors handed on for each result."""

    def __init__(self, *args, **how):
        self.kinds, self.samples, self.handed, self.averaged = [], [], [], []
        self.hub = {}
        super().__init__(*args, **how)

    def do(self, op, sample, received=None, ids=None, labels=None, accepted=True, given=None):
        taken = received.tensor.head().digest if received else ""
        if op == "forward":
            self.hub[sample] = taken
        if given:
            self.hub[sample] = given.tensor.head().digest
        if accepted:
            self.kinds.append("b" if op == "backward" else "l" if self.last else "f")
            self.samples.append(sample)
            self.handed.append((taken, self.hub.get(sample, "")))
        return super().do(op, sample, received, ids=ids, labels=labels, accepted=accepted, given=given)

    def step(self):
        self.averaged.append(self.pending)
        super().step()

    def facts(self):
        return msgspec.structs.replace(
            super().facts(), kinds=tuple(self.kinds), samples=tuple(self.samples), given=tuple(self.handed),
            averaged=tuple(self.averaged),
        )  # fmt: skip


class OwnInputs(Booked):
    """Computes every pass on one pair of tensors of its own, signed for each sample by a second key of its owner: one
    forward and one backward serve for all."""

    def receive(self, kind, sample, received):
        self.mine = getattr(self, "mine", {})
        tensor = self.mine.setdefault(kind, received.tensor)
        friend = Miner(self.case, 0, "a second key")
        return super().receive(kind, sample, Sent(tensor, friend.sign(sample, tensor, tensor.head().digest)))

    def run(self, op, sample, tensor, ids, labels):
        kind = ACTIVATION if op == "forward" else GRADIENT
        return super().run(op, sample, self.mine.get(kind, tensor), ids, labels)


class OneForward(Booked):
    """Computes the forward of sample 0 alone and sends its output again for every other sample; its transcript says so,
    and the backward recomputes what it needs from the corpus."""

    def do(self, op, sample, received=None, **how):
        if op == "backward" and sample:
            self.trainer.forward(sample, None, self.ids[sample])
        if op == "forward" and sample:
            self.ids[sample] = how["ids"]
            return super().do(op, 0, received, **(how | {"ids": self.ids[0]}))
        if op == "forward":
            self.ids = {0: how["ids"]}
        return super().do(op, sample, received, **how)

    def facts(self):
        """The hub knows which sample each of these results was for."""
        forwards = iter(range(len(self.samples)))
        samples = [next(forwards) if kind == "f" else s for kind, s in zip(self.kinds, self.samples, strict=True)]
        return msgspec.structs.replace(super().facts(), samples=tuple(samples))


class OneHead(Booked):
    """Answers two tasks with one operation: the second result carries the head and the output of the first."""

    def facts(self):
        facts = super().facts()
        names = ("heads", "outs", "losses", "kinds")
        twice = {name: (getattr(facts, name)[0], *getattr(facts, name)) for name in names}
        return msgspec.structs.replace(
            facts, samples=(99, *facts.samples), given=(facts.given[0], *facts.given), **twice
        )  # fmt: skip


async def booked(cheat=None, stage=1):
    case = Case()
    miners = [(cheat if cheat and s == stage else Booked)(case, s) for s in range(STAGES)]
    await train(case, miners)
    return case, miners


async def test_honest_miners_are_valid_against_the_whole_books():
    case, miners = await booked()
    for miner in miners:
        for start in (0, 2, 4):
            result = await audit(case, miner, start, start + 2)
            assert result.verdict == "valid" and "to the bit" in result.why, result


async def test_inputs_of_its_own_making_are_invalid_whoever_signed_them():
    case, miners = await booked(OwnInputs, 1)
    check_invalid(await audit(case, miners[1], 2, 4), "not computed on the tensors handed on for it")


async def test_one_output_for_many_samples_is_invalid():
    case, miners = await booked(OneForward, 0)
    check_invalid(await audit(case, miners[0], 2, 4), "accepted as the forward of sample 1", "forward of sample 0")


async def test_one_operation_for_two_results_is_invalid():
    case, miners = await booked(OneHead, 1)
    check_invalid(await audit(case, miners[1], 2, 4), "never computed")


async def test_inner_steps_at_other_times_than_told_are_invalid():
    case, miners = await booked()
    told = (2, *miners[1].averaged[1:])
    check_invalid(await audit(case, miners[1], facts={"averaged": told}), "was told to after 2")


# ------------------------------------------------------------------------------------- what the hub takes from a peer


class Hub:
    """A real orchestrator in memory, to be talked to by hand."""

    def __init__(self, node, network, clock):
        self.node, self.network, self.clock = node, network, clock

    @classmethod
    async def open(cls, **sections):
        config = tiny(merge=dict(members=1), **sections)
        clock, blobs, network = Clock(), MemoryBlobs(), MemoryNetwork()
        manifest = await create_run(config, blobs, ORCHESTRATOR.key, NOW, ORCHESTRATOR.sign)
        node = Orchestrator(
            manifest, await blobs.get(OBJECT), ORCHESTRATOR, "5e" * 32, journal=MemoryJournal(manifest.run),
            blobs=blobs, blob_url="http://store", clock=clock, entropy=lambda n: bytes(n),
        )  # fmt: skip
        await node.open()
        network.listen("hub", node.handler, limit=node.message_limit)
        return cls(node, network, clock)

    async def join(self, name, role="miner"):
        return await Talker(self, name).join(role)


class Talker:
    """A peer that says what it is told to. `task`: the last one it was given."""

    def __init__(self, hub, name):
        self.hub, self.seq, self.task = hub, 0, None
        self.caller = Caller(
            identity(name), hub.network.channel("hub"), ORCHESTRATOR.key, hub.node.manifest.run, hub.clock.now
        )

    async def call(self, body, tensors=(), **how):
        return await self.caller.call(body, tensors, id="x", session=1, timeout=5.0, reply_types=ANSWERS, **how)

    async def join(self, role):
        join = tasks.Join(
            role=role, token="", software="", device="", dtype="", memory=0, disk=0, owner=""
        )  # fmt: skip
        self.session = (await self.call(join)).body.session
        return self

    async def turn(self, result=None, tensors=(), seq=None, shown=()):
        self.seq = self.seq + 1 if seq is None else seq
        turn = tasks.Turn(session=self.session, seq=self.seq, result=result, shown=shown, draining=False)
        reply = await self.call(turn, tensors)
        self.task = reply.body.task
        return reply

    async def load(self):
        """Do the load task in hand."""
        m = self.hub.node.machine.state.member(self.caller.identity.key)
        root = self.hub.node.machine.state.checkpoints[m.stage].root()
        return await self.turn(tasks.Loaded(task=self.task.task, root=root, seconds=0.1))

    def tensor(self, fill=0):
        wire = boundary_tensor(self.hub.node.config, FORWARD)
        return Tensor(wire.dtype, wire.shape, bytes([fill]) * wire.nbytes)

    def passed(self, tensor, inp=""):
        return tasks.Passed(
            task=self.task.task, sample=self.task.sample, head="a" * 64, inp=inp, out=tensor.head().digest, cut=None,
            loss=None, seconds=0.1, recomputed=False,
        )  # fmt: skip


async def training(**sections):
    """Three miners, one a stage, all loaded; the first holds the forward of sample 0."""
    hub = await Hub.open(limits=dict(poll=0.01), **sections)
    miners = [await hub.join(f"talker {i}") for i in range(3)]
    for miner in miners:
        await miner.turn()
        await miner.load()
    while not isinstance(miners[0].task, tasks.Forward):
        await miners[0].turn()
    return hub, miners


async def test_a_relayed_tensor_cannot_be_replaced_by_a_turn_that_nobody_judges():
    """Aim: make the next stage, or a neighbour's samples, look guilty. Turn 0 passed for the repetition of a judged
    turn, and a repeated turn put its tensor into the relay again."""
    hub, (first, *_) = await training()
    sample, good = first.task.sample, first.tensor(0)
    result = first.passed(good)
    assert (await first.turn(result, (good,))).body.verdict.accepted
    with pytest.raises(PeerRefused, match="numbered from 1"):
        await first.turn(result, (first.tensor(1),), seq=0)
    first.seq, place = hub.node.machine.state.members[0].last_seq, ("activation", sample, 1)
    held = hub.node.relay._held[place] = Held(first.tensor(2), first.tensor(2).head(), b"somebody's since")
    again = await first.turn(result, (good,), seq=first.seq)
    assert again.body.verdict.accepted and hub.node.relay.find(*place) is held


async def test_a_result_cannot_carry_an_origin_that_fits_into_no_task():
    """Aim: stop the next stage, member by member: its task, with the producer's control part inside, was too large for
    any answer, so whoever got it heard nothing any more."""
    hub, (first, second, _) = await training()
    tensor = first.tensor()
    shown = (tasks.Shown(10**9, "x" * 60_000),)
    reply = await first.turn(first.passed(tensor), (tensor,), shown=shown)
    assert not reply.body.verdict.accepted and "control part" in reply.body.verdict.text
    while not isinstance(first.task, tasks.Forward):
        hub.clock.at += 1.1
        hub.node.machine.tick(hub.clock.now())
        await first.turn()
    tensor = first.tensor()
    assert (await first.turn(first.passed(tensor), (tensor,))).body.verdict.accepted
    assert isinstance((await second.turn()).body.task, tasks.Forward)


async def test_strangers_queries_leave_nothing_in_the_journal():
    hub = await Hub.open()
    before = hub.node.journal.marks()
    for i in range(5):
        assert (await Talker(hub, f"stranger {i}").call(queries.Status())).body.kind == "json"
    assert hub.node.journal.marks() == before


async def test_many_shows_come_on_a_sheet():
    """Every segment drawn: the links of some forty segments fit into no control part, and no answer could be given."""
    hub, (first, *_) = await training()
    mc = hub.node.machine
    cuts = [Cut(step, f"{step:064x}") for step in range(61)]
    mc.state.facts[1, 0, 1] = Facts(0, 1, 0, 1, heads=["a" * 64] * 60, cuts=cuts)
    for i in range(60):
        mc._open_audits[i] = mc.state.audits[i] = AuditRecord(i, 1, 0, 1, 0, i, i, i + 1, NOW + 60.0)
    reply = await first.turn()
    assert reply.body.shows_attached and reply.body.shows == ()
    heard = _with_shows(Heard(reply.body, reply.tensors, reply.control.tensors))
    assert [show.audit for show in heard.answer.shows] == list(range(60))
    assert not heard.answer.shows_attached and heard.tensors == ()


async def test_evidence_links_hold_what_was_committed_and_no_more():
    """Aim: fill the store, or the memory of whoever audits, with an endless object."""
    hub, (first, *_) = await training()
    mc = hub.node.machine
    mc.state.facts[1, 0, 1] = Facts(0, 1, 0, 1, heads=["a" * 64], cuts=[Cut(0, "0" * 64), Cut(1, "1" * 64)])
    mc._open_audits[0] = mc.state.audits[0] = AuditRecord(0, 1, 0, 1, 0, 0, 0, 1, NOW + 60.0)
    show = (await first.turn()).body.shows[0]
    urls = {name: url for name in URLS if (url := getattr(show, name))}
    links = {name: check_link(ORCHESTRATOR.key, "PUT", url, NOW) for name, url in urls.items()}
    stop = links.pop("stop_url")
    assert stop.sha256 == "1" * 64 and stop.length == 8 + 12 * mc.parameters[0]
    payload = hub.node.relay.largest
    assert set(links) == {"transcript_url", "inputs_url", "outputs_url"}
    assert all(payload < link.max_length < 600 * (payload + 20_000) for link in links.values())


# ------------------------------------------------------------------------------------------ audits that are slipped


def test_work_cannot_hide_in_one_long_segment():
    """Nine segments of one honest step and one of 91: drawn by segment, the cheat is found once in ten epochs."""
    swarm = machine_swarm.Swarm(machine_swarm.config(audit=dict(segments=1)))
    cuts = [Cut(step, "") for step in (*range(10), 100)]
    drawn = [
        auditing._segments(swarm.mc, Facts(number, 1, 0, 1, cuts=cuts), "secret") for number in range(300)
    ]  # fmt: skip
    assert 250 < sum(segment == [9] for segment in drawn) < 290


def test_snapshots_at_other_steps_than_announced_are_refused():
    swarm = machine_swarm.Swarm(machine_swarm.config())
    swarm.miners(3)
    cheat = swarm.peers[1]

    def odd(task, attach):
        result = machine_swarm.Peer._commit(cheat, task, attach)
        return msgspec.structs.replace(result, cuts=(result.cuts[0], Cut(1, "1" * 64), result.cuts[-1]))

    cheat._commit = odd
    cheat._step = lambda: setattr(cheat, "steps", cheat.steps + 1)
    swarm.run(lambda: swarm.mc.state.phase == "reduce")
    declined = [e for e in swarm.seen(ev.Declined) if e.number == cheat.member.number]
    assert declined and "snapshots are due every 2 inner steps" in declined[0].text
    assert cheat.member.number not in swarm.mc.state.commitments


def test_who_never_commits_cannot_live_on_old_verdicts():
    """Aim: two honest epochs, then noise for ever: without a commitment nothing can be audited, and unmeasured work is
    paid at the share of valid audits."""
    swarm = machine_swarm.Swarm(machine_swarm.config(stop="epochs >= 24", pay=PayConfig(gamma=0)))
    swarm.miners(6)
    swarm.add("validator")
    cheat = swarm.peers[0]
    swarm.run(lambda: swarm.mc.state.epoch == 3)
    cheat._commit = lambda task, attach: tasks.Failed(task=task.task, code="no_disk", text="so sorry")
    swarm.run(lambda: swarm.mc.state.phase == "finished", limit=20_000.0)
    paid = [dict(entry.emissions).get(cheat.key, 0) for entry in swarm.mc.state.ledger]
    assert paid[0] > 0 and paid[1] > 0
    assert cheat.member.history == ["absent"] * 10
    assert paid[-6:] == [0] * 6, paid
    honest = [sum(v == "valid" for v in p.member.history) for p in swarm.peers[1:6]]
    assert honest == [10] * 5
    waited = [r.began["upload"] - r.began["commit"] for r in swarm.mc.state.epochs.values()]
    assert max(waited) < 35.0, "a deadline that one member lets pass must not grow from epoch to epoch"


def test_a_member_that_never_delivers_does_not_make_epochs_longer_and_longer():
    """Aim: stop the run. It polls and fails at every pass, so its stage never has its quorum and TRAIN always lasts to
    its deadline; three times that was the next one."""
    swarm = machine_swarm.Swarm(machine_swarm.config(stop="epochs >= 8", merge=dict(members=2, epoch_limit=60.0)))
    swarm.miners(6)
    idler = swarm.peers[0]
    swarm.run(lambda: swarm.mc.state.epoch == 2)
    idler._forward = idler._backward = lambda task, attach: tasks.Failed(task=task.task, code="no_memory", text="")
    swarm.run(lambda: swarm.mc.state.phase == "finished", limit=20_000.0)
    lasted = [r.began["drain"] - r.began["train"] for r in swarm.mc.state.epochs.values()]
    assert max(lasted) < 65.0, lasted


async def test_a_digest_is_no_place_for_a_book():
    """Aim: fill journal and memory by a head of 50 KB with every result."""
    hub, (first, *_) = await training()
    tensor, before = first.tensor(), hub.node.journal.last
    result = msgspec.structs.replace(first.passed(tensor), head="a" * 50_000)
    with pytest.raises(PeerRefused, match="length <= 64"):
        await first.turn(result, (tensor,))
    assert hub.node.journal.last == before


# -------------------------------------------------------------------------------------------- work that is disturbed


def test_a_sample_that_nobody_can_use_starts_anew():
    """Aim: keep a whole stage busy with failing. A first-stage miner sends finite numbers that overflow at whoever gets
    them; the sample went from one neighbour to the next, each left alone for a second, until the drain."""
    swarm = machine_swarm.Swarm(machine_swarm.config(merge=dict(members=2, min_batches=12)))
    swarm.miners(6)
    poisoner = swarm.peers[0].member.number
    for peer in swarm.stage(1):

        def forward(task, attach, peer=peer):
            if swarm.mc.state.samples[task.sample].path[0][0] == poisoner:
                return tasks.Failed(task=task.task, code="not_finite", text="")
            return machine_swarm.Peer._forward(peer, task, attach)

        peer._forward = forward
    swarm.run(lambda: swarm.mc.state.phase == "finished", limit=20_000.0)
    swarm.check()
    rounds = {}
    for e in swarm.seen(ev.Rerouted):
        rounds[e.sample, e.stage] = rounds.get((e.sample, e.stage), 0) + 1
    closed = [e for e in swarm.seen(ev.SampleClosed) if "could not be used" in e.why]
    assert closed and all(e.how == "returned" for e in closed)
    assert swarm.mc.state.epochs[1].samples_full >= 12


def test_claimed_speed_draws_no_work_and_shortens_no_deadline():
    swarm = machine_swarm.Swarm(machine_swarm.config(merge=dict(members=2, min_batches=40), stop="epochs >= 1"))
    swarm.miners(6, seconds=3.0)
    liar = swarm.stage(1)[0]
    done = liar.result
    liar.result = lambda out: (
        msgspec.structs.replace(r, seconds=0.0) if isinstance(r := done(out), tasks.Passed) else r
    )  # fmt: skip
    swarm.until_phase("drain")
    mine, other = (peer.member.passes for peer in swarm.stage(1))
    assert 0.6 < mine / other < 1.6
    assert swarm.mc.soft.quantile(1, "f", 0.0) >= 3.0 and swarm.mc.soft.quantile(1, "b", 0.0) >= 3.0


def test_a_member_that_drains_shows_its_evidence_first():
    """Honest harm: it left between the draw and its upload, and its epoch stayed without a verdict."""
    swarm = machine_swarm.Swarm(machine_swarm.config(merge=dict(members=2)))
    swarm.miners(6)
    swarm.add("validator")
    leaver = swarm.peers[0]
    leaver.lazy = {"Show"}
    swarm.run(lambda: any(a.number == leaver.member.number for a in swarm.mc.state.audits.values()))
    leaver.draining = True
    swarm.wait(3.0)
    assert leaver.member.alive
    leaver.lazy = set()
    swarm.run(lambda: not leaver.member.alive)
    swarm.finish()
    assert leaver.member.history == ["valid"] and "left" in leaver.member.why_gone
