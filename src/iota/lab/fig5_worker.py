"""The process of one job of `iota lab fig5`.

    python -m iota.lab.fig5_worker < one line of JSON

It goes on until the job is done (exit 0) or its standard input ends, which is how the queue asks it to stop and what
happens when the queue is gone: it then writes a checkpoint and exits with 3.
"""

from __future__ import annotations

import fcntl
import os
import sys
import threading
import time
from pathlib import Path

import msgspec
import torch

from iota.errors import IotaError
from iota.lab.fig5_data import Tokens, open_tokens
from iota.lab.fig5_rows import Results, Row, add_row, code_digest, machine, write_rows
from iota.lab.fig5_spec import Corpus, Spec, fields
from iota.lab.fig5_train import Trainer
from iota.store.files import write_atomic

STOPPED = 3
CHECKPOINT_SECONDS = 60.0
CHECKPOINT_SHARE = 20.0
"""A checkpoint is written every so many seconds, and takes at most 1/20 of the time."""
SHOW_SECONDS = 2.0


class Order(msgspec.Struct):
    """What to do. `tokens`: the folder of the token cache; `rows`, `state`: files of results and checkpoint. A
    checkpoint is written after every `checkpoint_steps` steps, or with 0 by time."""

    spec: Spec
    corpus: Corpus
    tokens: str
    rows: str
    state: str
    device: str
    command: str
    checkpoint_steps: int = 0


def main() -> int:
    """Read the order, run the job, print what went wrong."""
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=Order)
    stop = threading.Event()
    threading.Thread(target=_watch, args=(stop,), name="input", daemon=True).start()
    try:
        return 0 if run(order, stop) else STOPPED
    except IotaError as error:
        print(f"{error.cause}. {error.remedy}", file=sys.stderr)
        return 1


def _watch(stop: threading.Event) -> None:
    """Not through the buffered reader: a thread that waits in it is in the way when the interpreter ends."""
    while os.read(0, 4096):
        continue
    stop.set()


def run(order: Order, stop: threading.Event) -> bool:
    """Run or resume the job until it ends (True) or `stop` is set (False). Raises ConfigError when another job's rows
    lie at its place, IotaError for a damaged checkpoint or cache."""
    torch.set_num_threads(1)
    tokens = open_tokens(order.corpus, Path(order.tokens))
    place = Path(order.state).with_suffix(".lock")
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the process of a queue that was killed may still write its checkpoint
        kept = Results(Path(order.rows))
        kept.check(order.spec, tokens.digest)
        return kept.end is not None or Job(order, tokens, kept.rows).run(stop)


class Job:
    """One job from its checkpoint, or from the start when there is none or its rows were removed."""

    def __init__(self, order: Order, tokens: Tokens, rows: list[Row]) -> None:
        self.order, self.tokens = order, tokens
        self.rows_path, self.state_path = Path(order.rows), Path(order.state)
        self.trainer = Trainer(order.spec, tokens, order.device)
        self.rows = self._resume(rows)
        self._saved = self._shown = time.monotonic()
        self._pause = CHECKPOINT_SECONDS

    def _resume(self, rows: list[Row]) -> list[Row]:
        """The rows that the trainer's state stands for; rows after it are dropped and will come again."""
        session: Row = {"row": "session", "machine": machine(), "device": self.order.device, "code": code_digest()}
        if rows and self.state_path.exists():
            self.trainer.restore(self.state_path, self.tokens.digest)
            if len(rows) < self.trainer.progress.rows:
                raise IotaError(
                    "corrupt", f"{self.rows_path} lacks rows of the checkpoint", "Remove both to begin anew."
                )
            rows = rows[: self.trainer.progress.rows]
        else:
            rows = [self._first_row()]
        session |= {"step": self.trainer.progress.step, "command": self.order.command}
        write_rows(self.rows_path, [*rows, session])
        return [*rows, session]

    def _first_row(self) -> Row:
        spec = self.order.spec
        return {
            "row": "job",
            "name": spec.name,
            "spec": fields(spec),
            "digest": spec.digest(),
            "data": self.tokens.digest,
            "source": self.order.corpus.source,
            "text_bytes_per_token": self.tokens.bytes_per_token,
            "parameters": self.trainer.parameters,
        }

    def run(self, stop: threading.Event) -> bool:
        """See `run` of this module."""
        trainer = self.trainer
        try:
            while not trainer.finished:
                if stop.is_set():
                    self._save()
                    return False
                begin = time.perf_counter()
                measure = trainer.advance()
                trainer.progress.seconds += time.perf_counter() - begin
                if measure:
                    self._add({"row": "heldout", **trainer.measure(), "seconds": round(trainer.progress.seconds, 1)})
                self._look()
        except IotaError as error:
            if error.code != "not_finite":
                raise
            self._end({"outcome": "diverged", "why": error.cause})
            return True
        self._end({"outcome": "done", "weights": trainer.digest(), **trainer.crossed()})
        return True

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        add_row(self.rows_path, row)

    def _end(self, row: Row) -> None:
        step, seconds = self.trainer.progress.step, round(self.trainer.progress.seconds, 1)
        self._add({"row": "end", "step": step, **row, "seconds": seconds})
        self.state_path.unlink(missing_ok=True)

    def _look(self) -> None:
        """Between two steps: a checkpoint when it is time, and how far the job is."""
        now, progress = time.monotonic(), self.trainer.progress
        steps = self.order.checkpoint_steps
        if (steps and progress.step % steps == 0) or (not steps and now - self._saved >= self._pause):
            self._save()
        if now - self._shown >= SHOW_SECONDS:
            self._shown = now
            text = f"{progress.step} {progress.seconds:.1f}".encode()
            write_atomic(self.state_path.with_suffix(".step"), [text], durable=False)

    def _save(self) -> None:
        begin = time.monotonic()
        self.trainer.progress.rows = len(self.rows)
        self.trainer.save(self.state_path, self.tokens.digest)
        self._saved = time.monotonic()
        self._pause = max(CHECKPOINT_SECONDS, CHECKPOINT_SHARE * (self._saved - begin))


if __name__ == "__main__":
    sys.exit(main())
