"""24 real `kill -9` in four runs of a tiny swarm, and what must be true after each: nothing lost, nothing counted
twice, every deadline kept, the same loss as the run that nobody disturbed."""

import asyncio
import json
import random
import time

import pytest

from iota.config.load import load_run
from iota.core import ledger
from iota.core.machine import events as ev
from iota.core.machine.fold import fold
from iota.core.machine.state import RunState
from iota.store.files import TEMP_SUFFIX
from iota.store.sqlite import SqliteJournal
from kill_case import Kill, Swarm, run_with_kills
from processes import processes, session_of

pytestmark = pytest.mark.slow

TOKENS = 50_000
"""What every run trains at least, so that their losses can be compared."""
LATE = 2.0
"""Seconds that a phase may outlast its announced deadline."""

PLANS = {
    1: (
        Kill(1, "gather"),
        Kill(0, "train"),
        Kill("orchestrator", "train", "reply"),
        Kill(1, "drain"),
        Kill("blobs", "upload"),
        Kill(2, "upload"),  # between commit and upload
    ),
    2: (
        Kill("orchestrator", "gather"),
        Kill("orchestrator", "sync", "acknowledged"),
        Kill(0, "reduce"),
        Kill("validator", "train", "audit"),
        Kill("orchestrator", "drain"),
        Kill(1, "sync"),
    ),
    3: (
        Kill("blobs", "gather"),
        Kill(1, "train", "reply"),
        Kill("orchestrator", "commit"),
        Kill(2, "commit"),
        Kill("blobs", "sync"),
        Kill("orchestrator", "upload"),
    ),
    4: (
        Kill("validator", "gather"),
        Kill("orchestrator", "reduce"),
        Kill(2, "train", "reply"),
        Kill("blobs", "reduce"),
        Kill(0, "upload"),
        Kill("validator", "reduce"),
    ),
}


def test_the_plans_cover_every_role_and_phase():
    kills = [kill for plan in PLANS.values() for kill in plan]
    phases = {"gather", "train", "drain", "commit", "upload", "reduce", "sync"}
    assert len(kills) == 24
    assert {kill.phase for kill in kills if kill.who == "orchestrator"} == phases
    assert {kill.phase for kill in kills if isinstance(kill.who, int)} == phases
    assert {kill.who for kill in kills} == {0, 1, 2, "orchestrator", "blobs", "validator"}
    assert {kill.moment for kill in kills} >= {"reply", "acknowledged"}


@pytest.fixture(scope="module")
def results():
    """What the runs of this module came to: number of the plan (0: undisturbed) -> (tokens, final held-out loss)."""
    return {}


@pytest.mark.parametrize("number", [0, *PLANS])
def test_a_run_survives(number, tmp_path, results):
    swarm = Swarm(tmp_path / "run")
    rng = random.Random(number)
    kills = list(PLANS.get(number, ()))
    swarm.start("epochs >= 100000" if kills else f"tokens >= {TOKENS}")
    try:
        if kills:
            asyncio.run(run_with_kills(swarm, kills, rng, TOKENS))
        swarm.wait()
        try:
            check_run(swarm, len(kills), results.get(0), results, number)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{swarm.told()}") from error
    finally:
        swarm.end()


def check_run(swarm, kills, undisturbed, results, number):
    folder = swarm.folder
    history = json.loads((folder / "history.json").read_text())
    events = journaled(folder)
    state = RunState(load_run(folder / "run.toml"), 3)
    for _, event in events:
        fold(state, event)
    assert history["phase"] == state.phase == "finished"
    assert len(swarm.struck) == kills
    kills_hit(swarm, events)
    merged_states_are_one(swarm, state, events)
    deadlines_held(history)
    the_end_is_normal(swarm, state, events)
    books_balance(history, events)
    nothing_credited_is_lost(swarm, state)
    assert all(audit["verdict"] != "invalid" for audit in history["audits"]), "an honest miner was found invalid"
    nothing_is_left(swarm)
    final = history["epochs"][-1]["heldout_loss"]
    results[number] = (history["tokens"], final)
    for row in swarm.struck:
        print(f"plan {number}: {row.kill} hit {row.name} in epoch {row.status['epoch']}")
    print(f"plan {number}: {len(history['epochs'])} epochs, {history['tokens']} tokens, held-out loss {final:.4f}")
    if undisturbed is not None:
        assert abs(final / undisturbed[1] - 1) <= 0.03, (final, undisturbed)


def journaled(folder):
    """(time, event) of a finished run, in order."""
    history = json.loads((folder / "history.json").read_text())
    journal = SqliteJournal(folder / "orchestrator" / "journal.sqlite", history["run"])
    try:
        assert journal.notices == []
        return [(row.time, ev.decode(row.payload)) for row in journal.replay()]
    finally:
        journal.close()


def sample_books(events):
    """Count every sample by its own rules, apart from the machine's: opened = full + partial + returned + open, nothing
    twice in one stage. Returns the counts."""
    counts = dict.fromkeys(("opened", "full", "partial", "returned"), 0)
    open_now, waiting, backward = {}, set(), set()
    fresh = 0

    def close(sample, how):
        assert (how == "returned") == (not open_now[sample]), (sample, how)
        del open_now[sample]
        counts[how] += 1
        if how == "returned":
            waiting.add(sample)

    for _, e in events:
        if isinstance(e, ev.Opened):
            assert e.sample not in open_now
            assert e.sample in waiting if e.again else e.sample == fresh
            fresh += not e.again
            waiting.discard(e.sample)
            open_now[e.sample] = 0
            counts["opened"] += 1
        elif isinstance(e, ev.Passed) and e.kind != "f":
            assert (e.sample, e.stage) not in backward, f"sample {e.sample} counted twice in stage {e.stage}"
            backward.add((e.sample, e.stage))
            open_now[e.sample] += 1
            if e.stage == 0:
                close(e.sample, "full")
        elif isinstance(e, ev.Passed):
            assert e.sample in open_now
        elif isinstance(e, ev.SampleClosed):
            close(e.sample, e.how)
        elif isinstance(e, ev.Restarted):
            for sample, passes in list(open_now.items()):
                close(sample, "partial" if passes else "returned")
    counts["open"] = len(open_now)
    assert counts["opened"] == counts["full"] + counts["partial"] + counts["returned"] + counts["open"]
    return counts


def leftovers(folder):
    """Temporary and half-written files."""
    return [str(path) for path in folder.rglob("*") if path.is_file() and path.name.endswith((TEMP_SUFFIX, ".part"))]


def kills_hit(swarm, events):
    """Each kill fell into its phase, by the journal's own times; each of the orchestrator's left its mark."""
    turns = [(e.at, getattr(e, "phase", "train")) for _, e in events if isinstance(e, (ev.PhaseBegan, ev.EpochOpened))]
    for row in swarm.struck:
        phase = next(name for at, name in reversed(turns) if at <= row.at)
        also = ("drain",) if row.kill.phase == "train" else ()  # TRAIN may end between the look and the blow
        assert phase in (row.kill.phase, *also), (row.kill, phase)
    boots = [e.down for _, e in events if isinstance(e, ev.Restarted)]
    assert len(boots) == sum(row.name == "orchestrator" for row in swarm.struck)


def merged_states_are_one(swarm, state, events):
    """The orchestrator died when some miners had proved the merged state and others not: all prove the same state of
    that epoch, each once (who had it is not asked again, nobody steps twice)."""
    for row in swarm.struck:
        if row.kill.moment != "acknowledged":
            continue
        epoch = row.status["epoch"]
        proved = [e.number for _, e in events if isinstance(e, ev.Loaded) and e.epoch == epoch]
        assert sorted(proved) == sorted(m.number for m in state.members if m.role == "miner")


def deadlines_held(history):
    """Every phase of every epoch ended within `LATE` of its announced deadline (which moved by the orchestrator's own
    downtime)."""
    for epoch in history["epochs"]:
        began = sorted(epoch["began"].items(), key=lambda row: row[1])
        ends = [at for _, at in began[1:]] + [epoch["closed"] or began[-1][1]]
        for (phase, _), end in zip(began, ends, strict=True):
            until = epoch["until"][phase]
            assert until is None or end <= until + LATE, (epoch["epoch"], phase, end - until, epoch["why"])


def the_end_is_normal(swarm, state, events):
    """In the last two epochs nobody was killed, and nothing of it is felt: all six merge, no work was given to another,
    nothing was refused."""
    last = max(state.epochs)
    if swarm.struck:
        assert last - 1 > max(row.status["epoch"] for row in swarm.struck)
    for epoch in (last - 1, last):
        record = state.epochs[epoch]
        assert record.merged == {0: True, 1: True, 2: True}, (epoch, record.merged)
        assert sorted(n for merge in record.summary.values() for n in merge.members) == sorted(
            m.number for m in state.members if m.role == "miner"
        )
        assert not record.missed and record.why["drain"].startswith("quorum")
    begin = state.epochs[last - 1].opened
    odd = (ev.Rerouted, ev.Declined, ev.Gone, ev.SessionOpened, ev.Restarted, ev.SampleClosed, ev.ShardReassigned)
    assert [e for at, e in events if at > begin and isinstance(e, odd)] == []


def books_balance(history, events):
    """Samples counted by the test's own rules, by the run's history, and miners' passes."""
    counts = sample_books(events)
    told = [epoch["samples"] for epoch in history["epochs"]]
    for how in ("full", "partial", "returned"):
        assert sum(row[how] for row in told) == counts[how], (how, counts, told)
    assert counts["full"] > 0 and counts["open"] == 0, counts


def nothing_credited_is_lost(swarm, state):
    """What a status or the ledger said before a kill is in the final books, and these verify."""
    entries = state.ledger
    assert len(entries) == len(state.epochs)
    assert ledger.verify_chain(entries, run=state.run) == []
    credited = {}
    for credit in ledger.credits_at(entries, entries[-1].epoch):
        credited[credit.epoch, credit.key] = credited.get((credit.epoch, credit.key), 0) + credit.passes
    passes = {(e, state.members[n].key): count for e, r in state.epochs.items() for n, count in r.passes.items()}
    assert credited == passes
    for struck in swarm.struck:
        assert struck.books == entries[: len(struck.books)]
        for stage in struck.status["stages"]:
            for row in stage["miners"]:
                member = state.member(row["key"])
                assert member.total >= row["passes_total"] and member.paid >= row["paid"]
                assert passes.get((struck.status["epoch"], row["key"]), 0) >= row["passes_epoch"]


def nothing_is_left(swarm):
    """No process and no temporary file."""
    deadline = time.monotonic() + 10
    while left := [
        (pid, words)
        for pid, words in processes()
        if session_of(pid) in swarm.sessions or any(str(swarm.folder) in word for word in words)
    ]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    assert leftovers(swarm.folder) == []
