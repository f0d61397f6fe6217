"""Where the ranks of a split lie: compared with a mesh that is laid out GPU by GPU."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_wlb.simulator.cluster import Group
from hf_wlb.simulator.split import Split

SIZES = st.integers(1, 4)


def config(**changes):
    settings = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 160,
    }
    return SimpleNamespace(**{**settings, **changes})


def lines(split: Split) -> dict[str, np.ndarray]:
    """GPUs along every axis, one row a group, from the mesh itself."""
    sizes = {"dp": split.dp_size, "pp": split.pp_size, "cp": split.cp_size, "tp": split.tp_size}
    order = ["pp", "dp", "cp", "tp"] if split.fsdp else ["dp", "pp", "cp", "tp"]
    mesh = np.arange(split.gpus).reshape([sizes[name] for name in order])
    return {name: np.moveaxis(mesh, place, -1).reshape(-1, sizes[name]) for place, name in enumerate(order)}


@given(tp=SIZES, cp=SIZES, pp=SIZES, dp=SIZES, fsdp=st.booleans())
def test_groups_are_those_of_the_mesh(tp: int, cp: int, pp: int, dp: int, fsdp: bool) -> None:
    split = Split(tp, cp, pp, dp, fsdp=fsdp and cp * dp > 1)
    assert split.gpus == tp * cp * pp * dp
    found = lines(split)
    groups = {"tp": split.tp_group, "cp": split.cp_group, "dp": split.dp_group, "pp": Group(pp, split.pp_stride)}
    for name, group in groups.items():
        assert group.size == found[name].shape[1]
        assert (np.diff(found[name], axis=1) == group.stride).all()


@given(tp=SIZES, cp=SIZES, pp=SIZES, dp=SIZES, fsdp=st.booleans())
def test_gradients_are_summed_over_all_replicas_and_context_ranks(
    tp: int, cp: int, pp: int, dp: int, fsdp: bool
) -> None:
    split = Split(tp, cp, pp, dp, fsdp=fsdp and cp * dp > 1)
    ranks = {0}
    for group in split.reduce_groups:
        assert group.size > 1
        ranks = {rank + step * group.stride for rank in ranks for step in range(group.size)}
    order = ["pp", "dp", "cp", "tp"] if split.fsdp else ["dp", "pp", "cp", "tp"]
    sizes = {"dp": dp, "pp": pp, "cp": cp, "tp": tp}
    mesh = np.arange(split.gpus).reshape([sizes[name] for name in order])
    whole = tuple(slice(None) if name in ("dp", "cp") else 0 for name in order)
    assert ranks == set(mesh[whole].ravel().tolist())


def test_labels() -> None:
    assert Split(8, 16, 16, 4).label == "TP8 CP16 PP16 DP4"
    assert Split(cp_size=2, fsdp=True).label == "TP1 CP2 PP1 FSDP1"


@pytest.mark.parametrize("name", ["tp_size", "cp_size", "pp_size", "dp_size"])
@pytest.mark.parametrize("size", [0, -1, 2.0, True])
def test_sizes_are_checked(name: str, size) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1, got {size!r}"):
        Split(**{name: size})


def test_fsdp_needs_somebody_to_share_with() -> None:
    Split(dp_size=2, fsdp=True)
    with pytest.raises(ValueError, match="fsdp shares parameters out over dp_size x cp_size ranks, but both are 1"):
        Split(tp_size=8, pp_size=2, fsdp=True)


@pytest.mark.parametrize(
    ("sizes", "changes", "message"),
    [
        ({"tp_size": 16}, {}, "tp_size=16 does not divide the model's attention heads, 8; powers of two that do: 1, 2"),
        ({"tp_size": 4}, {"intermediate_size": 98}, "does not divide the model's feed-forward width, 98"),
        ({"tp_size": 8}, {"vocab_size": 1001}, "tp_size=8 does not divide the model's vocabulary, 1,001"),
        ({"tp_size": 8}, {"num_key_value_heads": 6}, "does not go with the model's 6 KV heads"),
        ({"pp_size": 5}, {}, "pp_size=5 is more than the model's 4 layers; every stage needs one layer at least"),
        ({}, {"model_type": "mamba"}, "this family is not known here"),
    ],
)
def test_models_that_cannot_be_shared_out_so(sizes, changes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Split(**sizes).check_model(config(**changes))


@pytest.mark.parametrize("sizes", [{"tp_size": 8}, {"tp_size": 2, "pp_size": 4}, {"cp_size": 64}])
def test_models_that_can(sizes) -> None:
    Split(**sizes).check_model(config())
    Split(**sizes).check_model(SimpleNamespace(text_config=config()))
