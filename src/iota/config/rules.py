"""What the values of a run file must satisfy together, section by section: pure functions from a config to problems.

A problem is one line: the key, the value, what is allowed. `iota.config.load.check` raises them all at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import msgspec

from iota.config.schema import LimitsConfig, RunConfig
from iota.core.payload import (
    BACKWARD,
    CODECS,
    FLOATS,
    FORWARD,
    TOPK_WIDTH,
    boundary_tensor,
    channels_fit,
    indices_fit,
)
from iota.errors import ConfigError

DTYPES = ("float32", "bfloat16")
NAME = re.compile(r"[a-z0-9-]{1,40}")
KEY = re.compile(r"[0-9a-f]{64}")
EVERYWHERE = ("0.0.0.0", "::")

# ------------------------------------------------------------------------------------------------- small helpers


def _bounds(
    config: RunConfig, section: str, low: float | None, high: float | None, ends: str, keys: str
) -> Iterator[str]:
    """Each of `keys` lies between `low` and `high`; `ends` is "[]", "(]", "[)" or "()" as in interval notation."""
    for key in keys.split():
        value = getattr(getattr(config, section), key)
        under = low is not None and (value < low or (value == low and ends[0] == "("))
        over = high is not None and (value > high or (value == high and ends[1] == ")"))
        if not (under or over):
            continue
        wants = []
        if low is not None:
            wants.append(f"{'more than' if ends[0] == '(' else 'at least'} {low}")
        if high is not None:
            wants.append(f"{'less than' if ends[1] == ')' else 'at most'} {high}")
        yield f"{section}.{key} = {value} is out of range; write a number of {' and '.join(wants)}"


def _one_of(config: RunConfig, section: str, key: str, options: tuple[str, ...]) -> Iterator[str]:
    value = getattr(getattr(config, section), key)
    if value not in options:
        yield f"{section}.{key} = {value!r} is not known; write one of: {', '.join(options)}"


# ------------------------------------------------------------------------------------------------------ sections


def _top(config: RunConfig) -> Iterator[str]:
    if not NAME.fullmatch(config.name):
        yield f"name = {config.name!r} cannot name a run; write 1 to 40 of the characters a-z, 0-9 and '-'"
    if not 0 <= config.seed < 2**63:
        yield f"seed = {config.seed} is out of range; write a whole number of at least 0 and less than 2^63"
    problem = _stop_problem(config.stop)
    if problem:
        yield problem


def _stop_problem(rule: str) -> str:
    """Why the stop rule cannot be used (it names the rule), or "". The grammar lives beside its evaluation, in core."""
    from iota.core.stop import parse

    try:
        parse(rule)
    except ConfigError as error:
        return str(error)
    return ""


def _model(config: RunConfig) -> Iterator[str]:
    model = config.model
    yield from _bounds(config, "model", 1, None, "[]", "width blocks heads kv_heads sequence")
    yield from _bounds(config, "model", 0, None, "[]", "ffn")
    yield from _bounds(config, "model", 0, None, "(]", "rope_theta norm_eps")
    yield from _bounds(config, "model", 2, 2**32, "[]", "vocabulary")
    if model.heads >= 1 and model.width >= 1:
        if model.width % model.heads:
            yield f"model.heads = {model.heads} does not divide model.width = {model.width}; write a divisor"
        elif (model.width // model.heads) % 2:
            size = model.width // model.heads
            yield f"model.heads = {model.heads} makes heads of {size} channels (width / heads); it must be even"
    if model.heads >= 1 and model.kv_heads >= 1 and model.heads % model.kv_heads:
        yield f"model.kv_heads = {model.kv_heads} does not divide model.heads = {model.heads}; write a divisor"
    if model.tie_embeddings and config.stages.count > 1:
        yield (
            f"model.tie_embeddings = true needs one stage, stages.count = {config.stages.count}: embedding and head "
            "would lie on different machines; write model.tie_embeddings = false"
        )
    if config.data.tokenizer == "bytes" and 2 <= model.vocabulary < 256:
        yield f"model.vocabulary = {model.vocabulary} is too small for data.tokenizer = 'bytes'; write at least 256"


def _stages(config: RunConfig) -> Iterator[str]:
    stages, model = config.stages, config.model
    yield from _bounds(config, "stages", 1, None, "[]", "count channels")
    yield from _one_of(config, "stages", "codec", tuple(CODECS))
    yield from _one_of(config, "stages", "wire_dtype", FLOATS)
    if 1 <= model.blocks < stages.count:
        yield (
            f"stages.count = {stages.count} is more than model.blocks = {model.blocks}; "
            f"write at most {model.blocks}, every stage holds a block"
        )
    if stages.codec in CODECS and stages.channels >= 1 and model.width >= 1:
        yield from _codec(config)


def _codec(config: RunConfig) -> Iterator[str]:
    """What a codec that exists wants of the model, and the size of its boundary tensors."""
    stages, model = config.stages, config.model
    if not channels_fit(config):
        yield (
            f"stages.channels = {stages.channels} is more than model.width = {model.width}; write at most "
            f"{model.width}: codec {stages.codec} sends {stages.channels} of a token's {model.width} values"
        )
    if not indices_fit(config):
        yield (
            f"model.width = {model.width} is more than {TOPK_WIDTH}, the most that the indices of codec "
            f"{stages.codec} can tell apart; write another stages.codec or at most {TOPK_WIDTH}"
        )
    if stages.codec == "subspace" and model.tie_embeddings:
        yield (
            "model.tie_embeddings = true and stages.codec = 'subspace': most of the embedding is fixed and makes no "
            "head; write model.tie_embeddings = false or another codec"
        )
    if stages.wire_dtype not in FLOATS:
        return
    for payload in dict.fromkeys((boundary_tensor(config, FORWARD), boundary_tensor(config, BACKWARD))):
        if stages.count > 1 and payload.nbytes > config.limits.inline_bytes:
            yield (
                f"a boundary tensor has {payload.nbytes:,} bytes (train.batch x model.sequence x {payload.channels} "
                f"channels of {payload.format}), more than limits.inline_bytes = {config.limits.inline_bytes:,} that "
                "may ride in a message; write a smaller train.batch or stages.channels, or a larger limits.inline_bytes"
            )
            return


def _data(config: RunConfig) -> Iterator[str]:
    data = config.data
    yield from _bounds(config, "data", 0, 0.5, "(]", "heldout_share")
    yield from _bounds(config, "data", 0, None, "[]", "max_bytes")
    for key in ("source", "tokenizer", "column"):
        if not getattr(data, key):
            yield f"data.{key} is empty; leave the key out for the default"
    if data.heldout_tokens < config.model.sequence + 1:
        yield (
            f"data.heldout_tokens = {data.heldout_tokens} is too small; write at least model.sequence + 1 = "
            f"{config.model.sequence + 1}, one window"
        )


def _train(config: RunConfig) -> Iterator[str]:
    train = config.train
    yield from _bounds(config, "train", 1, None, "[]", "batch accumulate")
    yield from _bounds(config, "train", 0, None, "[]", "max_in_flight lr warmup_tokens lr_tokens weight_decay")
    yield from _bounds(config, "train", 0, 1, "[]", "min_lr_share")
    yield from _bounds(config, "train", 0, 1, "[)", "beta1 beta2 muon_momentum")
    yield from _bounds(config, "train", 0, None, "(]", "eps clip")
    yield from _one_of(config, "train", "pipeline", ("asynchronous", "synchronous"))
    yield from _one_of(config, "train", "dtype", DTYPES)
    yield from _one_of(config, "train", "optimizer", ("adamw", "muon"))
    open_end = not _stop_problem(config.stop) and stop_tokens(config.stop) is None
    if train.lr_tokens == 0 and train.warmup_tokens == 0 and open_end:
        yield (
            "train.lr_tokens = 0 means the stop rule's tokens, else 10 x train.warmup_tokens, and both are missing; "
            "write train.lr_tokens, the tokens over which the learning rate falls"
        )
    elif 0 < train.lr_tokens < train.warmup_tokens:
        yield (
            f"train.warmup_tokens = {train.warmup_tokens} is more than train.lr_tokens = {train.lr_tokens}; "
            f"write at most {train.lr_tokens}"
        )


def _merge(config: RunConfig) -> Iterator[str]:
    yield from _one_of(config, "merge", "outer", ("nesterov", "assign"))
    yield from _one_of(config, "merge", "inner_state", ("merge", "carry", "reset"))
    yield from _bounds(config, "merge", 0, 1, "(]", "quorum")
    yield from _bounds(config, "merge", 0, 1, "[]", "recompute_share")
    yield from _bounds(config, "merge", 0, 1, "[)", "outer_momentum")
    yield from _bounds(config, "merge", 0, None, "[]", "outer_lr")
    yield from _bounds(config, "merge", 1, None, "[]", "min_batches members weight_cap")
    yield from _bounds(config, "merge", 2, None, "[]", "group_max")
    yield from _bounds(config, "merge", 0, None, "(]", "epoch_limit phase_limit dispute_limit gather_limit")


def _audit(config: RunConfig) -> Iterator[str]:
    yield from _bounds(config, "audit", 1, None, "[]", "segment_steps segments_per_epoch ratio_high")
    yield from _bounds(config, "audit", 0, None, "[]", "segments redraws final_wait")
    yield from _bounds(config, "audit", 0, 1, "[]", "share")
    yield from _bounds(config, "audit", 0, 1, "(]", "cosine ratio_low")
    yield from _bounds(config, "audit", 0, None, "(]", "show_limit audit_limit")


def _pay(config: RunConfig) -> Iterator[str]:
    yield from _bounds(config, "pay", 0, None, "[]", "pool gamma half_life")
    yield from _bounds(config, "pay", 0, 1, "[]", "burn")


def _admit(config: RunConfig) -> Iterator[str]:
    admit = config.admit
    for name, keys in (
        ("allow", admit.allow),
        ("founders", admit.founders),
        ("validators", tuple(admit.validators)),
        ("operators", admit.operators),
    ):
        for key in keys:
            if not KEY.fullmatch(key):
                yield f"admit.{name} holds {key[:70]!r}, no key; write the 64 hex digits of `iota key show`"
    for key, stake in admit.validators.items():
        if stake < 1:
            yield f"admit.validators: the stake of {key[:12]} is {stake}; write a whole number of at least 1"


def _limits(config: RunConfig) -> Iterator[str]:
    limits: LimitsConfig = config.limits
    yield from _bounds(config, "limits", 0, None, "(]", "poll silence clock_window lease")
    yield from _bounds(config, "limits", 0, None, "[]", "grace inline_bytes")
    yield from _bounds(config, "limits", 1, None, "[]", "keep_checkpoints keep_every")
    if 0 < limits.silence <= limits.poll:
        yield (
            f"limits.silence = {limits.silence} is not more than limits.poll = {limits.poll}: an idle peer whose poll "
            f"is held would count as dead; write more than {limits.poll}"
        )


def _swarm(config: RunConfig) -> Iterator[str]:
    swarm = config.swarm
    yield from _bounds(config, "swarm", 0, None, "[]", "miners validators")
    yield from _bounds(config, "swarm", 1, 65535, "[]", "port blob_port")
    if not swarm.host:
        yield "swarm.host is empty; write the address to listen on, e.g. 127.0.0.1"
    if swarm.port == swarm.blob_port:
        yield f"swarm.blob_port = {swarm.blob_port} equals swarm.port; write two different ports"
    for key in ("public_url", "blob_url"):
        url = getattr(swarm, key)
        if url:
            yield from _url(key, url)
        elif swarm.host in EVERYWHERE:
            yield f"swarm.{key} is missing: swarm.host = {swarm.host!r} cannot be reached by peers; write a URL"


def _url(key: str, url: str) -> Iterator[str]:
    """A URL that is announced to peers: http(s), a host that exists for others, no wildcard and no port 0."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good or urlsplit(url).hostname in EVERYWHERE:
        yield f"swarm.{key} = {url!r} cannot be reached by peers; write http://HOST:PORT with the address they use"


SECTIONS: tuple[Callable[[RunConfig], Iterator[str]], ...] = (
    _top,
    _model,
    _stages,
    _data,
    _train,
    _merge,
    _audit,
    _pay,
    _admit,
    _limits,
    _swarm,
)


def problems(config: RunConfig) -> Iterator[str]:
    """Everything that is wrong with a config whose types are right, one line each."""
    for section in SECTIONS:
        yield from section(config)


# ------------------------------------------------------------------------------------------------ derived values


def stop_tokens(rule: str) -> int | None:
    """The largest token count that a stop rule waits for, or None: the default horizon of the learning rate."""
    from iota.core.stop import parse, tokens_bound

    return tokens_bound(parse(rule))


def derive(config: RunConfig) -> RunConfig:
    """Fill in the values whose documented 0 means "derived". Idempotent."""
    model, train = config.model, config.train
    changes: dict[str, Any] = {}
    if model.ffn == 0:
        ffn = -(-8 * model.width // (3 * 32)) * 32
        changes["model"] = msgspec.structs.replace(model, ffn=ffn)
    in_flight = train.max_in_flight or config.stages.count + 1
    lr_tokens = train.lr_tokens or stop_tokens(config.stop) or 10 * train.warmup_tokens
    changes["train"] = msgspec.structs.replace(train, max_in_flight=in_flight, lr_tokens=lr_tokens)
    return msgspec.structs.replace(config, **changes)
