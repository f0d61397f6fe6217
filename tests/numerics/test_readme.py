"""The Python examples of README.md and of the pages in docs/ run as they stand, each on its own."""

import re
from pathlib import Path
from typing import Any

import datasets
import pytest

from tests.support.pages import blocks, pages, read_page

#: What the examples share is the first one of the guide.
GUIDE = "docs/using.md"
SETUP = blocks(read_page(GUIDE), "python")[0]
EXAMPLES = [block for page in pages() for block in blocks(read_page(page), "python") if block != SETUP]


def title(block: str) -> str:
    """Name an example by the first thing it takes from us or from TRL."""
    used = re.findall(r"from (?:hf_wlb|hf_wlb\.data|trl|transformers|accelerate) import (.+)", block)
    return "+".join(used).replace(", ", ",")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the guide's first block defines, from that block itself."""
    names: dict[str, Any] = {}
    exec(SETUP, names)
    return names


def test_there_is_an_example_of_every_way_in() -> None:
    text = "\n".join(EXAMPLES)
    for name in ("WLBTrainer(", "SFTTrainer(", "Accelerator()", "WLBDataLoader(", "pack_dataset(", "WLBDataCollator()"):
        assert name in text
    assert len(EXAMPLES) == 6


def test_the_setup_gives_tokenised_documents(shared: dict[str, Any]) -> None:
    documents = shared["documents"]
    assert isinstance(documents, datasets.Dataset)
    assert {"input_ids", "length"} <= set(documents.column_names)
    assert len(documents) == 400


@pytest.mark.parametrize("block", EXAMPLES, ids=title)
def test_example(block: str, shared: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    if "trl" in block:
        pytest.importorskip("trl")
    monkeypatch.chdir(tmp_path)
    names = {
        "documents": shared["documents"],
        "tokenizer": shared["tokenizer"],
        "model": AutoModelForCausalLM.from_config(shared["model"].config),
    }
    exec(block, names)
    if "state" in names:
        assert names["state"]["planner"]["step"] >= 1
