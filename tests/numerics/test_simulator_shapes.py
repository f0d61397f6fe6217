"""The simulator's shapes and names, without Transformers and torch, are those of what models are trained with."""

import pytest

from hf_wlb.attention.kernels import KERNELS
from hf_wlb.presets import MODEL_PRESETS, preset_config
from hf_wlb.simulator.counts import ModelShape
from hf_wlb.simulator.paper import shape_of
from hf_wlb.simulator.validation import CLUSTER_OF_KERNEL


@pytest.mark.parametrize("name", MODEL_PRESETS)
def test_a_shape_is_counted_as_its_configuration(name) -> None:
    assert ModelShape.of(shape_of(name)) == ModelShape.of(preset_config(name))


def test_kernels_with_a_cluster_are_called_as_they_call_themselves() -> None:
    """All but the reference, which is no way to train on GPUs; a launch names kernels so."""
    assert {kernel.name for kernel in KERNELS.values()} - {"reference"} == set(CLUSTER_OF_KERNEL)
