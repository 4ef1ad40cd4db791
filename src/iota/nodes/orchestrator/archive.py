"""What past epochs' audits and newcomers still need: checkpoints by (epoch, stage), read off the journal's events;
and which objects in the store are no longer needed by anyone (design section 6 "Retention")."""

from __future__ import annotations

from collections.abc import Iterable

from iota.config.schema import RunConfig
from iota.core.machine import events as ev
from iota.core.values import Checkpoint


class Archive:
    """Folded from events beside the state, on replay too."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._checkpoints: dict[tuple[int, int], Checkpoint] = {}
        self._audits: dict[int, set[int]] = {}
        self._audit_objects: dict[int, str] = {}

    def observe(self, event: ev.Event) -> None:
        if isinstance(event, ev.RunStarted):
            self._checkpoints.update({(0, c.stage): c for c in event.checkpoints})
        elif isinstance(event, ev.StageMerged):
            self._checkpoints[(event.epoch, event.stage)] = event.checkpoint
        elif isinstance(event, ev.AuditDrawn):
            self._audits.setdefault(event.epoch, set()).add(event.audit)
            self._audit_objects[event.audit] = f"audits/{event.epoch}/{event.audit}/"
        elif isinstance(event, ev.VerdictGiven) and event.final:
            for open_audits in self._audits.values():
                open_audits.discard(event.audit)

    def checkpoint(self, epoch: int, stage: int) -> Checkpoint:
        """Raises KeyError when it is no longer kept."""
        return self._checkpoints[(epoch, stage)]

    def kept_epochs(self, now_at: int) -> set[int]:
        """The last few checkpoints (as many as a redrawn audit may reach back), every k-th, and those that open audits
        replay from."""
        limits = self._config.limits
        epochs = {epoch for epoch, _ in self._checkpoints}
        kept = set(sorted(epochs)[-max(limits.keep_checkpoints, self._config.audit.redraws + 1) :]) | {0}
        if limits.keep_every:
            kept |= {epoch for epoch in epochs if epoch % limits.keep_every == 0}
        kept |= {epoch - 1 for epoch, open_audits in self._audits.items() if open_audits}
        return kept | {now_at, now_at - 1}

    def forget(self, now_at: int) -> None:
        """Drop checkpoints that are not kept any more."""
        kept = self.kept_epochs(now_at)
        for key in [key for key in self._checkpoints if key[0] not in kept]:
            del self._checkpoints[key]

    def needed_objects(self) -> set[str]:
        return {piece.object for checkpoint in self._checkpoints.values() for piece in checkpoint.pieces}

    def rubbish(self, objects: Iterable[str], epoch: int) -> list[str]:
        """Of the store's objects, those that nothing needs: uploads and merge results of epochs before `epoch` that no
        kept checkpoint names, and evidence of closed audits."""
        needed = self.needed_objects()
        open_audits = {str(audit) for audits in self._audits.values() for audit in audits}
        gone = []
        for name in objects:
            kind, _, rest = name.partition("/")
            if (kind in ("uploads", "merge") and int(rest.partition("/")[0]) < epoch and name not in needed) or (
                kind == "audits" and rest.split("/")[1] not in open_audits
            ):
                gone.append(name)
        return gone
