"""Tokens a second of the paper's 1.5B preset with each codec, at several bandwidths, from the plan's cost model."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from iota.config.load import check
from iota.config.presets import presets
from iota.config.schema import RunConfig
from iota.errors import ConfigError
from iota.lab.fig5_report import Row
from iota.lab.fig5_spec import token_bytes
from iota.model.boundary import CODECS
from iota.model.cost import tokens_per_second
from iota.model.partition import cut_blocks

PRESET = "1.5b"
MBITS = (10.0, 80.0, 1000.0)
FLOPS = 4e13
"""Operations a second that a miner reaches, stated: about what a consumer GPU of 24 GB does in bfloat16."""
ROUND_TRIP_MS = 50.0


def preset_config(codec: str, ratio: float) -> RunConfig:
    """The preset with a codec at (at least) a compression ratio; for `identity` in the dtype that gives it. Raises
    ConfigError when the codec cannot."""
    model, stages = presets()[PRESET]
    spec = CODECS[codec]
    base = RunConfig(name="fig5", stop="tokens >= 1", model=model)
    base = msgspec.structs.replace(base, train=msgspec.structs.replace(base.train, dtype="bfloat16", warmup_tokens=0))
    wire = "bfloat16" if spec.narrow or ratio >= 2 else "float32"
    low, high, best = 1, model.width, None
    while low <= high:
        middle = (low + high) // 2
        one = msgspec.structs.replace(stages, codec=codec, channels=middle, wire_dtype=wire)
        config = msgspec.structs.replace(base, stages=one)
        if model.width * 4 / token_bytes(config) >= ratio:
            best, low = config, middle + 1
        else:
            high = middle - 1
    if best is None:
        raise ConfigError(f"{codec} cannot compress {ratio:g}x", "Use a smaller ratio.")
    return check(best)


def speed_rows(rows: Sequence[Row]) -> list[Row]:
    """One row for each codec and ratio that has results, without controls."""
    wanted = dict.fromkeys(
        (row["codec"], row["ratio"]) for row in rows if row.get("ratio") and not row["control"] and not row["H"]
    )
    out = []
    for codec, ratio in sorted(wanted):
        config = preset_config(codec, ratio)
        cuts = cut_blocks(config)
        row: Row = {
            "codec": codec,
            "ratio": round(config.model.width * 4 / token_bytes(config), 2),
            "channels": config.stages.channels,
        }
        for mbits in MBITS:
            rate = tokens_per_second(config, cuts, flops=FLOPS, mbits=mbits, round_trip_ms=ROUND_TRIP_MS)
            row[f"tokens_per_s_{mbits:g}"] = round(rate.tokens_per_s, 1)
            row[f"binds_{mbits:g}"] = rate.binds
        out.append(row)
    return out
