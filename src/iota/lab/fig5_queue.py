"""Runs the jobs of `iota lab fig5` in child processes, a few at a time, until they are done or time is up.

A child computes with one thread. It stops, after a checkpoint, when its standard input ends: so it does when this
process asks, and also when this process is gone however it ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import msgspec

from iota.errors import IotaError
from iota.lab.fig5_rows import Results
from iota.lab.fig5_spec import Corpus, Spec
from iota.lab.fig5_worker import STOPPED, Order

LOOK_SECONDS = 0.2
STOP_SECONDS = 180.0
"""A child that was asked to stop has so long for its step and checkpoint."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")


@dataclass
class Place:
    """Where everything lies. `work`: checkpoints, logs and tokens; `results`: one file of rows a job, to be kept."""

    work: Path
    results: Path
    corpus: Corpus
    device: str
    command: str
    checkpoint_steps: int = 0

    def rows(self, spec: Spec) -> Path:
        return self.results / f"{spec.name}.jsonl"

    def state(self, spec: Spec) -> Path:
        return self.work / "jobs" / f"{spec.name}.safetensors"

    @property
    def tokens(self) -> Path:
        return self.work / "tokens"

    def order(self, spec: Spec) -> Order:
        return Order(
            spec=spec,
            corpus=self.corpus,
            tokens=str(self.tokens),
            rows=str(self.rows(spec)),
            state=str(self.state(spec)),
            device=self.device,
            command=self.command,
            checkpoint_steps=self.checkpoint_steps,
        )


@dataclass
class Outcome:
    """Names of jobs by how they stand after a run of the queue. `failed` with the last line of the job's log."""

    done: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


@dataclass
class _Child:
    spec: Spec
    process: subprocess.Popen[bytes]
    log: IO[bytes]
    log_path: Path


class Queue:
    """The jobs of one call. `parallel` children at a time, for at most `seconds` (None: until all are done)."""

    def __init__(self, place: Place, jobs: Sequence[Spec], parallel: int, seconds: float | None) -> None:
        self.place, self.parallel = place, parallel
        self._limit = None if seconds is None else time.monotonic() + seconds
        self.outcome = Outcome()
        self.total = len(jobs)
        self._pending = [spec for spec in jobs if not self._finished(spec)]
        self.outcome.done = [spec.name for spec in jobs if spec not in self._pending]
        self._children: list[_Child] = []

    def _finished(self, spec: Spec) -> bool:
        return Results(self.place.rows(spec)).end is not None

    def run(self, show: Callable[[str], None]) -> Outcome:
        """Run what is left; `show` gets a line about how far it is whenever one changed. Children never outlive this
        call, also when it ends by an exception such as KeyboardInterrupt. Raises IotaError `busy` when another queue
        works in the same folder."""
        self.place.work.mkdir(parents=True, exist_ok=True)
        with (self.place.work / "lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise IotaError(
                    "busy", f"another lab works in {self.place.work}", "Wait for it, or give another --work."
                ) from None
            try:
                self._loop(show)
            finally:
                self._stop()
        return self.outcome

    def _loop(self, show: Callable[[str], None]) -> None:
        told = ""
        while self._pending or self._children:
            if self._limit is not None and time.monotonic() >= self._limit:
                return
            while self._pending and len(self._children) < self.parallel:
                self._children.append(self._start(self._pending.pop(0)))
            self._reap()
            line = self.line()
            if line != told:
                told = line
                show(line)
            time.sleep(LOOK_SECONDS)

    def line(self) -> str:
        """How far the queue is, in one line."""
        running = "; ".join(
            f"{child.spec.name} {self._step(child.spec)}/{child.spec.steps}" for child in self._children
        )
        failed = f", {len(self.outcome.failed)} failed" if self.outcome.failed else ""
        return f"{len(self.outcome.done)} of {self.total} done{failed}; running: {running or 'nothing'}"

    def _step(self, spec: Spec) -> int:
        try:
            return int(self.place.state(spec).with_suffix(".step").read_text(encoding="ascii").split()[0])
        except (OSError, ValueError, IndexError):
            return 0

    def _start(self, spec: Spec) -> _Child:
        path = self.place.state(spec).with_suffix(".log")
        path.parent.mkdir(parents=True, exist_ok=True)
        log = path.open("wb")
        process = subprocess.Popen(
            [sys.executable, "-m", "iota.lab.fig5_worker"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env={**os.environ, **dict.fromkeys(THREAD_VARIABLES, "1")},
            start_new_session=True,  # Ctrl-C at the terminal reaches this process alone, which then asks the children
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended at once; its log says why
            process.stdin.write(msgspec.json.encode(self.place.order(spec)) + b"\n")
            process.stdin.flush()
        return _Child(spec, process, log, path)

    def _reap(self) -> None:
        for child in [child for child in self._children if child.process.poll() is not None]:
            self._children.remove(child)
            self._close(child)

    def _close(self, child: _Child) -> None:
        """Book a child that has ended."""
        child.log.close()
        if child.process.stdin is not None and not child.process.stdin.closed:
            child.process.stdin.close()
        name, code = child.spec.name, child.process.returncode
        if code == 0 and self._finished(child.spec):
            self.outcome.done.append(name)
            for ending in (".log", ".step", ".lock"):
                child.log_path.with_suffix(ending).unlink(missing_ok=True)
        elif code == STOPPED:
            self.outcome.left.append(name)
        else:
            lines = child.log_path.read_text("utf-8", "replace").strip().splitlines()
            self.outcome.failed[name] = lines[-1] if lines else f"ended with {code}; nothing is in {child.log_path}"

    def _stop(self) -> None:
        """Ask every child to stop, wait for checkpoints, kill what does not listen."""
        for child in self._children:
            assert child.process.stdin is not None
            child.process.stdin.close()
        limit = time.monotonic() + STOP_SECONDS
        for child in self._children:
            try:
                child.process.wait(max(0.1, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
            self._close(child)
        self._children.clear()
        self.outcome.left += [spec.name for spec in self._pending]
        self._pending.clear()
