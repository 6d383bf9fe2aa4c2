"""English Wikipedia of 1 November 2023, streamed from the Hugging Face Hub; only what is read is downloaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field

from gradwire.base.errors import BadInput
from gradwire.base.files import check_regular
from gradwire.lm.data.document import parse
from gradwire.lm.data.sources import Source, Stream, datasets

DATASET = "wikimedia/wikipedia"
CONFIG = "20231101.en"
REVISION = "b04c8d1ceb2f5cd4588862100d08de323dccfbaa"
COLUMNS = ["id", "title", "text"]

WITHOUT_NETWORK = (
    "Check the network (and unset HF_HUB_OFFLINE), pass a Parquet file of the dataset with --data_path FILE, or use "
    "--source pydocs, which needs no network."
)


class Wikipedia(Source):
    """English Wikipedia of November 2023 from the Hugging Face Hub, in the dataset's order.

    The revision is a commit, branch or tag of the dataset; default: a pinned commit.
    """

    name = "wikipedia"
    size = "about 20 GB"

    data_path: Path | None = Field(
        default=None, description="a Parquet file with the dataset's columns to read instead"
    )

    def open(self) -> Stream:
        """Return the articles, and the commit of the revision (None for a local file)."""
        if self.data_path is None:
            commit = datasets.commit(DATASET, self.revision or REVISION, WITHOUT_NETWORK)
            where = f"{DATASET} {CONFIG}"
            table = datasets.streamed(path=DATASET, name=CONFIG, revision=commit, split="train")
            return Stream(where, commit, parse(datasets.rows(table, COLUMNS, where), where))
        check_regular(self.data_path, "--data_path")
        if not self.data_path.is_file():
            raise BadInput(f"--data_path {self.data_path} is not a file.")
        return Stream(str(self.data_path), None, parse(_rows_of(self.data_path), str(self.data_path)))


def _rows_of(file: Path) -> Iterator[dict[str, Any]]:
    import pyarrow

    try:
        table = datasets.streamed(path="parquet", data_files=str(file), split="train")
        yield from datasets.rows(table, COLUMNS, str(file))
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).rstrip(".")
        raise BadInput(f"--data_path {file} cannot be read as a Parquet file: {reason}.") from None
