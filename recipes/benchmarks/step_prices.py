"""What the simulator says that a launch's steps take: it tells how a sample of them compares with their whole stream.

The cost model that steps were planned by would not do. It knows nothing of stages that differ, of embedding and head,
or of a kernel that was never profiled, and errs by 5% from step to step, where the simulator by a profile of the same
model and kernel errs by far less (docs/measurement_log.md). No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hf_wlb.analysis.simulation import committed_profile
from hf_wlb.packing import StepPlan
from hf_wlb.simulator.cluster import CLUSTERS
from hf_wlb.simulator.costs import StepModel
from hf_wlb.simulator.measured import MeasuredLaunch
from hf_wlb.simulator.step import StepSimulator
from hf_wlb.simulator.systems import sharder_of
from hf_wlb.simulator.validation import cluster_of, step_model
from hf_wlb.workload import AnalyticWorkload, ProfiledWorkload, WorkloadModel

#: What prices steps of a kernel or device that no preset is of: those of a trial on CPUs.
STAND_IN = "h100"


@dataclass(frozen=True, eq=False)
class StepPrices:
    """What prices the steps of one launch.

    Attributes:
        model: Of the launch's model, split and stages.
        workload: By what its micro-batches are shared out.
        whole: Whether steps are whole ones; else they end with the last backward, as composed steps do.
        source: What the prices go by, in words.
        misfit: Why no preset fits, and ``STAND_IN`` prices them; "" where one does, or a profile.
    """

    model: StepModel
    workload: WorkloadModel
    whole: bool
    source: str
    misfit: str = ""

    @classmethod
    def of(cls, about: Mapping[str, Any]) -> StepPrices:
        """By the committed profile of the launch's model and kernel, its own profile, or its kernel's preset.

        A profile of layers that were compiled where the launch's were not, or the other way round, does not price them.

        Args:
            about: The launch's line; what it says of streams is not looked at.
        """
        launch = MeasuredLaunch.of({**about, "streams": {}}, [])
        workload = launch.workload
        if isinstance(workload, ProfiledWorkload) and workload.compiled != launch.compiled:
            # Any other cost model: step_model would price by this one.
            launch = replace(launch, workload=AnalyticWorkload.from_config(launch.config, STAND_IN))
        cluster, misfit = None, ""
        try:
            cluster = cluster_of(launch)
        except ValueError as error:
            cluster, misfit = CLUSTERS[STAND_IN], str(error)
        committed = committed_profile(launch)
        model = step_model(launch, cluster, committed)
        if committed is not None:
            source = f"`profile_{launch.model}_{launch.kernel}.json`, measured in a run of its own"
        else:
            source = "the launch's profile" if model.profile is not None else f"the figures of {cluster.name!r}"
        return cls(model, workload, not about.get("composed", False), source, misfit)

    def of_sharding(self, sharding: str) -> Callable[[StepPlan], float]:
        """Seconds of a step, by how its micro-batches are shared out."""
        simulator = StepSimulator(self.model, sharder_of(sharding, self.model.split.cp_size, self.workload))

        def seconds(plan: StepPlan) -> float:
            result = simulator.step(plan)
            return result.seconds if self.whole else result.pipeline_seconds

        return seconds
