"""One honest epoch of a tiny three-stage run, with all evidence, for the validator's tests.

Each stage's miner is a plain loop over `StageTrainer` and the evidence format; nothing here comes from the miner node.
Two samples are in flight, so backwards come after a step, and one backward is refused and done again.
"""

import asyncio
import hashlib
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch

from iota.config.schema import (
    AuditConfig,
    DataConfig,
    Manifest,
    MergeConfig,
    ModelConfig,
    RunConfig,
    StagesConfig,
    TokenShard,
    TrainConfig,
)
from iota.core import tasks
from iota.core.manifest import build_manifest
from iota.core.values import Checkpoint, Cut, Piece, sha256
from iota.model.layout import initial_state
from iota.model.partition import cut_blocks
from iota.model.trainer import StageTrainer
from iota.nodes.evidence import ACTIVATION, GRADIENT, Chain, encode_transcript, record_parts, snapshot_parts
from iota.store.blobs import MemoryBlobs
from iota.store.links import sign_link
from iota.store.manifest import checkpoint_zero, name_run
from iota.store.remote import DirectObjects
from iota.store.tokens import TokenReader
from iota.wire.keys import Identity
from iota.wire.message import seal

torch.set_num_threads(1)
SESSION, SEGMENT, NOW = 3, 2, 1_700_000_000.0
STAGES, SAMPLES = 3, 6


def identity(name):
    return Identity.new(hashlib.sha256(name.encode()).digest())


ORCHESTRATOR = identity("orchestrator")


class Clock:
    """Stands still."""

    def now(self):
        return NOW

    async def sleep(self, seconds):
        await asyncio.sleep(seconds)


class Inline:
    """`Compute` on the spot."""

    async def run(self, work, *args):
        return work(*args)

    def close(self):
        pass


def run_config(stages=STAGES, accumulate=1, **merge):
    return RunConfig(
        name="case",
        seed=5,
        model=ModelConfig(width=32, blocks=3, heads=4, kv_heads=2, vocabulary=64, sequence=32),
        stages=StagesConfig(count=stages, codec="bottleneck", channels=16, wire_dtype="bfloat16"),
        data=DataConfig(heldout_tokens=32 * 5 + 1),
        train=TrainConfig(batch=2, accumulate=accumulate, lr=3e-3, warmup_tokens=300, lr_tokens=4000),
        merge=MergeConfig(**merge),
        audit=AuditConfig(segment_steps=SEGMENT),
    )


class Case:
    """A run with its store, before any training. `corpus` repeats a pattern, so that there is something to learn."""

    def __init__(self, **how):
        self.config = config = run_config(**how)
        self.stages = config.stages.count
        self.blobs = MemoryBlobs()
        self.cuts = cut_blocks(config)
        rng = np.random.default_rng(1)
        self.tokens = np.tile(rng.integers(0, 64, 57), 40).astype(np.uint8)
        self.heldout_tokens = np.tile(rng.integers(0, 64, 23), 8)[: 32 * 5 + 1].astype(np.uint8)
        self.weights = [initial_state(config, stage, cut, config.seed) for stage, cut in enumerate(self.cuts)]
        self.objects = DirectObjects(self.blobs, ORCHESTRATOR.key, lambda: NOW)
        manifest = Manifest(
            version=1,
            protocol=1,
            run="",
            created=NOW,
            orchestrator=ORCHESTRATOR.key,
            config=config,
            train_shards=(self._shard("train", self.tokens),),
            heldout_shards=(self._shard("heldout", self.heldout_tokens),),
            tokenizer_digest="",
            bytes_per_token=1.0,
            trigram_loss=None,
            cuts=self.cuts,
            parameters=tuple(len(weights) for weights in self.weights),
            checkpoints=tuple(msgspec.msgpack.encode(self._checkpoint(stage)) for stage in range(self.stages)),
        )
        self.manifest = name_run(manifest)
        self.run = self.manifest.run
        self.checkpoints = [checkpoint_zero(self.manifest, stage) for stage in range(self.stages)]
        self.train = TokenReader.train(self.manifest, self.blobs.get)
        self.heldout = TokenReader.heldout(self.manifest, self.blobs.get)

    def put(self, name, data):
        self.blobs._keep(name, bytes(data))

    def _shard(self, name, tokens):
        data = tokens.tobytes()
        self.put(f"data/{name}.bin", data)
        return TokenShard(f"data/{name}.bin", len(tokens), "uint8", sha256(data))

    def _checkpoint(self, stage):
        """Two pieces, so that ranges matter."""
        weights, pieces = self.weights[stage], []
        half = len(weights) // 2
        for start, stop in ((0, half), (half, len(weights))):
            data = weights[start:stop].tobytes()
            name = f"checkpoints/0/{stage}/{start}.bin"
            self.put(name, data)
            pieces.append(Piece("weights", start, stop, name, 0, sha256(data)))
        return Checkpoint("", 0, stage, len(weights), 0, tuple(pieces))

    def get_link(self, name):
        return sign_link(ORCHESTRATOR, "http://store", "GET", name, NOW + 1000)

    def put_link(self, name):
        return sign_link(ORCHESTRATOR, "http://store", "PUT", name, NOW + 1000, max_length=1 << 30)

    def urls(self, checkpoint):
        return {piece.object: self.get_link(piece.object) for piece in checkpoint.pieces}


@dataclass
class Sent:
    """A boundary tensor with its producer's signed control part."""

    tensor: object
    origin: bytes


@dataclass
class Shelf:
    """All that one miner could be asked to show."""

    entries: list = field(default_factory=list)
    inputs: list = field(default_factory=list)
    outputs: list = field(default_factory=list)
    snapshots: dict = field(default_factory=dict)
    final: dict = field(default_factory=dict)


class Miner:
    """One stage. Cheats override `run` (what is computed), `sent` (what leaves), `state` (what is snapshotted)."""

    def __init__(self, case, stage, name=None, dtype="float32"):
        self.case, self.stage, self.config = case, stage, case.config
        self.identity = identity(name or f"miner {stage}")
        self.key, self.nonce = self.identity.key, 0
        self.trainer = StageTrainer(case.config, stage, case.cuts[stage], "cpu", dtype)
        self.load = tasks.Load(
            task=1, epoch=0, stage=stage, tokens=0, tokens_per_step=64, t=0, segment_steps=SEGMENT,
            deadline=NOW + 100, why="",
        )  # fmt: skip
        self.trainer.load(case.weights[stage], None, None, 0, 0, 64)
        self.chain = Chain(case.run, self.key, SESSION, 1)
        self.chain.add("load", -1, case.checkpoints[stage].root(), "")
        self.shelf, self.cuts, self.steps, self.pending = Shelf(), [], 0, 0
        self.heads, self.accepted, self.outs, self.losses = [], [], [], []
        self.cut()

    @property
    def last(self):
        return self.stage == self.case.stages - 1

    def sign(self, sample, tensor, out):
        self.nonce += 1
        passed = tasks.Passed(
            task=1, sample=sample, head=self.chain.head, inp="", out=out, cut=None, loss=None, seconds=0.0,
            recomputed=False,
        )  # fmt: skip
        turn = tasks.Turn(session=SESSION, seq=self.nonce, result=passed, shown=(), draining=False)
        first = seal(
            self.identity, recipient=ORCHESTRATOR.key, run=self.case.run, session=SESSION, time=NOW, nonce=self.nonce,
            id=str(self.nonce), body=turn, tensors=[tensor],
        )[0]  # fmt: skip
        return bytes(first[:64]) + bytes(first[68:])

    def receive(self, kind, sample, received):
        head = received.tensor.head()
        self.shelf.inputs.append((kind, sample, received.tensor, head, received.origin))
        return head.digest

    def run(self, op, sample, tensor, ids, labels):
        """(output, loss)"""
        if op == "forward" and self.last:
            return self.trainer.forward_loss(sample, tensor, ids, labels)
        if op == "forward":
            return self.trainer.forward(sample, tensor, ids), None
        return self.trainer.backward(sample, tensor)[0], None

    def sent(self, op, sample, out):
        return out

    def told_loss(self, loss):
        return loss

    def do(self, op, sample, received=None, ids=None, labels=None, accepted=True, given=None):
        """One task and the verdict on it; what is handed on. `given`: the input that came with a backward."""
        kind = ACTIVATION if op == "forward" else GRADIENT
        inp = self.receive(kind, sample, received) if received else ""
        if given:
            self.chain.add("forward", sample, self.receive(ACTIVATION, sample, given), "")
            self.trainer.forward(sample, given.tensor)
        out, loss = self.run(op, sample, received.tensor if received else None, ids, labels)
        out, loss = self.sent(op, sample, out), self.told_loss(loss)
        digest = ""
        if out is not None:
            head = out.head()
            digest = head.digest
            kind = ACTIVATION if op == "forward" and not self.last else GRADIENT
            self.shelf.outputs.append((kind, sample, out, head, b""))
        self.chain.add(op, sample, inp, digest, loss=loss)
        counts = op == "backward" or self.last
        if not accepted:
            assert counts
            self.trainer.drop()
            self.chain.add("drop", sample, "", "")
            return None
        self.heads.append(self.chain.head)
        self.outs.append(digest)
        self.losses.append(loss)
        if counts:
            self.accepted.append(sample)
            self.trainer.accept()
            self.pending += 1
            if self.pending == self.config.train.accumulate:
                self.step()
        return Sent(out, self.sign(sample, out, digest)) if out is not None else None

    def step(self):
        self.train_step()
        self.steps += 1
        self.chain.add("step", -1, "", sha256(np.ascontiguousarray(self.state()[1]).tobytes()), self.pending)
        self.pending = 0
        if self.steps % SEGMENT == 0:
            self.cut()

    def train_step(self):
        self.trainer.step()

    def state(self):
        """t, weights, m, v."""
        state = self.trainer.state()
        return state.t, state.weights, state.m, state.v

    def cut(self):
        data = b"".join(bytes(part) for part in snapshot_parts(*self.state()))
        self.shelf.snapshots[self.steps] = data
        self.cuts.append(Cut(self.steps, sha256(data)))

    def upload_root(self):
        """What was committed: built from what the miner has at the end."""
        _, weights, m, v = self.state()
        base = self.case.weights[self.stage]
        assign = self.config.merge.outer == "assign"
        first = ("weights", weights) if assign else ("delta", base - weights)
        parts = [first]
        if self.config.merge.inner_state == "merge":
            parts += [("m", m), ("v", v)]
        return build_manifest(parts)[0].root()

    def commit(self):
        if self.pending:
            self.step()
        if self.cuts[-1].step != self.steps:
            self.cut()
        self.heads.append(self.chain.head)
        self.root = self.upload_root()

    def facts(self):
        return tasks.MinerFacts(
            key=self.key, session=SESSION, stage=self.stage, heads=tuple(self.heads), accepted=tuple(self.accepted),
            cuts=tuple(self.cuts), upload_root=self.root, outs=tuple(self.outs), losses=tuple(self.losses),
        )  # fmt: skip

    def show(self, start, stop):
        """The objects of a segment by name, as an honest miner shows them."""
        files = {
            "transcript": encode_transcript(self.chain.transcript()),
            "start": self.shelf.snapshots[start],
            "stop": self.shelf.snapshots[stop],
            "final": self.shelf.snapshots[self.cuts[-1].step],
        }
        for name in ("inputs", "outputs"):
            files[name] = b"".join(bytes(part) for row in getattr(self.shelf, name) for part in record_parts(*row))
        return files


async def train(case, miners, samples=SAMPLES):
    """An epoch with two samples in flight; sample 1's backward at stage 1 is refused once."""
    waiting = {}
    for number in range(samples + 1):
        if number < samples:
            ids, labels = await case.train.batch_windows(number)
            hidden = miners[0].do("forward", number, ids=ids)
            waiting[number] = (miners[1].do("forward", number, hidden), labels)
        if number > 0:
            hidden, labels = waiting.pop(number - 1)
            gradient = miners[2].do("forward", number - 1, hidden, labels=labels)
            if number - 1 == 1:
                miners[1].do("backward", 1, gradient, accepted=False)
            gradient = miners[1].do("backward", number - 1, gradient)
            miners[0].do("backward", number - 1, gradient)
    for miner in miners:
        miner.commit()


async def sheet_and_task(case, miner, start, stop, files, hide=()):
    """Put the shown objects into the store and make the audit."""
    links = {}
    for name, data in files.items():
        key = f"audits/1/{miner.stage}-{start}/{name}.bin"
        await case.blobs.delete(key)
        if name not in hide:
            case.put(key, data)
        links[f"{name}_url"] = case.get_link(key)
    if start == 0:
        links["start_url"] = ""
    if stop == miner.cuts[-1].step:
        links["final_url"] = ""
    checkpoint = case.checkpoints[miner.stage]
    sheet = tasks.AuditSheet(
        facts=miner.facts(), load=miner.load, checkpoint=checkpoint, urls=case.urls(checkpoint), **links
    )
    task = tasks.Audit(
        task=9, audit=4, epoch=1, stage=miner.stage, start_step=start, stop_step=stop, deadline=NOW + 100
    )
    return task, sheet


SEGMENTS = [(start, start + SEGMENT) for start in range(0, SAMPLES, SEGMENT)]
