"""Everything that talks to other processes: the only part of the package that uses ``torch.distributed``."""

from hf_wlb.parallel.agreement import process_count, verify_agreement
from hf_wlb.parallel.exchange import ProcessGroupExchange

__all__ = ["ProcessGroupExchange", "process_count", "verify_agreement"]
