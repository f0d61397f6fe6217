"""Packing a whole data set beforehand: micro-batches as rows, to be trained by a plain Trainer."""

from __future__ import annotations

import hashlib
import json
import time
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np

from hf_wlb.data.documents import DocumentDataset, DocumentKey, document_lengths
from hf_wlb.data.given import check_kind
from hf_wlb.data.packed_collator import PackedDataCollator
from hf_wlb.lengths import LengthArray, RandomOrder, StoredOrder
from hf_wlb.packing import ArraySource, PackingConfig, PackingMetrics, PackingReport, StepPlan, StepPlanner
from hf_wlb.parallel import process_count
from hf_wlb.sharding import IGNORE_INDEX
from hf_wlb.workload import WorkloadModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PACKED_SCHEMA = "hf_wlb.packed/1"

_FEATURES = {
    "input_ids": datasets.List(datasets.Value("int32")),
    "labels": datasets.List(datasets.Value("int32")),
    "document_lengths": datasets.List(datasets.Value("int32")),
    "document_indices": datasets.List(datasets.Value("int64")),
    "step": datasets.Value("int64"),
    "micro_batch": datasets.Value("int32"),
    "replica": datasets.Value("int32"),
    "row": datasets.Value("int64"),
}
_TOKENS_PER_WRITE = 1 << 22


def pack_dataset(
    dataset: datasets.Dataset,
    config: PackingConfig,
    workload: WorkloadModel,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    text_column: str = "text",
    num_proc: int | None = None,
    seed: int = 0,
    shuffle: bool = True,
) -> PackedDataset:
    """Pack all documents into micro-batches and write these as rows, in the order in which steps train them.

    One pass over the documents is planned and written once; every epoch of a training then repeats it in the same
    order. (For another order every epoch use :class:`~hf_wlb.data.WLBDataLoader`.) The result is kept in the cache of
    ``datasets``: the same documents and plan are not written twice. Neither the tokens nor the rows are held in memory.

    Row ``(step * micro_batches_per_replica + micro_batch) * dp_size + replica`` is that micro-batch, so that reading
    in order, shared out over ``dp_size`` processes as accelerate does, gives each process its replica's micro-batches.

    Args:
        dataset: One document a row, with ``input_ids`` (and perhaps ``labels`` and ``length``), or with text.
        config: Settings of the planner; ``dp_size`` is the number of processes that will train.
        workload: What a document costs.
        tokenizer: Tokenises ``text_column`` if there are no ``input_ids``.
        text_column: The column holding the text.
        num_proc: Processes to tokenise with.
        seed: Of the order of documents.
        shuffle: Visit the documents in a random order; else as they are stored.

    Raises:
        ValueError: If there are neither ``input_ids`` nor a tokenizer, for documents that the settings refuse, or for
            the solver where several processes would pack.

    Example of its use:
        .. code-block:: python

            packed = pack_dataset(dataset, config, workload, tokenizer=tokenizer)
            arguments = TrainingArguments("out", num_train_epochs=1, **packed.training_arguments())
            Trainer(model, arguments, train_dataset=packed, data_collator=packed.data_collator()).train()
    """
    check_kind(dataset, "What pack_dataset was given")
    if not isinstance(dataset, datasets.Dataset):
        raise ValueError(
            f"pack_dataset takes a datasets.Dataset, got {type(dataset).__name__}. Documents in memory become one with "
            "datasets.Dataset.from_list; for a stream use StreamingPackedDataset."
        )
    if config.packer == "solver" and process_count() > 1:
        raise ValueError(
            f"The solver packer stops after solver_seconds, so these {process_count()} processes would pack "
            "differently. Pack in one process beforehand, save_to_disk, and PackedDataset.load_from_disk on every rank."
        )
    dataset = _tokenized(dataset, config, tokenizer, text_column, num_proc)
    DocumentDataset(dataset).checksum()  # reads some documents, so that faults of all are not wrapped in another's
    lengths = document_lengths(dataset)
    order = RandomOrder(len(lengths), seed, 0) if shuffle else StoredOrder(len(lengths))
    table, report = _plan(StepPlanner(ArraySource(lengths, order), workload, config))
    meta = {
        "schema": PACKED_SCHEMA,
        "config": config.to_dict(),
        "workload": workload.fingerprint,
        "seed": seed,
        "shuffle": shuffle,
        "rows": table.rows,
        "report": report.to_dict(),
    }
    written = _write(_RowWriter(dataset, lengths, table, config))
    written.info.description = json.dumps(meta)
    return PackedDataset.from_dataset(written)


class PackedDataset(datasets.Dataset):  # type: ignore[misc]
    """Micro-batches as rows in step order; made by :func:`pack_dataset`, given straight to a Trainer.

    A ``datasets.Dataset`` that knows how it was packed. That knowledge lies in ``info.description``, so that
    ``save_to_disk`` keeps it and :meth:`load_from_disk` (or ``from_dataset(datasets.load_from_disk(...))``) finds it.

    Columns: ``input_ids``, ``labels`` (-100 at each document's first token), ``document_lengths``,
    ``document_indices`` (rows of the source), ``step``, ``micro_batch``, ``replica``, ``row``. A dummy has none of the
    first four.
    """

    @classmethod
    def from_dataset(cls, dataset: datasets.Dataset) -> PackedDataset:
        """Take a data set written by :func:`pack_dataset` and loaded by other means.

        Raises:
            ValueError: If it was not written by it, by another version, or if rows are missing or were reordered.
        """
        meta = _read_meta(dataset)
        if dataset._indices is not None or len(dataset) != meta["rows"]:
            raise ValueError(
                f"This data set has {len(dataset)} of the {meta['rows']} rows that pack_dataset wrote, or has them in "
                "another order. Steps would be torn apart; select or shuffle documents before packing."
            )
        packed = cls(dataset.data, info=dataset.info, split=dataset.split, fingerprint=dataset._fingerprint)
        packed._meta = meta
        return packed

    @staticmethod
    def load_from_disk(
        dataset_path: Any, keep_in_memory: bool | None = None, storage_options: dict[str, Any] | None = None
    ) -> PackedDataset:
        """Load what ``save_to_disk`` wrote; arguments as those of ``datasets.Dataset.load_from_disk``.

        Raises:
            ValueError: As :meth:`from_dataset`.
        """
        loaded = datasets.Dataset.load_from_disk(dataset_path, keep_in_memory, storage_options)
        return PackedDataset.from_dataset(loaded)

    @property
    def config(self) -> PackingConfig:
        """The settings it was packed with."""
        return PackingConfig.from_dict(self._meta["config"])

    @property
    def dp_size(self) -> int:
        """Processes that it must be trained with."""
        return self.config.dp_size

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a step on each of them."""
        return self.config.micro_batches_per_replica

    @property
    def seed(self) -> int:
        """Seed of the order of documents."""
        return int(self._meta["seed"])

    @property
    def steps(self) -> int:
        """Optimizer steps of a pass."""
        return len(self) // self.config.micro_batches

    @property
    def report(self) -> PackingReport:
        """Figures of the plan: balance, delay, documents split."""
        return PackingReport(**self._meta["report"])

    def training_arguments(self) -> dict[str, Any]:
        """Return the ``TrainingArguments`` that the rows need; add your own to them.

        ``max_steps`` and ``num_train_epochs`` are free. The loss is the mean over a step's tokens on all processes.
        """
        return {
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "train_sampling_strategy": "sequential",
            "remove_unused_columns": False,
            "average_tokens_across_devices": True,
            "accelerator_config": {"split_batches": False, "dispatch_batches": False, "even_batches": True},
        }

    def data_collator(self, pad_token_id: int = 0, max_position_embeddings: int | None = None) -> PackedDataCollator:
        """Return the collator for these rows; one for each Trainer, because it remembers the row it got last."""
        return PackedDataCollator(self.dp_size, pad_token_id, max_position_embeddings)

    def shuffle(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: steps would be torn apart.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            "The rows of pack_dataset are micro-batches in step order; shuffled, they would form other, unbalanced "
            "steps. For another order of documents pack again with another seed: pack_dataset(..., seed=...)."
        )

    sort = shuffle
    train_test_split = shuffle


def _read_meta(dataset: datasets.Dataset) -> dict[str, Any]:
    try:
        meta = json.loads(dataset.info.description or "")
    except ValueError:
        meta = None
    if not isinstance(meta, Mapping) or "schema" not in meta:
        raise ValueError(
            "This data set was not written by pack_dataset (its description does not say how it was packed). Pack it "
            "with pack_dataset(dataset, config, workload)."
        )
    if meta["schema"] != PACKED_SCHEMA:
        raise ValueError(
            f"This data set was packed in the format {meta['schema']!r}, but this version of hf_wlb reads "
            f"{PACKED_SCHEMA!r}; pack it again, or use the version that wrote it."
        )
    return dict(meta)


def _tokenized(
    dataset: datasets.Dataset,
    config: PackingConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    text_column: str,
    num_proc: int | None,
) -> datasets.Dataset:
    if "input_ids" in dataset.column_names or (len(dataset) == 0 and not dataset.column_names):
        return dataset
    if tokenizer is None:
        raise ValueError(
            f"The data set has no column input_ids; its columns are {sorted(dataset.column_names)}. Pass tokenizer=... "
            f"to have {text_column!r} tokenised, or tokenise it first."
        )
    from hf_wlb.data.text import tokenize_documents

    return tokenize_documents(
        dataset, tokenizer, text_column=text_column, num_proc=num_proc, drop_empty=config.empty == "skip"
    )


@dataclass
class _PlanTable:
    """All plans of a pass in three integers a document, rows already in the order in which they are written."""

    keys: array[int] = field(default_factory=lambda: array("q"))  # index, start, length of every document
    ends: array[int] = field(default_factory=lambda: array("q", [0]))  # documents up to the end of every row

    @property
    def rows(self) -> int:
        return len(self.ends) - 1

    def add(self, plan: StepPlan) -> None:
        for of_all_replicas in zip(*plan.replicas, strict=True):
            for micro_batch in of_all_replicas:
                for document in micro_batch.documents:
                    self.keys.extend((document.index, document.start, document.length))
                self.ends.append(len(self.keys) // 3)

    def row(self, number: int) -> list[DocumentKey]:
        numbers = self.keys[3 * self.ends[number] : 3 * self.ends[number + 1]]
        return [DocumentKey(*numbers[i : i + 3]) for i in range(0, len(numbers), 3)]

    def digest(self) -> str:
        return hashlib.blake2b(self.keys.tobytes() + self.ends.tobytes(), digest_size=16).hexdigest()


def _plan(planner: StepPlanner) -> tuple[_PlanTable, PackingReport]:
    table, metrics = _PlanTable(), PackingMetrics(planner.config)
    while True:
        begin = time.perf_counter()
        plan = next(planner, None)
        if plan is None:
            return table, metrics.report(planner)
        metrics.observe(plan, planner.waiting, time.perf_counter() - begin)
        table.add(plan)


class _RowWriter:
    """Generates the rows, a micro-batch's documents in memory at a time."""

    def __init__(
        self, dataset: datasets.Dataset, lengths: LengthArray, table: _PlanTable, config: PackingConfig
    ) -> None:
        self._source: str = dataset._fingerprint
        self._documents = DocumentDataset(dataset, lengths)
        self._table = table
        self._config = config

    @property
    def rows(self) -> int:
        return self._table.rows

    @property
    def most_tokens(self) -> int:
        """Of a row, at most."""
        return self._config.capacity

    @property
    def fingerprint(self) -> str:
        """Names the rows: the documents, the plan and the format. Not the settings alone: packers improve."""
        digest = hashlib.blake2b(digest_size=8)
        for part in (PACKED_SCHEMA, self._source, self._table.digest(), json.dumps(self._config.to_dict())):
            digest.update(part.encode())
        return digest.hexdigest()

    def __call__(self) -> Iterator[dict[str, Any]]:
        for row in range(self._table.rows):
            keys = self._table.row(row)
            step, place = divmod(row, self._config.micro_batches)
            micro_batch, replica = divmod(place, self._config.dp_size)
            yield {
                **self._tokens(keys),
                "document_lengths": [key.length for key in keys],
                "document_indices": [key.index for key in keys],
                "step": step,
                "micro_batch": micro_batch,
                "replica": replica,
                "row": row,
            }

    def _tokens(self, keys: list[DocumentKey]) -> dict[str, Any]:
        input_ids = [np.zeros(0, dtype=np.int32)]
        labels = [np.zeros(0, dtype=np.int32)]
        for tokens in map(self._documents.tokens, keys):
            input_ids.append(tokens.input_ids.astype(np.int32))
            targets = (tokens.input_ids if tokens.labels is None else tokens.labels).astype(np.int32)
            targets[:1] = IGNORE_INDEX  # nothing of its own document precedes it
            labels.append(targets)
        return {"input_ids": np.concatenate(input_ids), "labels": np.concatenate(labels)}


def _write(rows: _RowWriter) -> datasets.Dataset:
    """Write all rows into the cache of ``datasets``, unless they are there already."""
    features = datasets.Features(_FEATURES)
    if not rows.rows:  # from_generator refuses to write nothing
        return datasets.Dataset.from_dict({name: [] for name in _FEATURES}, features=features)
    return datasets.Dataset.from_generator(
        rows,
        features=features,
        fingerprint=rows.fingerprint,
        writer_batch_size=max(1, _TOKENS_PER_WRITE // rows.most_tokens),
    )
