"""One job of `iota lab fig5` as data: a model, a codec, a control, a schedule and a seed."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from iota.config.load import check
from iota.config.schema import ModelConfig, RunConfig, Section, StagesConfig, TrainConfig
from iota.core.values import DTYPE_BYTES, sha256
from iota.errors import ConfigError
from iota.model.boundary import BACKWARD, CODECS, FORWARD, boundary_tensor

WIDE, BYPASS, REMOVED, IDS = "wide", "bypass", "removed", "ids"
CONTROLS = ("", WIDE, BYPASS, REMOVED, IDS)
"""What is taken apart:
* wide (c1): the codec's module with as many channels as the model is wide, float32 on the wire. More parameters.
* bypass (c1): the codec's own tensors and computing beside an uncompressed stream: same parameters, nothing narrow.
* removed (c2): the baseline without the blocks that receive a boundary.
* ids (c3): the baseline plus the codec's id tables at the receivers."""
BASELINE = "identity"


class Corpus(Section, frozen=True):
    """The text. `source` as `data.source` of a run file; `max_bytes` of it are read (0: all). `heldout_tokens` tokens
    are held out by document. A BPE of `vocabulary` is trained on the training text."""

    source: str = "python"
    max_bytes: int = 0
    vocabulary: int = 4096
    sequence: int = 256
    heldout_tokens: int = 65_536


class Spec(Section, frozen=True):
    """One job. A step takes `batch` sequences in each of `replicas` of every stage. `inner_steps` H: replicas step
    locally and merge after every H steps by the run's outer optimizer (0: one replica, synchronous). Held-out loss is
    measured every `every` steps (with local steps: at the first merge from then on) and at the end."""

    seed: int
    codec: str = BASELINE
    channels: int = 0
    wire: str = "float32"
    control: str = ""
    width: int = 512
    ffn: int = 1024
    heads: int = 8
    kv_heads: int = 8
    blocks: int = 4
    stages: int = 4
    vocabulary: int = 4096
    sequence: int = 256
    batch: int = 8
    replicas: int = 1
    inner_steps: int = 0
    outer_lr: float = 0.7
    outer_momentum: float = 0.5
    steps: int = 600
    every: int = 120
    warmup_steps: int = 60
    lr: float = 1e-3
    min_lr_share: float = 0.1
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0
    optimizer: str = "adamw"
    dtype: str = "float32"

    @property
    def tokens_per_step(self) -> int:
        return self.replicas * self.batch * self.sequence

    @property
    def tokens(self) -> int:
        """Tokens of the whole job."""
        return self.steps * self.tokens_per_step

    @property
    def variant(self) -> str:
        """Codec, channels, wire and control, as a person names them: `bottleneck-k8-bfloat16`."""
        spec = CODECS[self.codec]
        parts = [self.codec]
        if self.control == REMOVED:
            return "removed"
        if self.control != WIDE and (spec.narrow or spec.forward == "topk"):
            parts.append(f"k{self.channels}")
        if not spec.forward and self.control != WIDE:
            parts.append(self.wire)
        return "-".join(parts + ([self.control] if self.control else []))

    @property
    def name(self) -> str:
        """Names the job and its files; every job of the grid has another one."""
        parts = [self.variant, f"w{self.width}", f"{self.blocks}in{self.stages}", f"{self.steps}steps"]
        if self.inner_steps:
            parts.append(f"H{self.inner_steps}")
        if self.optimizer != "adamw":
            parts.append(self.optimizer)
        if self.dtype != "float32":
            parts.append(self.dtype)
        return "_".join([*parts, f"s{self.seed}"])

    def digest(self) -> str:
        """Names every value of the spec."""
        return sha256(msgspec.json.encode(self, order="sorted"))

    def baseline(self) -> Spec:
        """The uncompressed, synchronous job that this one is held against: same model, data, tokens and seed."""
        return msgspec.structs.replace(
            self,
            codec=BASELINE,
            channels=0,
            wire="float32",
            control="",
            batch=self.batch * self.replicas,
            replicas=1,
            inner_steps=0,
            outer_lr=0.7,
            outer_momentum=0.5,
        )


def differences(old: Section, new: Section) -> list[str]:
    """`key: old is now new` for every value that differs."""
    rows = ((key, getattr(old, key), getattr(new, key)) for key in new.__struct_fields__)
    return [f"{key} was {was!r}, is {now!r}" for key, was, now in rows if was != now]


def check_spec(spec: Spec) -> None:
    """Refuse a job that cannot be. Raises ConfigError before anything is built."""
    if spec.control not in CONTROLS:
        raise ConfigError(f"control {spec.control!r} does not exist", f"Use one of: {', '.join(CONTROLS[1:])}.")
    if spec.codec not in CODECS:
        raise ConfigError(f"unknown codec {spec.codec!r}", f"Use one of: {', '.join(CODECS)}.")
    if (spec.replicas > 1) != (spec.inner_steps > 0) or spec.replicas < 1 or spec.inner_steps < 0:
        raise ConfigError(
            f"{spec.replicas} replicas with {spec.inner_steps} inner steps",
            "Local steps need several replicas; a synchronous job has one and inner_steps = 0.",
        )
    if spec.steps < 1 or spec.every < 1 or spec.warmup_steps < 0:
        raise ConfigError(f"{spec.steps} steps, measured every {spec.every}", "Use at least 1 of each.")
    if spec.control in (BYPASS, WIDE) and CODECS[spec.codec].narrow is False:
        raise ConfigError(f"{spec.codec} has no narrow channel to be taken out", "Use a codec with channels.")
    if spec.control == WIDE and CODECS[spec.codec].forward:
        raise ConfigError(
            f"{spec.codec} quantises however wide it is", "Use its codec without a wire format of its own."
        )
    if spec.control == BYPASS and spec.codec == "subspace":
        raise ConfigError("a bypass does not free the writers of a subspace", "Use the control wide for it.")
    if spec.control == IDS and not CODECS[spec.codec].ids:
        raise ConfigError(f"{spec.codec} has no id tables", "Use a codec that reads ids.")
    if spec.control == REMOVED and spec.blocks < spec.stages:
        raise ConfigError(f"{spec.blocks} blocks, {spec.stages - 1} to be removed", "Use more blocks.")
    run_config(spec)


def codec_config(spec: Spec) -> RunConfig:
    """The run of this job's codec, with the control left out; checked. Raises ConfigError."""
    stages = StagesConfig(
        count=spec.stages,
        codec=spec.codec,
        channels=spec.width if spec.control == WIDE else max(1, spec.channels),
        wire_dtype="float32" if spec.control == WIDE else spec.wire,
    )
    return check(_run(spec, stages, spec.blocks), f"job {spec.name}")


def run_config(spec: Spec) -> RunConfig:
    """The run that the job's stages are built for, control included; checked. Raises ConfigError."""
    if spec.control in ("", WIDE):
        return codec_config(spec)
    removed = spec.stages - 1 if spec.control == REMOVED else 0
    count = min(spec.stages, spec.blocks - removed)
    plain = StagesConfig(count=count, codec=BASELINE, channels=1, wire_dtype="float32")
    return check(_run(spec, plain, spec.blocks - removed), f"job {spec.name}")


def _run(spec: Spec, stages: StagesConfig, blocks: int) -> RunConfig:
    model = ModelConfig(
        width=spec.width,
        blocks=blocks,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        ffn=spec.ffn,
        vocabulary=spec.vocabulary,
        sequence=spec.sequence,
    )
    train = TrainConfig(
        batch=spec.batch,
        pipeline="synchronous",
        dtype=spec.dtype,
        optimizer=spec.optimizer,
        lr=spec.lr,
        min_lr_share=spec.min_lr_share,
        warmup_tokens=spec.warmup_steps * spec.tokens_per_step,
        lr_tokens=max(spec.steps, spec.warmup_steps) * spec.tokens_per_step,
        weight_decay=spec.weight_decay,
        beta1=spec.beta1,
        beta2=spec.beta2,
        clip=spec.clip,
    )
    stop = f"tokens >= {spec.tokens}"
    return RunConfig(name="fig5", seed=spec.seed, stop=stop, model=model, stages=stages, train=train)


def token_bytes(config: RunConfig) -> float:
    """Payload bytes a token of one boundary, mean of both directions."""
    tokens = config.train.batch * config.model.sequence
    return sum(boundary_tensor(config, way).nbytes for way in (FORWARD, BACKWARD)) / (2 * tokens)


def channels_for(spec: Spec, ratio: float) -> int:
    """The most channels with which the codec's payload is at least `ratio` times smaller than float32 at full width.
    Raises ConfigError when not even one is."""
    allowed = spec.width * DTYPE_BYTES["float32"] / ratio
    low, high = 0, spec.width
    while low < high:
        middle = math.ceil((low + high) / 2)
        if token_bytes(codec_config(msgspec.structs.replace(spec, channels=middle))) <= allowed:
            low = middle
        else:
            high = middle - 1
    if low == 0:
        raise ConfigError(f"{spec.codec} cannot compress {ratio:g}x at width {spec.width}", "Use a smaller ratio.")
    return low


def fields(spec: Spec) -> dict[str, Any]:
    """The spec as plain values."""
    return msgspec.structs.asdict(spec)
