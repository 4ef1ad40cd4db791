"""Wire formats: float values of a boundary to bytes and back (design section 4, `iota.model.boundary`).

float32, bfloat16: rounded to nearest even. int8, int4, int2: a token's values are integers of that many bits times its
scale, a bfloat16 (largest magnitude over the largest integer, rounded up); bytes a token: the scale, then the integers,
offset to be unsigned, low bits first. topk: the largest values of a token as bfloat16, then their indices as uint16,
ascending.

Straight-through: the receiver computes with what was unpacked, and the gradient that comes back is taken as that of
the values before packing. Rounding is to nearest, or stochastic (unbiased) when the payload says so: counter-based, so
a replay rounds alike.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from iota.core.values import Tensor, is_finite
from iota.errors import IotaError
from iota.model.boundary import BITS, FLOATS, SCALE_BYTES, TOPK, Payload

_TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_STORED = {"float32": (torch.float32, "<f4"), "bfloat16": (torch.int16, "<i2")}
"""numpy has no bfloat16: its bits travel through int16 views."""


def pack(values: torch.Tensor, payload: Payload, key: bytes = b"") -> Tensor:
    """Wire bytes of float values [B, T, K], without needless copies. `key`: of the noise of stochastic rounding.

    The bytes stay as they are while the `Tensor` lives. Raises IotaError("not_finite") when a value is NaN or infinite,
    also when only the rounding made it so.
    """
    assert values.shape[-1] == payload.channels, (values.shape, payload)
    if payload.format in FLOATS:
        return pack_floats(values, payload.format)
    payload = payload.at(values.shape[0], values.shape[1])
    exact = values.detach().to(device="cpu", dtype=torch.float32).contiguous()
    if not bool(torch.isfinite(exact).all()):
        raise _computed(payload.format, exact)
    packed = _keep(exact, payload.kept) if payload.format == TOPK else _quantise(exact, payload, key)
    return Tensor(payload.dtype, payload.shape, packed.reshape(-1).data)


def pack_floats(values: torch.Tensor, dtype: str) -> Tensor:
    """Wire bytes of float values of any shape in `dtype`. Raises IotaError("not_finite") as `pack` does."""
    wire = values.detach().to(device="cpu", dtype=_TORCH[dtype]).contiguous()
    tensor = Tensor(dtype, tuple(wire.shape), wire.view(_STORED[dtype][0]).numpy().reshape(-1).data.cast("B"))
    if not is_finite(tensor):
        raise _computed(dtype, wire)
    return tensor


def unpack(tensor: Tensor, payload: Payload, device: torch.device, name: str) -> torch.Tensor:
    """Values [B, T, K] of a received tensor as an own, aligned float32 tensor on `device` (alignment: matrix kernels
    may round differently on unaligned memory, which would make digests differ between equal miners).

    Raises IotaError("bad_input") when dtype, shape or length is not the expected one or an index is impossible,
    IotaError("not_finite") when a value or scale is NaN or infinite. `name` says in the message which tensor it was.
    """
    if tensor.dtype != payload.dtype or tuple(tensor.shape) != payload.shape or len(tensor.data) != payload.nbytes:
        raise IotaError(
            "bad_input",
            f"{name}: expected {payload.dtype} {payload.shape} in {payload.nbytes} bytes, "
            f"got {tensor.dtype} {tuple(tensor.shape)} in {len(tensor.data)} bytes",
            "Send what the run manifest's model, batch, sequence and codec say.",
        )
    if payload.format in FLOATS:
        return _values(tensor, payload, device, name)
    rows = np.frombuffer(tensor.data, dtype=np.uint8).reshape(payload.shape)
    values = _spread(rows, payload, name) if payload.format == TOPK else _scaled(rows, payload, name)
    return values.to(device)


def round_trip(values: torch.Tensor, payload: Payload) -> torch.Tensor:
    """What a receiver would compute with, for values [B, T, K] of any batch and sequence."""
    sized = payload.at(values.shape[0], values.shape[1])
    return unpack(pack(values, sized), sized, values.device, "boundary")


# ------------------------------------------------------------------------------------------------------------ floats


def _values(tensor: Tensor, payload: Payload, device: torch.device, name: str) -> torch.Tensor:
    if not is_finite(tensor):
        raise _not_finite(payload, name)
    stored, code = _STORED[payload.format]
    values = torch.empty(payload.shape, dtype=stored)
    values.numpy()[...] = np.frombuffer(tensor.data, dtype=code).reshape(payload.shape)
    return values.view(_TORCH[payload.format]).to(device=device, dtype=torch.float32)


def _bfloat16_bytes(values: torch.Tensor) -> np.ndarray:
    """bfloat16 values [..., n] as bytes [..., 2 n]."""
    rows: np.ndarray = values.to(torch.bfloat16).contiguous().view(torch.int16).numpy().view(np.uint8)
    return rows


def _from_bfloat16(rows: np.ndarray) -> torch.Tensor:
    """bytes [..., 2 n] as float32 values [..., n]."""
    return torch.from_numpy(rows.copy().view(np.int16)).view(torch.bfloat16).float()


def _computed(format: str, values: torch.Tensor) -> IotaError:
    return IotaError(
        "not_finite",
        f"a computed {format} tensor of shape {tuple(values.shape)} has values that are not finite",
        "Lower the learning rate, or look at the stage's last input and gradient norm.",
    )


def _not_finite(payload: Payload, name: str) -> IotaError:
    return IotaError(
        "not_finite", f"{name}: {payload.format} {payload.shape} has values that are not finite", "Drop this sample."
    )


# ---------------------------------------------------------------------------------------------------------- integers


def _noise(key: bytes, shape: tuple[int, ...]) -> torch.Tensor:
    """Uniform float32 in [0, 1) from Philox keyed by `key`."""
    number = int.from_bytes(hashlib.blake2b(key, digest_size=16).digest(), "little")
    draws: np.ndarray = np.random.Generator(np.random.Philox(key=number)).random(shape, dtype=np.float32)
    return torch.from_numpy(draws)


def _scale(values: torch.Tensor, top: int) -> torch.Tensor:
    """A token's scale [B, T, 1]: largest magnitude / `top`, rounded up to bfloat16: under one that is too small the
    largest values would be cut off, and stochastic rounding biased. At most the largest whose product with `top` is
    finite: a receiver refuses others."""
    wanted = values.abs().amax(-1, keepdim=True) / top
    nearest = wanted.to(torch.bfloat16)
    above = (nearest.view(torch.int16) + (nearest.float() < wanted).to(torch.int16)).view(torch.bfloat16)
    largest = torch.tensor(torch.finfo(torch.float32).max / top).view(torch.int32) & -(2**16)
    return above.clamp(max=largest.view(torch.float32).item())  # the upper half of its bits: a bfloat16


def _quantise(values: torch.Tensor, payload: Payload, key: bytes) -> np.ndarray:
    bits = BITS[payload.format]
    top = 2 ** (bits - 1) - 1
    scale = _scale(values, top)
    divisor = torch.where(scale > 0, scale.float(), torch.ones(()))
    steps = values / divisor
    rounded = torch.floor(steps + (_noise(key, tuple(values.shape)) if payload.stochastic else 0.5))
    integers = rounded.clamp(-top, top).to(torch.int16).add_(top + 1).to(torch.uint8).numpy()
    return np.concatenate((_bfloat16_bytes(scale), _pack_bits(integers, bits)), axis=-1)


def _scaled(rows: np.ndarray, payload: Payload, name: str) -> torch.Tensor:
    bits = BITS[payload.format]
    scale = _from_bfloat16(rows[..., :SCALE_BYTES])
    if not bool(torch.isfinite(scale).all()):
        raise _not_finite(payload, name)
    integers = _unpack_bits(rows[..., SCALE_BYTES:], bits, payload.channels)
    values = torch.from_numpy(integers.astype(np.float32)).sub_(2 ** (bits - 1)).mul_(scale)
    if not bool(torch.isfinite(values).all()):
        raise _not_finite(payload, name)
    return values


def _pack_bits(integers: np.ndarray, bits: int) -> np.ndarray:
    """uint8 [..., n] below 2**bits, 8 // bits to a byte, low bits first; the rest of the last byte is zero."""
    per = 8 // bits
    if per == 1:
        return integers
    missing = -integers.shape[-1] % per
    padded = np.pad(integers, [(0, 0)] * (integers.ndim - 1) + [(0, missing)]).reshape(*integers.shape[:-1], -1, per)
    out = np.zeros(padded.shape[:-1], dtype=np.uint8)
    for place in range(per):
        out |= padded[..., place] << np.uint8(place * bits)
    return out


def _unpack_bits(rows: np.ndarray, bits: int, count: int) -> np.ndarray:
    per = 8 // bits
    if per == 1:
        return rows
    places = np.arange(per, dtype=np.uint8) * np.uint8(bits)
    spread: np.ndarray = (rows[..., None] >> places) & np.uint8(2**bits - 1)
    return spread.reshape(*rows.shape[:-1], -1)[..., :count]


# -------------------------------------------------------------------------------------------------------------- topk


def _keep(values: torch.Tensor, kept: int) -> np.ndarray:
    _, indices = torch.topk(values.abs(), kept, dim=-1, sorted=False)
    indices, _ = indices.sort(-1)
    chosen = _bfloat16_bytes(values.gather(-1, indices).clamp(-3.38e38, 3.38e38))
    return np.concatenate((chosen, indices.numpy().astype("<u2").view(np.uint8)), axis=-1)


def _spread(rows: np.ndarray, payload: Payload, name: str) -> torch.Tensor:
    chosen = _from_bfloat16(rows[..., : 2 * payload.kept])
    if not bool(torch.isfinite(chosen).all()):
        raise _not_finite(payload, name)
    indices = rows[..., 2 * payload.kept :].copy().view("<u2").astype(np.int64)
    if int(indices.max(initial=0)) >= payload.channels or bool((np.diff(indices, axis=-1) <= 0).any()):
        raise IotaError(
            "bad_input",
            f"{name}: indices of kept values must ascend below {payload.channels}",
            "Send what the run manifest's codec says.",
        )
    values = torch.zeros((*payload.shape[:2], payload.channels))
    return values.scatter_(-1, torch.from_numpy(indices), chosen)


def noise_key(seed: int, sample: int, boundary: int, direction: str) -> bytes:
    """The key of a boundary tensor's stochastic rounding (design section 4)."""
    return f"iota rounding {seed} {sample} {boundary} {direction}".encode()
