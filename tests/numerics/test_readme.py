"""The Python examples of README.md and of the pages in docs/ run as they stand, each on its own."""

import json
import re
from copy import deepcopy
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
    for name in ("StreamingPackedDataset(", "chats.documents", "document_lengths(", "plain_attention("):
        assert name in text
    assert len(EXAMPLES) == 10


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
        "tokenizer": deepcopy(shared["tokenizer"]),  # the example of chats adds tokens to it
        "model": AutoModelForCausalLM.from_config(shared["model"].config),
    }
    exec(block, names)
    if "state" in names:
        assert names["state"]["planner"]["step"] >= 1
    if "lengths.json" in block:
        assert json.loads(Path("lengths.json").read_text()) == shared["documents"]["length"][:]


def test_control_a_stream_needs_its_columns(
    shared: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example without its remove_unused_columns=False trains nothing, and says why."""
    monkeypatch.chdir(tmp_path)
    block = next(block for block in EXAMPLES if "StreamingPackedDataset(" in block)
    line = "    remove_unused_columns=False,\n"
    assert line in block
    with pytest.raises(ValueError, match=r"micro-batch of StreamingPackedDataset.* set remove_unused_columns=False"):
        exec(block.replace(line, ""), {"documents": shared["documents"], "model": shared["model"]})
