"""From names to links: the machine names objects; here each becomes a signed, expiring URL for one peer."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from iota.core import tasks
from iota.core.machine.auditing import needed, objects
from iota.core.machine.machine import Machine
from iota.core.machine.merging import upload_keys
from iota.core.machine.state import Facts
from iota.core.values import Checkpoint, CheckpointSheet, Tensor
from iota.nodes.evidence import snapshot_length
from iota.nodes.orchestrator.archive import Archive
from iota.nodes.orchestrator.relay import MAX_ORIGIN
from iota.store.links import Signer, sign_link
from iota.wire.message import pack_sheet

SPARE_RESULTS = 256
"""Refused results beyond the accepted ones for which evidence has room."""
ENTRY_BYTES = 512
"""More than any transcript entry, or a record's header without its origin, takes."""


@dataclass(slots=True)
class Linker:
    """Signs links with the orchestrator's key, for the blob service at `base_url`. `margin`: seconds that a link
    outlives the deadline it serves, so that clocks that differ a little do not cut a transfer."""

    signer: Signer
    base_url: str
    margin: float = 60.0

    def get(self, name: str, until: float) -> str:
        return sign_link(self.signer, self.base_url, "GET", name, until + self.margin)

    def put(self, name: str, until: float, max_length: int) -> str:
        return sign_link(self.signer, self.base_url, "PUT", name, until + self.margin, max_length=max_length)

    def pinned(self, name: str, until: float, length: int, sha256: str) -> str:
        return sign_link(self.signer, self.base_url, "PUT", name, until + self.margin, length=length, sha256=sha256)


def checkpoint_sheet(linker: Linker, checkpoint: Checkpoint, until: float) -> Tensor:
    urls = {name: linker.get(name, until) for name in sorted({p.object for p in checkpoint.pieces})}
    return pack_sheet(CheckpointSheet(checkpoint, urls))


def reduce_sheet(linker: Linker, sheet: tasks.ReduceSheet, until: float, shard_bytes: int) -> Tensor:
    """`shard_bytes`: an upper bound of one reduced shard."""
    replace = msgspec.structs.replace
    rows = tuple(
        replace(c, url=linker.get(c.url, until), manifest_url=linker.get(c.manifest_url, until))
        for c in sheet.contributions
    )
    work = tuple(replace(w, url=linker.put(w.url, until, shard_bytes)) for w in sheet.shards)
    names = {p.object for p in sheet.base.pieces} if sheet.base else set()
    urls = {name: linker.get(name, until) for name in sorted(names)}
    return pack_sheet(replace(sheet, contributions=rows, shards=work, urls=urls))


def link_upload(linker: Linker, mc: Machine, number: int, task: tasks.Upload) -> tasks.Upload:
    """The upload's URLs pin the committed length and digest: the store refuses other bytes."""
    m, c = mc.state.members[number], mc.state.commitments[number]
    name, manifest_name = upload_keys(task.epoch, m.stage, m.key)
    return msgspec.structs.replace(
        task,
        url=linker.pinned(name, task.deadline, c.length, c.digest),
        manifest_url=linker.pinned(manifest_name, task.deadline, c.manifest_length, c.manifest_digest),
    )


def link_shows(linker: Linker, mc: Machine, shows: tuple[tasks.Show, ...], payload: int) -> tuple[tasks.Show, ...]:
    """`payload`: bytes of the larger boundary tensor. Snapshots are pinned to the committed digests, the rest to what
    the books say there can be: an object without limit could fill the store, or a validator's memory."""
    return tuple(_link_show(linker, mc, show, payload) for show in shows)


def _link_show(linker: Linker, mc: Machine, show: tasks.Show, payload: int) -> tasks.Show:
    audit = mc.state.audits[show.audit]
    facts = mc.state.facts[(audit.epoch, audit.number, audit.session)]
    cuts = {cut.step: cut.digest for cut in facts.cuts}
    steps = {"start_url": audit.start, "stop_url": audit.stop, "final_url": facts.cuts[-1].step}
    results = len(facts.heads) + SPARE_RESULTS
    sizes = {
        "transcript_url": 4 * results * ENTRY_BYTES,
        "inputs_url": 2 * results * (payload + MAX_ORIGIN + ENTRY_BYTES),
        "outputs_url": results * (payload + ENTRY_BYTES),
    }
    changes = {field: linker.put(getattr(show, field), show.deadline, size) for field, size in sizes.items()}
    length = snapshot_length(mc.parameters[audit.stage])
    for field, step in steps.items():
        if name := getattr(show, field):
            changes[field] = linker.pinned(name, show.deadline, length, cuts[step])
    return msgspec.structs.replace(show, **changes)


def audit_sheet(linker: Linker, mc: Machine, archive: Archive, audit_id: int, until: float) -> Tensor:
    """All that a validator needs to replay one segment: the books' facts, the checkpoint, the evidence."""
    s = mc.state
    audit = s.audits[audit_id]
    facts = s.facts[(audit.epoch, audit.number, audit.session)]
    checkpoint = archive.checkpoint(audit.epoch - 1, audit.stage)
    record = s.epochs[audit.epoch]
    load = tasks.Load(
        task=0,
        epoch=audit.epoch - 1,
        stage=audit.stage,
        tokens=record.tokens,
        tokens_per_step=record.tokens_per_step[audit.stage],
        t=record.t[audit.stage],
        segment_steps=record.segment_steps[audit.stage],
        deadline=until,
        why="the audited epoch's",
    )
    names, need = objects(audit), needed(mc, audit)
    sheet = tasks.AuditSheet(
        facts=_facts(mc, facts),
        load=load,
        checkpoint=checkpoint,
        urls={name: linker.get(name, until) for name in sorted({p.object for p in checkpoint.pieces})},
        transcript_url=linker.get(names["transcript"], until),
        start_url=linker.get(names["start"], until) if need["start"] else "",
        stop_url=linker.get(names["stop"], until),
        final_url=linker.get(names["final"], until) if need["final"] else "",
        inputs_url=linker.get(names["inputs"], until),
        outputs_url=linker.get(names["outputs"], until),
    )
    return pack_sheet(sheet)


def _facts(mc: Machine, facts: Facts) -> tasks.MinerFacts:
    return tasks.MinerFacts(
        key=mc.state.members[facts.number].key,
        session=facts.session,
        stage=facts.stage,
        heads=tuple(facts.heads),
        outs=tuple(facts.outs),
        losses=tuple(facts.losses),
        kinds=tuple(facts.kinds),
        samples=tuple(facts.samples),
        given=tuple(facts.given),
        averaged=tuple(facts.averaged),
        accepted=tuple(facts.accepted),
        cuts=tuple(facts.cuts),
        upload_root=facts.root,
    )
