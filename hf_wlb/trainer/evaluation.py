"""The evaluating half of ``WLBTrainer``: documents packed in their order, and a loss that is exact over all tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from accelerate.state import GradientState
from torch.nn.functional import pad
from transformers import TrainingArguments
from transformers.trainer_utils import EvalLoopOutput, IntervalStrategy

from hf_wlb.accounting import TokenMean
from hf_wlb.attention import document_attention_enabled, position_limit
from hf_wlb.data import WLBDataLoader
from hf_wlb.packing import PackingConfig
from hf_wlb.parallel import ParallelMesh, verify_settings
from hf_wlb.sharding import IGNORE_INDEX, ShardPlan, unshard_order
from hf_wlb.trainer.training_loss import TrainingLoss
from hf_wlb.workload import WorkloadModel

_NO_DOCUMENTS = "{} holds no documents, so there is no loss to compute. Give it some, or do not evaluate on it."


class PlannedEvaluation(TrainingLoss):
    """``Trainer`` that loads and evaluates packed and sharded documents; ``WLBTrainer`` sets the attributes."""

    mesh: ParallelMesh
    packing: PackingConfig
    workload: WorkloadModel
    data_collator: Any
    gather_function: Callable[..., Any]
    _num_items: int

    def _loader(self, dataset: Any, config: PackingConfig, shuffle: bool) -> WLBDataLoader:
        args = self.args
        loader = WLBDataLoader(
            dataset,
            config,
            self.workload,
            collator=self.data_collator,
            dp_rank=self.mesh.dp_rank,
            seed=args.seed if args.data_seed is None else args.data_seed,
            shuffle=shuffle,
            num_workers=args.dataloader_num_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            pin_memory=args.dataloader_pin_memory and args.device.type == "cuda",
            place=self.mesh.place,
        )
        self._check_positions(loader)
        return loader

    def _check_positions(self, loader: WLBDataLoader) -> None:
        """Refuses documents that the model has no positions for now, not when their step comes."""
        limit, lengths = position_limit(self._causal_lm.config), loader.sampler.lengths
        if limit is None or not len(lengths):
            return
        longest = min(int(lengths.max()), loader.config.longest_document or loader.config.capacity)
        if longest > limit.tokens:
            raise ValueError(f"a document of {longest:,} tokens would be trained whole, but {limit.why}")

    def set_initial_training_values(self, args: TrainingArguments, dataloader: Any) -> tuple[Any, ...]:
        """Also refuses what could not be evaluated on, before anything is trained."""
        ours = type(self).get_eval_dataloader is PlannedEvaluation.get_eval_dataloader
        if ours and (args.eval_strategy != IntervalStrategy.NO or args.eval_on_start):
            self._check_eval_dataset()
        return cast(tuple[Any, ...], super().set_initial_training_values(args, dataloader))

    def _check_eval_dataset(self) -> None:
        given = self.eval_dataset
        if isinstance(given, dict):
            if not given:
                raise ValueError(_NO_DOCUMENTS.format("the eval_dataset, an empty dict,"))
            for name, dataset in given.items():
                _check_documents([] if dataset is None else dataset, f"the eval_dataset {name!r}")
        elif given is not None:
            _check_documents(given, "the eval_dataset")

    def get_eval_dataloader(self, eval_dataset: Any = None) -> WLBDataLoader:  # type: ignore[override]
        """Documents in their order, packed without looking at workloads, shared out over the ranks."""
        what = "the data set to evaluate on"
        if isinstance(eval_dataset, str):
            what = f"the eval_dataset {eval_dataset!r}"
            eval_dataset = cast(dict[str, Any], self.eval_dataset)[eval_dataset]
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if dataset is None:
            raise ValueError("Trainer: evaluation requires an eval_dataset.")
        _check_documents(dataset, what)
        config = PackingConfig(
            context_length=self.packing.longest_document or self.packing.capacity,
            micro_batches_per_replica=1,
            dp_size=self.mesh.dp_size,
            packer="next-fit",
            oversize=self.packing.oversize,
            empty=self.packing.empty,
        )
        loader = self._loader(dataset, config, shuffle=False)
        if not loader.sampler.steps(0):  # only empty documents, which are skipped
            raise ValueError(_NO_DOCUMENTS.format(what))
        return loader

    def get_test_dataloader(self, test_dataset: Any) -> WLBDataLoader:  # type: ignore[override]
        """See ``get_eval_dataloader``."""
        return self.get_eval_dataloader(test_dataset)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Trainer's loop; the loss is the mean over all tokens instead of a mean of means."""
        self._token_mean = TokenMean()
        if self.mesh.sizes.total > self.mesh.dp_size:
            loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
            whether = "whether to predict, by compute_metrics and prediction_loss_only"
            verify_settings({whether: not loss_only}, place=self.mesh.place)
            self.gather_function = self._gather_from_replicas
        with document_attention_enabled(self._causal_lm), _telling_the_end(dataloader):
            output = super().evaluation_loop(
                dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            )
        assert output.metrics is not None
        output.metrics[f"{metric_key_prefix}_loss"] = self._token_mean.value()
        return output

    def prediction_step(
        self, model: torch.nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """Also adds the micro-batches of all ranks to the evaluation's mean, and puts shards together again."""
        with self._with_logits(not prediction_loss_only):
            loss, logits, labels = cast(
                tuple[torch.Tensor | None, Any, Any],
                super().prediction_step(model, inputs, prediction_loss_only, ignore_keys),
            )
        if loss is not None:
            # compute_loss gives (sum on this rank / tokens on all) * ranks: the mean over ranks is exact.
            self._token_mean.add(self.accelerator.reduce(loss.detach().clone(), "mean"), self._num_items)
            loss = self.mesh.shard_mean(loss)  # of the micro-batch, as include_for_metrics=["loss"] has it
        if "wlb_info" in inputs and not prediction_loss_only:
            plan: ShardPlan = inputs["wlb_info"].plan
            if not isinstance(logits, torch.Tensor):
                raise ValueError(
                    f"the model gives {len(logits)} outputs besides the loss, and only its logits can be put together "
                    "from several context-parallel ranks. Name the others in ignore_keys, or set "
                    "prediction_loss_only=True."
                )
            logits, shifted = self._in_document_order(plan, logits), self._in_document_order(plan, labels)
            labels = pad(shifted[:, :-1], (1, 0), value=IGNORE_INDEX)  # as of whole micro-batches: not shifted
        return loss, logits, labels

    def _in_document_order(self, plan: ShardPlan, shard: torch.Tensor) -> torch.Tensor:
        """[1, tokens of the shard, ...] of every rank to [1, tokens of the micro-batch, ...]."""
        shards = self.mesh.gather_shards(shard[0], cast(Sequence[int], plan.tokens.tolist()))
        return shards[torch.from_numpy(unshard_order(plan)).to(shards.device)][None]

    def _gather_from_replicas(self, rows: Any) -> Any:
        """One row per replica: all of its ranks have the same."""
        return self.accelerator.gather_for_metrics(rows)[self.mesh.replica_leads()]


class _End:
    """What Accelerate asks of a loader of its own; ours does not go through ``accelerator.prepare``."""

    remainder = 0  # samples that were added to fill up a batch

    def __init__(self, loader: WLBDataLoader) -> None:
        self._loader = loader

    @property
    def end_of_dataloader(self) -> bool:
        return self._loader.steps_handed_out >= self._loader.steps_per_epoch


@contextlib.contextmanager
def _telling_the_end(dataloader: Any) -> Iterator[None]:
    """Inside, Accelerate knows which micro-batch is the last: with it Trainer closes ``batch_eval_metrics``."""
    if not isinstance(dataloader, WLBDataLoader):  # of a subclass's own, perhaps prepared
        yield
        return
    state, end = GradientState(), _End(dataloader)
    state._add_dataloader(end)
    try:
        yield
    finally:
        state._remove_dataloader(end)


def _check_documents(dataset: Any, what: str) -> None:
    if not hasattr(dataset, "__len__"):
        raise ValueError(
            f"evaluation needs documents with a length, one a row, got {type(dataset).__name__}; take some of the "
            "stream into a list or a datasets.Dataset"
        )
    if not len(dataset):
        raise ValueError(_NO_DOCUMENTS.format(what))
