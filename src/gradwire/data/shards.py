"""Token shards: their files, and reading them.

A shards folder holds ``train/`` and ``val/``, or ``all/`` where no document is held out; each has ``shard-00000.pt`` …
and ``shards.meta.pt``. A shard is a dictionary of ``input_ids`` (``[n, max_length]``, int16 or int32 by vocabulary,
right-padded), ``lengths`` (``[n]`` int32, in tokens) and ``sample_ids`` (a list of n strings). The tokenizer lies
beside the folder in ``tokenizer/``.
"""

from __future__ import annotations

import pickle
import time
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset

from gradwire.errors import BadInput, RunFault
from gradwire.files import digest, sha256_file

FORMAT_VERSION = 1
SPLITS = ("train", "val")
ALL = "all"  # the one split of a corpus none of whose documents validate
META = "shards.meta.pt"
POLL_SECONDS = 0.05


class Sample(NamedTuple):
    """One row of a shard without its padding; the targets are ``input_ids[1:]``."""

    sample_id: str
    input_ids: torch.Tensor


class Shards(Dataset[Sample]):
    """The samples of one split, in the order of the corpus; each shard file is memory-mapped when first needed."""

    def __init__(self, folder: Path, split: str) -> None:
        """Open a split.

        Raises:
            BadInput: If the split is missing or still being written.
        """
        self.folder = Path(folder) / split
        self.meta = meta(folder, split)
        if not self.meta["finalized"]:
            raise BadInput(
                f"{self.folder} is not complete; run `gradwire tokenize` again, it goes on where it stopped."
            )
        self._ends = list(accumulate(shard["samples"] for shard in self.meta["shards"]))
        self._open: dict[int, dict[str, Any]] = {}

    @property
    def digest(self) -> str:
        """A digest of the split's samples: of its shards' checksums, in hex."""
        return digest([shard["sha256"] for shard in self.meta["shards"]], length=64)

    def told(self, count: int) -> str:
        """The split's first ``count`` samples, in words that name all of its samples and documents."""
        samples = f"{count} samples" if count == len(self) else f"the first {count} of {len(self)} samples"
        return f"{samples} of {self.meta['processed_documents']} documents"

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        number = bisect_right(self._ends, index)
        if number not in self._open:
            self._open[number] = read(self.folder / self.meta["shards"][number]["file"])
        shard = self._open[number]
        row = index - (self._ends[number] - len(shard["sample_ids"]))
        length = int(shard["lengths"][row])
        return Sample(shard["sample_ids"][row], shard["input_ids"][row, :length].long())


def meta(folder: Path, split: str) -> dict[str, Any]:
    """What ``tokenize`` noted about a split; ``finalized`` tells whether it is complete.

    Raises:
        BadInput: If there is none.
    """
    path = Path(folder) / split / META
    if not path.exists():
        raise BadInput(f"{path} is missing: {folder} is no folder of token shards; `gradwire tokenize` makes one.")
    return read(path)


def read(path: Path) -> dict[str, Any]:
    """Load a shard or a meta file, memory-mapped; nothing in it is executed.

    Raises:
        BadInput: If the file is missing or damaged.
    """
    try:
        return torch.load(path, weights_only=True, mmap=True)
    except FileNotFoundError:
        raise BadInput(f"the token shard {path} is missing; run `gradwire tokenize` into a new folder.") from None
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise BadInput(f"{path} is damaged ({str(error).splitlines()[0]}); run `gradwire tokenize` again.") from None


def tables(folder: Path, meta: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The shards of one split folder, one after the other."""
    return (read(folder / shard["file"]) for shard in meta["shards"])


def splits(folder: Path) -> tuple[str, ...]:
    """The splits of a shards folder: ``all``, or else train and val."""
    return (ALL,) if (Path(folder) / ALL / META).exists() else SPLITS


def exist(folder: Path) -> bool:
    """Whether a folder is one of token shards, perhaps not complete ones."""
    return all((Path(folder) / split / META).exists() for split in splits(folder))


def finalized(folder: Path) -> bool:
    """Whether all splits are complete."""
    return exist(folder) and all(meta(folder, split)["finalized"] for split in splits(folder))


def check(folder: Path) -> None:
    """Read every shard of all splits and compare it with its checksum.

    Raises:
        BadInput: If a split is missing or incomplete, or a shard is missing or altered.
    """
    for split in splits(folder):
        shards = Shards(folder, split)
        for shard in shards.meta["shards"]:
            path = shards.folder / shard["file"]
            if not path.exists():
                raise BadInput(f"the token shard {path} is missing; run `gradwire tokenize` into a new folder.")
            if sha256_file(path) != shard["sha256"]:
                raise BadInput(
                    f"the token shard {path} is not what was written (its SHA-256 differs); delete {folder} and run "
                    "`gradwire tokenize` again."
                )


def wait_finalized(folder: Path, timeout: float) -> None:
    """Wait until another process has completed the shards, by polling: no rank holds the others in a barrier.

    Args:
        folder: The shards folder; need not exist yet.
        timeout: Seconds without any progress after which the producer counts as dead.

    Raises:
        RunFault: If nothing has changed for that long.
    """
    progress, since = None, time.monotonic()
    while not finalized(folder):
        now = _progress(Path(folder))
        if now != progress:
            progress, since = now, time.monotonic()
        if time.monotonic() - since > timeout:
            raise RunFault(
                f"waited {timeout:g} s for the token shards in {folder} and nothing was written; the process that "
                "makes them (rank 0) is not running or has failed."
            )
        time.sleep(POLL_SECONDS)


def _progress(folder: Path) -> list[int]:
    return [path.stat().st_mtime_ns for split in splits(folder) for path in [folder / split / META] if path.exists()]
