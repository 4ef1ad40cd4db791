"""Real swarms whose processes are killed at chosen moments, and what must be true of a run afterwards.

A moment is caught by holding it. A phase ends when every miner that owes it something has delivered, so one miner that
is stopped (SIGSTOP) keeps it open; before that one goes on, another, which will owe the next phase something, is
stopped: the baton is handed on until the wanted phase is reached. So a kill (SIGKILL) hits what it says on any machine,
fast or slow; a moment that was missed all the same comes again in the next epoch.
"""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from iota.core import ledger
from iota.core.queries import LedgerFrom, Operate, Status
from iota.errors import IotaError
from iota.nodes.ask import Asker, get_page
from iota.nodes.real import RealClock, entropy
from iota.store.files import TEMP_SUFFIX
from iota.wire.keys import Identity
from ports import free_ports
from processes import processes, send

TINY = str(Path(__file__).resolve().parents[1] / "recipes" / "tiny.toml")
MINERS = 6
MINIMUM = 24
SETS = (
    f"swarm.miners={MINERS}",
    "merge.members=2",
    "merge.quorum=1.0",
    "merge.epoch_limit=60",
    "merge.gather_limit=120",
    "train.lr_tokens=40000",
    "train.lr=0.0005",
    "train.min_lr_share=0.0",
    f"merge.min_batches={MINIMUM}",
    "limits.poll=3.0",
    "limits.silence=6.0",
    "audit.final_wait=60",
)
LOOK = 0.02
PATIENCE = 150.0
"""Seconds to wait for one moment, or for one recovery: a limit for hangs, not a measure of speed."""
PASSES = ("f", "b", "l")
SERVICES = {"orchestrator": "orchestrator", "blobs": "blobs", "validator": "validator-0"}
HELD = {"drain": "b", "commit": "commit", "upload": "upload", "reduce": "reduce", "sync": "load"}
"""The task by which one miner holds a phase open, in order of the phases."""


@dataclass(frozen=True)
class Kill:
    """`who`: orchestrator | blobs | validator | 0 | 1 | 2 (a miner of that stage). `moment`, within the phase: "reply"
    (a result was judged, the reply is on its way), "acknowledged" (some, not all miners proved the merged state)."""

    who: str | int
    phase: str
    moment: str = ""


@dataclass(frozen=True)
class Struck:
    """A kill that was carried out: by whom, when (Unix time), and what the run said just before."""

    kill: Kill
    name: str
    at: float
    status: dict
    books: list


@dataclass
class Swarm:
    """One `iota up` with all its processes. `sessions`: every session id (POSIX) that its children ever had."""

    folder: Path
    struck: list[Struck] = field(default_factory=list)
    sessions: set[int] = field(default_factory=set)
    asker: Asker | None = None
    keys: dict[str, str] = field(default_factory=dict)

    @property
    def log(self):
        return self.folder.with_suffix(".log")

    def start(self, stop):
        port, self.blob_port = free_ports(2)
        where = (f"folder={self.folder}", f"swarm.port={port}", f"swarm.blob_port={self.blob_port}", f"stop={stop}")
        words = [word for value in (*SETS, *where) for word in ("--set", value)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "iota.cli.main", "up", TINY, "--no-report", *words],
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )

    # ------------------------------------------------------------------------------------------------- processes

    def pids(self):
        """Name -> process id of every child that runs now."""
        found = {}
        for pid, words in processes():
            named = next((word for word in words if word.startswith(f"{self.folder}/")), "")
            if "iota.cli.main" in words and "up" not in words and named:
                role = next(word for word in words if word in ("orchestrator", "blobs", "miner", "validator"))
                found[Path(named).name if role in ("miner", "validator") else role] = pid
        self.sessions.update(found.values())
        return found

    def name_of(self, key):
        """miner-N or validator-N of a public key."""
        for folder in self.folder.glob("*-[0-9]*"):
            if folder.name not in self.keys and (folder / "key").exists():
                self.keys[folder.name] = Identity.load(folder / "key").key
        return next(name for name, own in self.keys.items() if own == key)

    def key_of(self, name):
        return Identity.load(self.folder / name / "key").key

    @contextlib.contextmanager
    def frozen(self, *names):
        """These processes stand still meanwhile; one that ended is left alone."""
        pids = [pid for name, pid in self.pids().items() if name in names]
        try:
            for pid in pids:
                send(pid, signal.SIGSTOP)
            yield
        finally:
            for pid in pids:
                send(pid, signal.SIGCONT)

    def end(self):
        """Whatever happened, nothing of it is left."""
        pids = set(self.pids().values())
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pid in pids:
            send(pid, signal.SIGKILL)

    def wait(self, seconds=400.0):
        """Until `iota up` is done, which it must be in order."""
        end = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < end, f"no end after {seconds:.0f} s\n{self.told()}"
            self.healthy()
            self.pids()
            time.sleep(0.5)
        assert self.process.returncode == 0, self.told()

    def healthy(self):
        """No process met an error that it does not know."""
        for path in self.folder.glob("logs/*.log"):
            assert "Traceback" not in path.read_text(), self.told()

    def told(self):
        """What went on, for a failed test."""
        logs = [f"{path.name}:\n{path.read_text()[-1500:]}" for path in sorted(self.folder.glob("logs/*.log"))]
        kills = [f"{row.kill} {row.name} at {row.at:.3f} in epoch {row.status['epoch']}" for row in self.struck]
        return "\n".join([*kills, self.log.read_text()[-6000:], *logs])

    # ------------------------------------------------------------------------------------------------- questions

    async def ask(self, query, timeout=5.0, identity=None):
        """The answer's document; None while nobody answers."""
        if self.asker is None or identity is not None:
            await self.close()
            url = self.folder / "join.url"
            if not url.exists():
                return None
            self.asker = Asker(url.read_text(), clock=RealClock(), entropy=entropy, identity=identity)
        try:
            return await self.asker.ask(query, timeout)
        except IotaError:
            await self.close()
            return None

    async def status(self):
        answer = await self.ask(Status())
        return json.loads(answer) if answer else None

    async def close(self):
        if self.asker is not None:
            await self.asker.__aexit__()
            self.asker = None

    async def until(self, what, condition, seconds=PATIENCE):
        """The first status for which `condition` gives something true; that."""
        end, look = time.monotonic() + seconds, 0.0
        while time.monotonic() < end:
            assert self.process.poll() is None, f"iota up ended while waiting for {what}\n{self.told()}"
            status = await self.status()
            found = condition(status) if status else None
            if found:
                return found
            await asyncio.sleep(LOOK)
            if time.monotonic() > look:
                look = time.monotonic() + 1.0
                self.healthy()
        raise AssertionError(f"waited {seconds:.0f} s for {what}\n{self.told()}")

    # ----------------------------------------------------------------------------------------------------- kills

    async def strike(self, kill, rng):
        """Carry out one kill, then wait until its victim is back."""
        end = time.monotonic() + PATIENCE
        passes = rng.randrange(4, 40)
        struck = None
        while struck is None:
            assert time.monotonic() < end, f"{kill} found no moment\n{self.told()}"
            if kill.phase in list(HELD)[1:]:
                struck = await self._at(kill, rng)
            else:
                status = await self.until(kill, lambda s: s if self._moment(s, kill, passes) else None)
                reply = kill.moment == "reply"
                struck = await (self._reply(kill, status, rng) if reply else self._hold(kill, status, passes, rng))
            await asyncio.sleep(LOOK)
        self.struck.append(struck)
        await self._recovered(struck)

    # ------------------------------------------------------------------------------- gathering, training, draining

    def _moment(self, status, kill, passes):
        """Whether the wanted moment is now, as far as a status tells."""
        if status["phase"] != kill.phase:
            return False
        if kill.phase == "gather":
            there = status["validators"] if kill.who == "validator" else self._busy(status, kill)
            shown = "gather" in self.log.read_text()  # `iota up` knows now that its services can start
            return shown and any(m["alive"] for m in there) and sum(m["alive"] for m in miners(status)) >= 2
        if kill.phase == "train" and sum(m["passes_epoch"] for m in miners(status)) < passes:
            return False
        if kill.moment == "audit":
            return any(m["task"] for m in status["validators"])
        return bool(self._busy(status, kill))

    def _busy(self, status, kill):
        """The miners that the moment is about: of the victim's stage, or any; with a pass in hand (but for gather)."""
        rows = [m for m in miners(status) if m["alive"] and kill.who in (m["stage"], *SERVICES)]
        return [m for m in rows if kill.phase == "gather" or m["task"] in PASSES]

    async def _hold(self, kill, status, passes, rng):
        held = rng.sample(self._busy(status, kill), 1) if self._busy(status, kill) else []
        names = [self.name_of(m["key"]) for m in held]
        name = names[0] if isinstance(kill.who, int) else SERVICES[kill.who]
        with self.frozen(*names):
            await asyncio.sleep(0.05)  # what they had sent is dealt with
            status = await self.status()
            if not status or not self._moment(status, kill, passes):
                return None
            if not {m["key"] for m in held} <= {m["key"] for m in self._busy(status, kill)}:
                return None
            return await self._kill(kill, name, status)

    # --------------------------------------------------------------------------------- from commit to the next epoch

    async def _at(self, kill, rng):
        """Walk through the end of an epoch with one miner stopped at any time; strike in the wanted phase. None when
        the baton was lost on the way: the next epoch brings another chance."""
        held = await self.until("a drain", in_drain)
        try:
            self.signal(held, signal.SIGSTOP)
            for phase, following in itertools.pairwise(HELD):
                after = await self._baton(kill, phase, following, held, rng)
                if not after:
                    return None
                self.signal(after, signal.SIGSTOP)
                self.signal(held, signal.SIGCONT)
                held = after
                status = await self._soon(lambda s, f=following, h=held: holds(s, f, h))
                if not status:
                    return None
                if following == kill.phase:
                    await asyncio.sleep(0.1)  # a miner that had its task before it was stopped would be done by now
                    status = await self.status()
                    if not status or not holds(status, following, held):
                        return None
                    name = self.name_of(held[0]) if isinstance(kill.who, int) else SERVICES[kill.who]
                    return await self._kill(kill, name, status)
            return None
        finally:
            self.signal(held, signal.SIGCONT)

    async def _baton(self, kill, phase, following, held, rng):
        """Once the stopped miners are all that a phase waits for: keys of those to be stopped in the next one."""

        def idle(status):
            others = [m for m in miners(status) if m["alive"] and m["key"] not in held]
            return status["phase"] == phase and not any(m["task"] or m["queued"] for m in others)

        status = await self._soon(idle)
        if not status:
            return []
        rows = [m for m in miners(status) if m["alive"] and m["passes_epoch"] >= MINIMUM and m["key"] not in held]
        target = following == kill.phase
        if target and isinstance(kill.who, int):
            rows = [m for m in rows if m["stage"] == kill.who]
        count = 4 if target and kill.moment == "acknowledged" else 1
        return [m["key"] for m in rng.sample(rows, count)] if len(rows) >= count else []

    async def _soon(self, condition, seconds=2.0):
        """The status once the condition holds; None when it does not within some seconds."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            status = await self.status()
            if status and condition(status):
                return status
            await asyncio.sleep(LOOK)
        return None

    def signal(self, keys, number):
        """Send a signal to miners by their keys."""
        pids = self.pids()
        for key in keys:
            send(pids.get(self.name_of(key)), number)

    async def _reply(self, kill, status, rng):
        """Everyone's results pile up before the stopped orchestrator; then it goes on, and either it dies while it
        judges them, or a miner dies before it read the reply."""
        name = "orchestrator"
        if isinstance(kill.who, int):
            name = self.name_of(rng.choice(self._busy(status, kill))["key"])
        with self.frozen("orchestrator"):
            await asyncio.sleep(0.3)
            if name != "orchestrator":
                send(self.pids()[name], signal.SIGSTOP)
        if name == "orchestrator":
            await asyncio.sleep(rng.uniform(0.002, 0.012))
            return await self._kill(kill, name, status, books=False)
        before = next(m for m in miners(status) if self.name_of(m["key"]) == name)
        await asyncio.sleep(0.1)
        status = await self.status()
        now = next(m for m in miners(status) if m["key"] == before["key"]) if status else before
        if now["busy_seconds"] == before["busy_seconds"] or status["phase"] != kill.phase:
            send(self.pids()[name], signal.SIGCONT)
            return None
        return await self._kill(kill, name, status)

    async def _kill(self, kill, name, status, books=True):
        document = await self.ask(LedgerFrom(epoch=0)) if books else b""
        if document is None:
            return None
        pid = self.pids().get(name)
        if pid is None:
            return None
        at = time.time()
        os.kill(pid, signal.SIGKILL)
        self._half_written(name)
        return Struck(kill, name, at, status, ledger.decode(document))

    def _half_written(self, name):
        """Files as a process leaves them that dies while it writes; whoever starts in its place clears them away."""
        places = {"orchestrator": (".", "orchestrator"), "blobs": (f"blobs/{TEMP_SUFFIX}",)}
        for place in places.get(name, (name, f"{name}/tokens")):
            with contextlib.suppress(FileNotFoundError):  # a miner in the middle holds no tokens
                (self.folder / place / f"{os.urandom(8).hex()}{TEMP_SUFFIX}").write_bytes(b"half")

    async def _recovered(self, struck):
        """Until the victim is back in its place."""
        if struck.name in ("orchestrator", "blobs"):
            dead = max(row.at for row in self.struck)
            port = self.blob_port
            await self.until(f"{struck.name} to come back", lambda s: s["time"] > dead and struck.name in self.pids())
            end = time.monotonic() + PATIENCE
            while struck.name == "blobs":
                assert time.monotonic() < end, f"the blob service did not come back\n{self.told()}"
                with contextlib.suppress(IotaError):
                    await get_page(f"http://127.0.0.1:{port}/health")
                    return
                await asyncio.sleep(LOOK)
            return
        key = self.key_of(struck.name)
        before = next(m["session"] for m in everyone(struck.status) if m["key"] == key)

        def back(status):
            return any(m["key"] == key and m["alive"] and m["session"] > before for m in everyone(status))

        waits = isinstance(struck.kill.who, int)
        seen = await self.until(
            f"{struck.name} to come back", lambda s: back(s) or (waits and s["phase"] == "train" and "train")
        )
        if seen == "train":
            await self._paused_until(back)

    async def _paused_until(self, back):
        """Nobody trains while one is missing: the other of its stage would make twice the steps a token, and the loss
        would say more of that than of what was lost. (What a phase does about a death is over by then.)"""
        await self.order("pause", lambda s: s["paused"])
        await self.until("the victim to come back", back)
        await self.order("resume", lambda s: not s["paused"])

    async def order(self, command, done):
        """An operator's order, again until the status shows it."""
        operator = Identity.load(self.folder / "operator.key")
        end = time.monotonic() + PATIENCE
        while True:
            assert time.monotonic() < end, f"{command} had no effect\n{self.told()}"
            await self.ask(Operate(command=command, target=""), identity=operator)
            await self.close()
            status = await self.status()
            if status and done(status):
                return
            await asyncio.sleep(LOOK)

    async def finish(self, tokens):
        """No more kills: two whole epochs with everybody, at least `tokens` in all, then the end."""

        def all_train(status):
            there = [m["alive"] and m["passes_epoch"] > 0 for m in miners(status)]
            return status["epoch"] if status["phase"] == "train" and there == [True] * MINERS else 0

        epoch = await self.until("an epoch in which all miners train", all_train)
        rule = f"epochs >= {epoch + 2} and tokens >= {tokens}"
        order = Operate(command="extend", target=rule)
        operator = Identity.load(self.folder / "operator.key")
        end = time.monotonic() + PATIENCE
        while await self.ask(order, identity=operator) is None:
            assert time.monotonic() < end, self.told()
        await self.close()


async def run_with_kills(swarm, kills, rng, tokens):
    """From the start through every kill to the rule that ends the run."""
    try:
        while "miner-5" not in swarm.pids():
            assert swarm.process.poll() is None, swarm.told()
            await asyncio.sleep(LOOK)
        for kill in kills:
            latecomer = ("miner-5",) if kill.phase == "gather" else ()  # without it nobody trains yet
            with swarm.frozen(*latecomer):
                await swarm.strike(kill, rng)
        await swarm.finish(tokens)
    finally:
        await swarm.close()


def miners(status):
    return [m | {"stage": stage["stage"]} for stage in status["stages"] for m in stage["miners"]]


def everyone(status):
    return miners(status) + status["validators"]


def in_drain(status):
    """Of a drain, a first-stage miner that runs a backward: as long as it is stopped, the drain waits."""
    busy = [m["key"] for m in miners(status) if m["alive"] and m["stage"] == 0 and m["task"] == "b"]
    return busy[:1] if status["phase"] == "drain" else []


def holds(status, phase, keys):
    """Whether these miners keep a phase open: each owes it the task that it waits for."""
    return status["phase"] == phase and all(m["task"] == HELD[phase] for m in miners(status) if m["key"] in keys)
