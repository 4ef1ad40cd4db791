"""The run's configuration as frozen, typed values: what a run file may say and what each value means.

Each section is owned by the part it configures. Defaults here are the product's defaults. Cross-field checks live in
`iota.config.load.check`, which every entry point calls before anything is built.
"""

from __future__ import annotations

import msgspec


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all sections: keyword-only, immutable, unknown keys refused."""


class ModelConfig(Section, frozen=True):
    """A Llama 3 family model. `ffn` 0 means the family's rule: 8/3 of width rounded up to a multiple of 32."""

    width: int = 256
    blocks: int = 6
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 0
    vocabulary: int = 256
    sequence: int = 256
    rope_theta: float = 500_000.0
    rope_scaling: bool = False
    norm_eps: float = 1e-5
    tie_embeddings: bool = False


class StagesConfig(Section, frozen=True):
    """How the model is cut. `codec`: identity | bottleneck. `channels` is the bottleneck's k. `wire_dtype`: float32 |
    bfloat16, what boundary tensors travel in."""

    count: int = 3
    codec: str = "identity"
    channels: int = 32
    wire_dtype: str = "bfloat16"


class DataConfig(Section, frozen=True):
    """`source`: "python" (text that every CPython carries), or a folder or glob of .txt, .jsonl, .jsonl.gz, .parquet.
    `tokenizer`: "bytes" or the path of a `tokenizers` JSON file. Held-out text is split off by document.
    `max_bytes` caps the corpus read (0: no cap)."""

    source: str = "python"
    tokenizer: str = "bytes"
    column: str = "text"
    heldout_share: float = 0.02
    heldout_tokens: int = 16_384
    max_bytes: int = 0


class TrainConfig(Section, frozen=True):
    """`batch` sequences make a sample (one microbatch); `accumulate` passes make an inner step. `pipeline`:
    asynchronous | synchronous. `max_in_flight` samples per first-stage miner (0: stages + 1). `dtype`: compute dtype,
    float32 | bfloat16 (autocast). `lr_tokens` 0: the stop rule's tokens, else 10 x warmup. `optimizer`: adamw | muon
    (the blocks' matrices by Muon with momentum `muon_momentum`, the rest by AdamW; both at `lr` and `weight_decay`)."""

    batch: int = 4
    accumulate: int = 1
    max_in_flight: int = 0
    pipeline: str = "asynchronous"
    dtype: str = "float32"
    optimizer: str = "adamw"
    lr: float = 1e-3
    min_lr_share: float = 0.1
    warmup_tokens: int = 50_000
    lr_tokens: int = 0
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    muon_momentum: float = 0.95
    clip: float = 1.0


class MergeConfig(Section, frozen=True):
    """Design sections 3 and 5. `outer`: nesterov | assign. `inner_state`: merge | carry | reset. `phase_limit` and
    `epoch_limit` hold until durations are known (seconds). `weight_cap`: contributions are capped at this multiple of
    the stage's median of passes. `recompute_share`: agreeing shards recomputed as an audit. `members`: the run begins
    once every stage has this many loaded members, or `gather_limit` seconds passed and every stage has one."""

    outer: str = "nesterov"
    outer_lr: float = 0.7
    outer_momentum: float = 0.5
    inner_state: str = "merge"
    min_batches: int = 8
    quorum: float = 0.75
    epoch_limit: float = 600.0
    phase_limit: float = 60.0
    weight_cap: float = 2.0
    recompute_share: float = 0.05
    dispute_limit: float = 10.0
    group_max: int = 32
    members: int = 1
    gather_limit: float = 120.0


class AuditConfig(Section, frozen=True):
    """Design section 6. `segment_steps` holds for epoch 1; later S = `segments_per_epoch` of the last epoch's median.
    `share` of miners audited each epoch with `segments` drawn each (0: every segment). Thresholds by operation kind."""

    segment_steps: int = 8
    segments_per_epoch: int = 10
    share: float = 1.0
    segments: int = 1
    cosine: float = 0.99
    ratio_low: float = 0.9
    ratio_high: float = 1.1
    show_limit: float = 60.0
    audit_limit: float = 120.0
    redraws: int = 2
    final_wait: float = 20.0


class PayConfig(Section, frozen=True):
    """Paper section 3. `pool` integer units a epoch; `burn` share of it; `gamma` epochs a score counts in full.
    `half_life` epochs (0: the paper's step function)."""

    pool: int = 1_000_000
    burn: float = 0.0
    gamma: int = 10
    half_life: float = 0.0


class AdmitConfig(Section, frozen=True):
    """Who may join. `allow`: keys (empty: anyone). `founders`: keys the sybil policy leaves alone. `validators`: stakes
    by key (empty: any validator, stake 1). `operators`: keys that may pause, stop, ban."""

    allow: tuple[str, ...] = ()
    founders: tuple[str, ...] = ()
    validators: dict[str, int] = {}
    operators: tuple[str, ...] = ()


class LimitsConfig(Section, frozen=True):
    """Time in seconds. `poll`: longest a poll is held, the heartbeat. `silence`: an idle peer that said nothing this
    long is dead. `clock_window`: largest difference between a message's time and ours. `inline_bytes`: boundary tensors
    up to this size ride inside messages."""

    poll: float = 10.0
    silence: float = 15.0
    clock_window: float = 60.0
    lease: float = 60.0
    grace: float = 5.0
    inline_bytes: int = 64 * 1024 * 1024
    keep_checkpoints: int = 3
    keep_every: int = 10


class SwarmConfig(Section, frozen=True):
    """What `iota up` starts on this machine, and where the services listen."""

    miners: int = 6
    validators: int = 1
    host: str = "127.0.0.1"
    port: int = 8400
    blob_port: int = 8401
    public_url: str = ""
    blob_url: str = ""


class RunConfig(Section, frozen=True):
    """A whole run. `stop` is a rule such as "epochs >= 6 or minutes >= 30 and loss <= 2.0", checked at SYNC. `initial`:
    a folder with the weights to begin with, a Hugging Face Llama or written by `iota export`; "": drawn from `seed`."""

    name: str
    seed: int = 0
    stop: str = "epochs >= 10"
    folder: str = ""
    initial: str = ""
    model: ModelConfig = ModelConfig()
    stages: StagesConfig = StagesConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    merge: MergeConfig = MergeConfig()
    audit: AuditConfig = AuditConfig()
    pay: PayConfig = PayConfig()
    admit: AdmitConfig = AdmitConfig()
    limits: LimitsConfig = LimitsConfig()
    swarm: SwarmConfig = SwarmConfig()


class TokenShard(msgspec.Struct, frozen=True):
    """One file of the tokenised corpus in the blob store: `tokens` of `dtype` (uint8 | uint16 | uint32)."""

    object: str
    tokens: int
    dtype: str
    digest: str


class Manifest(msgspec.Struct, frozen=True):
    """The run manifest (format final): everything that a peer must know and nobody may change. Signed by the
    orchestrator's key; its digest names the run.

    `run` is the run id: name plus the first digits of the digest of the rest. `train_shards`/`heldout_shards` cover the
    corpus in order; `trigram_loss` is the held-out loss of a byte-trigram model fitted on the training tokens (nats per
    token), the yardstick of the demo, or None for other tokenizers. `checkpoints[s]` is stage s's checkpoint 0 encoded
    as msgpack. `bytes_per_token`: of the held-out text. `parameters[s]`: of each stage; `cuts[s]`: the (first, last)
    block of each stage, half open.
    """

    version: int
    protocol: int
    run: str
    created: float
    orchestrator: str
    config: RunConfig
    train_shards: tuple[TokenShard, ...]
    heldout_shards: tuple[TokenShard, ...]
    tokenizer_digest: str
    bytes_per_token: float
    trigram_loss: float | None
    cuts: tuple[tuple[int, int], ...]
    parameters: tuple[int, ...]
    checkpoints: tuple[bytes, ...]
