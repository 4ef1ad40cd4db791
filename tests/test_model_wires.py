"""Wire formats: exact bytes, bounded error, unbiased rounding, hostile payloads."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from iota.config.schema import ModelConfig, RunConfig, StagesConfig, TrainConfig
from iota.core.payload import BACKWARD, BITS, CODECS, FORWARD, Payload, boundary_tensor
from iota.core.values import Tensor, check_head, is_finite
from iota.errors import IotaError
from iota.model.wires import noise_key, pack, round_trip, unpack

CPU = torch.device("cpu")
BF16_MAX = float(torch.finfo(torch.bfloat16).max)


def payload(form, channels=4, kept=None, batch=1, sequence=2, stochastic=False):
    return Payload(form, channels, channels if kept is None else kept, batch, sequence, stochastic)


def scale_of(tensor, token=0):
    rows = np.frombuffer(tensor.data, dtype=np.uint8).reshape(-1, tensor.shape[-1])
    return float(torch.from_numpy(rows[token, :2].copy().view(np.int16)).view(torch.bfloat16).float())


# --------------------------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("direction", [FORWARD, BACKWARD])
def test_bytes_equal_the_closed_form(codec, direction):
    config = RunConfig(
        name="t",
        model=ModelConfig(width=32, heads=2, kv_heads=1, blocks=2, vocabulary=32, sequence=8),
        stages=StagesConfig(count=2, codec=codec, channels=7),
        train=TrainConfig(batch=3),
    )
    expected = boundary_tensor(config, direction)
    packed = pack(torch.randn(3, 8, expected.channels), expected, b"key")
    assert len(packed.data) == expected.nbytes and tuple(packed.shape) == expected.shape
    assert packed.dtype == expected.dtype and check_head(packed.head()) is None and is_finite(packed)
    assert unpack(packed, expected, CPU, "x").shape == (3, 8, expected.channels)


@pytest.mark.parametrize(
    ("form", "channels", "kept", "token"),
    [
        ("float32", 32, 32, 128),
        ("bfloat16", 32, 32, 64),
        ("int8", 512, 512, 514),
        ("int4", 28, 28, 16),
        ("int4", 5, 5, 5),
        ("int2", 56, 56, 16),
        ("topk", 512, 4, 16),
    ],
)
def test_bytes_a_token(form, channels, kept, token):
    assert payload(form, channels, kept, batch=3, sequence=5).nbytes == 15 * token


def test_integers_lie_low_bits_first_after_their_scale():
    packed = pack(torch.tensor([[[7.0, -7.0, 1.0]]]), payload("int4", 3, sequence=1))
    assert bytes(packed.data) == bytes([0x80, 0x3F, 15 | 1 << 4, 9])  # 1.0 in bfloat16, then 7, -7, 1 offset by 8


def test_topk_keeps_the_largest_with_ascending_indices():
    packed = pack(torch.tensor([[[0.5, -3.0, 0.0, 2.0]]]), payload("topk", 4, 2, sequence=1))
    assert bytes(packed.data[4:]) == bytes([1, 0, 3, 0])
    assert unpack(packed, payload("topk", 4, 2, sequence=1), CPU, "x").tolist() == [[[0.0, -3.0, 0.0, 2.0]]]


# -------------------------------------------------------------------------------------------------------------- values

FINITE = arrays.arrays(np.float32, (2, 3, 5), elements=st.floats(width=32, allow_nan=False, allow_infinity=False))
TAME = arrays.arrays(np.float32, (2, 3, 5), elements=st.floats(-1e6, 1e6, width=32))


@settings(max_examples=40, deadline=None)
@given(FINITE, st.sampled_from([*BITS, "topk", "float32"]), st.booleans())
@example(np.full((2, 3, 5), np.finfo(np.float32).max), "int4", True)
@example(np.full((2, 3, 5), np.finfo(np.float32).max), "int8", False)
def test_whatever_is_finite_stays_finite(values, form, stochastic):
    shaped = payload(form, 5, 2 if form == "topk" else 5, 2, 3, stochastic and form in BITS)
    back = unpack(pack(torch.from_numpy(values), shaped, b"k"), shaped, CPU, "x")
    assert back.shape == (2, 3, 5) and back.dtype == torch.float32 and bool(torch.isfinite(back).all())


@settings(max_examples=40, deadline=None)
@given(TAME, st.sampled_from(list(BITS)))
def test_rounding_to_nearest_errs_by_half_a_step_at_most(values, form):
    exact = torch.from_numpy(values)
    error = (round_trip(exact, payload(form, 5, 5)) - exact).abs()
    step = exact.abs().amax(-1, keepdim=True) / (2 ** (BITS[form] - 1) - 1) * (1 + 2**-7)
    assert bool((error <= step / 2 * (1 + 1e-5) + 1e-38).all())


@settings(max_examples=40, deadline=None)
@given(TAME, st.integers(1, 5))
def test_topk_errs_by_what_it_drops(values, kept):
    exact = torch.from_numpy(values)
    dropped = (round_trip(exact, payload("topk", 5, kept)) - exact).abs()
    smallest = exact.abs().sort(-1, descending=True).values[..., kept : kept + 1]
    limit = smallest if kept < 5 else torch.zeros(())
    assert bool((dropped <= torch.maximum(limit, exact.abs() / 128) + 1e-38).all())


@pytest.mark.parametrize("form", list(BITS))
def test_stochastic_rounding_is_unbiased(form):
    """The mean over many tokens of equal values is these values within five standard errors."""
    values = torch.tensor([0.913, -0.731, 0.402, -0.123, 0.011])
    count = 20_000
    shaped = payload(form, 5, 5, 1, count, stochastic=True)
    many = values.expand(1, count, 5).contiguous()
    packed = pack(many, shaped, noise_key(0, 3, 1, BACKWARD))
    back = unpack(packed, shaped, CPU, "x")[0].double()
    step = scale_of(packed)
    assert bool(((back - values).abs() <= step * (1 + 1e-5)).all())
    assert bool(((back.mean(0) - values).abs() <= 5 * 0.5 * step / math.sqrt(count)).all())


def test_nearest_is_biased_where_stochastic_is_not():
    values = torch.tensor([7.0, 0.3]).expand(1, 4000, 2).contiguous()
    nearest = round_trip(values, payload("int4", 2, 2))
    assert float(nearest[..., 1].abs().max()) == 0
    shaped = payload("int4", 2, 2, 1, 4000, stochastic=True)
    assert abs(float(unpack(pack(values, shaped, b"k"), shaped, CPU, "x")[..., 1].mean()) - 0.3) < 0.05


def test_noise_follows_the_key():
    values = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(0))
    shaped = payload("int4", 6, 6, 2, 8, stochastic=True)
    keys = [noise_key(*parts) for parts in ((0, 1, 2, BACKWARD), (0, 1, 2, FORWARD), (0, 1, 3, BACKWARD))]
    assert len(set(keys)) == 3
    packs = [bytes(pack(values, shaped, key).data) for key in (*keys, keys[0])]
    assert packs[0] == packs[3] and len(set(packs)) == 3


EDGES = [
    torch.zeros(2, 3, 4),
    torch.tensor([[[1.5]]]),
    torch.full((1, 2, 2), BF16_MAX),
    torch.tensor([[[-0.0, 1e-40]]]),
]


@pytest.mark.parametrize("values", EDGES, ids=["zeros", "one", "largest", "tiny"])
@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8", "int4", "int2", "topk"])
def test_edges_cross_and_cross_again_unchanged(values, form):
    shaped = Payload(form, values.shape[-1], 1 if form == "topk" else values.shape[-1], *values.shape[:2])
    packed = pack(values, shaped)
    back = unpack(packed, shaped, CPU, "x")
    if form in ("float32", "bfloat16"):
        kind = {"float32": torch.float32, "bfloat16": torch.bfloat16}[form]
        assert torch.equal(back, values.to(kind).float())
    elif form in BITS:
        assert bool(((back - values).abs() <= values.abs().amax(-1, keepdim=True) / 127 + 1e-40).all())
    assert bytes(pack(back, shaped).data) == bytes(packed.data)


def test_a_view_that_is_not_contiguous_packs_as_its_copy():
    values = torch.randn(2, 6, 4).transpose(1, 2)
    for form in ("float32", "bfloat16", "int8", "int4"):
        shaped = payload(form, 6, 6, 2, 4)
        assert bytes(pack(values, shaped).data) == bytes(pack(values.contiguous(), shaped).data)


def test_unpack_takes_any_offset_and_makes_its_own_aligned_memory():
    values = torch.randn(2, 3, 4)
    shaped = payload("float32", 4, 4, 2, 3)
    raw = b"\0\0\0" + bytes(pack(values, shaped).data)
    back = unpack(Tensor("float32", (2, 3, 4), memoryview(raw)[3:]), shaped, CPU, "x")
    assert torch.equal(back, values) and back.data_ptr() % 64 == 0
    back.zero_()
    assert raw[3:] == bytes(pack(values, shaped).data)


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8", "int4", "int2", "topk"])
def test_a_value_that_is_not_finite_is_not_sent(bad, form):
    values = torch.zeros(1, 2, 4)
    values[0, 1, 3] = bad
    with pytest.raises(IotaError) as error:
        pack(values, payload(form, 4, 2 if form == "topk" else 4))
    assert error.value.code == "not_finite"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("form", ["float32", "bfloat16"])
def test_a_value_that_is_not_finite_is_not_taken(bad, form):
    values = torch.zeros(1, 2, 4)
    values[0, 1, 3] = bad
    data = values.numpy().tobytes() if form == "float32" else values.bfloat16().view(torch.int16).numpy().tobytes()
    with pytest.raises(IotaError) as error:
        unpack(Tensor(form, (1, 2, 4), data), payload(form), CPU, "x")
    assert error.value.code == "not_finite"


def test_rounding_to_infinity_is_caught():
    with pytest.raises(IotaError, match="not finite"):
        pack(torch.full((1, 1, 1), float(np.finfo(np.float32).max)), payload("bfloat16", 1, sequence=1))


NAN, INF, LARGEST, ONE = b"\xc0\x7f", b"\x80\xff", b"\x7f\x7f", b"\x80\x3f"


@pytest.mark.parametrize("scale", [NAN, INF, LARGEST], ids=["nan", "inf", "overflow"])
@pytest.mark.parametrize(("form", "rest"), [("int8", b"\xff" * 4), ("int4", b"\xff" * 2), ("int4", b"\0\0")])
def test_hostile_scales_are_refused(scale, form, rest):
    shaped = payload(form, 4, 4, 1, 1)
    with pytest.raises(IotaError) as error:
        unpack(Tensor("uint8", shaped.shape, scale + rest), shaped, CPU, "gradient")
    assert error.value.code == "not_finite" and "gradient" in error.value.cause


def test_every_bit_pattern_of_the_integers_is_a_value():
    for form in BITS:
        shaped = payload(form, 8, 8, 1, 256)
        rows = b"".join(ONE + bytes([number]) * (shaped.shape[2] - 2) for number in range(256))
        back = unpack(Tensor("uint8", shaped.shape, rows), shaped, CPU, "x")
        assert float(back.abs().max()) == 2 ** (BITS[form] - 1) and bool((back == back.round()).all())


@pytest.mark.parametrize(
    "indices", [(0, 4), (1, 1), (3, 2), (0xFFFF, 0xFFFF)], ids=["beyond", "twice", "descending", "largest"]
)
def test_hostile_indices_are_refused(indices):
    shaped = payload("topk", 4, 2, 1, 1)
    data = ONE * 2 + np.array(indices, dtype="<u2").tobytes()
    with pytest.raises(IotaError) as error:
        unpack(Tensor("uint8", shaped.shape, data), shaped, CPU, "input")
    assert error.value.code == "bad_input" and "ascend below 4" in error.value.cause


def test_hostile_kept_values_are_refused():
    shaped = payload("topk", 4, 1, 1, 1)
    for bad in (NAN, INF):
        with pytest.raises(IotaError) as error:
            unpack(Tensor("uint8", shaped.shape, bad + b"\0\0"), shaped, CPU, "x")
        assert error.value.code == "not_finite"


@pytest.mark.parametrize(
    "tensor",
    [
        Tensor("float32", (1, 2, 4), b"\0" * 32),
        Tensor("bfloat16", (2, 1, 4), b"\0" * 16),
        Tensor("bfloat16", (1, 2, 4), b"\0" * 14),
    ],
)
def test_other_shapes_are_refused_with_both(tensor):
    with pytest.raises(IotaError) as error:
        unpack(tensor, payload("bfloat16"), CPU, "input")
    assert error.value.code == "bad_input"
    assert "expected bfloat16 (1, 2, 4) in 16 bytes" in error.value.cause
    assert f"got {tensor.dtype} {tensor.shape} in {len(tensor.data)} bytes" in error.value.cause


@pytest.mark.parametrize("form", ["int8", "int4", "int2", "topk"])
def test_packed_formats_refuse_other_dtypes_shapes_and_lengths(form):
    shaped = payload(form, 4, 2 if form == "topk" else 4)
    good = pack(torch.randn(1, 2, 4), shaped)
    data = bytes(good.data)
    for tensor in (
        Tensor("int8", good.shape, data),
        Tensor("uint8", (2, 1, good.shape[2]), data),
        Tensor("uint8", good.shape, data[:-1]),
        Tensor("uint8", good.shape, data + b"\0"),
    ):
        with pytest.raises(IotaError) as error:
            unpack(tensor, shaped, CPU, "input")
        assert error.value.code == "bad_input"
