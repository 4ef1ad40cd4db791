"""Joining, sessions, stage assignment, silence, leaving. Design section 3 "SYNC" and section 6 "Wire"."""

from __future__ import annotations

from typing import TYPE_CHECKING

from iota.core import tasks
from iota.core.machine import events as ev
from iota.core.machine import training
from iota.core.machine.state import ENDED, TRAINING, Member
from iota.core.values import Digest, Key, sha256
from iota.errors import Refused

if TYPE_CHECKING:
    from iota.core.machine.machine import Machine

ROLES = ("miner", "validator")


def _token_digest(token: str) -> Digest:
    return sha256(token.encode())


def join(mc: Machine, key: Key, request: tasks.Join, token: Digest, now: float, block: str = "") -> Member:
    """Open a session for a key: register it if new, assign a stage, end the old session's leases.

    `token` is the digest of the new session's token. Raises `Refused` when the key is not admitted, or while its old
    session still speaks and the request does not hold that session's token.
    """
    s = mc.state
    _admit(mc, key, request)
    m = s.member(key)
    if m is None:
        number = len(s.members)
        founder = key in s.config.admit.founders
        stake = s.config.admit.validators.get(key, 1)
        mc.emit(ev.Registered(number, key, request.role, now, request.owner[:64], block, founder, False, stake))
        m = s.members[number]
    elif m.role != request.role:
        raise Refused(
            "wrong_role", f"key {key[:8]} is registered as a {m.role}, not as a {request.role}", "Use another key."
        )
    elif m.alive and _token_digest(request.token) != m.token:
        silence = now - mc.soft.seen.get(m.number, now)
        if silence < s.config.limits.silence:
            raise Refused(
                "key_in_use",
                f"key {key[:8]} is in use by a session that spoke {silence:.0f} s ago",
                f"Stop the other process, or wait {s.config.limits.silence - silence:.0f} s after its last word; "
                "one key cannot run twice.",
            )
    held = training.held_by(mc, m.number)
    mc.soft.forget(m.number)
    stage = -1 if request.role == "validator" else _assign(mc, m)
    starts = _starts(mc, m, stage) if request.role == "miner" else 0
    mc.emit(
        ev.SessionOpened(
            m.number,
            m.session + 1,
            stage,
            token,
            now,
            starts,
            request.software[:64],
            request.device[:64],
            request.dtype[:16],
        )
    )
    mc.soft.seen[m.number] = now
    mc.soft.trainers = None
    training.release_holds(mc, held, f"{key[:8]} started a new session", m.number)
    mc.check_phase = True
    return m


def _admit(mc: Machine, key: Key, request: tasks.Join) -> None:
    s = mc.state
    if request.role not in ROLES:
        raise Refused("bad_role", f"role {request.role[:32]!r} is unknown", f"Use one of: {', '.join(ROLES)}.")
    if key in s.banned:
        raise Refused("banned", f"key {key[:8]} is banned from this run", "Ask the operator of the run.")
    if request.role == "miner" and s.allowed and key not in s.allowed:
        raise Refused(
            "not_allowed",
            f"this run has an allow-list and key {key[:8]} is not on it",
            f"Ask the operator to run: iota allow URL {key}",
        )
    if request.role == "validator" and s.config.admit.validators and key not in s.config.admit.validators:
        raise Refused(
            "not_allowed",
            f"key {key[:8]} is not among the run's validators",
            "Validators and their stakes stand in the run file under [admit.validators].",
        )
    if s.phase == "finished":
        raise Refused("finished", "the run has ended", "Its operator may extend it with a new stop rule.")


def _assign(mc: Machine, m: Member) -> int:
    """A returning miner keeps the stage that it has worked in; any other goes where members are fewest, then where it
    was, then where capacity is least. (One that comes back before it did anything may find its place taken: kept in its
    stage, it would leave another one short for the whole run.)"""
    s = mc.state
    if m.stage >= 0 and m.total:
        return m.stage
    counts = [0] * s.stages
    capacity = [0.0] * s.stages
    for other in s.members:
        if other.alive and other.stage >= 0 and other is not m:
            counts[other.stage] += 1
            capacity[other.stage] += 1.0 / mc.soft.speed.get(other.number, 1.0)
    return min(range(s.stages), key=lambda stage: (counts[stage], stage != m.stage, capacity[stage], stage))


def _starts(mc: Machine, m: Member, stage: int) -> int:
    """First epoch that a session trains in: at once when it returns, or when its stage is short of members; else it
    waits for the next full sync (paper section 2.2)."""
    s = mc.state
    if s.phase not in TRAINING:
        return s.epoch
    others = sum(1 for o in s.members if o.stage == stage and o.alive and o is not m and o.loaded == s.epoch - 1)
    short = others < s.config.merge.members
    return s.epoch if m.session > 0 or short else s.epoch + 1


def gone(mc: Machine, m: Member, how: str, why: str, now: float) -> None:
    """A member is no longer there: its work is re-routed, its passes of this epoch carry no merge weight."""
    number = m.number
    held = training.held_by(mc, number)
    mc.emit(ev.Gone(number, how, now, why))
    mc.soft.forget(number)
    training.release_holds(mc, held, f"{m.key[:8]} is gone ({how})", number)
    mc.check_phase = True


def find_dead(mc: Machine, now: float) -> None:
    """An idle member that said nothing for `silence` seconds is dead; one with a task has until its deadline."""
    s, soft = mc.state, mc.soft
    silence = s.config.limits.silence
    for m in s.members:
        if not m.alive or m.number in soft.lease:
            continue
        quiet = now - soft.seen.setdefault(m.number, now)
        if quiet > silence:
            gone(mc, m, "dead", f"said nothing for {quiet:.1f} s", now)


def check_session(mc: Machine, key: Key, session: int) -> Member:
    """The member behind a turn, or `Refused` with what it should do."""
    m = mc.state.member(key)
    if m is None:
        raise Refused("unknown_key", f"key {key[:8]} has not joined this run", "Join first.")
    if key in mc.state.banned:
        raise Refused("banned", f"key {key[:8]} is banned from this run", "Ask the operator of the run.")
    if session != m.session:
        raise Refused(
            "session_over",
            f"session {session} of key {key[:8]} is over, {m.session} is current",
            "Another process uses this key; stop one of them.",
        )
    if not m.alive:
        raise Refused("rejoin", f"this session ended ({m.why_gone})", "Join again; what was accepted stays booked.")
    return m


def farewell(mc: Machine, m: Member, now: float) -> tasks.Leave | None:
    """The last word to a peer when the run is over, or it asked to drain, holds nothing any more and has shown the
    evidence that was asked of it: whoever leaves before that leaves its work without a verdict."""
    if mc.state.phase == "finished":
        return tasks.Leave(code="finished", text=f"the run ended: {mc.state.phase_why}")
    busy = m.number in mc.soft.lease or any(a.state == "show" for a in mc.open_audits(m.number))
    if m.number in mc.soft.draining and not busy and mc.state.phase not in ENDED:
        gone(mc, m, "left", "drained on its own wish", now)
        return tasks.Leave(code="drained", text="your last work is booked; nothing is held by you any more")
    return None
