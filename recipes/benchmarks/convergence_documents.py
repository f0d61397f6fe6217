"""The documents of the convergence benchmark: tokenised once, then chosen for every call's settings. No torch.

They lie in the order of their content's hash, which is as good as random. The first ones are held out, the next ones
are the base's, those behind them the runs': no document belongs to two of them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from convergence_cases import SCHEMA, Settings, write_json

from hf_wlb.lengths import IntArray, RandomOrder
from hf_wlb.packing import ArraySource, PackingConfig, StepPlanner

#: Whose folders, and what is installed beside them, hold the text that is trained.
PACKAGES = ("torch", "transformers", "numpy", "scipy", "pandas", "sympy", "matplotlib")
STRINGS, STRING_TOKENS = 8, 512  # that are to be copied, and the length of each, at most
MASKED = -100  # a label that is not learned


def text_folders() -> list[str]:
    """The standard library, and every folder that one of ``PACKAGES`` is installed in."""
    found = [sysconfig.get_path("stdlib")]
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            found.append(str(Path(spec.origin).resolve().parents[1]))
    return list(dict.fromkeys(found))


class Documents(Sequence[dict[str, IntArray]]):
    """Tokenised documents in two files, one a row, as data loaders take them; all of them, or some that adjoin.

    Args:
        folder: Holds ``tokens.npy`` (one document behind the other) and ``lengths.npy``.
        first: The first row taken.
        tokens: So many from there on, if there are; the last document is cut. None for all.
    """

    def __init__(self, folder: Path, first: int = 0, tokens: int | None = None) -> None:
        lengths: IntArray = np.load(folder / "lengths.npy")
        self._tokens = np.load(folder / "tokens.npy", mmap_mode="r")
        self._begin = int(lengths[:first].sum())
        ends = np.cumsum(lengths[first:])
        most = int(ends[-1]) if len(ends) else 0
        taken = most if tokens is None else min(tokens, most)
        rows = int(np.searchsorted(ends, taken)) + 1 if taken else 0
        self._ends = np.minimum(ends[:rows], taken)
        self.lengths: IntArray = np.diff(self._ends, prepend=0)
        self.first = first
        self.tokens = taken

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: Any) -> Any:
        end = self._begin + int(self._ends[index])
        length = int(self.lengths[index])
        return {"input_ids": self._tokens[end - length : end], "length": length}

    @property
    def place(self) -> list[int]:
        """The arguments ``first`` and ``tokens``."""
        return [self.first, self.tokens]

    def add_to(self, digest: Any) -> None:
        """Their tokens and lengths, to a hash."""
        digest.update(self._tokens[self._begin : self._begin + self.tokens].tobytes())
        digest.update(self.lengths.astype("<i8").tobytes())

    @staticmethod
    def save(documents: Sequence[IntArray], folder: Path) -> int:
        """Writes documents; returns their tokens."""
        folder.mkdir(parents=True, exist_ok=True)
        lengths = np.array([len(document) for document in documents], dtype=np.int64)
        np.save(folder / "tokens.npy", np.concatenate(documents))
        np.save(folder / "lengths.npy", lengths)
        return int(lengths.sum())


def tokenised(texts: Sequence[str], settings: Settings, processes: int | None) -> Iterator[IntArray]:
    """Documents with an end token each, uint16, in their order, as many as somebody takes."""
    import datasets

    from hf_wlb.data.text import tokenize_documents, train_byte_level_bpe

    datasets.disable_progress_bars()
    sizes = np.cumsum([len(text) for text in texts])
    shown = int(np.searchsorted(sizes, settings.tokenizer_characters)) + 1
    tokenizer = train_byte_level_bpe(texts[:shown], vocab_size=settings.vocabulary)
    portion = settings.tokens_needed * 3 // 4  # in characters: all is done in about four portions
    begin = 0
    while begin < len(texts):
        done = int(sizes[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(sizes, done + portion)))
        rows = datasets.Dataset.from_dict({"text": list(texts[begin:end])})
        ids = tokenize_documents(rows, tokenizer, num_proc=min(processes or 1, end - begin)).with_format("numpy")
        for batch in ids.select_columns(["input_ids"]).iter(batch_size=1_000):
            yield from (np.asarray(document, dtype=np.uint16) for document in batch["input_ids"])
        begin = end


def prepare_documents(texts: Sequence[str], settings: Settings, folder: Path, processes: int | None) -> dict[str, Any]:
    """Tokenises as many documents as are needed for the settings, if there is text for them, and writes them.

    Returns:
        What is written to ``documents.json``, besides the settings: ``documents`` and their ``tokens``, ``texts`` there
        were, and whether all of these were taken (``all_taken``).

    Raises:
        ValueError: If there is no text at all.
    """
    if not texts:
        raise ValueError("There is no text in these folders. Name folders with source files (--text).")
    taken: list[IntArray] = []
    tokens = longest = 0
    for document in tokenised(texts, settings, processes):
        taken.append(document)
        tokens, longest = tokens + len(document), max(longest, len(document))
        # Where the held-out documents and those of the base end, the rest of a document is not used.
        if tokens >= settings.tokens_needed + 2 * longest:
            break
    about = {
        "documents": len(taken),
        "tokens": Documents.save(taken, folder),
        "texts": len(texts),
        "all_taken": len(taken) == len(texts),
    }
    write_json(folder / "documents.json", {"schema": SCHEMA, "settings": asdict(settings), **about})
    return about


def chosen_documents(folder: Path, pool: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """Which of the tokenised documents are held out, the base's and the runs'.

    Args:
        folder: Holds the documents.
        pool: What ``prepare_documents`` said of them.
        settings: Of this call.

    Returns:
        ``documents``, ``tokens``, ``longest`` and ``median`` (tokens, before splitting) of those that runs train,
        ``above_context`` (the share of tokens in longer ones), ``held_out`` and ``base`` (documents and tokens),
        ``places`` (arguments of ``Documents`` for each part; the base is evaluated on the first of those that are held
        out), ``steps`` (which the tokens suffice for),
        ``sequential_context`` and ``base_context`` (see ``matched_context``), and ``fingerprint`` and
        ``base_fingerprint`` of what the runs and the base see.

    Raises:
        ValueError: If there are too few: fewer than were asked for although there is more text, or than the base and
            the warm-up take.
    """
    held_out = Documents(folder, 0, settings.held_out_tokens)
    base = Documents(folder, len(held_out), settings.base_steps * settings.base_tokens_per_step)
    train = Documents(folder, len(held_out) + len(base), settings.steps * settings.tokens_per_step)
    steps = min(settings.steps, train.tokens // settings.tokens_per_step)
    if steps < settings.steps and not pool["all_taken"]:
        raise ValueError(
            f"{folder} holds {pool['tokens']:,} tokens, too few for these settings, and there is more text: remove it, "
            "or give another --documents."
        )
    if steps <= settings.warmup:
        raise ValueError(
            f"There is text for {train.tokens:,} tokens besides those held out and those of the base, {steps} steps of "
            f"{settings.tokens_per_step:,}; the warm-up alone takes {settings.warmup}. Name folders with more text "
            "(--text)."
        )
    seen, seen_by_base = hashlib.sha256(), hashlib.sha256()
    for digest, parts in ((seen, (held_out, train)), (seen_by_base, (held_out, base))):
        for part in parts:
            part.add_to(digest)
    shorter = settings.shortest_context / settings.context_length
    about: dict[str, Any] = {
        "documents": len(train),
        "tokens": train.tokens,
        "longest": int(train.lengths.max()),
        "median": int(np.median(train.lengths)),
        "above_context": round(float(train.lengths[train.lengths > settings.context_length].sum() / train.tokens), 4),
        "held_out": [len(held_out), held_out.tokens],
        "base": [len(base), base.tokens],
        "places": {
            "held_out": held_out.place,
            "held_out_of_base": [0, max(1, int(held_out.tokens * shorter))],  # as many micro-batches of evaluation
            "base": base.place,
            "train": train.place,
        },
        "steps": steps,
        "sequential_context": matched_context(train.lengths, settings, steps),
        "fingerprint": seen.hexdigest()[:16],
        "base_fingerprint": seen_by_base.hexdigest()[:16],
    }
    if settings.base_steps:
        about["base_context"] = matched_context(base.lengths, settings, settings.base_steps, base=True)
    return about


def matched_context(lengths: IntArray, settings: Settings, steps: int, *, base: bool = False) -> int:
    """What a micro-batch of sequential packing may hold so that it trains as many tokens a step as is asked for.

    Documents stay whole, so sequential packing leaves the end of every micro-batch empty: with the same context its
    steps would be smaller and more than those of the other packers.

    Args:
        lengths: Of the documents, before splitting.
        settings: Common to all runs.
        steps: That they shall make.
        base: Whether it is for the base's steps of one micro-batch, or for the runs'.
    """
    context = settings.base_tokens_per_step if base else settings.context_length
    order = RandomOrder(len(lengths), settings.seed, 0)

    def needed(most: int) -> int:
        config = PackingConfig(
            context_length=most,
            micro_batches_per_replica=1 if base else settings.micro_batches,
            packer="next-fit",
            max_document_tokens=settings.base_context_length if base else settings.context_length,
        )
        return sum(1 for _ in StepPlanner(ArraySource(lengths, order), settings.workload, config))

    low, high = context, 2 * context
    while high - low > max(1, context // 256):
        middle = (low + high) // 2
        low, high = (middle, high) if needed(middle) > steps else (low, middle)
    return high


def copied_strings(settings: Settings) -> dict[str, list[dict[str, IntArray]]]:
    """Documents that tell whether a model copies from its context: random tokens, and the same ones again.

    Returns:
        The same documents twice, with labels for the string itself (``copy_first``) and for its repetition
        (``copy_second``), for all but its first token, which nothing announces: then both have the same targets.

    >>> from convergence_cases import QUICK
    >>> strings = copied_strings(QUICK)
    >>> first, second = strings["copy_first"][0], strings["copy_second"][0]
    >>> bool((first["input_ids"] == second["input_ids"]).all()), len(first["input_ids"])
    (True, 256)
    >>> bool((first["labels"][1:128] == second["labels"][129:]).all()), set(second["labels"][:129].tolist())
    (True, {-100})
    """
    length = min(STRING_TOKENS, settings.shortest_context // 2)
    strings = np.random.default_rng(settings.seed).integers(0, settings.vocabulary, (STRINGS, length))
    found: dict[str, list[dict[str, IntArray]]] = {"copy_first": [], "copy_second": []}
    for string in strings:
        twice = np.concatenate([string, string])
        for name, learned in (("copy_first", slice(1, length)), ("copy_second", slice(length + 1, None))):
            labels = np.full_like(twice, MASKED)
            labels[learned] = twice[learned]
            found[name].append({"input_ids": twice, "labels": labels})
    return found
