"""Collated micro-batches of one replica from map-style data: planned ahead, fetched by workers, resumed exactly."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.utils.data

from hf_wlb.data.collator import WLBDataCollator
from hf_wlb.data.documents import DocumentDataset, DocumentKey, document_lengths
from hf_wlb.data.given import check_documents
from hf_wlb.data.progress import (
    Collator,
    PassProgress,
    PlannedStep,
    TellsProgress,
    check_state,
    fingerprint_of,
    planned_steps,
    warn_position_dropped,
    whole_steps,
)
from hf_wlb.data.sampler import PlannedBatchSampler
from hf_wlb.lengths import LengthArray
from hf_wlb.packing import PackingConfig, StepPlanner
from hf_wlb.workload import WorkloadModel

LOADER_SCHEMA = "hf_wlb.loader/1"


class WLBDataLoader(TellsProgress):
    """Iterates over the collated micro-batches of one data-parallel replica, one epoch at a time.

    Every rank plans for itself in its main process; workers only fetch and collate. Before a step's first
    micro-batch all ranks compare the step's whole plan, so all of them must iterate together. A step always has
    ``config.micro_batches_per_replica`` micro-batches (dummies at the end of the data), on every replica.

    It is no ``torch.utils.data.DataLoader``, so that ``accelerator.prepare`` hands it back as it is: split once more
    over the ranks, documents would be lost. Give ``device`` instead, or move the tensors yourself.

    Epochs: a pass that ends moves on to the next epoch; ``set_epoch`` chooses one. A pass that is broken off starts
    anew at the next ``iter()``, unless a state is loaded.

    State: ``state_dict`` tells what was handed out, whatever the workers have fetched ahead. It is the same on every
    rank, whichever replica it has, and plain JSON.

    Args:
        dataset: Map-style, one document a row: ``input_ids`` and perhaps ``labels``.
        config: Settings of the planner.
        workload: What a document costs.
        lengths: Tokens of every document. Default: the column ``length``, else the lengths of the ``input_ids``.
        collator: Turns documents into a micro-batch; must make a dummy of none. Default: ``WLBDataCollator()``. Its
            ``fingerprint``, if it has one, is compared over the ranks with every plan.
        dp_rank: The replica to load for. All ranks of a replica's pipeline and context-parallel group give the same.
        seed: Of the order of documents.
        shuffle: Another random order every epoch; else as the documents are stored.
        num_workers: Worker processes; 0 for none.
        prefetch_factor: Micro-batches each worker fetches ahead; default 2.
        pin_memory: Copy micro-batches to pinned memory.
        device: Move them there.
        place: What this rank is besides its number, for errors, such as ``"stage 1"``.

    Raises:
        ValueError: If lengths and data set do not fit each other, there is no such replica, or the packer's plans
            cannot be repeated on every rank (``solver``).

    Example:
        >>> from hf_wlb.workload import AnalyticWorkload
        >>> documents = [{"input_ids": [1] * n} for n in (4, 1, 3, 2)]
        >>> config = PackingConfig(context_length=5, micro_batches_per_replica=2, packer="next-fit")
        >>> loader = WLBDataLoader(documents, config, AnalyticWorkload.from_crossover(8), shuffle=False)
        >>> [micro_batch["cu_seq_lens_q"].tolist() for micro_batch in loader]
        [[0, 4, 5], [0, 3, 5]]
    """

    def __init__(
        self,
        dataset: Any,
        config: PackingConfig,
        workload: WorkloadModel,
        *,
        lengths: LengthArray | Sequence[int] | None = None,
        collator: Collator | None = None,
        dp_rank: int = 0,
        seed: int = 0,
        shuffle: bool = True,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        pin_memory: bool = False,
        device: torch.device | str | int | None = None,
        place: str = "",
    ) -> None:
        check_documents(dataset, "The data set")
        given = document_lengths(dataset) if lengths is None else lengths
        if len(given) != len(dataset):
            raise ValueError(f"{len(given)} lengths were given for {len(dataset)} documents; give one for each.")
        self.dataset = dataset
        self.config = config
        self.sampler = PlannedBatchSampler(given, config, workload, dp_rank=dp_rank, seed=seed, shuffle=shuffle)
        self.collator: Any = WLBDataCollator() if collator is None else collator
        self.place = place
        self._documents = DocumentDataset(dataset, self.sampler.lengths)
        self._device = None if device is None else torch.device(device)
        self._workers: dict[str, Any] = {
            "num_workers": num_workers,
            "prefetch_factor": prefetch_factor,
            "pin_memory": pin_memory,
        }
        self._loaded: dict[str, Any] | None = None  # where the next pass starts, if not at the beginning
        self._position: dict[str, Any] | None = None  # as of what was handed out; None at an epoch's beginning
        self._progress = PassProgress(config, place=place)
        self._pass = 0  # counts iterators, so that an abandoned one cannot go on

    # ---- epochs and sizes ----

    @property
    def epoch(self) -> int:
        """The epoch of the present pass, or of the next one between passes."""
        return self.sampler.epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass. The one that a loaded state is in goes on from there."""
        if epoch == self.epoch:
            return
        if self._loaded is not None:
            warn_position_dropped(self.epoch, epoch)
        self.sampler.set_epoch(epoch)
        self._loaded = self._position = None

    def __len__(self) -> int:
        """Micro-batches of the present epoch on each replica, those handed out before a resume included."""
        return len(self.sampler)

    @property
    def steps_per_epoch(self) -> int:
        """Steps of the present epoch; others may differ by a few, see ``PlannedBatchSampler.steps``."""
        return self.sampler.steps(self.epoch)

    # ---- iteration ----

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._pass += 1
        start, self._loaded = self._loaded, None
        self._position = start
        self._progress = PassProgress(self.config, place=self.place)
        return self._iterate(self._pass, self._planner(start), 0 if start is None else start["handed_out"])

    def _iterate(self, number: int, planner: StepPlanner, skip: int) -> Iterator[dict[str, Any]]:
        size = self.config.micro_batches_per_replica
        ahead: deque[PlannedStep] = deque()  # planned, not all handed out: at most what the workers prefetch
        progress = self._progress
        progress.handed_out = size  # the first micro-batch opens a step
        for micro_batch in self._fetch(self._keys(planner, ahead, skip)):
            if number != self._pass:
                raise RuntimeError(
                    "This iterator was replaced: iter() was called on the loader again, or a state was loaded. Only "
                    "the latest iterator goes on, because the loader has one position."
                )
            if progress.handed_out == size:
                before = skip if progress.step is None and skip < size else 0
                progress.begin(ahead.popleft(), handed_out=before, salt=self._content ^ fingerprint_of(self.collator))
            progress.handed_out += 1
            assert progress.step is not None, "a micro-batch belongs to a step"
            self._position = {"planner": progress.step.state, "handed_out": progress.handed_out}
            yield self._to_device(micro_batch)
        progress.finish()
        self.sampler.set_epoch(self.epoch + 1)
        self._position = None

    def _keys(self, planner: StepPlanner, ahead: deque[PlannedStep], skip: int) -> Iterator[list[DocumentKey]]:
        for step in planned_steps(planner):
            keys = self.sampler.keys(step.plan)[skip:]
            skip = 0
            if keys:
                ahead.append(step)
                yield from keys

    def _fetch(self, keys: Iterator[list[DocumentKey]]) -> Iterator[dict[str, Any]]:
        loader: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(
            self._documents,
            batch_sampler=_Once(keys),
            collate_fn=self.collator,
            generator=torch.Generator().manual_seed(0),  # else it draws from the global one, unlike after a resume
            **self._workers,
        )
        return iter(loader)

    def _to_device(self, micro_batch: dict[str, Any]) -> dict[str, Any]:
        if self._device is None:
            return micro_batch
        return {
            name: value.to(self._device, non_blocking=True) if hasattr(value, "to") else value  # ShardTensors too
            for name, value in micro_batch.items()
        }

    @property
    def steps_handed_out(self) -> int:
        """Whole steps of the present pass that were handed out, those before a resume included."""
        position = self._loaded or self._position
        return 0 if position is None else whole_steps(position["planner"], position["handed_out"], self.config)

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """Return the position as of the micro-batch handed out last, in plain JSON types."""
        position = self._loaded or self._position
        if position is None:
            position = {"planner": self._planner(None).state_dict(), "handed_out": 0}
        return {
            "schema": LOADER_SCHEMA,
            "epoch": self.epoch,
            "handed_out": position["handed_out"],
            "content": self._content,
            "planner": copy.deepcopy(position["planner"]),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass go on with the micro-batch after the last one handed out; ends the present pass.

        Raises:
            ValueError: If the state is of another version, data set, order or seed, or of other settings.
        """
        parts = ("epoch", "handed_out", "planner", "content")
        check_state(state, LOADER_SCHEMA, "data loader", parts, self.config.micro_batches_per_replica)
        if int(state["content"]) != self._content:
            raise ValueError(
                "This data loader state belongs to another data set: its documents are as long as these, but their "
                "tokens differ. Pass the data set that it was taken from, or start anew without the state."
            )
        loaded = copy.deepcopy({"planner": state["planner"], "handed_out": int(state["handed_out"])})
        before, epoch = self.epoch, int(state["epoch"])
        self.sampler.set_epoch(epoch)
        try:
            self._planner(loaded)  # it checks data, order and settings
        except ValueError:
            self.sampler.set_epoch(before)
            raise
        self._loaded = loaded
        self._position = None
        self._pass += 1

    @cached_property
    def _content(self) -> int:
        """Checksum of some documents' tokens: lengths alone would not tell two data sets of equal lengths apart."""
        return self._documents.checksum()

    def _planner(self, position: Mapping[str, Any] | None) -> StepPlanner:
        planner = self.sampler.planner(self.epoch)
        if position is not None:
            planner.load_state_dict(position["planner"])
        return planner


class _Once:
    """An iterator as the iterable that a torch DataLoader asks for; read by one pass only."""

    def __init__(self, keys: Iterator[list[DocumentKey]]) -> None:
        self._keys = keys

    def __iter__(self) -> Iterator[list[DocumentKey]]:
        return self._keys
