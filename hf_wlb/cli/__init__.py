"""The command ``hf-wlb``: what packing and sharding would bring for given data, and settings for it.

``analyze`` compares packers, ``tune`` finds settings, ``shard`` compares ways to share one micro-batch out,
``stages`` cuts a model into pipeline stages, ``profile`` measures what all of them go by, ``simulate`` predicts steps
of ways of training on a cluster, and ``plan`` searches for the fastest way to train on so many GPUs.

Results go to standard output, progress and errors to standard error. What the user can mend is told in one sentence,
with exit code 2.
"""

from hf_wlb.cli import packing, plan, profile, sharding, simulate, stages  # they add their commands to app
from hf_wlb.cli.base import app

__all__ = ["app", "packing", "plan", "profile", "sharding", "simulate", "stages"]
