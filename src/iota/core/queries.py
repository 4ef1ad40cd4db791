"""What anyone may ask an orchestrator outside of the task loop, and what an operator may order.

Every request is signed; reading needs no membership. Answers are JSON documents (attached as one uint8 tensor): a
machine may read them, the command line prints them.
"""

from __future__ import annotations

import msgspec

from iota.core.values import Key


class Status(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """The run now: epoch, phase with what it waits for and until when, members, losses, speed. Answer: Document."""


class Explain(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Why `key` got what it got in `epoch` (0: the last closed one). Answer: Document."""

    key: Key
    epoch: int


class LedgerFrom(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Ledger entries from `epoch` on, as JSON lines. Answer: Document."""

    epoch: int


class History(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Everything the report needs: epochs, phases, verdicts, agreement, emissions, bytes. Answer: Document."""


class EventsFrom(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Journal rows from `seq` on, at most `limit`, as msgpack of (seq, time, event bytes). Operators only."""

    seq: int
    limit: int


class Operate(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """pause | resume | stop | ban | allow | extend, signed by an operator's key. `target`: a key, or a stop rule."""

    command: str
    target: str


class DataLinks(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """Signed GET URLs of objects that the run manifest names (token shards, tokenizer). Answer: Document, a JSON object
    name -> URL. Links expire; ask again."""

    names: tuple[str, ...]


class Document(msgspec.Struct, frozen=True, tag=True, kw_only=True, forbid_unknown_fields=True):
    """The answer is the attached uint8 tensor, of this media `kind`: json | jsonl | msgpack."""

    kind: str


Query = Status | Explain | LedgerFrom | History | EventsFrom | Operate | DataLinks
