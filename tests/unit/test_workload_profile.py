"""ProfiledWorkload: what it reads off a profile, how it behaves between and beyond samples, bad files."""

from __future__ import annotations

import copy
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_wlb.workload import AnalyticWorkload, ProfiledWorkload, load_workload, parse_profile


def attention(q_len, kv_len, forward, backward):
    return {"q_len": q_len, "kv_len": kv_len, "forward_seconds": forward, "backward_seconds": backward}


def linear(tokens, forward, backward):
    return {"tokens": tokens, "forward_seconds": forward, "backward_seconds": backward}


def collective(operation, group_size, size_bytes, seconds):
    return {"operation": operation, "group_size": group_size, "bytes": size_bytes, "seconds": seconds}


METADATA = {
    "device": "made up",
    "dtype": "bfloat16",
    "model": {"hidden_size": 64},
    "versions": {"torch": "2"},
}


def documents_only():
    """Time per pair: 0.04 for 3 tokens or fewer (6 pairs), 0.01 for 15 or more (120 pairs)."""
    return {
        "schema": "hf_wlb.profile/1",
        "metadata": METADATA,
        "attention": [attention(3, 3, 0.08, 0.16), attention(15, 15, 0.4, 0.8)],
        "linear": [linear(10, 1.0, 2.0), linear(1000, 10.0, 20.0)],
    }


def full_profile():
    """Two kinds of layers, chunks, a head and collectives; the chunk of 15 tokens is slow."""
    profile = documents_only()
    profile["layers"] = [{"count": 2, "window": None}, {"count": 1, "window": 7}]
    profile["attention"] += [attention(15, 115, 2.0, 6.0), attention(15, 1015, 20.0, 60.0)]
    profile["head"] = [linear(1000, 4.0, 8.0)]
    profile["collectives"] = [
        collective("all_gather", 2, 100, 1.0),
        collective("all_gather", 2, 10_000, 10.0),
    ]
    return profile


def test_samples_come_back():
    model = ProfiledWorkload.from_dict(documents_only())
    assert model.attention(3) == pytest.approx(0.24)
    assert model.attention(15) == pytest.approx(1.2)
    assert model.linear(1000) == pytest.approx(30.0)
    assert model.document(15) == pytest.approx(1.2 + 0.45)


def test_between_samples_time_is_a_power_of_the_pairs():
    model = ProfiledWorkload.from_dict(documents_only())
    exponent = math.log(1.2 / 0.24) / math.log(120 / 6)
    for length in (4, 7, 14):
        pairs = length * (length + 1) / 2
        assert model.attention(length) == pytest.approx(0.24 * (pairs / 6) ** exponent)


def test_beyond_the_samples_the_ends_rate_holds():
    model = ProfiledWorkload.from_dict(documents_only())
    assert model.attention(0) == 0.0
    assert model.attention(1) == pytest.approx(0.04)
    assert model.attention(131_072) == pytest.approx(0.01 * 131_072 * 131_073 / 2)


def test_linear_work_has_the_rate_of_a_whole_micro_batch():
    model = ProfiledWorkload.from_dict(documents_only())
    assert model.linear(np.array([0, 1, 7])).tolist() == pytest.approx([0.0, 0.03, 0.21])
    profile = {**documents_only(), "micro_batch_tokens": 100}
    assert ProfiledWorkload.from_dict(profile).linear(1) == pytest.approx(math.sqrt(3.0 * 30.0) / 100)
    profile["micro_batch_tokens"] = 5
    assert ProfiledWorkload.from_dict(profile).linear(1) == pytest.approx(0.3)


def test_a_profile_of_attention_alone_prices_other_work_at_nothing():
    profile = {**documents_only(), "linear": []}
    model = ProfiledWorkload.from_dict(profile)
    assert model.linear(1000) == 0.0 and model.document(15) == model.attention(15) == pytest.approx(1.2)
    assert model.crossover_length == 0.0
    assert ProfiledWorkload.from_dict(model.to_dict()) == model
    head = ProfiledWorkload.from_dict({**profile, "head": [linear(1000, 4.0, 8.0)]})
    assert head.linear(1000) == pytest.approx(12.0)


def test_the_embedding_is_linear_work_that_is_never_repeated():
    profile = {**documents_only(), "embedding": [linear(1000, 1.0, 3.0)]}
    without = ProfiledWorkload.from_dict(documents_only())
    for repeated in (False, True):
        options = {"gradient_checkpointing": repeated}
        found = ProfiledWorkload.from_dict({**profile, **options}).linear(1000)
        assert found - ProfiledWorkload.from_dict({**documents_only(), **options}).linear(1000) == pytest.approx(4.0)
    assert ProfiledWorkload.from_dict({**profile, "linear": []}).linear(500) == pytest.approx(2.0)
    # A profile that has none is what it was: no new key, hence the same fingerprint.
    assert "embedding" not in without.to_dict()
    again = ProfiledWorkload.from_dict(profile)
    assert ProfiledWorkload.from_dict(again.to_dict()) == again != without


def test_every_known_operation_is_read():
    sizes = {"all_gather": 4, "all_reduce": 4, "key_value_exchange": 4, "reduce_scatter": 4, "send_recv": 2}
    profile = {**documents_only(), "collectives": [collective(name, n, 100, 1.0) for name, n in sizes.items()]}
    model = ProfiledWorkload.from_dict(profile)
    assert all(model.collective_seconds(name, n, 100) == 1.0 for name, n in sizes.items())


def test_the_exchange_is_its_own_samples_or_bare_collectives():
    profile = documents_only()
    profile["metadata"] = {**METADATA, "model": {"kv_width": 5}}  # 10 bytes a token
    profile["collectives"] = [collective("all_gather", 2, 1000, 1.0), collective("reduce_scatter", 2, 1000, 2.0)]
    bare = ProfiledWorkload.from_dict(profile)
    assert bare.exchange(200, 2) == pytest.approx(6.0) and bare.exchange(200, 1) == bare.exchange(0, 2) == 0.0
    again = ProfiledWorkload.from_dict({**profile, "gradient_checkpointing": True})
    assert again.exchange(100, 2) == pytest.approx(4.0)
    profile["collectives"].insert(1, collective("key_value_exchange", 2, 1000, 5.0))
    whole = ProfiledWorkload.from_dict({**profile, "layers": [{"count": 3, "window": None}]})
    assert whole.exchange(100, 2) == pytest.approx(15.0)
    again = ProfiledWorkload.from_dict({**profile, "gradient_checkpointing": True})
    assert again.exchange(100, 2) == pytest.approx(6.0)
    with pytest.raises(ValueError, match="no time of all_gather over 4 ranks"):
        whole.exchange(100, 4)


def test_checkpointing_repeats_layer_forwards_only():
    profile = full_profile()
    plain = ProfiledWorkload.from_dict(profile)
    again = ProfiledWorkload.from_dict({**profile, "gradient_checkpointing": True})
    assert plain.linear(1) == pytest.approx((3 * 30.0 + 12.0) / 1000)
    assert again.linear(1) == pytest.approx((3 * 40.0 + 12.0) / 1000)
    assert again.attention(3) == pytest.approx(plain.attention(3) * (2 * 0.08 + 0.16) / 0.24)


def test_without_chunk_samples_a_chunk_has_its_documents_rate():
    model = ProfiledWorkload.from_dict(documents_only())
    assert model.chunk(15, 115) == pytest.approx(0.01 * (15 * 115 - 15 * 14 / 2) + 15 * 0.03)
    assert model.chunk(3, 100) == pytest.approx(0.04 * (3 * 100 - 3) + 3 * 0.03)


def test_chunk_samples_come_back_and_extrapolate():
    profile = full_profile()
    del profile["layers"]
    model = ProfiledWorkload.from_dict(profile)
    linear_work = model.linear(15)
    assert model.chunk(15, 115) == pytest.approx(8.0 + linear_work)
    assert model.chunk(15, 1015) == pytest.approx(80.0 + linear_work)
    mean_keys = {kv: kv - 7 for kv in (115, 315, 1015, 5015)}
    exponent = math.log(80.0 / 8.0) / math.log(mean_keys[1015] / mean_keys[115])
    between = 8.0 * (mean_keys[315] / mean_keys[115]) ** exponent
    assert model.chunk(15, 315) == pytest.approx(between + linear_work)
    assert model.chunk(15, 5015) == pytest.approx(80.0 * mean_keys[5015] / mean_keys[1015] + linear_work)


def test_growths_are_blended_between_query_lengths():
    profile = documents_only()
    # 7.67 x the keys cost a chunk of 2 queries 4 x its document's time; 7.22 x cost one of 8 queries 16 x.
    profile["attention"] = [
        attention(2, 2, 1.0, 2.0),
        attention(2, 12, 4.0, 8.0),
        attention(8, 8, 2.0, 4.0),
        attention(8, 36, 32.0, 64.0),
    ]
    model = ProfiledWorkload.from_dict(profile)
    # Four queries are half-way in log between 2 and 8; ending at 16 they see 5.8 x their document's keys.
    keys = math.log((16 - 1.5) / 2.5)
    growth_2 = 4.0 ** (keys / math.log(11.5 / 1.5))
    growth_8 = 16.0 ** (keys / math.log(32.5 / 4.5))
    expected = model.attention(4) * math.sqrt(growth_2 * growth_8)
    assert model.chunk(4, 16) - model.linear(4) == pytest.approx(expected)
    # Outside the measured query lengths the nearest one's growth holds.
    keys = math.log((21 - 9.5) / 10.5)
    expected = model.attention(20) * 16.0 ** (keys / math.log(32.5 / 4.5))
    assert model.chunk(20, 21) - model.linear(20) == pytest.approx(expected)


def test_sliding_layers_pay_for_the_pairs_in_their_window():
    profile = {**documents_only(), "layers": [{"count": 5, "window": 3}]}
    model = ProfiledWorkload.from_dict(profile)
    assert model.attention(3) == pytest.approx(5 * 0.24)
    assert model.attention(10) == pytest.approx(5 * 0.04 * (1 + 2 + 8 * 3))
    assert model.chunk(2, 10) - model.linear(2) == pytest.approx(5 * 0.04 * 6)


@pytest.mark.parametrize("profile", [documents_only(), full_profile()])
def test_a_whole_document_is_its_own_chunk(profile):
    model = ProfiledWorkload.from_dict(profile)
    lengths = np.arange(1, 200)
    assert model.chunk(lengths, lengths).tolist() == model.document(lengths).tolist()
    assert [model.chunk(int(d), int(d)) for d in lengths] == model.document(lengths).tolist()
    assert [model.document(int(d)) for d in lengths] == model.document(lengths).tolist()
    assert type(model.document(7)) is type(model.chunk(2, 7)) is type(model.linear(np.int32(7))) is float
    assert model.chunk(2, np.array([4, 5])).shape == (2,)
    assert model.micro_batch(lengths) == pytest.approx(model.document(lengths).sum())


SECONDS = st.floats(1e-6, 1e3)


@st.composite
def profiles(draw):
    """Any valid profile, with timings as noisy as can be."""
    profile = documents_only()
    documents = draw(st.sets(st.integers(1, 3000), min_size=1, max_size=6))
    pairs = {(d, d) for d in documents}
    pairs |= {
        (q, q + more) for q, more in draw(st.sets(st.tuples(st.integers(1, 900), st.integers(1, 5000)), max_size=6))
    }
    profile["attention"] = [attention(q, kv, draw(SECONDS), draw(SECONDS)) for q, kv in sorted(pairs)]
    windows = draw(st.lists(st.none() | st.integers(1, 4000), min_size=1, max_size=3, unique=True))
    profile["layers"] = [{"count": draw(st.integers(1, 9)), "window": window} for window in windows]
    return profile


@settings(deadline=None)
@given(profiles())
def test_longer_never_costs_less(profile):
    model = ProfiledWorkload.from_dict(profile)
    lengths = np.unique(np.geomspace(1, 100_000, 300).astype(np.int64))
    for prices in (
        model.attention(lengths),
        model.document(lengths),
        *(model.chunk(np.full_like(lengths, q), lengths + q) for q in (1, 20, 1000, 5000)),
    ):
        assert np.all(np.isfinite(prices))
        assert np.all(prices[1:] >= prices[:-1] * (1 - 1e-9))


def test_noise_is_smoothed_upwards():
    profile = documents_only()
    profile["attention"].insert(1, attention(7, 7, 0.04, 0.08))  # took less than 3 tokens did
    model = ProfiledWorkload.from_dict(profile)
    assert model.attention(7) == pytest.approx(model.attention(3))


def test_crossover_of_a_profile():
    profile = documents_only()
    profile["attention"][1] = attention(15, 15, 1.2, 2.4)
    profile["linear"] = [linear(1000, 40.0, 60.0)]
    model = ProfiledWorkload.from_dict(profile)
    length = model.crossover_length
    assert 3 < length < 15
    below, above = math.floor(length), math.ceil(length)
    assert model.attention(below) < model.linear(below)
    assert model.attention(above) > model.linear(above)
    profile = documents_only()
    profile["linear"] = [linear(1000, 50.0, 150.0)]  # 0.2 a token: (d + 1) / 2 = 20
    assert ProfiledWorkload.from_dict(profile).crossover_length == pytest.approx(39.0)
    profile["layers"] = [{"count": 1, "window": 3}]  # at most 3 pairs of 0.04 a token
    assert ProfiledWorkload.from_dict(profile).crossover_length == math.inf
    profile["linear"] = [linear(1000, 0.01, 0.01)]
    assert ProfiledWorkload.from_dict(profile).crossover_length == 0.0


def test_collectives():
    model = ProfiledWorkload.from_dict(full_profile())
    assert model.collective_seconds("all_gather", 2, 1) == pytest.approx(1.0)
    assert model.collective_seconds("all_gather", 2, 1000) == pytest.approx(math.sqrt(10.0))
    assert model.collective_seconds("all_gather", 2, 20_000) == pytest.approx(20.0)
    with pytest.raises(ValueError, match="no time of all_gather over 4 ranks; it holds all_gather over 2"):
        model.collective_seconds("all_gather", 4, 1000)
    with pytest.raises(ValueError, match="it holds no collectives at all"):
        ProfiledWorkload.from_dict(documents_only()).collective_seconds("all_gather", 2, 1)


@pytest.mark.parametrize("profile", [documents_only(), full_profile()])
def test_round_trip_through_a_file(profile, tmp_path):
    model = ProfiledWorkload(parse_profile(profile), gradient_checkpointing=True, micro_batch_tokens=64)
    path = tmp_path / "profile.json"
    model.save(path)
    for again in (ProfiledWorkload.load(path), load_workload(path), load_workload(str(path))):
        assert again == model
        assert again.fingerprint == model.fingerprint
    text = path.read_text()
    assert text == json.dumps(json.loads(text), sort_keys=True, indent=1) + "\n"
    assert model.fingerprint != ProfiledWorkload(parse_profile(profile)).fingerprint


def test_load_workload_dispatches_on_the_schema(tmp_path):
    assert isinstance(load_workload(documents_only()), ProfiledWorkload)
    assert isinstance(load_workload(AnalyticWorkload(1.0, 1.0).to_dict()), AnalyticWorkload)
    with pytest.raises(ValueError, match=r"is of schema 'other/3'; known are 'hf_wlb.workload/1' and"):
        load_workload({"schema": "other/3"})
    with pytest.raises(FileNotFoundError, match=r"no workload file .*absent\.json"):
        load_workload(tmp_path / "absent.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ValueError, match=r"workload .*list\.json must be a JSON object, but it is a list"):
        load_workload(tmp_path / "list.json")


def change(*path_and_value):
    *path, last, value = path_and_value

    def apply(profile):
        for key in path:
            profile = profile[key]
        if value is ...:
            del profile[last]
        else:
            profile[last] = value

    return apply


BAD_PROFILES = [
    (change("schema", "hf_wlb.profile/2"), "its schema is 'hf_wlb.profile/2', and this version reads"),
    (change("schema", ...), "it names no schema"),
    (change("metadata", ...), "lacks 'metadata'"),
    (change("attention", ...), "lacks 'attention'"),
    (change("linear", ...), "lacks 'linear'"),
    (change("metadata", "dtype", ...), "metadata of the profile .* lacks 'dtype'"),
    (change("metadata", []), "metadata of the profile .* must be an object, but it is a list"),
    (change("metadata", "device", 3), "'device' .* must be a text, but it is 3"),
    (change("metadata", "versions", "2"), "'versions' .* must be an object .*, but it is '2'"),
    (change("atention", []), "unknown keys 'atention'; allowed are schema, metadata"),
    (change("attention", []), "attention of the profile .* is empty"),
    (change("linear", {}), "linear of the profile .* must be a list of samples, but it is an object"),
    (change("linear", 0, 5), r"linear\[0\] of the profile .* must be an object, but it is 5"),
    (change("linear", 0, "tokens", ...), r"linear\[0\] of the profile .* lacks 'tokens'"),
    (change("linear", 0, "stddev", 1.0), r"linear\[0\] .* has unknown keys 'stddev'"),
    (change("linear", 0, "tokens", 10.5), "tokens of linear.* must be a whole number, but it is 10.5"),
    (change("linear", 0, "tokens", True), "tokens of linear.* must be a whole number, but it is True"),
    (change("linear", 0, "tokens", 0), "tokens of linear.* must be at least 1, but it is 0"),
    (
        change("linear", 0, "tokens", 1000),
        r"sorted by tokens .*, but sample 1 \(1000,\) follows",
    ),
    (change("attention", 0, "q_len", -1), "q_len of attention.* must be at least 1, but it is -1"),
    (change("attention", 0, "q_len", 4), r"attention\[0\] .* has q_len 4 above its kv_len 3"),
    (change("attention", 0, attention(20, 20, 1, 1)), "attention .* must be sorted by q_len, kv_len"),
    (change("attention", [attention(3, 4, 1, 1)]), r"holds no whole document \(q_len equal to kv_len\)"),
    (change("attention", 0, "forward_seconds", -1.0), "forward_seconds .* above 0 seconds and finite"),
    (change("attention", 0, "backward_seconds", 0), "backward_seconds .* above 0 seconds and finite"),
    (change("attention", 0, "backward_seconds", math.nan), "above 0 seconds and finite, but it is nan"),
    (change("attention", 0, "backward_seconds", "1"), "must be a number of seconds, but it is '1'"),
    (change("attention", 0, "backward_seconds", None), "must be a number of seconds, but it is null"),
    (change("layers", {}), "layers of the profile .* must be a list, but it is an object"),
    (change("layers", []), "layers of the profile .* is empty"),
    (change("layers", [3]), r"layers\[0\] .* must be an object, but it is 3"),
    (change("layers", 0, "count", 0), r"count of layers\[0\] .* must be at least 1, but it is 0"),
    (change("layers", 1, "window", "7"), r"window of layers\[1\] .* must be a whole number, but it is '7'"),
    (change("layers", 1, "window", None), r"each window once, but it holds \[None, None\]"),
    (change("collectives", 0, "operation", ""), "operation of collectives.* must be a text, but it is ''"),
    (
        change("collectives", 1, "operation", "broadcast"),
        r"operation of collectives\[1\] .* must be one of all_gather",
    ),
    (change("collectives", [collective("send_recv", 4, 100, 1.0)]), r"group_size of collectives\[0\] .* must be 2"),
    (change("embedding", [linear(0, 1.0, 1.0)]), r"tokens of embedding\[0\] .* must be at least 1, but it is 0"),
    (change("collectives", 0, "seconds", -1), "seconds of collectives.* must be above 0 seconds"),
    (change("gradient_checkpointing", 1), "gradient_checkpointing .* must be true or false, but it is 1"),
    (change("micro_batch_tokens", 0), "micro_batch_tokens .* must be at least 1, but it is 0"),
]


@pytest.mark.parametrize(("spoil", "message"), BAD_PROFILES, ids=[message for _, message in BAD_PROFILES])
def test_every_bad_file_gets_its_sentence(spoil, message, tmp_path):
    profile = copy.deepcopy(full_profile())
    parse_profile(profile)
    spoil(profile)
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(profile))
    with pytest.raises(ValueError, match=message) as caught:
        ProfiledWorkload.load(path)
    assert "bad.json" in str(caught.value)


def test_files_that_are_no_profile_at_all_get_a_sentence(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no profile file .*absent\.json"):
        ProfiledWorkload.load(tmp_path / "absent.json")
    path = tmp_path / "cut.json"
    path.write_text('{"schema": ')
    with pytest.raises(ValueError, match=r"profile .*cut\.json is no JSON file: .* line 1"):
        ProfiledWorkload.load(path)
    path.write_text("3")
    with pytest.raises(ValueError, match="must be a JSON object, but it is 3"):
        ProfiledWorkload.load(path)
    with pytest.raises(ValueError, match="micro_batch_tokens must be a whole number of at least 1, not 0"):
        ProfiledWorkload(parse_profile(documents_only()), micro_batch_tokens=0)
