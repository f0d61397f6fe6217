"""The data sets that a trainer is given, looked at when it is made and not when it trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_wlb.data.given import check_documents


def check_given(train_dataset: Any, eval_dataset: Any) -> None:
    """Refuses data sets that hold no documents with ``input_ids``; empty ones pass, and None.

    Args:
        train_dataset: Documents, or None.
        eval_dataset: Documents, several data sets by name, or None.

    Raises:
        ValueError: Names the columns or the splits there are, and what to do.
    """
    given = {"The train_dataset": train_dataset}
    if isinstance(eval_dataset, Mapping):
        given |= {f"The eval_dataset {name!r}": dataset for name, dataset in eval_dataset.items()}
    else:
        given["The eval_dataset"] = eval_dataset
    for name, dataset in given.items():
        if dataset is not None:
            check_documents(dataset, name)
