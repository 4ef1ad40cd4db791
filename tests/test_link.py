"""The client side of the turn loop against a scripted orchestrator: repeats, rejoining, clocks, draining, tokens."""

import asyncio
import os
import stat

import pytest

from iota.config.load import load_run
from iota.core import tasks
from iota.core.values import Tensor
from iota.errors import IotaError, Refused, Unreachable
from iota.net.memory import MemoryNetwork
from iota.net.peer import Caller, Outgoing, PeerRefused, Receiver
from iota.nodes.link import Link, Peer, SessionOver
from iota.nodes.orchestrator.create import create_run
from iota.sim.effects import Host
from iota.sim.loop import run as simulate
from iota.store.blobs import MemoryBlobs
from iota.store.manifest import OBJECT
from iota.wire.keys import Identity
from iota.wire.nonces import NonceBook

HUB, ME = Identity.new(b"h" * 32), Identity.new(b"m" * 32)
TINY = load_run(os.path.join(os.path.dirname(__file__), "..", "recipes", "tiny.toml"))
STANDING = tasks.Standing(
    epoch=1, phase="train", phase_since=0.0, phase_until=None, passes_epoch=0, passes_total=0, last_verdict="",
    paid_total=0,
)  # fmt: skip
WAIT = tasks.Wait(code="no_work", text="nothing", since=0.0, until=None)
MANIFEST = []


async def sealed_manifest():
    if not MANIFEST:
        blobs = MemoryBlobs()
        MANIFEST.append(await create_run(TINY, blobs, HUB.key, 1.0, HUB.sign))
        MANIFEST.append(await blobs.get(OBJECT))
    return MANIFEST


class Hub:
    """Answers each request with the next step of `script`: "ok", "lost" (handled, no reply), "damaged", "hold" (no
    answer for 10 s), or (code, ...) of a refusal. An exhausted script is "ok"."""

    def __init__(self, loop, *script):
        self.script, self.seen, self.joins = list(script), [], []
        self.host = Host(loop, "hub")
        self.network = MemoryNetwork()
        self.tokens = 0

    async def serve(self, run=None):
        manifest, self.sealed = await sealed_manifest()
        self.receiver = Receiver(
            HUB, run or manifest.run, self.host.clock.now, nonces=NonceBook(), request_types=tasks.Join | tasks.Turn,
            limits={"Turn": 1 << 20},
        )  # fmt: skip
        handler = self.receiver.handler(self.answer)

        async def listen(raw):
            self.how = self.script.pop(0) if self.script else "ok"
            reply = await handler(raw)
            if self.how == "lost":
                await asyncio.sleep(1000.0)
            if self.how == "damaged":
                reply = [bytes(reply[0])[:-9] + b"\0" * 9, *reply[1:]]
            return reply

        self.network.listen("hub", listen)

    async def answer(self, incoming):
        how, body = self.how, incoming.body
        if isinstance(how, tuple):
            raise Refused(how[0], f"refused with {how[0]}", "Do something.")
        if isinstance(body, tasks.Join):
            self.joins.append(body.token)
            self.tokens += 1
            welcome = tasks.Welcome(session=self.tokens, token=f"token-{self.tokens}", stage=0, time=0.0)
            return Outgoing(welcome, (Tensor("uint8", (len(self.sealed),), self.sealed),))
        self.seen.append((incoming.id, body, incoming.control.tensors))
        if how == "hold" and not body.draining:
            await asyncio.sleep(9.0)
        task = tasks.Leave(code="drained", text="bye") if body.draining else WAIT
        return Outgoing(
            tasks.Answer(seq=body.seq, verdict=None, step=False, task=task, shows=(), standing=STANDING, time=0.0)
        )


def with_link(folder, script, work, give_up=None, offset=0.0):
    """Run `work(hub, link, notices, clock)` in virtual time."""

    async def main(loop):
        hub = Hub(loop, *script)
        await hub.serve()
        host = Host(loop, "peer", offset=offset)
        caller = Caller(ME, hub.network.channel("hub"), HUB.key, "", host.clock.now)
        notices = []
        link = Link(
            caller, Peer("miner", "iota test", "cpu", "float32"), folder, clock=host.clock, compute=host.compute,
            entropy=host.entropy, report=notices.append, give_up=give_up,
        )  # fmt: skip
        return await work(hub, link, notices, host.clock)

    return simulate(main, limit=3600.0, leaks_ok=True)


def test_joining_checks_the_manifest_and_keeps_the_token_for_the_next_start(tmp_path):
    async def work(hub, link, notices, clock):
        session = await link.join()
        assert (session.number, session.stage, session.manifest.run) == (1, 0, MANIFEST[0].run)
        assert link.caller.run == MANIFEST[0].run
        await link.join()
        return hub.joins

    assert with_link(tmp_path, [], work) == ["", "token-1"]
    (path,) = tmp_path.glob("session-*.token")
    assert path.read_text() == "token-2" and stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("trouble", ["lost", "damaged", ("busy",)])
def test_a_turn_is_repeated_unchanged_until_it_is_answered(tmp_path, trouble):
    async def work(hub, link, notices, clock):
        await link.join()
        tensor = Tensor("uint8", (3,), b"abc")
        await link.turn(tasks.Done(task=7), (tensor,), (tensor.head(),), (tasks.Shown(4, ""),))
        link.drain()
        await link.turn(None)
        handled = [row for row in hub.seen if row[1].seq == 1]
        assert {row[0] for row in hub.seen} == {"1-1", "1-2"}
        assert all(row == handled[0] for row in handled), "the same words each time"
        assert handled[0][1].result == tasks.Done(task=7) and not handled[0][1].draining
        assert len([text for text in notices if "does not answer" in text]) == 1
        assert any("answers again" in text for text in notices) and link.waiting == ""
        return len(handled)

    count = with_link(tmp_path, ["ok", trouble, trouble, trouble], work)
    assert count == (1 if isinstance(trouble, tuple) else 4)


def test_first_contact_waits_for_ever_or_as_long_as_it_was_told(tmp_path):
    async def late(hub, link, notices, clock):
        handler = hub.network._listeners["hub"].handler
        hub.network.unlisten("hub")
        began, joining = clock.now(), asyncio.ensure_future(link.join())
        await clock.sleep(60.0)
        assert "next try in" in link.waiting
        hub.network.listen("hub", handler)
        await joining
        assert clock.now() - began < 66.0
        assert [text for text in notices if "does not answer" in text] == notices[:1] and len(notices) == 2

    async def never(hub, link, notices, clock):
        hub.network.unlisten("hub")
        began = clock.now()
        with pytest.raises(Unreachable, match="did not answer for"):
            await link.join()
        assert 10.0 < clock.now() - began <= 20.0

    with_link(tmp_path, [], late)
    with_link(tmp_path, [], never, give_up=20.0)


@pytest.mark.parametrize("code", ["rejoin", "session_over", "unknown_key", "old_turn"])
def test_a_session_that_is_over_is_joined_again_with_its_token(tmp_path, code):
    async def work(hub, link, notices, clock):
        await link.join()
        with pytest.raises(SessionOver):
            await link.turn(None)
        session = await link.join()
        await link.turn(None)
        assert session.number == 2 and hub.joins == ["", "token-1"]
        assert [(row[0], row[1].session) for row in hub.seen] == [("2-1", 2)]

    with_link(tmp_path, ["ok", (code,)], work)


def test_refusals_that_trying_cannot_cure_come_out(tmp_path):
    async def banned(hub, link, notices, clock):
        with pytest.raises(PeerRefused, match="refused with banned"):
            await link.join()

    async def one_result(hub, link, notices, clock):
        await link.join()
        with pytest.raises(PeerRefused, match="too_large"):
            await link.turn(tasks.Done(task=1))
        await link.turn(tasks.Failed(task=1, code="bad_input", text="withdrawn"))
        assert [row[0] for row in hub.seen] == ["1-1"], "nothing changed there, so the number is used again"

    async def other_signer(hub, link, notices, clock):
        link.caller.recipient = ME.key
        with pytest.raises(IotaError):
            await link.join()

    with_link(tmp_path, [("banned",)], banned)
    with_link(tmp_path, ["ok", ("too_large",)], one_result)
    with_link(tmp_path, [], other_signer)


def test_the_same_key_twice_is_refused_but_a_lost_session_of_our_own_is_waited_out(tmp_path):
    async def stranger(hub, link, notices, clock):
        began = clock.now()
        with pytest.raises(PeerRefused, match="key_in_use"):
            await link.join()
        assert clock.now() - began < 1.0, "no token: somebody else uses this key"

    async def own(hub, link, notices, clock):
        await link.join()
        return [text for text in notices if "last session" in text]

    with_link(tmp_path / "a", [("key_in_use",)], stranger)
    notices = with_link(tmp_path / "b", ["lost", ("key_in_use",), ("key_in_use",), ("key_in_use",)], own)
    assert len(notices) == 1


@pytest.mark.parametrize("offset", [3600.0, -3600.0])
def test_a_wrong_clock_is_corrected_in_messages_and_said(tmp_path, offset):
    async def work(hub, link, notices, clock):
        await link.join()
        await link.turn(None)
        assert len(notices) == 1 and "3600.0 s" in notices[0] and "set it right" in notices[0]
        assert abs(link.caller.offset + offset) < 1.0

    with_link(tmp_path, [], work, offset=offset)


def test_draining_cuts_a_held_poll_short_and_says_so_under_the_same_number(tmp_path):
    async def work(hub, link, notices, clock):
        await link.join()
        began, polling = clock.now(), asyncio.ensure_future(link.turn(None))
        await clock.sleep(2.0)
        link.drain()
        heard = await polling
        assert isinstance(heard.answer.task, tasks.Leave) and clock.now() - began < 2.5
        assert [(row[0], row[1].draining) for row in hub.seen] == [("1-1", False), ("1-1", True)]

    with_link(tmp_path, ["ok", "hold"], work)


def test_a_cut_poll_that_was_answered_meanwhile_is_heard_first(tmp_path):
    """The orchestrator may have told a step in the reply that was cut off; it then refuses other words under that
    number, and is asked in the old ones."""

    async def work(hub, link, notices, clock):
        await link.join()
        polling = asyncio.ensure_future(link.turn(None))
        await clock.sleep(1.0)
        link.drain()
        heard = await polling
        assert isinstance(heard.answer.task, tasks.Wait)
        assert isinstance((await link.turn(None)).answer.task, tasks.Leave)
        assert [(row[0], row[1].draining) for row in hub.seen] == [("1-1", False), ("1-1", False), ("1-2", True)]

    with_link(tmp_path, ["ok", "hold", ("idempotency",)], work)
