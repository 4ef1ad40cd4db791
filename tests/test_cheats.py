"""Cheats in the simulated swarm with real torch: each is invalid in its first epoch, no honest miner ever is."""

import pytest

from cheats import Copier, ForgedMoment, FreeRider, Honest, Noise, Scaled, StaleUpload
from swarm_case import run_swarm, tiny


def audited(stop, **sections):
    """Every segment of every miner audited."""
    return tiny(
        stop=stop,
        merge=dict(min_batches=4, members=2, epoch_limit=60.0, **sections.pop("merge", {})),
        audit=dict(segments=0, segment_steps=2, segments_per_epoch=3, final_wait=200.0),
        **sections,
    )


def verdicts(swarm):
    """verdict kinds by (miner name, epoch)."""
    names = {swarm.key(name): name for name in swarm.names}
    out = {}
    for audit in swarm.state.audits.values():
        name = names[swarm.state.members[audit.number].key]
        out.setdefault((name, audit.epoch), []).append((audit.verdict, audit.why))
    return out


# miner-k joins as the k-th: stages 0, 1, 2, 0, 1, 2
@pytest.mark.parametrize(
    ("cheat", "name"),
    [
        (FreeRider, "miner-0"),
        (FreeRider, "miner-4"),
        (FreeRider, "miner-5"),
        (Noise, "miner-3"),
        (Noise, "miner-4"),
        (Noise, "miner-5"),
        (Scaled, "miner-0"),
        (Scaled, "miner-1"),
        (Scaled, "miner-2"),
        (Copier, "miner-3"),
        (Copier, "miner-4"),
        (Copier, "miner-5"),
        (ForgedMoment, "miner-1"),
        (StaleUpload, "miner-2"),
    ],
)
def test_a_cheat_is_invalid_in_its_first_epoch_and_nobody_else_is(tmp_path, cheat, name):
    workers = {f"miner-{i}": Honest for i in range(6)} | {name: cheat}
    swarm = run_swarm(audited("epochs >= 2"), tmp_path, miners=6, validators=1, workers=workers)
    found = verdicts(swarm)
    stage = swarm.state.member(swarm.key(name)).stage
    for (who, epoch), rows in sorted(found.items()):
        kinds = {kind for kind, _ in rows}
        if who == name:
            assert "invalid" in kinds, (stage, epoch, rows)
        elif cheat is Copier:
            assert "invalid" not in kinds, (who, epoch, rows)
        else:
            assert kinds == {"valid"}, (who, epoch, rows)
    assert (name, 1) in found
    paid = {key: units for entry in swarm.state.ledger for key, units in entry.emissions}
    assert paid.get(swarm.key(name), 0) == 0
    assert len(paid) == 5


def test_nobody_honest_is_invalid_over_twenty_epochs(tmp_path):
    swarm = run_swarm(audited("epochs >= 20"), tmp_path, miners=6, validators=1, limit=40_000)
    found = verdicts(swarm)
    assert len({epoch for _, epoch in found}) == 20
    bad = {key: rows for key, rows in found.items() if any(kind == "invalid" for kind, _ in rows)}
    assert bad == {}
    assert sum(len(rows) for rows in found.values()) >= 20 * 6
