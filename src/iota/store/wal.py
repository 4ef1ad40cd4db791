"""Looks into SQLite's write-ahead log before SQLite does, because SQLite drops a damaged tail without a word.

Read-only, so that a refused journal stays as it was found. Format: https://www.sqlite.org/fileformat2.html#walformat
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import NamedTuple

_HEADER = 32
_FRAME = 24
_MAGIC = {0x377F0682: "<", 0x377F0683: ">"}


class WalState(NamedTuple):
    """The last whole transaction ends at byte `end`; `dropped` bytes after it that SQLite will not use; `bad_frame`
    (from 1) is set when whole transactions follow the damage, so that more than an unfinished tail is lost (0 means
    the header)."""

    end: int
    dropped: int
    bad_frame: int | None


def inspect_wal(path: Path) -> WalState:
    """The state of a `-wal` file; a missing or empty one is clean."""
    data = path.read_bytes() if path.exists() else b""
    if len(data) < _HEADER:
        return WalState(0, len(data), None)
    magic, _, page, _, salt1, salt2, sum1, sum2 = struct.unpack(">8I", data[:_HEADER])
    order = _MAGIC.get(magic)
    if order is None or _checksum(order, data[:24], (0, 0)) != (sum1, sum2) or page < 512:
        # SQLite would take this for an empty log; one that holds frames was not empty.
        return WalState(0, len(data), 0 if len(data) > _HEADER else None)
    size = _FRAME + page
    whole = (len(data) - _HEADER) // size
    running, valid, end = (sum1, sum2), 0, _HEADER
    heads = [struct.unpack_from(">6I", data, _HEADER + number * size) for number in range(whole)]
    done = 0
    for number, head in enumerate(heads):
        at = _HEADER + number * size
        running = _checksum(order, data[at : at + 8], running)
        running = _checksum(order, data[at + _FRAME : at + size], running)
        if (head[2], head[3]) != (salt1, salt2) or running != (head[4], head[5]):
            break
        valid = number + 1
        if head[1]:  # database size: marks the last frame of a transaction
            end, done = at + size, valid
    # What follows is old frames, of an earlier round of the log and with other salts, unless something was damaged.
    ours = [n for n in range(done, whole) if heads[n][2] == salt1 or heads[n][3] == salt2 or not any(heads[n])]
    tail = _HEADER + (ours[-1] + 1) * size if ours else end
    rest = data[_HEADER + whole * size :]
    if rest and tail == _HEADER + whole * size and data[16:24].startswith(rest[8:16]):
        tail = len(data)  # the part of one more frame of this round
    commits = sum(bool(heads[n][1]) for n in ours)
    return WalState(end, tail - end, valid + 1 if commits > 1 else None)


def _checksum(order: str, data: bytes, start: tuple[int, int]) -> tuple[int, int]:
    s0, s1 = start
    words = struct.unpack(f"{order}{len(data) // 4}I", data)
    for x0, x1 in zip(words[::2], words[1::2], strict=True):
        s0 = (s0 + x0 + s1) & 0xFFFFFFFF
        s1 = (s1 + x1 + s0) & 0xFFFFFFFF
    return s0, s1
