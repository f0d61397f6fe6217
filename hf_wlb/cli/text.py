"""What commands about clusters take to read text, and what is split before it is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from hf_wlb.analysis import LengthSource, read_lengths
from hf_wlb.lengths import holds_lengths

Data = Annotated[
    str | None,
    typer.Option(
        help="A file of lengths (.npy, a JSON list, a .csv of one column, or one a line); tokenised documents (rows "
        "with input_ids) or text: a .jsonl or .parquet file, a saved data set, a folder, a `datasets` name, a .txt "
        "file, or `stdlib`. Absent: the built-in sampler of lengths.",
        show_default=False,
    ),
]
Tokenizer = Annotated[str | None, typer.Option(help="For text: name or folder of a tokenizer.")]
ColumnOfText = Annotated[str | None, typer.Option(help="For text: the column that holds it.")]
TextSplit = Annotated[str, typer.Option("--text-split", help="For text or tokenised documents: the split to read.")]
MaxDocuments = Annotated[int | None, typer.Option(help="Take only the first so many documents.", min=1)]


class TextOptions(NamedTuple):
    """How text becomes documents.

    Attributes:
        tokenizer: Name or folder; None trains one on the text.
        text_column: Column that holds the text.
        dataset_split: Split of the data set.
        max_documents: Take only the first so many.
    """

    tokenizer: str | None = None
    text_column: str | None = None
    dataset_split: str = "train"
    max_documents: int | None = None

    def read(self, data: str | None, seed: int) -> LengthSource:
        """Lengths of the data; see ``read_lengths``."""
        return read_lengths(
            data,
            tokenizer=self.tokenizer,
            text_column=self.text_column,
            split=self.dataset_split,
            max_documents=self.max_documents,
            seed=seed,
        )

    def arguments(self) -> dict[str, Any]:
        """The same for the recipe, what is not given left out."""
        given = {name: value for name, value in self._asdict().items() if value is not None}
        if self.dataset_split == "train":
            del given["dataset_split"]
        return given

    def check_used(self, data: str | None) -> None:
        """Refuses options that nothing would be read with.

        Raises:
            ValueError: One is given, but the data are no text.
        """
        if self.arguments() and (data is None or holds_lengths(Path(data))):
            options = {"dataset_split": "--text-split"}
            given = ", ".join(options.get(name, f"--{name.replace('_', '-')}") for name in self.arguments())
            what = "no --data is given" if data is None else f"{Path(data).name} holds lengths"
            say, them = ("says", "it") if len(self.arguments()) == 1 else ("say", "them")
            raise ValueError(f"{given} {say} how to read text, but {what}. Leave {them} out, or give text as --data.")
