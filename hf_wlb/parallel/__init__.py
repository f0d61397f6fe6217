"""Everything that talks to other processes: the only part of the package that uses ``torch.distributed``."""

from hf_wlb.parallel.agreement import failing_together, verify_agreement, verify_settings
from hf_wlb.parallel.collectives import process_count
from hf_wlb.parallel.exchange import ProcessGroupExchange
from hf_wlb.parallel.mesh import ParallelMesh, check_cp_size, gather_figures

__all__ = [
    "ParallelMesh",
    "ProcessGroupExchange",
    "check_cp_size",
    "failing_together",
    "gather_figures",
    "process_count",
    "verify_agreement",
    "verify_settings",
]
