"""The work of one stage: passes, steps, transcript, snapshots, commit. Synchronous; runs on the compute thread.

`StageWorker.turn` is one hand-over of the loop: the verdict on the last result, whether to step, the next task. The
order of the transcript is the order of what was done here. Nothing enters the weights before the orchestrator accepted
it: a pass stays in the trainer's scratch gradient until the verdict comes (design section 3.1).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from iota.config.schema import Manifest
from iota.core import tasks
from iota.core.manifest import ChunkManifest, build_manifest, commitment, encode
from iota.core.reduce import Outer
from iota.core.values import Checkpoint, Cut, Digest, Key, Tensor, TensorHead, sha256
from iota.errors import IotaError
from iota.model.trainer import StageState, StageTrainer
from iota.nodes.evidence import ACTIVATION, GRADIENT, Chain, check_producer, snapshot_parts
from iota.nodes.miner.load import Floats, check_checkpoint, recomputed_root
from iota.nodes.miner.retain import Buffer, EpochShelf, Retention, digest_of

FAILURES = {
    "disk_full": "no_disk",
    "disk_failed": "no_disk",
    "no_disk": "no_disk",
    "no_memory": "no_memory",
    "not_finite": "not_finite",
    "stale": "stale",
    "too_late": "too_late",
    "no_object": "no_object",
    "corrupt": "no_object",
    "expired": "no_object",
    "bad_range": "no_object",
    "bad_signature": "no_object",
    "unreachable": "no_object",
}
"""From an error's code to that of `Failed`; any other is bad_input."""


def failed(task: int, error: IotaError) -> tasks.Failed:
    """What the orchestrator is told of a task that could not be done."""
    return tasks.Failed(
        task=task, code=FAILURES.get(error.code, "bad_input"), text=f"{error.code}: {error.cause}"[:300]
    )


@dataclass(frozen=True)
class Given:
    """What a task came with: attached tensors with their heads (load: none), token ids and labels [batch, T], and for a
    load its checkpoint with the parts fetched."""

    tensors: tuple[Tensor, ...] = ()
    heads: tuple[TensorHead, ...] = ()
    ids: np.ndarray | None = None
    labels: np.ndarray | None = None
    checkpoint: Checkpoint | None = None
    arrays: dict[str, Floats] = field(default_factory=dict)


@dataclass(frozen=True)
class Work:
    """A task's result with the tensor to attach, and what its owner should read."""

    result: tasks.Result | None
    tensors: tuple[Tensor, ...] = ()
    heads: tuple[TensorHead, ...] = ()
    notices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Upload:
    """A committed upload. `pieces` are views of `arrays`; the trainer must not step while it lives."""

    epoch: int
    arrays: dict[str, Floats]
    manifest: ChunkManifest
    encoded: bytes
    pieces: list[Buffer]
    result: tasks.Committed


@dataclass(frozen=True)
class _Pending:
    """The result whose verdict is awaited."""

    sample: int
    gradient: bool
    cut: Cut | None


class StageWorker:
    """A stage of one session. Small methods are there to be replaced in tests: `run_forward`, `run_loss`,
    `run_backward`, `train_step`, `output_of`, `upload_arrays`."""

    def __init__(
        self, manifest: Manifest, key: Key, stage: int, session: int, device: str, dtype: str, folder: Path,
        max_disk: int = 0,
    ) -> None:  # fmt: skip
        config = manifest.config
        self.config, self.run, self.key, self.stage, self.session = config, manifest.run, key, stage, session
        self.parameters = manifest.parameters[stage]
        self.trainer = StageTrainer(config, stage, manifest.cuts[stage], device, dtype)
        self.outer = Outer(config.merge.outer, config.merge.outer_lr, config.merge.outer_momentum)
        self.moments = config.merge.inner_state == "merge"
        self.retention = Retention(folder, max_disk)
        self.base: dict[str, Floats] = {}
        """The common state this epoch began from: weights, and as merged momentum (outer), m, v. Absent: zeros."""
        self.reduced: dict[Digest, Floats] = {}
        """Results of own shards by digest: they need not be downloaded at the sync that follows."""
        self.upload: Upload | None = None
        self.epoch = 0
        """The epoch trained in (one more than the loaded checkpoint's); 0: nothing is loaded."""
        self.steps = 0
        self.passes = 0
        """Accepted passes since the last step."""
        self.segment_steps = 1
        self.chain = Chain(self.run, key, session, 0)
        self.shelf: EpochShelf | None = None
        self._untold: list[Cut] = []
        self._pending: _Pending | None = None
        self._notices: list[str] = []

    # ------------------------------------------------------------------------------------------------ the hand-over

    def turn(self, accepted: bool, step: bool, task: tasks.Task | None, given: Given) -> Work:
        """Settle the last result, step if told, do the task (Load, Prove, Forward, Backward, Commit; else nothing)."""
        self._settle(accepted, step)
        work = Work(None)
        if isinstance(task, tasks.Load | tasks.Forward | tasks.Backward | tasks.Commit):
            try:
                work = self._do(task, given)
            except IotaError as error:
                self._notices.append(str(error))
                work = Work(failed(task.task, error))
            except (MemoryError, torch.OutOfMemoryError) as error:
                self._notices.append(f"out of memory: {error}")
                work = Work(tasks.Failed(task=task.task, code="no_memory", text=str(error)[:300]))
        notices, self._notices = tuple(self._notices), []
        return Work(work.result, work.tensors, work.heads, notices)

    def abandon(self) -> None:
        """The result that awaits its verdict will never get one (it was withdrawn): as if it had been refused."""
        self._settle(False, False)

    def _settle(self, accepted: bool, step: bool) -> None:
        pending, self._pending = self._pending, None
        if pending is not None and accepted:
            if pending.gradient:
                self.trainer.accept()
                self.passes += 1
            if pending.cut is not None:
                self._untold.remove(pending.cut)
        elif pending is not None:
            if pending.gradient:
                self.trainer.drop()
            else:
                self.trainer.forget(pending.sample)
            self.chain.add("drop", pending.sample, "", "")
        if step:
            self._step()

    def _do(self, task: tasks.Load | tasks.Forward | tasks.Backward | tasks.Commit, given: Given) -> Work:
        if isinstance(task, tasks.Load):
            return self._load(task, given)
        if self.epoch != task.epoch:
            raise IotaError("stale", f"the task is of epoch {task.epoch}, this stage is loaded for epoch {self.epoch}")
        if isinstance(task, tasks.Commit):
            return Work(self.commit(task))
        return self._forward(task, given) if isinstance(task, tasks.Forward) else self._backward(task, given)

    # --------------------------------------------------------------------------------------------------------- load

    def release(self) -> None:
        """Another state is about to be fetched: free what only the old one's merge needed. Until it is loaded, every
        other task is stale."""
        self.base, self.upload, self.epoch = {}, None, 0

    def _load(self, task: tasks.Load, given: Given) -> Work:
        checkpoint, arrays = given.checkpoint, given.arrays
        assert checkpoint is not None, "a load comes with its checkpoint"
        check_checkpoint(
            checkpoint, run=self.run, epoch=task.epoch, stage=self.stage, parameters=self.parameters, t=task.t
        )
        root = recomputed_root(checkpoint, arrays)
        if root != checkpoint.root():
            raise IotaError("corrupt", f"the bytes fetched for epoch {task.epoch} are not the checkpoint's")
        m, v = self._moments_for(task, arrays)
        self.trainer.load(arrays["weights"], m, v, task.t, task.tokens, task.tokens_per_step)
        self.base, self.upload, self.reduced = arrays, None, {}
        self.epoch, self.steps, self.segment_steps = task.epoch + 1, 0, max(1, task.segment_steps)
        self.passes, self._pending, self._untold = 0, None, []
        self.chain = Chain(self.run, self.key, self.session, self.epoch)
        self.chain.add("load", -1, root, "")
        self.shelf = self.retention.begin(self.epoch, self.chain)
        self._cut(write=self.config.merge.inner_state == "carry")
        self._untold.clear()  # the first cut is the loaded state: it goes with the commitment alone
        return Work(tasks.Loaded(task=task.task, root=root, seconds=0.0))

    def _moments_for(self, task: tasks.Load, arrays: dict[str, Floats]) -> tuple[Floats | None, Floats | None]:
        """The inner moments to start with: merged, carried over a sync, or zeros (None)."""
        if self.moments:
            return arrays.get("m"), arrays.get("v")
        if self.config.merge.inner_state == "carry" and isinstance(task, tasks.Prove) and self.trainer.loaded:
            state = self.trainer.state()
            return state.m, state.v
        return None, None

    # ------------------------------------------------------------------------------------------------------- passes

    def _forward(self, task: tasks.Forward, given: Given) -> Work:
        last = self.trainer.last
        x, inp = self._received(given, 0, task.sample, task.origin) if self.stage else (None, "")
        loss = None
        if last:
            assert given.labels is not None
            out, loss = self.run_loss(task.sample, x, given.ids, given.labels)
        else:
            out = self.run_forward(task.sample, x, given.ids)
        kept = [(ACTIVATION, 0, task.origin)] if self.stage else []
        return self._pass(task, given, kept, out, last, inp, loss, False, "")

    def _backward(self, task: tasks.Backward, given: Given) -> Work:
        gradient, inp = self._received(given, 0, task.sample, task.origin)
        kept, x, taken = [(GRADIENT, 0, task.origin)], None, ""
        if task.with_input and self.stage:
            x, taken = self._received(given, 1, task.sample, task.input_origin)
            kept.append((ACTIVATION, 1, task.input_origin))
        out, recomputed = self.run_backward(task.sample, gradient, x, given.ids if task.with_input else None)
        return self._pass(task, given, kept, out, True, inp, None, recomputed, taken)

    def _received(self, given: Given, index: int, sample: int, origin: bytes) -> tuple[Tensor, Digest]:
        """A boundary tensor that came with the task, its signed origin checked."""
        if index >= len(given.tensors):
            raise IotaError("bad_input", f"the task of sample {sample} came without its tensor {index}")
        check_producer(origin, self.run, sample, given.heads[index].digest)
        return given.tensors[index], given.heads[index].digest

    def _pass(
        self, task: tasks.Forward | tasks.Backward, given: Given, kept: list[tuple[str, int, bytes]],
        out: Tensor | None, gradient: bool, inp: Digest, loss: float | None, recomputed: bool, taken: Digest,
    ) -> Work:  # fmt: skip
        """Keep the evidence, write the transcript, make the result. Without evidence there is no result: a pass whose
        tensors cannot be kept is dropped again."""
        out = self.output_of(task, out)
        head = out.head() if out is not None else None
        try:
            self._retain(task.sample, given, kept, out, head, GRADIENT if gradient else ACTIVATION)
        except IotaError:
            self.trainer.drop() if gradient else self.trainer.forget(task.sample)
            raise
        if taken:
            self.chain.add("forward", task.sample, taken, "")
        op = "forward" if isinstance(task, tasks.Forward) else "backward"
        digest = head.digest if head else ""
        self.chain.add(op, task.sample, inp, digest, loss=loss)
        cut = self._untold[0] if self._untold else None
        self._pending = _Pending(task.sample, gradient, cut)
        result = tasks.Passed(
            task=task.task, sample=task.sample, head=self.chain.head, inp=inp, out=digest, cut=cut, loss=loss,
            seconds=0.0, recomputed=recomputed,
        )  # fmt: skip
        return Work(result, (out,) if out is not None else (), (head,) if head is not None else ())

    def _retain(
        self, sample: int, given: Given, kept: list[tuple[str, int, bytes]], out: Tensor | None,
        head: TensorHead | None, kind: str,
    ) -> None:  # fmt: skip
        assert self.shelf is not None
        for name, index, origin in kept:
            self.retention.keep(self.shelf.inputs, name, sample, given.tensors[index], given.heads[index], origin)
        if out is not None and head is not None:
            self.retention.keep(self.shelf.outputs, kind, sample, out, head)

    def run_forward(self, sample: int, x: Tensor | None, ids: np.ndarray | None) -> Tensor | None:
        """The stage's output."""
        return self.trainer.forward(sample, x, ids)

    def run_loss(
        self, sample: int, x: Tensor | None, ids: np.ndarray | None, labels: np.ndarray
    ) -> tuple[Tensor | None, float]:
        """The last stage's gradient and loss."""
        return self.trainer.forward_loss(sample, x, ids, labels)

    def run_backward(
        self, sample: int, gradient: Tensor, x: Tensor | None, ids: np.ndarray | None
    ) -> tuple[Tensor | None, bool]:
        """The gradient to the stage before, and whether the forward ran again."""
        return self.trainer.backward(sample, gradient, x, ids)

    def output_of(self, task: tasks.Forward | tasks.Backward, out: Tensor | None) -> Tensor | None:
        """What is sent."""
        return out

    # -------------------------------------------------------------------------------------------- steps and snapshots

    def _step(self) -> None:
        """An inner step, told by the orchestrator. It counts even when its gradient was useless (the orchestrator
        counted it); the weights then stay as they are and the owner is told."""
        passes, self.passes = self.passes, 0
        self.steps += 1
        try:
            self.train_step()
        except IotaError as error:
            self._notices.append(f"inner step {self.steps} changed nothing: {error}")
        self.trainer.steps = self.steps
        self.chain.add("step", -1, "", self.trainer.weights_digest(), passes)
        if self.steps % self.segment_steps == 0:
            try:
                self._cut()
            except IotaError as error:
                self._notices.append(f"no snapshot after step {self.steps}, its segment grows longer: {error}")

    def train_step(self) -> None:
        """Clip, AdamW."""
        self.trainer.step()

    def _cut(self, write: bool = True) -> None:
        """Take a snapshot and commit to it with the next result."""
        assert self.shelf is not None
        state = self.trainer.state()
        parts = snapshot_parts(state.t, state.weights, state.m, state.v)
        if write:
            self.retention.snapshot(self.shelf, self.steps, parts)
        cut = Cut(self.steps, digest_of(parts))
        self.shelf.cuts.append(cut)
        self._untold.append(cut)

    # ------------------------------------------------------------------------------------------------------- merging

    def commit(self, task: tasks.Commit) -> tasks.Committed:
        """Build the upload and commit to it, to the final snapshot and to the transcript."""
        assert self.shelf is not None
        if self.steps == 0:
            raise IotaError("stale", "no inner step was done this epoch: there is nothing to commit to")
        if self.shelf.cuts[-1].step != self.steps:
            self._cut()
        arrays = self.upload_arrays(self.trainer.state())
        try:
            manifest, pieces = build_manifest(list(arrays.items()))
        except ValueError as error:
            raise IotaError("not_finite", f"the upload cannot be built: {error}") from error
        encoded, root = encode(manifest), manifest.root()
        result = tasks.Committed(
            task=task.task,
            root=root,
            commitment=commitment(root, self.key, self.run, self.epoch, self.stage),
            length=manifest.length,
            digest=digest_of(pieces),
            manifest_length=len(encoded),
            manifest_digest=sha256(encoded),
            cuts=tuple(self.shelf.cuts),
            steps=self.steps,
            head=self.chain.head,
        )
        self.upload = Upload(self.epoch, arrays, manifest, encoded, pieces, result)
        return result

    def upload_arrays(self, state: StageState) -> dict[str, Floats]:
        """The parts of the upload, float32 [parameters] each, in order."""
        arrays = {"weights": state.weights, "m": state.m, "v": state.v}
        if self.outer.upload_part == "delta":
            arrays["delta"] = np.subtract(self.base["weights"], state.weights)
        return {name: arrays[name] for name in self.outer.upload_parts(self.moments)}

    def old_parts(self, start: int, stop: int) -> dict[str, Floats]:
        """The stage's present value, elements [start, stop), for `core.reduce.reduce_shard`."""
        names = ["weights"] + (["momentum"] if self.outer.kind != "assign" else [])
        names += ["m", "v"] if self.moments else []
        zeros: Floats = np.zeros(stop - start, dtype=np.float32)
        return {name: self.base[name][start:stop] if name in self.base else zeros for name in names}

    def close(self) -> None:
        self.retention.close()
