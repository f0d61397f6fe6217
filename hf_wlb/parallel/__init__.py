"""Everything that talks to other processes: the only part of the package that uses ``torch.distributed``."""

from hf_wlb.parallel.agreement import failing_together, verify_agreement, verify_settings
from hf_wlb.parallel.collectives import process_count
from hf_wlb.parallel.data_parallel import (
    is_sharded,
    reduce_over_replicas,
    same_start,
    shard_parameters,
    verify_shapes,
    wrap_data_parallel,
)
from hf_wlb.parallel.exchange import ProcessGroupExchange
from hf_wlb.parallel.mesh import ParallelMesh, gather_figures
from hf_wlb.parallel.mesh_config import WLBParallelismConfig, check_launcher
from hf_wlb.parallel.parameter_layout import ParameterLayout, TensorShard
from hf_wlb.parallel.sizes import ParallelSizes
from hf_wlb.parallel.tensor_parallel import check_tensor_parallel, split_model, verify_gradients
from hf_wlb.parallel.vocabulary import VocabularyGroup

__all__ = [
    "ParallelMesh",
    "ParallelSizes",
    "ParameterLayout",
    "ProcessGroupExchange",
    "TensorShard",
    "VocabularyGroup",
    "WLBParallelismConfig",
    "check_launcher",
    "check_tensor_parallel",
    "failing_together",
    "gather_figures",
    "is_sharded",
    "process_count",
    "reduce_over_replicas",
    "same_start",
    "shard_parameters",
    "split_model",
    "verify_agreement",
    "verify_gradients",
    "verify_settings",
    "verify_shapes",
    "wrap_data_parallel",
]
