"""Everything that talks to other processes: the only part of the package that uses ``torch.distributed``."""

from hf_wlb.parallel.agreement import process_count, verify_agreement

__all__ = ["process_count", "verify_agreement"]
