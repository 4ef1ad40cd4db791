"""A tiny run's manifest, a stage worker loaded with checkpoint 0, and tasks as an orchestrator would hand them out."""

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import torch

from iota.config.load import load_run
from iota.core import tasks
from iota.core.values import CheckpointSheet, Tensor
from iota.model.wires import pack_floats
from iota.nodes.miner.load import fetch_state
from iota.nodes.miner.stage import Given, StageWorker
from iota.nodes.orchestrator.create import create_run
from iota.store.blobs import MemoryBlobs
from iota.store.links import sign_link
from iota.store.manifest import checkpoint_zero
from iota.store.remote import DirectObjects
from iota.store.tokens import TokenReader
from iota.wire.keys import Identity
from iota.wire.message import seal

torch.set_num_threads(1)
TINY = load_run(Path(__file__).parent.parent / "recipes" / "tiny.toml")
HUB, OTHER = Identity.new(b"h" * 32), Identity.new(b"o" * 32)
NOW = 1_700_000_000.0


class Inline:
    async def run(self, work, *args):
        return work(*args)

    def close(self):
        pass


class Case:
    """`config` changes: sections as keyword dicts."""

    def __init__(self, **sections):
        config = TINY
        for name, values in sections.items():
            part = msgspec.structs.replace(getattr(config, name), **values)
            config = msgspec.structs.replace(config, **{name: part})
        self.blobs = MemoryBlobs()
        self.manifest = asyncio.run(create_run(config, self.blobs, HUB.key, NOW, HUB.sign))
        self.run = self.manifest.run
        self.objects = DirectObjects(self.blobs, HUB.key, lambda: NOW)
        self.reader = TokenReader.train(self.manifest, self.blobs.get)
        self.rng = np.random.default_rng(3)
        self.tasks = 0

    def number(self):
        self.tasks += 1
        return self.tasks

    def get_link(self, name):
        return sign_link(HUB, "http://store", "GET", name, NOW + 100)

    def put_link(self, name):
        return sign_link(HUB, "http://store", "PUT", name, NOW + 100, max_length=1 << 30)

    def worker(self, folder, stage, key="me", load=True, segment_steps=2, **options):
        identity = Identity.new(key.encode().ljust(32, b"k"))
        made = StageWorker(self.manifest, identity.key, stage, 1, "cpu", "float32", folder, **options)
        if load:
            work = made.turn(False, False, *self.load(made, checkpoint_zero(self.manifest, stage), segment_steps))
            assert isinstance(work.result, tasks.Loaded), work.result
        return made

    def load(self, worker, checkpoint, segment_steps=2, kind=tasks.Load, tokens=0):
        urls = {piece.object: self.get_link(piece.object) for piece in checkpoint.pieces}
        sheet = CheckpointSheet(checkpoint, urls)
        arrays = asyncio.run(fetch_state(self.objects, Inline(), sheet, worker.reduced))
        task = kind(
            task=self.number(), epoch=checkpoint.epoch, stage=worker.stage, tokens=tokens, tokens_per_step=64,
            t=checkpoint.t, segment_steps=segment_steps, deadline=NOW + 60, why="test",
        )  # fmt: skip
        return task, Given(checkpoint=checkpoint, arrays=arrays)

    def boundary(self, scale=1.0):
        shape = (self.manifest.config.train.batch, self.manifest.config.model.sequence, 8)
        values = torch.tensor(self.rng.standard_normal(shape) * scale)
        return pack_floats(values, self.manifest.config.stages.wire_dtype)

    def signed(self, sample, tensor, by=OTHER, of=None):
        """The control part of the pass that produced `tensor`."""
        passed = tasks.Passed(
            task=1, sample=sample if of is None else of, head="0" * 64, inp="", out=tensor.head().digest, cut=None,
            loss=None, seconds=0.1, recomputed=False,
        )  # fmt: skip
        turn = tasks.Turn(session=9, seq=1, result=passed, shown=(), draining=False)
        parts = seal(
            by, recipient=HUB.key, run=self.run, session=9, time=NOW, nonce=1, id="9-1", body=turn, tensors=[tensor]
        )
        return bytes(parts[0][:64] + parts[0][68:])

    def forward(self, worker, sample, x=None, epoch=1, origin=None):
        """A forward task and what comes with it."""
        first, last = worker.trainer.first, worker.trainer.last
        ids, labels = asyncio.run(self.reader.batch_windows(sample))
        x = None if first else (x or self.boundary())
        signed = b"" if x is None else (origin or self.signed(sample, x))
        task = tasks.Forward(
            task=self.number(), epoch=epoch, sample=sample, attempt=0, deadline=NOW + 60, origin=signed
        )
        return task, self.given([] if x is None else [x], ids if first else None, labels if last else None)

    def backward(self, worker, sample, x=None, gradient=None, ids=None):
        gradient = gradient or self.boundary(0.01)
        task = tasks.Backward(
            task=self.number(), epoch=1, sample=sample, attempt=0, deadline=NOW + 60,
            origin=self.signed(sample, gradient), with_input=x is not None or ids is not None,
            input_origin=b"" if x is None else self.signed(sample, x),
        )  # fmt: skip
        return task, self.given([gradient] if x is None else [gradient, x], ids)

    def given(self, tensors, ids=None, labels=None):
        return Given(tuple(tensors), tuple(tensor.head() for tensor in tensors), ids, labels)

    def do_pass(self, worker, sample, accepted=False, step=False):
        """Settle what is pending, then a pass that makes a gradient. Returns its result."""
        if worker.trainer.last:
            return worker.turn(accepted, step, *self.forward(worker, sample)).result
        work = worker.turn(accepted, step, *self.forward(worker, sample))
        assert isinstance(work.result, tasks.Passed), work.result
        return worker.turn(True, False, *self.backward(worker, sample)).result


def state_bytes(worker):
    state = worker.trainer.state()
    return state.weights.tobytes(), state.m.tobytes(), state.v.tobytes(), state.t


def corrupt(tensor: Tensor) -> Tensor:
    data = bytearray(tensor.data)
    data[5] ^= 1
    return Tensor(tensor.dtype, tensor.shape, bytes(data))
