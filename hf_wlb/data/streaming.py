"""Packed micro-batches from a stream of documents whose lengths are not known beforehand."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.data

from hf_wlb.data.collator import WLBDataCollator
from hf_wlb.data.progress import (
    Collator,
    PassProgress,
    PlannedStep,
    TellsProgress,
    check_repeatable,
    check_replica,
    check_state,
    fingerprint_of,
    planned_steps,
    warn_position_dropped,
    whole_steps,
)
from hf_wlb.data.stream_source import Stream, StreamSnapshot, StreamSource
from hf_wlb.packing import PackingConfig, StepPlanner
from hf_wlb.workload import WorkloadModel

STREAM_SCHEMA = "hf_wlb.stream/1"


@dataclass(frozen=True, slots=True)
class _Position:
    planner: Mapping[str, Any]
    snapshot: StreamSnapshot
    handed_out: int


class StreamingPackedDataset(TellsProgress, torch.utils.data.IterableDataset[dict[str, Any]]):
    """Yields the collated micro-batches of one data-parallel replica from a stream of documents.

    Every rank reads the same, whole stream, plans for itself and keeps its replica's share: do not shard the source
    by rank. Before a step's first micro-batch all ranks compare its plan and a checksum of the tokens read so far.
    A step always has ``config.micro_batches_per_replica`` micro-batches on every replica, with dummies at the end of
    the stream. Nothing is read before planning needs it, except that one document is looked ahead.

    How to iterate:
        Directly, or through ``torch.utils.data.DataLoader(data, batch_size=None)``; both are exact. Do not give such a
        DataLoader to ``accelerator.prepare`` on several processes: it would share the micro-batches of each replica out
        once more. On one process a plain Trainer takes it, with ``remove_unused_columns=False`` (else it removes what
        keeps documents apart), ``per_device_train_batch_size=1`` and ``dispatch_batches`` off:

        .. code-block:: python

            arguments = TrainingArguments(
                "out",
                max_steps=1000,
                per_device_train_batch_size=1,
                gradient_accumulation_steps=config.micro_batches_per_replica,
                remove_unused_columns=False,
                accelerator_config={"dispatch_batches": False},
            )
            Trainer(model, arguments, train_dataset=data, data_collator=WLBDataCollator()).train()

        With one worker (``num_workers=1``) the stream is read and packed in the background, but the main process
        cannot know where it stands, so that ``state_dict`` is refused and ranks are not compared. More workers are
        refused: each would train the whole stream.

    Epochs: a pass that ends moves on to the next epoch; a source with ``set_epoch`` is told.

    State: the documents that were read and wait are part of it, with their tokens. The source is continued by its own
    ``state_dict`` where it has one, and else by reading up to the same place; so is a ``datasets`` stream that
    shuffles through a buffer, because its state would lose the buffer's documents. The state is the same on every
    rank, and plain JSON.

    Args:
        source: An iterable of documents (mappings with ``input_ids`` and perhaps ``labels``) that can be read again
            from its beginning, such as a ``datasets.IterableDataset``, or a function that returns an iterable.
        config: Settings of the planner.
        workload: What a document costs.
        dp_rank: The replica to yield for.
        collator: Turns documents into a micro-batch; must make a dummy of none. Default: ``WLBDataCollator()``. Its
            ``fingerprint``, if it has one, is compared over the ranks with every plan.
        place: What this rank is besides its number, for errors, such as ``"stage 1"``.

    Raises:
        TypeError, ValueError: If the source is an iterator or cannot be iterated, there is no such replica, or the
            packer's plans cannot be repeated on every rank (``solver``).

    Example:
        >>> from hf_wlb.workload import AnalyticWorkload
        >>> documents = [{"input_ids": [1] * n} for n in (4, 1, 3, 2)]
        >>> config = PackingConfig(context_length=5, micro_batches_per_replica=2, packer="next-fit")
        >>> data = StreamingPackedDataset(documents, config, AnalyticWorkload.from_crossover(8))
        >>> [micro_batch["cu_seq_lens_q"].tolist() for micro_batch in data]
        [[0, 4, 5], [0, 3, 5]]
    """

    def __init__(
        self,
        source: Any,
        config: PackingConfig,
        workload: WorkloadModel,
        *,
        dp_rank: int = 0,
        collator: Collator | None = None,
        place: str = "",
    ) -> None:
        super().__init__()
        check_replica(config, dp_rank)
        check_repeatable(config)
        self.config = config
        self.workload = workload
        self.dp_rank = dp_rank
        self.collator: Any = WLBDataCollator() if collator is None else collator
        self.place = place
        self.epoch = 0
        self._stream = Stream(source)
        self._loaded: _Position | None = None
        self._position: _Position | None = None
        self._progress = PassProgress(config, place=place)
        self._pass = 0
        # Shared with worker processes, so that the main one learns that it is not the one that iterates
        self._read_by_worker = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass. The one that a loaded state is in goes on from there."""
        if epoch == self.epoch:
            return
        if self._loaded is not None:
            warn_position_dropped(self.epoch, epoch)
        self.epoch = epoch
        self._loaded = self._position = None

    # ---- iteration ----

    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = torch.utils.data.get_worker_info()
        if worker is not None:
            if worker.num_workers > 1:
                raise ValueError(
                    f"num_workers={worker.num_workers} would read this stream {worker.num_workers} times, and every "
                    "document would be trained as often. Use num_workers=0, or 1 to pack in the background."
                )
            self._read_by_worker.fill_(1)
        else:
            self._read_by_worker.fill_(0)
        self._pass += 1
        start, self._loaded = self._loaded, None
        self._position = start
        self._progress = PassProgress(self.config, place=self.place, compare_ranks=worker is None)
        return self._iterate(self._pass, start)

    def _iterate(self, number: int, start: _Position | None) -> Iterator[dict[str, Any]]:
        self._stream.set_epoch(self.epoch)
        planner, source = self._planner()
        skip = 0
        if start is not None:
            planner.load_state_dict(dict(start.planner))
            source.restore(start.snapshot)
            skip = start.handed_out
        for step in planned_steps(planner, source.snapshot):
            features = self._features(step, source)
            self._progress.begin(step, handed_out=skip, salt=source.checksum ^ fingerprint_of(self.collator))
            for documents in features[skip:]:
                if number != self._pass:
                    raise RuntimeError(
                        "This iterator was replaced: iter() was called on the data set again, or a state was loaded. "
                        "Only the latest iterator goes on, because the data set has one position."
                    )
                micro_batch = self.collator(documents)
                self._progress.handed_out += 1
                self._position = _Position(step.state, step.snapshot, self._progress.handed_out)
                yield micro_batch
            skip = 0
        self._progress.finish()
        self.epoch += 1
        self._position = None

    def _planner(self) -> tuple[StepPlanner, StreamSource]:
        config = self.config
        source = StreamSource(self._stream, config.longest_document if config.oversize == "truncate" else None)
        return StepPlanner(source, self.workload, config), source

    def _features(self, step: PlannedStep, source: StreamSource) -> list[list[Mapping[str, Any]]]:
        """Take this replica's documents, and let the source forget the whole step's."""
        replica = step.plan.replicas[self.dp_rank]
        features: list[list[Mapping[str, Any]]] = [
            [source.piece(document).as_feature() for document in micro_batch.documents] for micro_batch in replica
        ]
        source.release(step.plan.documents)
        return features

    @property
    def steps_handed_out(self) -> int:
        """Whole steps of the present pass that were handed out, those before a resume included."""
        position = self._loaded or self._position
        return 0 if position is None else whole_steps(position.planner, position.handed_out, self.config)

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """Return the position as of the micro-batch handed out last, in plain JSON types.

        Raises:
            RuntimeError: If a data loader worker iterates, whose position is not known here.
        """
        if bool(self._read_by_worker.item()) and torch.utils.data.get_worker_info() is None:
            raise RuntimeError(
                "This stream is being read in a data loader worker, which has read ahead by an unknown number of "
                "micro-batches. Use num_workers=0 to be able to save and resume, and iterate anew."
            )
        position = self._loaded or self._position
        if position is None:
            planner, source = self._planner()
            position = _Position(planner.state_dict(), source.snapshot(), 0)
        return {
            "schema": STREAM_SCHEMA,
            "epoch": self.epoch,
            "handed_out": position.handed_out,
            "planner": copy.deepcopy(dict(position.planner)),
            "stream": position.snapshot.to_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass go on with the micro-batch after the last one handed out; ends the present pass.

        Whether the stream is the same one is found out when that pass starts to read it.

        Raises:
            ValueError: If the state is of another version or of other settings.
        """
        parts = ("epoch", "handed_out", "planner", "stream")
        check_state(state, STREAM_SCHEMA, "stream", parts, self.config.micro_batches_per_replica)
        planner, _ = self._planner()
        planner.load_state_dict(state["planner"])  # it checks the settings
        snapshot = StreamSnapshot.from_dict(state["stream"])
        self._loaded = _Position(copy.deepcopy(state["planner"]), snapshot, int(state["handed_out"]))
        self._position = None
        self.epoch = int(state["epoch"])
        self._pass += 1
        self._read_by_worker.fill_(0)
