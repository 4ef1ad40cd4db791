"""The reduction of one shard and the outer step, bit-exact in numpy float32 (design section 5 "Reduce").

    c_i  = float32(B_i / sum B)                     divided in float64, B_i capped at `cap` x the median
    acc  = c_1 * x_1 + c_2 * x_2 + ...              in order of key, separate multiply and add
    assign:    base := acc                          x are weights
    Nesterov:  m := mu * m + acc                    x are deltas (base minus local)
               base := base - lr * (acc + mu * m)
    inner moments m and v: acc, with the same coefficients

Every operation is an element-wise float32 ufunc (no BLAS, no fused multiply-add), so the same bytes come out on any
machine and for any number of threads; that is what lets two owners' digests be compared for equality. The sum begins
with the first product, not with zero, so one contribution with c = 1 is reproduced bit for bit, negative zeros too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from iota.core.values import Key

Floats = npt.NDArray[np.float32]
MOMENTS = ("m", "v")
"""Inner moments in upload order; `v` must be nowhere negative."""


class Outer(msgspec.Struct, frozen=True):
    """The outer step. `kind`: assign | nesterov. `momentum` is mu."""

    kind: str
    lr: float = 1.0
    momentum: float = 0.0

    @property
    def upload_part(self) -> str:
        """What members upload first: their weights, or base minus weights."""
        return "weights" if self.kind == "assign" else "delta"

    def upload_parts(self, moments: bool) -> tuple[str, ...]:
        return (self.upload_part, *MOMENTS) if moments else (self.upload_part,)

    def result_parts(self, moments: bool) -> tuple[str, ...]:
        """Parts of a reduced shard, in order."""
        own = ("weights",) if self.kind == "assign" else ("weights", "momentum")
        return own + MOMENTS if moments else own


class Reduced(msgspec.Struct, frozen=True):
    """`parts`: name -> float32 [elements of the shard], in order of `Outer.result_parts`. `dropped`: contributions left
    out, with the reason. `kept`: nothing usable came, so every part is its old value (momentum too)."""

    parts: dict[str, Floats]
    dropped: tuple[tuple[Key, str], ...]
    kept: bool


def coefficients(passes: Mapping[Key, int], cap: float) -> dict[Key, float]:
    """Coefficients in order of key: float32(B_i / sum B) as Python floats, B_i as `capped` says. Members without passes
    are left out; an empty result means that the stage keeps its state. Raises what `capped` does."""
    return _shares(capped(passes, cap))


def mean_steps(passes: Mapping[Key, int], cap: float, steps: Mapping[Key, int]) -> int:
    """The merged state's step of Adam beyond the base's: the mean of the members' local steps weighted by B_i, rounded
    (half to even). By the weights themselves: rounded coefficients would decide a half by their rounding."""
    weights = capped(passes, cap)
    return round(sum(weight * steps[key] for key, weight in weights.items()) / sum(weights.values())) if weights else 0


def capped(passes: Mapping[Key, int], cap: float) -> dict[Key, float]:
    """B_i in order of key: min(passes, cap x median of those above zero); members without passes are left out.

    Raises ValueError for negative passes or a cap that is not positive.
    """
    if not cap > 0 or any(count < 0 for count in passes.values()):
        raise ValueError(f"passes must not be negative and the cap must be positive (cap {cap})")
    counts = {key: passes[key] for key in sorted(passes) if passes[key] > 0}
    if not counts:
        return {}
    ordered = sorted(counts.values())
    median = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
    return {key: min(float(count), cap * median) for key, count in counts.items()}


def renormalise(coefficient: Mapping[Key, float], keep: Collection[Key]) -> dict[Key, float]:
    """Coefficients of those kept, in order of key: unchanged when nobody fell out, else divided by their sum."""
    kept = {key: coefficient[key] for key in sorted(coefficient) if key in keep}
    return kept if len(kept) == len(coefficient) else _shares(kept)


def _shares(amounts: Mapping[Key, float]) -> dict[Key, float]:
    total = 0.0
    for amount in amounts.values():  # in order of key: a float sum depends on its order
        total += amount
    return {key: float(np.float32(amount / total)) for key, amount in amounts.items()}


def weighted_sum(arrays: Sequence[Floats], coefficient: Sequence[float]) -> Floats:
    """acc = sum of c_i * x_i in the order given, as a new array; at least one array."""
    acc = np.multiply(arrays[0], np.float32(coefficient[0]), dtype=np.float32)
    scratch = np.empty_like(acc)
    for array, c in zip(arrays[1:], coefficient[1:], strict=True):
        np.multiply(array, np.float32(c), out=scratch)
        np.add(acc, scratch, out=acc)
    return acc


def outer_step(base: Floats, momentum: Floats, acc: Floats, outer: Outer) -> tuple[Floats, Floats]:
    """Nesterov: the new base and momentum as new arrays; the inputs are left alone."""
    mu, lr = np.float32(outer.momentum), np.float32(outer.lr)
    moved = np.multiply(momentum, mu)
    np.add(moved, acc, out=moved)
    change = np.multiply(moved, mu)
    np.add(acc, change, out=change)
    np.multiply(change, lr, out=change)
    return np.subtract(base, change, out=change), moved


def problem_of(parts: Mapping[str, Floats], names: Sequence[str], length: int) -> str | None:
    """Why one contribution to a shard of `length` elements cannot be used, or None. The rule is the same for both
    owners: every part there, of the right length, finite, v nowhere negative."""
    for name in names:
        array = parts.get(name)
        if array is None:
            return f"part {name} is missing"
        if array.dtype != np.float32 or array.shape != (length,):
            return f"part {name} is {array.dtype} {array.shape}, expected float32 ({length},)"
        if not bool(np.isfinite(array).all()):
            return f"part {name} has a value that is not finite"
        if name == "v" and bool((array < 0).any()):
            return "part v has a negative second moment"
    return None


def reduce_shard(
    contributions: Mapping[Key, Mapping[str, Floats] | str],
    coefficient: Mapping[Key, float],
    old: Mapping[str, Floats],
    outer: Outer,
) -> Reduced:
    """Reduce one shard and apply the outer step.

    `contributions[key]`: that member's parts of this shard, or a string: why there is none (the manifest was
    contradicted, the object is missing). `old`: the shard's present value, float32 [elements] for each of
    `outer.result_parts`; "momentum" may be missing before the first merge (zeros), and the inner moments are reduced
    when `old` holds them. A contribution that cannot be used is left out and the rest renormalised; when none is left,
    or the result would not be finite, the shard keeps its old value. Pure: no input is written to.
    """
    moments = "m" in old
    base = old["weights"]
    names = outer.upload_parts(moments)
    usable, dropped = dict[Key, Mapping[str, Floats]](), list[tuple[Key, str]]()
    for key in sorted(coefficient):
        given = contributions.get(key, "no contribution")
        why = given if isinstance(given, str) else problem_of(given, names, len(base))
        if why is not None:
            dropped.append((key, why))
        elif not isinstance(given, str):
            usable[key] = given
    weights = list(renormalise(coefficient, usable).values())
    if not usable:
        return Reduced(keep(old, outer), tuple(dropped), kept=True)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        acc = {name: weighted_sum([parts[name] for parts in usable.values()], weights) for name in names}
        result = _stepped(acc, old, outer)
    if not all(bool(np.isfinite(array).all()) for array in result.values()):
        return Reduced(keep(old, outer), tuple(dropped), kept=True)
    return Reduced(result, tuple(dropped), kept=False)


def _stepped(acc: Mapping[str, Floats], old: Mapping[str, Floats], outer: Outer) -> dict[str, Floats]:
    moments = {name: acc[name] for name in MOMENTS if name in acc}
    if outer.kind == "assign":
        return {"weights": acc["weights"], **moments}
    base, momentum = outer_step(old["weights"], _momentum(old), acc["delta"], outer)
    return {"weights": base, "momentum": momentum, **moments}


def _momentum(old: Mapping[str, Floats]) -> Floats:
    momentum = old.get("momentum")
    return np.zeros_like(old["weights"]) if momentum is None else momentum


def keep(old: Mapping[str, Floats], outer: Outer) -> dict[str, Floats]:
    """The result of a shard that keeps its old value, momentum too: an orphan nobody could take over."""
    whole = {**old, "momentum": _momentum(old)}
    return {name: whole[name] for name in outer.result_parts("m" in old)}


def zero_gradient(old: Mapping[str, Floats], outer: Outer) -> dict[str, Floats]:
    """The result of a dispute that nobody settled in time: a pseudo-gradient of zero. Nesterov still moves by its
    momentum; under `assign`, and for the inner moments, the old value stands."""
    if outer.kind == "assign":
        return keep(old, outer)
    base, momentum = outer_step(old["weights"], _momentum(old), np.zeros_like(old["weights"]), outer)
    return {**keep(old, outer), "weights": base, "momentum": momentum}
