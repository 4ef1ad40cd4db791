"""The stages of one lab job in a row, with the controls that only the lab has.

Each is the product's `StageTrainer`, so codecs, wire bytes, clipping and optimizer are the product's. A control has the
product's stages without compression and puts other modules at the receivers.
"""

from __future__ import annotations

import re

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from iota.config.schema import RunConfig
from iota.errors import ConfigError
from iota.lab.fig5_spec import BYPASS, IDS, Spec, codec_config, run_config
from iota.model.boundary import DECODER, ENCODER
from iota.model.codec_base import IdEmbedding
from iota.model.codecs import build_codec
from iota.model.layout import Layout, draw_tensor, initial_state
from iota.model.partition import cut_blocks
from iota.model.trainer import StageTrainer


class Bypass(nn.Module):
    """Control c1: both halves of a codec beside an uncompressed stream. The encoder's tensors lie with the receiver.

    Every narrow codec has a path on which the first K channels pass as they are (the paper's joins after the attention,
    the others' at once). The uncompressed stream takes its place: added too, it would double these channels."""

    def __init__(self, config: RunConfig, boundary: int) -> None:
        super().__init__()
        self.bypass_encoder = build_codec(config, boundary, ENCODER)
        self.bypass_decoder = build_codec(config, boundary, DECODER)

    def decode(self, received: torch.Tensor, ids: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What crossed, plus what the codec's modules make of it."""
        values = self.bypass_encoder.encode(received, ids)
        hidden, skip = self.bypass_decoder.decode(values, ids)
        path = received[..., : values.shape[-1]]
        if skip is not None:
            return received + hidden, skip - path
        return received + hidden - F.pad(path, (0, received.shape[-1] - path.shape[-1])), None


class Ids(nn.Module):
    """Control c3: an uncompressed stream plus the id tables of a codec."""

    def __init__(self, config: RunConfig, boundary: int) -> None:
        super().__init__()
        part = getattr(build_codec(config, boundary, DECODER), "ids", None)
        if not isinstance(part, IdEmbedding):
            raise ConfigError(f"{config.stages.codec} has no id tables", "Use a codec that adds an embedding of ids.")
        self.ids = part

    def decode(self, received: torch.Tensor, ids: torch.Tensor | None) -> tuple[torch.Tensor, None]:
        """What crossed, plus the embedding of the ids."""
        assert ids is not None, "the lab gives ids to every stage"
        added: torch.Tensor = self.ids(ids)
        return received + added, None


_MODULES: dict[str, type[Bypass] | type[Ids]] = {BYPASS: Bypass, IDS: Ids}


class LabStage(StageTrainer):
    """A stage of the product; for some controls with another module at its receiving end."""

    def __init__(self, spec: Spec, config: RunConfig, stage: int, cut: tuple[int, int], device: str) -> None:
        super().__init__(config, stage, cut, device, spec.dtype)
        self._like = codec_config(spec)
        self._replaced = spec.control in _MODULES
        if self._replaced and stage > 0:
            self.module.boundaries[str(stage - 1)] = _MODULES[spec.control](self._like, stage - 1)
            self.module.to(self.device)
            self.layout = Layout.of(self.module)
            self._build_buffers()

    def initial(self, seed: int) -> np.ndarray:
        """Checkpoint 0 of this stage: equal names have equal values in every job of a seed."""
        if not self._replaced:
            return initial_state(self.config, self.stage, self.cut, seed)
        flat = np.empty(self.layout.size, dtype=np.float32)
        for name, view in self.layout.views(flat).items():
            plain = re.sub(r"\.bypass_(en|de)coder\.", ".", name)
            view[...] = draw_tensor(self._like, seed, plain, view.shape)
        return flat


class Line:
    """One replica of every stage. Counts the payload bytes that crossed, by direction, and tokens times boundaries."""

    def __init__(self, spec: Spec, device: str) -> None:
        self.config = run_config(spec)
        cuts = cut_blocks(self.config)
        self.stages = [LabStage(spec, self.config, stage, cut, device) for stage, cut in enumerate(cuts)]
        self.forward_bytes = self.backward_bytes = self.crossings = 0

    @property
    def parameters(self) -> int:
        return sum(stage.layout.size for stage in self.stages)

    def pass_through(self, sample: int, ids: np.ndarray, labels: np.ndarray) -> float:
        """One sample forward through all stages and back; every pass is accepted. Returns the loss, nats a token."""
        x = None
        for stage in self.stages[:-1]:
            x = stage.forward(sample, x, ids)
            self.forward_bytes += len(x.data)
            self.crossings += ids.size
        gradient, loss = self.stages[-1].forward_loss(sample, x, ids, labels)
        self.stages[-1].accept()
        for stage in reversed(self.stages[:-1]):
            assert gradient is not None
            self.backward_bytes += len(gradient.data)
            gradient, _ = stage.backward(sample, gradient)
            stage.accept()
        return loss

    def step(self) -> None:
        """One inner step of every stage."""
        for stage in self.stages:
            stage.step()

    def heldout(self, ids: np.ndarray, labels: np.ndarray) -> float:
        """The loss of some windows, through the wire formats as in training, without trace."""
        x = None
        for stage in self.stages[:-1]:
            x = stage.evaluate(x, ids)
        return self.stages[-1].evaluate_loss(x, ids, labels)
