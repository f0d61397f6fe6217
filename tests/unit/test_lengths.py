import itertools
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_wlb.lengths import (
    Order,
    RandomOrder,
    StoredOrder,
    fingerprint_lengths,
    length_summary,
    load_lengths,
    sample_lengths,
)

QUANTILES = {
    **{1: 63, 5: 324, 10: 646, 25: 1606, 50: 3227, 75: 4832, 90: 5784, 97: 6236, 98: 10078, 99: 26058},
    **{99.3: 46547, 99.6: 78660, 99.8: 99302, 100: 124913},
}
SQUARED_OVER_MEAN = 18905.0


# Reading


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_json_text_and_npy_give_the_same_lengths(tmp_path: Path) -> None:
    expected = [812, 0, 95, 2**40]
    np.save(tmp_path / "a.npy", np.array(expected))
    for path in (
        write(tmp_path / "a.json", json.dumps(expected)),
        write(tmp_path / "a.lengths", "  \n" + json.dumps(expected)),
        write(tmp_path / "b.json", json.dumps({"name": "mine", "lengths": expected})),
        write(tmp_path / "c.json", json.dumps({"length": expected})),
        write(tmp_path / "a.txt", "812\n0\n\n 95 \n1099511627776"),
        write(tmp_path / "a.csv", "length\n812\n0\n\n95\n1099511627776\n"),
        write(tmp_path / "b.csv", '\ufeff"tokens"\r\n"812"\r\n"0"\r\n95\r\n1099511627776\r\n'),
        write(tmp_path / "c.csv", "812\n0\n95\n1099511627776\n"),
        tmp_path / "a.npy",
    ):
        lengths = load_lengths(path)
        assert lengths.dtype == np.int64
        assert lengths.tolist() == expected


def test_npy_is_mapped_and_keeps_its_dtype(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([3, 4], dtype=np.uint16))
    lengths = load_lengths(tmp_path / "a.npy")
    assert isinstance(lengths, np.memmap)
    assert lengths.dtype == np.uint16
    assert not lengths.flags.writeable


def test_empty_files_are_empty_lists(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.empty(0, dtype=np.int64))
    for path in (write(tmp_path / "a.json", "[]"), write(tmp_path / "a.txt", ""), tmp_path / "a.npy"):
        assert load_lengths(path).shape == (0,)


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.json", '{"a": [1]}', r"a.json holds a JSON object with the names 'a'; .* list of .* \{\"lengths\": \[812"),
        ("a.json", '{"lengths": "1"}', r"names 'lengths'; .*document_lengths\(dataset\).*docs/your_data\.md"),
        ("a.json", '{"lengths": [1, "x"]}', "Entry 1 of a.json is 'x'"),
        ("a.json", "{}", "a JSON object without names"),
        ("a.csv", ",length\n0,12\n", r"Line 1 of a.csv has 2 columns \(',length'\); .* has one, .*to_csv.*\.parquet"),
        ("a.csv", "length\n12\nmany\n", "Line 3 of a.csv is 'many'"),
        ("a.csv", "-3\n", "Line 1 of a.csv is '-3'"),
        ("a.json", "12", "holds a JSON number"),
        ("a.json", "[1, 2", "a.json is not valid JSON"),
        ("a.json", "[1, 2.5, -3]", "Entry 1 of a.json is 2.5; .* integers from 0 to 1,099,511,627,776, in tokens"),
        ("a.json", "[1, 2, -3]", "Entry 2 of a.json is -3"),
        ("a.json", "[true]", "Entry 0 of a.json is True"),
        ("a.json", '[1, "2"]', "Entry 1 of a.json is '2'"),
        ("a.json", "[1, 9223372036854775808]", "Entry 1 of a.json is 9223372036854775808"),
        ("a.json", f"[1, {2**40 + 1}]", f"Entry 1 of a.json is {2**40 + 1}; .* from 0 to 1,099,511,627,776"),
        ("a.json", f"[{'9' * 5000}]", "a.json is not valid JSON"),
        ("a.txt", "1\n\n-2\nx", "Line 3 of a.txt is '-2'; .* one a line"),
        ("a.txt", "1\n2 3\n", "Line 2 of a.txt is '2 3'"),
        ("a.txt", "1\n1e3\n", "Line 2 of a.txt is '1e3'"),
        ("a.txt", "1_000\n", "Line 1 of a.txt is '1_000'"),
        ("a.txt", "9" * 5000, r"Line 1 of a.txt is '9+\.\.\."),
        ("a.txt", "0" * 20 + "9" * 20, r"Line 1 of a.txt is '0+9+\.\.\."),
        ("a.txt", f"7\n{2**40 + 1}\n", f"Line 2 of a.txt is '{2**40 + 1}'; .* from 0 to 1,099,511,627,776"),
    ],
)
def test_bad_content_is_named_by_its_place(tmp_path: Path, name: str, text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        load_lengths(write(tmp_path / name, text))


@pytest.mark.parametrize(
    ("array", "sentence"),
    [
        (np.array([[1, 2]]), r"shape \(1, 2\) and dtype int64"),
        (np.array([1.0]), "dtype float64"),
        (np.array([True]), "dtype bool"),
        (np.array([5, 4, -1, -2]), "Entry 2 of a.npy is -1"),
        (np.array([1, 2**63], dtype=np.uint64), "Entry 1 of a.npy is 9223372036854775808"),
        (np.array([1, 2**40 + 1]), f"Entry 1 of a.npy is {2**40 + 1}; .* from 0 to 1,099,511,627,776"),
    ],
)
def test_bad_arrays_are_refused(tmp_path: Path, array: np.ndarray[Any, Any], sentence: str) -> None:
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(ValueError, match=sentence):
        load_lengths(tmp_path / "a.npy")


def test_files_that_are_no_lengths_at_all(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"There is no file '.*nothing\.json'"):
        load_lengths(tmp_path / "nothing.json")
    (tmp_path / "a.npy").write_bytes(b"no array")
    with pytest.raises(ValueError, match=r"a\.npy is not a readable \.npy array"):
        load_lengths(tmp_path / "a.npy")
    np.savez(tmp_path / "a.npz", lengths=np.array([1]))
    with pytest.raises(ValueError, match=r"a\.npz is not text"):
        load_lengths(tmp_path / "a.npz")
    (tmp_path / "a.npz").rename(tmp_path / "b.npy")
    with pytest.raises(ValueError, match=r"b\.npy holds an archive of arrays"):
        load_lengths(tmp_path / "b.npy")


def test_fingerprint_sees_values_and_order_only() -> None:
    lengths = sample_lengths(3000, seed=1)
    changed = lengths.copy()
    changed[-1] += 1
    same = {fingerprint_lengths(lengths.astype(dtype)) for dtype in (np.int64, np.int32, np.uint32, ">i4")}
    others = {fingerprint_lengths(other) for other in (changed, lengths[::-1], lengths[:-1])}
    assert len(same) == 1
    assert len(others) == 3
    assert not same & others
    assert fingerprint_lengths(lengths[::2]) == fingerprint_lengths(lengths[::2].copy())


# Sampling


@pytest.mark.parametrize("seed", [0, 1, 2, 12345])
def test_sample_has_the_stated_quantiles_and_ratio(seed: int) -> None:
    lengths = sample_lengths(100_000, seed)
    for percent, expected in QUANTILES.items():
        assert np.percentile(lengths, percent) == pytest.approx(expected, rel=0.02), percent
    assert np.square(lengths).sum() / lengths.sum() == pytest.approx(SQUARED_OVER_MEAN, rel=0.02)


def test_sample_matches_the_reference_file(shared_data: Any) -> None:
    reference = load_lengths(shared_data / "lengths_wlb_128k.json").astype(np.float64)
    lengths = sample_lengths(100_000).astype(np.float64)
    for percent in [*QUANTILES, 2, 3, 15, 35, 60, 85, 95, 97.5, 98.5, 99.5, 99.9]:
        expected = np.percentile(reference, percent)
        assert np.percentile(lengths, percent) == pytest.approx(expected, rel=0.02), percent
    assert lengths.mean() == pytest.approx(reference.mean(), rel=0.02)
    ratio = (reference**2).sum() / reference.sum()
    assert ratio == pytest.approx(SQUARED_OVER_MEAN, rel=0.001)
    assert (lengths**2).sum() / lengths.sum() == pytest.approx(ratio, rel=0.02)


def test_the_other_data_set_does_not_match(shared_data: Any) -> None:
    """Negative control: the comparison above tells another long-tailed data set apart."""
    summary = length_summary(load_lengths(shared_data / "lengths_prolong.json"))
    assert summary.percentiles[50.0] != pytest.approx(QUANTILES[50], rel=0.2)


def test_small_samples_keep_the_tail() -> None:
    ratios = [length_summary(sample_lengths(5000, seed)).squared_over_mean for seed in range(20)]
    assert max(ratios) / min(ratios) < 1.02


def test_sample_is_fixed_by_its_seed() -> None:
    assert sample_lengths(8, seed=0).tolist() == [2938, 4239, 5659, 14, 5480, 2349, 3707, 1388]
    assert (sample_lengths(1000, seed=3) == sample_lengths(1000, seed=3)).all()
    assert (sample_lengths(1000, seed=3) != sample_lengths(1000, seed=4)).mean() > 0.9


def test_sample_order_has_no_structure() -> None:
    logs = np.log(sample_lengths(100_000))
    logs -= logs.mean()
    for lag in (1, 2, 10, 1000):
        assert abs((logs[:-lag] * logs[lag:]).mean() / logs.var()) < 4 / np.sqrt(100_000)


def test_sample_of_nothing_and_of_a_negative_number() -> None:
    assert sample_lengths(0).shape == (0,)
    assert 1 <= sample_lengths(1)[0] <= 124_913
    with pytest.raises(ValueError, match="n=-1 and seed=0; both must be 0 or more"):
        sample_lengths(-1)
    with pytest.raises(ValueError, match="seed=-5"):
        sample_lengths(3, seed=-5)


# Summary


@given(
    lengths=st.lists(st.integers(0, 300), max_size=60),
    block=st.integers(1, 70),
)
def test_summary_equals_a_plain_computation(lengths: list[int], block: int) -> None:
    summary = length_summary(np.array(lengths, dtype=np.int64), block=block)
    assert summary.count == len(lengths)
    assert summary.tokens == sum(lengths)
    assert summary.empty == lengths.count(0)
    assert summary.maximum == max(lengths, default=0)
    if lengths:
        assert summary.mean == pytest.approx(sum(lengths) / len(lengths))
        for percent, length in summary.percentiles.items():
            assert length == np.percentile(lengths, percent, method="inverted_cdf")
    if summary.tokens:
        assert summary.squared_over_mean == pytest.approx(sum(d * d for d in lengths) / sum(lengths))
    histogram = summary.histogram
    for low, high, documents, tokens, pairs in zip(
        histogram.edges,
        histogram.edges[1:],
        histogram.documents,
        histogram.tokens,
        histogram.attention_pairs,
        strict=False,
    ):
        inside = [d for d in lengths if low <= d < high]
        assert (documents, tokens) == (len(inside), sum(inside))
        assert pairs == sum(d * (d + 1) // 2 for d in inside)
    assert sum(histogram.documents) == len(lengths) - summary.empty


def test_summary_of_the_reference_sample() -> None:
    summary = length_summary(sample_lengths(100_000))
    assert summary.percentiles[50.0] == pytest.approx(3227, rel=0.01)
    assert summary.percentiles[99.3] == pytest.approx(46547, rel=0.02)
    edges = np.array(summary.histogram.edges)
    assert (np.diff(edges) > 0).all()
    ratios = edges[-8:] / edges[-9:-1]
    assert ratios == pytest.approx(2**0.25, rel=0.01)


def test_summary_becomes_json() -> None:
    summary = length_summary(np.array([3, 5], dtype=np.int16))
    content = json.loads(json.dumps(summary.to_dict()))
    assert content["percentiles"]["99.3"] == 5
    assert content["squared_over_mean"] == pytest.approx(34 / 8)
    assert sum(content["histogram"]["documents"]) == 2


def test_summary_refuses_negative_lengths() -> None:
    with pytest.raises(ValueError, match="length of document 3 is -7"):
        length_summary(np.array([1, 2, 3, -7, -8]), block=2)
    with pytest.raises(ValueError, match="block=0"):
        length_summary(np.array([1]), block=0)


def test_summary_walks_a_memory_map_in_blocks(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.tile(sample_lengths(1000), 50).astype(np.int32))
    lengths = load_lengths(tmp_path / "a.npy")
    assert length_summary(lengths, block=777) == length_summary(np.array(lengths))


# Orders


@settings(deadline=None)
@given(n=st.integers(0, 3000), seed=st.integers(-(2**40), 2**70), epoch=st.integers(0, 100))
def test_random_order_visits_every_document_once(n: int, seed: int, epoch: int) -> None:
    order = RandomOrder(n, seed, epoch)
    assert len(order) == n
    assert sorted(order.block(0, n).tolist()) == list(range(n))


@pytest.mark.parametrize("n", [2**16, 2**16 + 1, 100_003])
def test_random_order_around_powers_of_two(n: int) -> None:
    assert (np.bincount(RandomOrder(n, 0, 0).block(0, n), minlength=n) == 1).all()


@given(n=st.integers(1, 500), cuts=st.lists(st.integers(0, 500), max_size=6), seed=st.integers(0, 9))
def test_blocks_join_to_the_whole(n: int, cuts: list[int], seed: int) -> None:
    for order in (RandomOrder(n, seed, 0), StoredOrder(n)):
        edges = sorted({0, n, *(cut % (n + 1) for cut in cuts)})
        parts = [order.block(a, b).tolist() for a, b in itertools.pairwise(edges)]
        assert [index for part in parts for index in part] == order.block(0, n).tolist()


def test_seeds_and_epochs_give_unrelated_orders() -> None:
    n = 20_000
    first = RandomOrder(n, 0, 0).block(0, n)
    for seed, epoch in ((1, 0), (0, 1), (1, 1), (-1, 0)):
        other = RandomOrder(n, seed, epoch).block(0, n)
        assert (first == other).sum() < 12  # one on average for unrelated permutations
    assert (first == RandomOrder(n, 0, 0).block(0, n)).all()
    assert (first == np.arange(n)).sum() < 12
    assert RandomOrder(n, 0, 0).block(0, 5).tolist() == [19315, 13839, 8565, 9907, 17111]


def test_small_orders_are_evenly_spread_over_all_permutations() -> None:
    for n, permutations in ((2, 2), (3, 6), (4, 24)):
        seen: dict[tuple[int, ...], int] = {}
        draws = 100 * permutations
        for seed in range(draws):
            key = tuple(RandomOrder(n, seed, 0).block(0, n).tolist())
            seen[key] = seen.get(key, 0) + 1
        assert len(seen) == permutations
        chi_square = sum((count - 100) ** 2 / 100 for count in seen.values())
        assert chi_square < permutations - 1 + 5 * np.sqrt(2 * (permutations - 1))


def test_first_places_are_evenly_spread() -> None:
    n, bins, draws = 1000, 20, 4000
    firsts = np.array([RandomOrder(n, seed, 0).block(0, 2) for seed in range(draws)])
    for column in (firsts[:, 0], firsts[:, 1], (firsts[:, 1] - firsts[:, 0]) % n):
        counts = np.bincount(column * bins // n, minlength=bins)
        chi_square = ((counts - draws / bins) ** 2 / (draws / bins)).sum()
        assert chi_square < bins - 1 + 5 * np.sqrt(2 * (bins - 1))


def test_neighbours_are_unrelated() -> None:
    n = 100_000
    order = RandomOrder(n, 5, 0).block(0, n).astype(np.float64)
    for lag in (1, 2, 256, 512):
        assert abs(np.corrcoef(order[:-lag], order[lag:])[0, 1]) < 4 / np.sqrt(n)


def test_very_large_orders_need_no_memory() -> None:
    order = RandomOrder(2**40, 0, 0)
    block = order.block(2**40 - 1000, 2**40)
    assert len(np.unique(block)) == 1000
    assert block.min() >= 0
    assert block.max() < 2**40
    started = time.perf_counter()
    RandomOrder(10_000_000, 0, 0).block(0, 1_000_000)
    assert time.perf_counter() - started < 5


def test_stored_order_and_protocol() -> None:
    assert StoredOrder(4).block(1, 4).tolist() == [1, 2, 3]
    assert isinstance(StoredOrder(0), Order)
    assert isinstance(RandomOrder(0, 0, 0), Order)
    orders = [StoredOrder(5), RandomOrder(5, 0, 0), RandomOrder(5, 1, 0), RandomOrder(5, 0, 1), RandomOrder(6, 0, 0)]
    assert len({order.fingerprint for order in orders}) == len(orders)
    assert RandomOrder(5, 0, 1).fingerprint == RandomOrder(5, np.int64(0), np.int64(1)).fingerprint  # type: ignore[arg-type]


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (2, 1), (0, 6)])
def test_places_outside_are_refused(start: int, stop: int) -> None:
    for order in (StoredOrder(5), RandomOrder(5, 0, 0)):
        with pytest.raises(ValueError, match=r"order of 5 documents; give 0 <= start <= stop <= 5"):
            order.block(start, stop)


@pytest.mark.parametrize("n", [-1, 2**40 + 1])
def test_impossible_sizes_are_refused(n: int) -> None:
    with pytest.raises(ValueError, match=r"from 0 to 2\*\*40"):
        RandomOrder(n, 0, 0)
    with pytest.raises(ValueError, match=r"from 0 to 2\*\*40"):
        StoredOrder(n)
