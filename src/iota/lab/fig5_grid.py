"""The grid of `iota lab fig5` as data: named cells of jobs.

A job that stands in several cells is one job. All jobs of a seed share initial values and data order, so differences
between codecs are paired.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from iota.errors import ConfigError
from iota.lab.fig5_spec import BYPASS, IDS, REMOVED, WIDE, Corpus, Spec, channels_for

PAPER = "bottleneck"
BEST = "direct4+ids"
SECOND = "resbm4+ids"
"""The two codecs that go on to the sweep, the long runs and the local steps."""
RATIO = 128.0
SWEEP = (128.0, 32.0, 8.0, 256.0, 64.0, 16.0)
"""In order of what is wanted first."""
FLOAT = "bfloat16"
"""What codecs without a wire format of their own travel in."""


@dataclass(frozen=True)
class Entry:
    """One job without its seed. `seeds` > 0: so many seeds are enough."""

    spec: Spec
    seeds: int = 0


def compressed(base: Spec, codec: str, ratio: float) -> Spec:
    """The codec at a compression ratio."""
    spec = msgspec.structs.replace(base, codec=codec, wire=FLOAT)
    return msgspec.structs.replace(spec, channels=channels_for(spec, ratio))


def _with(spec: Spec, **changes: Any) -> Spec:
    return msgspec.structs.replace(spec, **changes)


def _width(width: int) -> Spec:
    """The issue's model at another width: heads of 64, SwiGLU of twice the width."""
    return Spec(seed=0, width=width, ffn=2 * width, heads=width // 64, kv_heads=width // 64)


def _minimum() -> Iterable[Entry]:
    """1.2M tokens at width 512: baseline, every codec at 128x, the three controls."""
    base = Spec(seed=0)
    yield Entry(base)
    for codec in dict.fromkeys((PAPER, "resbm", "subspace", "resbm+ids", "resbm4", SECOND, BEST)):
        yield Entry(compressed(base, codec, RATIO))
    for codec in (PAPER, SECOND):  # without a narrow channel, `direct4+ids` is the control with id tables
        yield Entry(_with(compressed(base, codec, RATIO), control=BYPASS, wire="float32"))
    yield Entry(_with(base, control=REMOVED))
    yield Entry(_with(compressed(base, BEST, RATIO), control=IDS, wire="float32"))
    yield Entry(_with(base, codec="int8", wire=FLOAT), seeds=1)
    yield Entry(compressed(base, "topk", RATIO), seeds=1)


def _dtype() -> Iterable[Entry]:
    """The channel's width apart from what it travels in, and the module with a channel as wide as the model."""
    base = Spec(seed=0)
    yield Entry(base)
    yield Entry(_with(base, wire=FLOAT))
    paper = compressed(base, PAPER, RATIO)
    yield Entry(paper)
    yield Entry(_with(paper, wire="float32"))
    yield Entry(compressed(base, BEST, RATIO))
    for codec in (PAPER, "resbm", "resbm+ids"):
        yield Entry(_with(base, codec=codec, control=WIDE, wire=FLOAT))


def _sweep() -> Iterable[Entry]:
    """0.3M tokens, the best two, from 8x to 256x."""
    base = Spec(seed=0, steps=150, every=50)
    yield Entry(base)
    yield Entry(_with(compressed(base, BEST, RATIO), control=IDS, wire="float32"))
    for ratio in SWEEP:
        for codec in (BEST, SECOND):
            yield Entry(compressed(base, codec, ratio))


def _local() -> Iterable[Entry]:
    """Does compression interact with local steps? Two replicas with half of the batch: equal tokens, equal steps."""
    base = Spec(seed=0)
    for spec in (base, compressed(base, BEST, RATIO)):
        yield Entry(spec)
        for inner in (8, 32):
            yield Entry(_with(spec, batch=spec.batch // 2, replicas=2, inner_steps=inner))


def _boundaries() -> Iterable[Entry]:
    """1, 3 and 7 boundaries in eight blocks, 0.6M tokens."""
    for stages in (2, 4, 8):
        base = Spec(seed=0, blocks=8, stages=stages, steps=300, every=100)
        yield Entry(base)
        for codec in (PAPER, BEST):
            yield Entry(compressed(base, codec, RATIO))


def _widths() -> Iterable[Entry]:
    """Other widths at the same tokens and ratio."""
    for width in (256, 512, 1024):
        base = _width(width)
        yield Entry(base)
        for codec in (PAPER, BEST):
            yield Entry(compressed(base, codec, RATIO))


def _long() -> Iterable[Entry]:
    """2.5M tokens: does the gap widen, and from which bytes a token on does it not?"""
    base = Spec(seed=0, steps=1200, every=240)
    yield Entry(base)
    yield Entry(compressed(base, BEST, RATIO))
    yield Entry(compressed(base, BEST, 32.0))
    yield Entry(compressed(base, PAPER, RATIO))


def _muon() -> Iterable[Entry]:
    """The published results at 128x used Muon."""
    base = Spec(seed=0, optimizer="muon")
    yield Entry(base)
    for codec in (PAPER, BEST):
        yield Entry(compressed(base, codec, RATIO))


def _quick() -> Iterable[Entry]:
    """Seconds, for trying the machinery: says nothing about codecs."""
    base = Spec(
        seed=0, width=64, ffn=128, heads=2, kv_heads=2, vocabulary=512, sequence=64, batch=4, steps=24, every=8,
        warmup_steps=4,
    )  # fmt: skip
    narrow = compressed(base, PAPER, 32.0)
    yield Entry(base)
    yield Entry(narrow)
    yield Entry(_with(narrow, control=BYPASS, wire="float32"), seeds=1)
    yield Entry(_with(narrow, batch=2, replicas=2, inner_steps=8), seeds=1)


CELLS: dict[str, Callable[[], Iterable[Entry]]] = {
    "minimum": _minimum,
    "dtype": _dtype,
    "sweep": _sweep,
    "local": _local,
    "boundaries": _boundaries,
    "widths": _widths,
    "long": _long,
    "muon": _muon,
}
QUICK = "quick"
QUICK_CORPUS = Corpus(max_bytes=300_000, vocabulary=512, sequence=64, heldout_tokens=8192)


def cell(name: str) -> list[Entry]:
    """The entries of one cell. Raises ConfigError for an unknown name."""
    if name == QUICK:
        return list(_quick())
    if name not in CELLS:
        raise ConfigError(f"cell {name!r} does not exist", f"Use some of: {', '.join(CELLS)}.")
    return list(CELLS[name]())


def jobs(cells: Sequence[str], seeds: Sequence[int], dtype: str = "float32") -> list[Spec]:
    """Every job once, computing in `dtype`, seed after seed, so that whatever is finished is paired. Raises
    ConfigError."""
    entries = [entry for name in cells for entry in cell(name)]
    found: dict[str, Spec] = {}
    for place, seed in enumerate(seeds):
        for entry in entries:
            if entry.seeds and place >= entry.seeds:
                continue
            spec = msgspec.structs.replace(entry.spec, seed=seed, dtype=dtype)
            assert found.get(spec.name, spec) == spec, f"two different jobs are called {spec.name}"
            found[spec.name] = spec
    return list(found.values())
