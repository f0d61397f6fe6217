"""The simulator's shapes, made without Transformers, are those of the configurations that models are built from."""

import pytest

from hf_wlb.presets import MODEL_PRESETS, preset_config
from hf_wlb.simulator.counts import ModelShape
from hf_wlb.simulator.paper import shape_of


@pytest.mark.parametrize("name", MODEL_PRESETS)
def test_a_shape_is_counted_as_its_configuration(name) -> None:
    assert ModelShape.of(shape_of(name)) == ModelShape.of(preset_config(name))
