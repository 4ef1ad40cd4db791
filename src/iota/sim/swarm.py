"""A whole swarm in one process under virtual time: the same node code, real torch, simulated machines and network.

The orchestrator's journal and the blob store outlive crashes, as disks do; everything else of a killed machine is lost.
Compute costs virtual seconds by a cost model, so a second of training takes a moment and the order of events is the
same at every run.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from iota.config.schema import Manifest, RunConfig
from iota.core.machine import events as ev
from iota.core.machine.state import RunState
from iota.errors import IotaError
from iota.net.peer import Caller
from iota.nodes.miner.node import Miner, MinerSettings
from iota.nodes.miner.retain import Retention
from iota.nodes.miner.stage import StageWorker
from iota.nodes.orchestrator.create import create_run
from iota.nodes.orchestrator.node import Orchestrator
from iota.nodes.validator.engine import Engine
from iota.nodes.validator.inline import InlineReplayer
from iota.nodes.validator.node import Validator, ValidatorSettings
from iota.sim.effects import Cost, Host, VirtualClock, seeded_entropy
from iota.sim.faults import FaultPlan, Injector
from iota.sim.loop import VirtualLoop
from iota.sim.network import Link, SimNetwork, SimObjects
from iota.store.blobs import MemoryBlobs
from iota.store.files import Buffer, disk_error
from iota.store.journal import Entry, MemoryJournal
from iota.store.manifest import OBJECT
from iota.store.remote import DirectObjects, Objects
from iota.wire.keys import Identity

T = TypeVar("T")
ORCHESTRATOR = "orchestrator"
STORE = "store"
BLOB_URL = "http://store"
STORE_IDLE = 2.0
"""Seconds after which an attempt at the store is given up and made again."""


def identity_of(seed: int, name: str) -> Identity:
    """A node's key, fixed by the simulation's seed and its name."""
    return Identity.new(seeded_entropy(seed, f"key of {name}")(32))


def steady(seconds: float) -> Cost:
    """A cost model in which every piece of work takes the same virtual time."""
    return lambda work, args: seconds


class WatchedJournal(MemoryJournal):
    """Tells `watchers` every event once it is in the journal, before any reply that rests on it leaves."""

    def __init__(self, run: str, watchers: Sequence[Callable[[ev.Event], None]]) -> None:
        super().__init__(run)
        self._watchers = watchers

    def append(self, rows: Sequence[Entry], marks: Mapping[str, int] | None = None) -> asyncio.Future[int]:
        done = super().append(rows, marks)
        for _, _, payload in rows:
            event = ev.decode(payload)
            for watch in self._watchers:
                watch(event)
        return done


class SimRetention(Retention):
    """A miner's evidence on the real disk, which is full whenever a fault says so."""

    def __init__(self, folder: Path, max_disk: int, injector: Injector, name: str) -> None:
        super().__init__(folder, max_disk)
        self._injector, self._name = injector, name

    @contextlib.contextmanager
    def _writing(self, path: Path, need: int) -> Iterator[None]:
        with super()._writing(path, need):
            try:
                self._injector.check_disk(self._name)
            except OSError as error:
                raise disk_error(error, path, need) from error
            yield


class PatientObjects:
    """What `HttpObjects` does beside HTTP: an attempt that failed on the way is made again, a few times."""

    def __init__(self, objects: Objects, clock: VirtualClock, attempts: int = 5, pause: float = 0.2) -> None:
        self._objects, self._clock = objects, clock
        self._attempts, self._pause = attempts, pause

    async def get(
        self, url: str, start: int = 0, stop: int | None = None, *, expect_sha256: str | None = None
    ) -> bytes:
        return await self._again(lambda: self._objects.get(url, start, stop, expect_sha256=expect_sha256))

    async def put(self, url: str, parts: Sequence[Buffer]) -> None:
        await self._again(lambda: self._objects.put(url, parts))

    async def close(self) -> None:
        await self._objects.close()

    async def _again(self, attempt: Callable[[], Awaitable[T]]) -> T:
        for number in range(self._attempts):
            try:
                return await attempt()
            except IotaError as error:
                if error.code not in ("unreachable", "corrupt") or number + 1 == self._attempts:
                    raise
            await self._clock.sleep(self._pause * 2**number)
        raise AssertionError("at least one attempt")


class Swarm:
    """Orchestrator, miners and validators of one run. `folder`: scratch space for miners' evidence.

    `workers[name]` replaces a miner's StageWorker (adversaries); `speeds[name]` multiplies its compute time.
    `watchers` hear every event when it was journaled; `ended` and `failed` hold each finished node's last word."""

    def __init__(
        self,
        loop: VirtualLoop,
        config: RunConfig,
        folder: Path,
        *,
        miners: int,
        validators: int = 1,
        seed: int = 0,
        plan: FaultPlan | None = None,
        cost: float = 0.05,
        link: Link | None = None,
        workers: dict[str, type[StageWorker]] | None = None,
        speeds: dict[str, float] | None = None,
    ) -> None:
        self.loop, self.config, self.folder, self.seed = loop, config, folder, seed
        self.names = [f"miner-{i}" for i in range(miners)] + [f"validator-{i}" for i in range(validators)]
        self.blobs = MemoryBlobs()
        self.journal: MemoryJournal | None = None
        self.manifest: Manifest | None = None
        self.reports: list[tuple[float, str, str]] = []
        self.orchestrator: Orchestrator | None = None
        self.miners: dict[str, Miner] = {}
        self.validators: dict[str, Validator] = {}
        self.watchers: list[Callable[[ev.Event], None]] = []
        self.ended: dict[str, str] = {}
        self.failed: dict[str, IotaError] = {}
        self._identity = identity_of(seed, ORCHESTRATOR)
        self._cost, self._workers, self._speeds = cost, workers or {}, speeds or {}
        self._starts: dict[str, int] = {}
        self._lives: list[asyncio.Task[Any]] = []
        self.injector = Injector(loop, plan or FaultPlan(()), on_crash=lambda name: None, on_restart=self._restart)
        self.network = SimNetwork(loop, seed, self.injector, link or Link(latency=0.005, jitter=0.5))

    # --------------------------------------------------------------------------------------------------- lifetime

    async def start(self) -> None:
        """Create the run and start every node."""
        now, key = self.loop.now(), self._identity.key
        self.manifest = await create_run(self.config, self.blobs, key, now, self._identity.sign)
        self.journal = WatchedJournal(self.manifest.run, self.watchers)
        await self.start_node(ORCHESTRATOR)
        for name in self.names:
            await self.start_node(name)

    async def finish(self) -> RunState:
        """Wait until the run has ended and every node heard so; returns the final state."""
        while not (self.up(ORCHESTRATOR) and self.orchestrator is not None and self.orchestrator.finished):
            self._raise_failures()
            await asyncio.sleep(0.5)
        for _ in range(60):
            if all(name in self.ended or name in self.failed or not self.up(name) for name in self.names):
                break
            await asyncio.sleep(0.5)
        return await self.close()

    def _raise_failures(self) -> None:
        """A process that failed in a way no node may (a bug) ends the simulation at once, with its own error."""
        for task in self._lives:
            if task.done() and not task.cancelled():
                task.result()

    async def close(self) -> RunState:
        assert self.orchestrator is not None
        state = self.orchestrator.machine.state
        await self.orchestrator.close()
        for host in list(self.injector.hosts.values()):
            host.kill()
        await self.network.close()
        return state

    @property
    def state(self) -> RunState:
        assert self.orchestrator is not None
        return self.orchestrator.machine.state

    def events(self) -> list[ev.Event]:
        """The journal so far."""
        assert self.journal is not None
        return [ev.decode(row.payload) for row in self.journal.replay()]

    def key(self, name: str) -> str:
        return identity_of(self.seed, name).key

    # ------------------------------------------------------------------------------------------------------ nodes

    async def start_node(self, name: str) -> None:
        """Start a node, or start it again after a crash."""
        incarnation = self._starts[name] = self._starts.get(name, -1) + 1
        seconds = self._cost * self._speeds.get(name, 1.0)
        host = Host(self.loop, name, seed=self.seed, incarnation=incarnation, cost=steady(seconds))
        self.injector.attach(host)
        self.network.attach(host)
        self.ended.pop(name, None)
        self.failed.pop(name, None)
        if name == ORCHESTRATOR:
            await self._start_orchestrator(host)
        elif name.startswith("miner"):
            self._lives.append(host.spawn(self._live(name, self._miner(host).run()), name))
        else:
            self._lives.append(host.spawn(self._live(name, self._validator(host).run()), name))

    def crash(self, name: str) -> None:
        """kill -9 a node's machine; `start_node` starts it again."""
        self.injector.hosts[name].kill()

    def up(self, name: str) -> bool:
        """Whether a node's machine runs (a frozen one does)."""
        host = self.injector.hosts.get(name)
        return host is not None and not host.gate.dead

    async def _live(self, name: str, life: Coroutine[Any, Any, str]) -> None:
        """A node's process: it ends with a word, or with the error that its owner would read."""
        try:
            self.ended[name] = await life
        except IotaError as error:
            self.failed[name] = error

    async def _start_orchestrator(self, host: Host) -> None:
        assert self.manifest is not None and self.journal is not None
        self.journal.reopen()
        node = Orchestrator(
            self.manifest,
            await self.blobs.get(OBJECT),
            self._identity,
            seeded_entropy(self.seed, "secret")(32).hex(),
            journal=self.journal,
            blobs=self.blobs,
            blob_url=BLOB_URL,
            clock=host.clock,
            entropy=host.entropy,
            stop=self.config.stop,
        )
        await node.open()
        self.orchestrator = node
        self.network.listen(ORCHESTRATOR, node.handler, node=ORCHESTRATOR, limit=node.message_limit)
        self._lives.append(host.spawn(node.run(), "ticks"))

    def _caller(self, host: Host) -> Caller:
        channel = self.network.channel(host.name, ORCHESTRATOR)
        return Caller(identity_of(self.seed, host.name), channel, self._identity.key, "", host.clock.now)

    def _objects(self, host: Host) -> Objects:
        direct = DirectObjects(self.blobs, self._identity.key, self.loop.now)
        return PatientObjects(SimObjects(direct, self.network, host.name, STORE, timeout=STORE_IDLE), host.clock)

    def _report(self, name: str) -> Callable[[str], None]:
        return lambda text: self.reports.append((self.loop.time(), name, text))

    def _miner(self, host: Host) -> Miner:
        folder = self.folder / host.name
        folder.mkdir(parents=True, exist_ok=True)
        miner = self.miners[host.name] = Miner(
            MinerSettings(folder=folder),
            self._caller(host),
            self._objects(host),
            clock=host.clock,
            compute=host.compute,
            entropy=host.entropy,
            report=self._report(host.name),
            worker_class=self._worker(host.name),
        )
        return miner

    def _worker(self, name: str) -> type[StageWorker]:
        """The miner's stage worker, on a disk that faults can fill."""
        injector = self.injector

        class Simulated(self._workers.get(name, StageWorker)):  # type: ignore[misc]
            def __init__(self, *args: Any) -> None:
                super().__init__(*args)
                folder, max_disk = args[6], args[7]
                self.retention = SimRetention(folder, max_disk, injector, name)

        return Simulated

    def _validator(self, host: Host) -> Validator:
        folder = self.folder / host.name
        folder.mkdir(parents=True, exist_ok=True)

        def replayer(manifest: Manifest) -> InlineReplayer:
            engine = Engine(manifest.config, manifest.cuts, "cpu", manifest.config.train.dtype)
            return InlineReplayer(engine, host.compute)

        validator = self.validators[host.name] = Validator(
            ValidatorSettings(folder=folder),
            self._caller(host),
            self._objects(host),
            replayer,
            clock=host.clock,
            compute=host.compute,
            entropy=host.entropy,
            report=self._report(host.name),
        )
        return validator

    def _restart(self, name: str) -> None:
        self.loop.create_task(self.start_node(name), name=f"restart {name}")
