"""Models with codecs between their stages for `transformers`: `import iota.hf` registers them with its Auto classes.

    import iota.hf
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(FOLDER)     # written by: iota export RUN FOLDER --format hf

The logits are those of the run's stages in a row, wire formats included. Needs the package transformers (the extra
`hf`). Legend: B batch, T new tokens, S all tokens so far, V vocabulary.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, cast

import msgspec
import torch
import torch.nn.functional as F
from torch import nn

from iota.errors import IotaError
from iota.model.generate import stages_in_a_row
from iota.model.layout import draw_tensor
from iota.model.llama import LlamaStage
from iota.nodes.card import Card, parse_card
from iota.nodes.huggingface import IOTA

try:
    from transformers.cache_utils import DynamicCache
    from transformers.configuration_utils import PretrainedConfig
    from transformers.generation.utils import GenerationMixin
    from transformers.modeling_outputs import CausalLMOutputWithPast
    from transformers.modeling_utils import PreTrainedModel
    from transformers.models.auto.configuration_auto import AutoConfig
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM
except ImportError as error:
    raise ImportError(f"iota.hf needs transformers ({error}). Install it: pip install 'iota-train[hf]'") from error


class IotaConfig(PretrainedConfig):  # type: ignore[no-untyped-call]
    """`iota`: the exported model's card as in its `config.json` (`iota.nodes.card.Card`). The sizes that transformers
    asks for by its own names follow from it.

    Raises IotaError `bad_checkpoint` for a card that is none or of another format, ConfigError for an impossible model.
    """

    model_type = IOTA
    has_no_defaults_at_init = True

    def __init__(self, iota: dict[str, Any] | None = None, **rest: Any) -> None:
        self.iota = iota
        if iota is not None:
            model = self.card().model
            rest |= {
                "vocab_size": model.vocabulary,
                "hidden_size": model.width,
                "num_hidden_layers": model.blocks,
                "num_attention_heads": model.heads,
                "num_key_value_heads": model.kv_heads,
                "max_position_embeddings": model.sequence,
                "tie_word_embeddings": False,
            }
        super().__init__(**rest)

    def card(self) -> Card:
        """What the model is."""
        return parse_card(msgspec.json.encode(self.iota), "the configuration's key iota")


class _Positions:
    """A `Past` (`iota.model.cache`) over one of transformers' caches, or over none. `places` [T]: where the new tokens
    come to lie in the cache, which before version 5 did not count by itself."""

    def __init__(self, cache: Any, places: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None) -> None:
        self._cache, self._places = cache, {"cache_position": places}
        self.positions, self.mask = positions, mask

    def extend(self, block: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self._cache is None:
            return keys, values
        extended: tuple[torch.Tensor, torch.Tensor] = self._cache.update(keys, values, block, cache_kwargs=self._places)
        return extended


class IotaForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[no-untyped-call]
    """The stages of a run in a row, codecs and wire formats included. Float32 weights (`torch.autocast` computes in
    bfloat16). At most the run's `model.sequence` positions: rotary tables end there."""

    config_class = IotaConfig
    _supports_sdpa = True

    def __init__(self, config: IotaConfig) -> None:
        super().__init__(config)
        card = config.card()
        self._run = card.config()
        self.stages = nn.ModuleList(LlamaStage(self._run, stage, cut) for stage, cut in enumerate(card.cuts))
        cast("Any", self).post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """What a checkpoint does not hold: the stages' fixed buffers, and weights that it lacks, drawn as a new run
        draws them. Called by transformers for every module, after loading too."""
        for number, stage in enumerate(self._row()):
            if stage is module:
                self._fill_buffers(number)
            prefix = next((name for name, inner in stage.named_modules() if inner is module), None)
            if prefix is None:
                continue
            for name, parameter in module.named_parameters(recurse=False):
                if not getattr(parameter, "_is_hf_initialized", False):
                    drawn = draw_tensor(self._run, self._run.seed, f"{prefix}.{name}", tuple(parameter.shape))
                    parameter.data.copy_(torch.from_numpy(drawn))

    def _fill_buffers(self, number: int) -> None:
        """Non-persistent buffers: transformers builds models without values and fills in the checkpoint's only."""
        with torch.device("cpu"):
            fresh = LlamaStage(self._run, number, self.config.card().cuts[number])
        for name, buffer in fresh.named_buffers():
            self._row()[number].get_buffer(name).copy_(buffer)

    def _row(self) -> list[LlamaStage]:
        return [cast("LlamaStage", stage) for stage in self.stages]

    def get_input_embeddings(self) -> nn.Module:
        return self._row()[0].embedding

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **_: Any,
    ) -> Any:
        """Logits [B, T, V] of `input_ids` [B, T], which follow what the cache holds (`cache`, or `past_key_values` as
        older versions of transformers call it). `attention_mask` [B, S]: 0 for padding. `labels` [B, T]: the mean loss
        of predicting each from the tokens before it, -100 left out.

        Raises IotaError `bad_input` for positions beyond the model's sequence, embeddings in place of ids, or weights
        that are not float32.
        """
        if input_ids is None or self.dtype != torch.float32:
            raise IotaError(
                "bad_input",
                "no input_ids were given" if input_ids is None else f"the weights are {self.dtype}",
                "Give token ids (codecs read them)" if input_ids is None else "Load in float32; use torch.autocast",
            )
        cache = past_key_values if cache is None else cache
        if cache is None and use_cache is not False:
            cache = DynamicCache()
        past = self._past(input_ids, attention_mask, position_ids, cache)
        logits = stages_in_a_row(self._run, self._row(), input_ids, past)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten().to(logits.device))
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        names = {field.name for field in fields(CausalLMOutputWithPast)}
        kept_cache = {"cache" if "cache" in names else "past_key_values": cache}
        return CausalLMOutputWithPast(loss=loss, logits=logits[:, kept], **kept_cache)

    def _past(
        self, ids: torch.Tensor, attention_mask: torch.Tensor | None, position_ids: torch.Tensor | None, cache: Any
    ) -> _Positions:
        """Where the new tokens stand and what each may look at. Rows padded on the left count positions from their
        first token on."""
        new, seen = ids.shape[1], 0 if cache is None else int(cache.get_seq_length())
        places = torch.arange(seen, seen + new, device=ids.device)
        mask = None
        if attention_mask is not None and attention_mask.ndim == 4:  # made by transformers, for caches of fixed size
            mask = attention_mask
        else:
            padded = attention_mask is not None and not bool(attention_mask.all())
            if padded or (seen > 0 and new > 1):
                mask = (places[:, None] >= torch.arange(seen + new, device=ids.device))[None, None]
            if padded:
                assert attention_mask is not None and mask is not None
                own = torch.eye(new, seen + new, dtype=torch.bool, device=ids.device).roll(seen, -1)
                mask = (mask & attention_mask[:, None, None, :].bool()) | own  # padding looks at itself, never at none
                if position_ids is None:
                    position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -new:]
        positions = places if position_ids is None else position_ids
        limit = self._run.model.sequence
        if int(positions.max()) >= limit:
            raise IotaError(
                "bad_input",
                f"position {int(positions.max())} lies beyond the model's sequence of {limit} tokens",
                f"Give at most {limit} tokens, prompt and continuation together",
            )
        return _Positions(cache, places, positions, mask)


AutoConfig.register(IOTA, IotaConfig)
AutoModelForCausalLM.register(IotaConfig, IotaForCausalLM)
