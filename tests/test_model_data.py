"""Data order: a pure function of seed and sample id."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iota.model.data import count_windows, ids_and_labels, sample_windows, window_index, window_range


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**63), n=st.integers(1, 300), number=st.integers(0, 5))
def test_each_pass_is_a_permutation(seed, n, number):
    order = [window_index(seed, n, number * n + place) for place in range(n)]
    assert sorted(order) == list(range(n))


def test_passes_and_seeds_differ():
    n = 200
    orders = {tuple(window_index(seed, n, number * n + i) for i in range(n)) for seed in (0, 1) for number in range(4)}
    assert len(orders) == 8
    fixed = [sum(window_index(0, n, k * n + i) == i for i in range(n)) for k in range(4)]
    assert max(fixed) < 10


def test_samples_cover_a_pass_without_repeats_and_run_over_its_end():
    rows = [sample_windows(7, 4, 10, sample) for sample in range(5)]
    flat = [window for row in rows for window in row]
    assert sorted(flat[:10]) == sorted(flat[10:]) == list(range(10))
    assert flat[:10] != flat[10:]
    assert rows[3] == sample_windows(7, 4, 10, 3)


def test_large_corpora_stay_in_range():
    n = 123_456_789
    found = [window_index(1, n, i) for i in range(300)]
    assert len(set(found)) == 300 and min(found) >= 0 and n * 0.9 < max(found) < n


def test_windows_overlap_in_one_token():
    assert count_windows(1 + 4 * 16, 16) == 4 and count_windows(4 * 16, 16) == 3 and count_windows(0, 16) == 0
    assert window_range(0, 16) == (0, 17) and window_range(3, 16) == (48, 65)
    ids, labels = ids_and_labels(np.arange(17, dtype=np.uint8).reshape(1, 17))
    assert ids.dtype == labels.dtype == np.int64 and ids.shape == (1, 16)
    assert (labels == ids + 1).all()


def test_no_windows_is_an_error():
    with pytest.raises(ValueError, match="0 windows"):
        window_index(0, 0, 0)
    with pytest.raises(ValueError, match="-1"):
        window_index(0, 5, -1)
