"""What is shown for an audit: transcript, snapshots, boundary tensors (formats final, version 1).

Used by the miner, who writes and shows them, and by the validator, who reads them as hostile input. An audited segment
[start_step, stop_step) is the run of transcript entries after the `start_step`-th `step` entry, up to and including the
`stop_step`-th (step 0 is the `load` entry).

* transcript: msgpack of `Transcript`, all entries of one miner, session and epoch. `load` first; then what was done, in
  order. A `drop` undoes the operation entry (`forward` or `backward`) right before it: its result was refused.
  A `forward` whose `out` is "" computed nothing: it names the input that came with a `backward` (the pathway broke and
  somebody else did the forward); that backward is the next entry.
* snapshot: `t` as 8 little-endian bytes, then weights, m and v as float32: exactly the bytes behind a `Cut`'s digest.
* boundary tensors: records one after another, each `u32 little-endian header length | msgpack RecordHead | bytes`.
  `inputs` holds what was received (with the producer's signed control part), `outputs` what was sent. A tensor is
  found by its digest: a `forward`'s input is the record whose digest is its `inp`, its output the one of its `out`; a
  `backward`'s `inp` is the gradient received, its `out` the gradient sent; a backward's own input tensor is that of the
  last `forward` entry of the same sample before it, wherever in the transcript that is (`operations` resolves all
  this). The first stage has no tensors but the outgoing activation and the incoming gradient: ids come from the corpus.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from iota.core.tasks import Passed, Turn
from iota.core.values import (
    Cut,
    Digest,
    Entry,
    Key,
    Tensor,
    TensorHead,
    check_head,
    is_finite,
    sha256,
    transcript_next,
    transcript_start,
)
from iota.errors import IotaError, Refused
from iota.wire.message import check_origin, decode_body, decode_strict

Buffer = bytes | bytearray | memoryview

VERSION = 1
ACTIVATION = "activation"
GRADIENT = "gradient"
MAX_HEADER = 128 * 1024
"""A record's header holds an origin (at most 64 KiB) and a tensor head."""
PASSES = ("forward", "backward")


def bad_evidence(cause: str) -> IotaError:
    """Evidence that contradicts itself or the books: the shower's fault."""
    return IotaError("bad_evidence", cause, "Show what was done, as it was done.")


# ---------------------------------------------------------------------------------------------------- transcript


class Transcript(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One miner's operations in one epoch of one session, from its last load on."""

    version: int
    run: str
    key: Key
    session: int
    epoch: int
    entries: tuple[Entry, ...]

    def heads(self) -> list[Digest]:
        """The chain's head after each entry."""
        head, heads = transcript_start(self.run, self.key, self.session, self.epoch), []
        for entry in self.entries:
            head = transcript_next(head, entry)
            heads.append(head)
        return heads


class Chain:
    """A transcript that grows: what a miner keeps while it works."""

    def __init__(self, run: str, key: Key, session: int, epoch: int) -> None:
        self.run, self.key, self.session, self.epoch = run, key, session, epoch
        self.entries: list[Entry] = []
        self.head = transcript_start(run, key, session, epoch)

    def add(self, op: str, sample: int, inp: Digest, out: Digest, number: int = 0, loss: float | None = None) -> Digest:
        """Append an entry; the new head."""
        entry = Entry(op, sample, inp, out, number, loss)
        self.entries.append(entry)
        self.head = transcript_next(self.head, entry)
        return self.head

    def transcript(self) -> Transcript:
        return Transcript(VERSION, self.run, self.key, self.session, self.epoch, tuple(self.entries))


def encode_transcript(transcript: Transcript) -> bytes:
    return msgspec.msgpack.encode(transcript)


def decode_transcript(data: Buffer) -> Transcript:
    """Raises IotaError `bad_evidence` for anything but a transcript of this version."""
    try:
        transcript: Transcript = decode_strict(data, Transcript, "the transcript")
    except Refused as error:
        raise bad_evidence(error.cause) from None
    if transcript.version != VERSION:
        raise bad_evidence(f"transcript version {transcript.version}, this software reads {VERSION}")
    for entry in transcript.entries:
        if any(digest and (len(digest) != 64 or digest.strip("0123456789abcdef")) for digest in (entry.inp, entry.out)):
            raise bad_evidence(f"an entry of sample {entry.sample} names no digest")
    return transcript


def check_transcript(
    transcript: Transcript, *, run: str, key: Key, session: int, epoch: int, heads: Sequence[Digest]
) -> str | None:
    """Why a transcript is not the one whose heads were reported (in order, each somewhere in the chain), or None."""
    if (transcript.run, transcript.key, transcript.session, transcript.epoch) != (run, key, session, epoch):
        return f"it is of session {transcript.session}, epoch {transcript.epoch}, key {transcript.key[:8]}"
    chain = iter(transcript.heads())
    for number, head in enumerate(heads):
        if head not in chain:  # consumes: the reported heads must come in this order
            return f"the head reported with result {number} is not in its chain"
    return None


def accepted_passes(entries: Sequence[Entry], last_stage: bool) -> list[int]:
    """Samples of the passes that counted by this transcript, in order: backward entries (at the last stage forward
    entries), less those dropped."""
    op = "forward" if last_stage else "backward"
    return [
        entry.sample
        for i, entry in enumerate(entries)
        if entry.op == op and not (i + 1 < len(entries) and entries[i + 1].op == "drop")
    ]


def segment(entries: Sequence[Entry], start_step: int, stop_step: int) -> tuple[int, int]:
    """Entry range [from, to) of a segment of inner steps. Raises IotaError `bad_evidence` when it is not all there."""
    if not entries or entries[0].op != "load":
        raise bad_evidence("the transcript does not begin with a load")
    ends = [0, *(i for i, entry in enumerate(entries) if entry.op == "step")]
    if not 0 <= start_step < stop_step < len(ends):
        raise bad_evidence(f"the transcript has {len(ends) - 1} steps, asked for steps {start_step} to {stop_step}")
    return ends[start_step] + 1, ends[stop_step] + 1


# ----------------------------------------------------------------------------------------------------- snapshots


def snapshot_parts(t: int, weights: np.ndarray, m: np.ndarray, v: np.ndarray) -> list[Buffer]:
    """A snapshot as buffers to be written one after another, without copies (float32 arrays, flat)."""
    arrays = [np.ascontiguousarray(array, dtype="<f4") for array in (weights, m, v)]
    return [t.to_bytes(8, "little"), *(memoryview(array.data).cast("B") for array in arrays)]


def snapshot_length(parameters: int) -> int:
    return 8 + 12 * parameters


def read_snapshot(data: Buffer, parameters: int, cut: Cut) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
    """t, weights, m and v (read-only views) of a shown snapshot. Raises IotaError `bad_evidence` when it is not the
    committed one."""
    if len(data) != snapshot_length(parameters):
        raise bad_evidence(f"the snapshot of step {cut.step} has {len(data)} bytes, not {snapshot_length(parameters)}")
    if sha256(data) != cut.digest:
        raise bad_evidence(f"the snapshot of step {cut.step} is not the committed one")
    weights, m, v = np.frombuffer(data, dtype="<f4", offset=8).reshape(3, parameters)
    return int.from_bytes(data[:8], "little"), weights, m, v


# ------------------------------------------------------------------------------------------------------- tensors


class RecordHead(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`kind`: activation | gradient. `origin`: the producer's signed control part, b"" for what was sent."""

    kind: str
    sample: int
    head: TensorHead
    origin: bytes


class Record(msgspec.Struct, frozen=True):
    """A stored boundary tensor."""

    kind: str
    sample: int
    digest: Digest
    tensor: Tensor
    origin: bytes


def record_parts(kind: str, sample: int, tensor: Tensor, head: TensorHead, origin: bytes) -> list[Buffer]:
    """One record as buffers, the tensor's bytes not copied."""
    header = msgspec.msgpack.encode(RecordHead(kind, sample, head, origin))
    return [len(header).to_bytes(4, "little"), header, tensor.data]


def read_records(data: Buffer) -> Iterator[Record]:
    """All records of an object, tensors as views, each checked: shape, dtype, length, digest, finiteness. Raises
    IotaError `bad_evidence` at the first that is wrong."""
    view, at = memoryview(data).cast("B"), 0
    while at < len(view):
        size = int.from_bytes(view[at : at + 4], "little")
        if size > MAX_HEADER or at + 4 + size > len(view):
            raise bad_evidence(f"byte {at}: a record header of {size} bytes cannot be")
        try:
            row: RecordHead = decode_strict(view[at + 4 : at + 4 + size], RecordHead, f"byte {at}: the record header")
        except Refused as error:
            raise bad_evidence(error.cause) from None
        problem = check_head(row.head)
        at += 4 + size
        if problem or row.kind not in (ACTIVATION, GRADIENT) or at + row.head.length > len(view):
            raise bad_evidence(f"byte {at}: {problem or 'a record of unknown kind or cut short'}")
        tensor = Tensor(row.head.dtype, row.head.shape, view[at : at + row.head.length])
        at += row.head.length
        if sha256(tensor.data) != row.head.digest or not is_finite(tensor):
            raise bad_evidence(f"the {row.kind} of sample {row.sample} has another digest or is not finite")
        yield Record(row.kind, row.sample, row.head.digest, tensor, row.origin)


def check_record_origin(record: Record, run: str) -> Key:
    """Who produced a received tensor: the signer of its origin, which must name this run, this tensor and this sample.
    Raises Refused."""
    return check_producer(record.origin, run, record.sample, record.digest)


def check_producer(origin: bytes, run: str, sample: int, digest: Digest) -> Key:
    """The key that signed the result which brought this tensor. Raises Refused when the origin does not say so."""
    control = check_origin(origin, run=run, digest=digest)
    result = decode_body(control, Turn).result
    if not isinstance(result, Passed) or result.sample != sample:
        raise Refused("wrong_origin", f"the origin is not of a pass of sample {sample}", "Ask for the task again.")
    return control.sender


# ------------------------------------------------------------------------------------------------------- replaying


class Operation(msgspec.Struct, frozen=True):
    """One entry of a segment with all that a replay needs. `entry.op`: forward | backward | step; `dropped`: its result
    was refused, so its gradient does not count. `x`: the stage's input (None at the first stage); `gradient`: a
    backward's; `output`: what the miner sent (None where it sends nothing, or when outputs were not given)."""

    entry: Entry
    dropped: bool
    x: Tensor | None
    gradient: Tensor | None
    output: Tensor | None


def tensors_wanted(entries: Sequence[Entry], start: int, stop: int) -> tuple[set[Digest], set[Digest]]:
    """Digests of the received and of the sent tensors that entries [start, stop) need for their replay."""
    received: set[Digest] = set()
    sent: set[Digest] = set()
    latest: dict[int, Digest] = {}
    for index, entry in enumerate(entries[:stop]):
        if entry.op == "forward":
            latest[entry.sample] = entry.inp
        if index < start or entry.op not in PASSES:
            continue
        received.add(entry.inp)
        received.add(latest.get(entry.sample, ""))
        sent.add(entry.out)
    return received - {""}, sent - {""}


def operations(
    transcript: Transcript,
    start_step: int,
    stop_step: int,
    *,
    stage: int,
    inputs: Mapping[Digest, Record],
    outputs: Mapping[Digest, Record] | None = None,
) -> list[Operation]:
    """The segment's operations in order, tensors in place. Raises IotaError `bad_evidence` naming what is missing."""
    entries = transcript.entries
    start, stop = segment(entries, start_step, stop_step)
    latest = {entry.sample: entry.inp for entry in entries[:start] if entry.op == "forward"}
    rows = []
    for index in range(start, stop):
        entry = entries[index]
        if entry.op == "forward":
            latest[entry.sample] = entry.inp
        if entry.op not in (*PASSES, "step") or (entry.op == "forward" and entry.out == "" and entry.loss is None):
            continue
        x = gradient = output = None
        if entry.op in PASSES:
            if stage > 0:
                x = _tensor(inputs, latest.get(entry.sample), f"the input of the {entry.op} of sample {entry.sample}")
            if entry.op == "backward":
                gradient = _tensor(inputs, entry.inp, f"the gradient of sample {entry.sample}")
            if outputs is not None and entry.out:
                output = _tensor(outputs, entry.out, f"the output of the {entry.op} of sample {entry.sample}")
        dropped = index + 1 < len(entries) and entries[index + 1].op == "drop"
        rows.append(Operation(entry, dropped, x, gradient, output))
    return rows


def _tensor(records: Mapping[Digest, Record], digest: Digest | None, what: str) -> Tensor:
    record = records.get(digest or "")
    if record is None:
        raise bad_evidence(f"{what} ({(digest or 'unknown')[:16]}) was not shown")
    return record.tensor
