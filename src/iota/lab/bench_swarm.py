"""`iota bench swarm`: what the protocol costs. Tokens a second of a real six-miner swarm against plain PyTorch.

In turns, in one run, on the same cores: a swarm (processes over HTTP, journal, signatures, transcripts),
then, while the swarm is paused by its operator, plain PyTorch on the same model, data, batch, accumulation and dtype in
two ways (one process with all cores; one single-threaded replica a core without any exchange, rates added; the better
of the two counts), then the six stage processes computing without any protocol ("bare").

How each rate is counted:
* swarm: accepted backward passes in the window (journal events and times) / stages x tokens of a sample / seconds;
* plain: samples in the window x tokens of a sample / seconds, summed over replicas;
* bare: each of the six processes loops over forward, backward and step of its stage on inputs that never change; no
  stage may be more than a few samples ahead of the slowest, so each group does the same number; the rate is the least
  over stages of (samples of its two processes in the window) x tokens of a sample / seconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import msgspec
import numpy as np

from iota.config.load import check, save_run
from iota.config.schema import RunConfig
from iota.core.machine import events as ev
from iota.core.queries import EventsFrom, Operate, Status
from iota.errors import ConfigError, IotaError, Unreachable
from iota.lab.bench_workers import Done, Job, progress
from iota.model.partition import count_parameters, cut_blocks, stage_cost
from iota.nodes.ask import Asker
from iota.nodes.folder import RunFolder
from iota.nodes.real import RealClock, entropy
from iota.store.blobs import FolderBlobs
from iota.store.manifest import OBJECT, read_manifest
from iota.store.tokens import TokenReader
from iota.wire.keys import Identity

SAMPLES = 64
"""Training samples that the yardsticks cycle through."""
START_LIMIT = 300.0
PAGE = 5_000


@dataclass
class Window:
    """One turn of the swarm: tokens a second, tokens per CPU-second of all its processes (0 where that cannot be read),
    how many backward passes there were and how many of them had to run the forward again, and each role's cores."""

    tokens_per_s: float
    per_cpu_s: float
    recomputed: int
    backwards: int
    cores: dict[str, float]


# ------------------------------------------------------------------------------------------------- the yardsticks


def run_workers(jobs: Sequence[Job]) -> list[Done]:
    """Start the processes, let them begin together, and return what each did. IotaError `bench_failed`."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        for job in jobs:
            environment = {**os.environ, "OMP_NUM_THREADS": str(job.threads), "OPENBLAS_NUM_THREADS": "1"}
            command = [sys.executable, "-m", "iota.lab.bench_workers"]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
            started.append(process)
            _tell(process, msgspec.json.encode(job))
        for process in started:
            _hear(process)
        begin = time.monotonic() + 0.1
        for process in started:
            _tell(process, repr(begin).encode())
        return [msgspec.json.decode(_hear(process), type=Done) for process in started]
    finally:
        end_processes(started)


def _tell(process: subprocess.Popen[bytes], line: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(line + b"\n")
    process.stdin.flush()


def _hear(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise IotaError("bench_failed", "a worker process ended early", "Its error stands above.")
    return line


def end_processes(processes: Sequence[subprocess.Popen[bytes]], patience: float = 10.0) -> None:
    """Interrupt what still runs, kill what does not listen."""
    for process in processes:
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        if process.poll() is None:
            process.terminate()
    limit = time.monotonic() + patience
    for process in processes:
        try:
            process.wait(max(0.1, limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@dataclass
class Rate:
    """Tokens a second of wall time, and per CPU-second: the figure that other work on the machine disturbs less."""

    per_s: float
    per_cpu_s: float


def plain_rate(config: RunConfig, run: Path, samples: Path, replicas: int, threads: int, seconds: float) -> Rate:
    """Plain PyTorch."""
    jobs = [
        Job("plain", str(run), str(samples), worker, replicas, threads, warmup=min(3.0, seconds / 4), seconds=seconds)
        for worker in range(replicas)
    ]
    done = run_workers(jobs)
    tokens = _tokens(config)
    return Rate(tokens * sum(d.samples for d in done) / seconds, tokens * sum(d.per_cpu_s for d in done) / replicas)


def bare_rate(config: RunConfig, run: Path, samples: Path, seconds: float) -> Rate:
    """The six stage processes without any protocol. Per CPU-second: a sample costs the sum over stages of what it costs
    the stage's processes."""
    stages, miners = config.stages.count, config.swarm.miners
    members = miners // stages
    counters = samples.with_name("counters.bin")
    counters.write_bytes(bytes(8 * members * stages))
    jobs = [
        Job(
            "bare", str(run), str(samples), worker, members * stages, 1, warmup=min(3.0, seconds / 4), seconds=seconds,
            stage=worker // members, members=members, counters=str(counters),
        )
        for worker in range(members * stages)
    ]  # fmt: skip
    done = run_workers(jobs)
    groups = [done[stage * members : (stage + 1) * members] for stage in range(stages)]
    least = min(sum(d.samples for d in group) for group in groups)
    cost = sum(members / sum(d.per_cpu_s for d in group) for group in groups)
    return Rate(_tokens(config) * least / seconds, _tokens(config) / cost)


def _tokens(config: RunConfig) -> int:
    return config.train.batch * config.model.sequence


# ------------------------------------------------------------------------------------------------------- the swarm


@dataclass
class Swarm:
    """Real processes of the command line in `folder`, driven by the operator's key. Use `start`, then `window`."""

    config: RunConfig
    folder: RunFolder
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    _seq: int = 1
    _logs: list[IO[bytes]] = field(default_factory=list)

    async def start(self) -> None:
        """Start services and miners and wait for TRAIN. Raises IotaError `bench_failed`."""
        self.folder.logs.mkdir(parents=True, exist_ok=True)
        self.folder.run_file.write_text(save_run(self.config), encoding="utf-8")
        self._spawn("blobs", "blobs", str(self.folder.run_file))
        self._spawn("orchestrator", "orchestrator", str(self.folder.run_file))
        await self._until("the run is created", self._created)
        url = self.folder.join_url.read_text(encoding="ascii").strip()
        for number in range(self.config.swarm.miners):
            home = str(self.folder.path / f"miner-{number}")
            self._spawn(f"miner-{number}", *miner_arguments(url, home, self.config.train.dtype))
        await self._until("all miners train", self._training)

    def _spawn(self, name: str, *arguments: str) -> None:
        log = (self.folder.logs / f"{name}.log").open("ab")
        self._logs.append(log)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "iota.cli.main", *arguments]
        self.processes.append(
            subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        )

    async def _until(self, what: str, true: object) -> None:
        assert callable(true)
        end = time.monotonic() + START_LIMIT
        while not await true():
            dead = [name for name, p in zip(self._names(), self.processes, strict=True) if p.poll() is not None]
            if dead or time.monotonic() > end:
                why = f"{dead[0]} ended" if dead else f"{START_LIMIT:g} s passed"
                log = (self.folder.logs / f"{dead[0] if dead else 'orchestrator'}.log").read_text("utf-8", "replace")
                raise IotaError("bench_failed", f"{why} before {what}; its log ends: {log[-1500:]}")
            await asyncio.sleep(0.5)

    def _names(self) -> list[str]:
        return [Path(log.name).stem for log in self._logs]

    async def _created(self) -> bool:
        try:
            await self._ask(Status())
        except (Unreachable, OSError):
            return False
        return True

    async def _training(self) -> bool:
        status = json.loads(await self._ask(Status()))
        members = [m for stage in status["stages"] for m in stage["miners"]]
        trained = all(m["passes_epoch"] > 0 for m in members)
        return status["phase"] == "train" and len(members) == self.config.swarm.miners and trained

    async def _ask(self, query: Status | EventsFrom | Operate) -> bytes:
        url = self.folder.join_url.read_text(encoding="ascii").strip()
        operator = Identity.load(self.folder.operator_key)
        async with Asker(url, clock=RealClock(), entropy=entropy, identity=operator) as asker:
            return await asker.ask(query)

    async def _rows(self) -> list[tuple[float, ev.Event]]:
        """Journal rows since the last call."""
        rows: list[tuple[float, ev.Event]] = []
        while True:
            page = msgspec.msgpack.decode(await self._ask(EventsFrom(seq=self._seq, limit=PAGE)))
            rows += [(at, ev.decode(payload)) for _, at, payload in page]
            if not page:
                return rows
            self._seq = page[-1][0] + 1

    async def window(self, settle: float, seconds: float) -> Window:
        """Measure `seconds` of TRAIN that begin `settle` seconds from now."""
        await asyncio.sleep(settle)
        start, before = time.time(), self._cpu()
        await asyncio.sleep(seconds)
        stop, after = time.time(), self._cpu()
        await asyncio.sleep(2.0)  # the pass that straddles the edge
        passes = [(at, e) for at, e in await self._rows() if isinstance(e, ev.Passed) and e.kind != "f"]
        within = [e for at, e in passes if start <= at <= stop and e.kind == "b"]
        done = progress([at for at, _ in passes], start, stop) if len(passes) > 1 else 0.0
        tokens = done / self.config.stages.count * _tokens(self.config)
        cores = {role: round((after[role] - before[role]) / (stop - start), 3) for role in after}
        per_cpu = tokens / (stop - start) / sum(cores.values()) if sum(cores.values()) else 0.0
        return Window(tokens / (stop - start), per_cpu, sum(e.recomputed for e in within), len(within), cores)

    def _cpu(self) -> dict[str, float]:
        """CPU seconds so far by role."""
        seconds: dict[str, float] = {}
        for name, process in zip(self._names(), self.processes, strict=True):
            role = name.split("-")[0]
            seconds[role] = seconds.get(role, 0.0) + cpu_seconds(process.pid)
        return seconds

    async def order(self, command: str) -> None:
        """pause | resume | stop."""
        await self._ask(Operate(command=command, target=""))

    async def samples(self) -> np.ndarray:
        """The run's first training samples: int64 [SAMPLES, 2, batch, sequence], ids and labels."""
        key = self.folder.public_key.read_text(encoding="ascii").strip()
        blobs = FolderBlobs(self.folder.blobs)
        manifest = read_manifest(await blobs.get(OBJECT), key)
        reader = TokenReader.train(manifest, blobs.get)
        return np.stack([np.stack(await reader.batch_windows(sample)) for sample in range(SAMPLES)])

    def end(self) -> None:
        end_processes(self.processes)
        for log in self._logs:
            log.close()


def cpu_seconds(pid: int) -> float:
    """User and system time of a running process, 0.0 where /proc does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def miner_arguments(url: str, home: str, dtype: str) -> list[str]:
    return ["miner", url, "--folder", home, "--threads", "1", "--device", "cpu", "--dtype", dtype]


def bench_config(config: RunConfig, folder: Path, dtype: str) -> RunConfig:
    """The recipe with the run's own folder, free ports, and the wanted dtype."""
    first, second = _free_ports(2)
    swarm = msgspec.structs.replace(config.swarm, port=first, blob_port=second, validators=0)
    train = msgspec.structs.replace(config.train, dtype=dtype) if dtype else config.train
    return check(msgspec.structs.replace(config, folder=str(folder), swarm=swarm, train=train))


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


# ------------------------------------------------------------------------------------------------------ everything


async def measure(
    config: RunConfig, *, seconds: float = 60.0, turns: int = 2, dtype: str = "", folder: Path | None = None
) -> dict[str, object]:
    """The whole benchmark. Raises ConfigError for a run that the yardstick does not train alike, IotaError when a
    process fails; the swarm's folder is removed unless given."""
    if config.train.optimizer != "adamw":
        raise ConfigError(
            f"the plain yardstick steps by AdamW, not {config.train.optimizer}", "Write train.optimizer = 'adamw'"
        )
    with tempfile.TemporaryDirectory(prefix="iota-bench-") as name:
        home = folder or Path(name)
        swarm = Swarm(bench_config(config, home, dtype), RunFolder(home))
        try:
            await swarm.start()
            rows = await _turns(swarm, seconds, turns)
        finally:
            swarm.end()
    return summary(swarm.config, rows, seconds)


@dataclass
class Turns:
    """What the turns gave, one item a turn."""

    swarm: list[Window] = field(default_factory=list)
    one_process: list[Rate] = field(default_factory=list)
    replicas: list[Rate] = field(default_factory=list)
    bare: list[Rate] = field(default_factory=list)


async def _turns(swarm: Swarm, seconds: float, turns: int) -> Turns:
    """A B A B."""
    config, run, cores = swarm.config, swarm.folder.run_file, os.cpu_count() or 1
    samples = swarm.folder.path / "samples.npy"
    np.save(samples, await swarm.samples())
    rows = Turns()
    for turn in range(turns):
        if turn:
            await swarm.order("resume")
        rows.swarm.append(await swarm.window(min(10.0, seconds / 2), seconds))
        await swarm.order("pause")
        await asyncio.sleep(3.0)  # passes that were begun come to their end
        rows.one_process.append(await asyncio.to_thread(plain_rate, config, run, samples, 1, cores, seconds))
        rows.replicas.append(await asyncio.to_thread(plain_rate, config, run, samples, cores, 1, seconds))
        rows.bare.append(await asyncio.to_thread(bare_rate, config, run, samples, seconds))
    return rows


def recompute_ceiling(config: RunConfig, share: float, cuts: Sequence[tuple[int, int]]) -> float:
    """Largest part of the bare rate left when `share` of the backward passes before the last stage run their forward
    again: a backward costs two forwards, so a sample costs 3 * sum(c) and the repeats share * sum(c but the last)."""
    costs = [stage_cost(config, stage, cut) for stage, cut in enumerate(cuts)]
    return 1.0 / (1.0 + share * sum(costs[:-1]) / (3 * sum(costs)))


def summary(config: RunConfig, rows: Turns, seconds: float) -> dict[str, object]:
    """What is printed: means over turns, the better plain PyTorch as the reference, and the spread of the ratio.

    `ratio_per_cpu` compares tokens per CPU-second with single-threaded plain PyTorch: nearly the same figure on an idle
    machine, and much less moved by other work on a busy one.
    """
    swarm = [window.tokens_per_s for window in rows.swarm]
    plain = {"one_process": rows.one_process, "replicas": rows.replicas}
    reference = max(plain, key=lambda name: _mean([rate.per_s for rate in plain[name]]))
    better = [rate.per_s for rate in plain[reference]]
    bare = _mean([rate.per_s for rate in rows.bare])
    cuts = cut_blocks(config)
    share = sum(w.recomputed for w in rows.swarm) / max(1, sum(w.backwards for w in rows.swarm))
    ceiling = recompute_ceiling(config, share, cuts)
    ratio, ratio_bare = _mean(swarm) / _mean(better), _mean(swarm) / bare
    low, high = min(swarm) / max(better), max(swarm) / min(better)
    per_cpu = _mean([window.per_cpu_s for window in rows.swarm])
    return {
        "bench": "swarm",
        "tokens_per_s": round(_mean(swarm), 1),
        "reference_tokens_per_s": round(_mean(better), 1),
        "bare_tokens_per_s": round(bare, 1),
        "ratio": round(ratio, 4),
        "ratio_min": round(low, 4),
        "ratio_max": round(high, 4),
        "ratio_bare": round(ratio_bare, 4),
        "ratio_per_cpu": round(per_cpu / _mean([rate.per_cpu_s for rate in rows.replicas]), 4),
        "ratio_bare_per_cpu": round(per_cpu / _mean([rate.per_cpu_s for rate in rows.bare]), 4),
        "recomputed_share": round(share, 4),
        "ceiling": round(ceiling * bare / _mean(better), 4),
        "ceiling_bare": round(ceiling, 4),
        "reference": reference,
        "turns": msgspec.to_builtins(rows),
        "seconds": seconds,
        "parameters": sum(count_parameters(config, stage, cut) for stage, cut in enumerate(cuts)),
        "miners": config.swarm.miners,
        "dtype": config.train.dtype,
        "cores": os.cpu_count(),
        "sentence": (
            f"The swarm of {config.swarm.miners} miners trains {_mean(swarm):,.0f} tokens/s, plain PyTorch "
            f"({reference.replace('_', ' ')}) {_mean(better):,.0f}: ratio {ratio:.2f} ({low:.2f} to {high:.2f} over "
            f"{len(swarm)} turns of {seconds:g} s); {ratio_bare:.2f} of the bare stages, where recomputing {share:.0%} "
            f"of the forwards allows {ceiling:.2f}."
        ),
    }


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
