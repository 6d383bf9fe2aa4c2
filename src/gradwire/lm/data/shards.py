"""Token shards: their file format and their reader.

A shards folder contains ``train/`` and ``val/``, or ``all/`` if no document is held out; each has ``shard-00000.pt`` …
and ``shards.meta.pt``. A shard is a dictionary of ``input_ids`` (``[n, max_length]``, int16 or int32 by vocabulary,
right-padded), ``lengths`` (``[n]`` int32, in tokens) and ``sample_ids`` (a list of n strings). If a document has parts
that are not to be predicted, such as a prompt, its shards also have ``is_target`` (``[n, max_length]`` bool). The
tokenizer is next to the folder, in ``tokenizer/``.
"""

from __future__ import annotations

import reprlib
import time
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradwire.base import torch_files
from gradwire.base.errors import BadInput, RunFault
from gradwire.base.files import check_regular, digest, sha256_file
from gradwire.base.units import amount

if TYPE_CHECKING:
    import torch

FORMAT_VERSION = 1
SPLITS = ("train", "val")
ALL = "all"  # the only split of a corpus without validation documents
META = "shards.meta.pt"
META_TYPES: dict[str, type] = {
    **dict.fromkeys(("split", "dataset", "dataset_digest", "tokenizer_digest", "source"), str),
    **dict.fromkeys(("max_length", "vocab_size", "eos_id", "pad_id", "tokens"), int),
    **dict.fromkeys(("processed_documents", "processed_samples", "next_document_samples"), int),
    "val_fraction": float,
    "shards": list,
    "finalized": bool,
}
POLL_SECONDS = 0.05


class Sample(NamedTuple):
    """One row of a shard without padding.

    Attributes:
        sample_id: Its id.
        input_ids: Its tokens, int64.
        is_target: Whether each token is to be predicted, bool; None: all. The first one never is.
    """

    sample_id: str
    input_ids: torch.Tensor
    is_target: torch.Tensor | None = None

    @property
    def n_targets(self) -> int:
        """Number of predicted tokens."""
        return len(self.input_ids) - 1 if self.is_target is None else int(self.is_target[1:].sum())


class Shards:
    """The samples of one split, in corpus order; each shard file is memory-mapped on first use."""

    def __init__(self, folder: Path, split: str) -> None:
        """Open a split.

        Raises:
            BadInput: If the split is missing or still being written.
        """
        self.folder = Path(folder) / split
        self.meta = meta(folder, split)
        if not self.meta["finalized"]:
            raise BadInput(f"{self.folder} is not complete; run `gradwire tokenize` again to resume it.")
        self._ends = list(accumulate(shard["samples"] for shard in self.meta["shards"]))
        self._open: dict[int, dict[str, Any]] = {}

    @property
    def digest(self) -> str:
        """A digest of the split's samples, from the checksums of its shards; in hex."""
        return digest([shard["sha256"] for shard in self.meta["shards"]], length=64)

    def describe(self, count: int) -> str:
        """Describe the split's first ``count`` samples, with its total numbers of samples and documents."""
        samples = amount(count, "sample") if count == len(self) else f"the first {count} of {len(self)} samples"
        left_out = f", {self.meta['left_out']} invalid ones left out" if self.meta.get("left_out") else ""
        return f"{samples} of {amount(self.meta['processed_documents'], 'document')}{left_out}"

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Sample:
        import torch

        shard, row, length = self._row(index)
        tokens = torch.from_numpy(shard["input_ids"][row, :length].astype(np.int64))
        is_target = torch.from_numpy(shard["is_target"][row, :length]) if "is_target" in shard else None
        return Sample(shard["sample_ids"][row], tokens, is_target)

    def __iter__(self) -> Iterator[Sample]:
        return (self[index] for index in range(len(self)))

    def sample_id(self, index: int) -> str:
        """Return a sample's id; unlike the sample, without importing torch."""
        shard, row, _ = self._row(index)
        id_: str = shard["sample_ids"][row]
        return id_

    def tokens(self, index: int) -> list[int]:
        """Return a sample's tokens; unlike the sample, without importing torch."""
        shard, row, length = self._row(index)
        tokens: list[int] = shard["input_ids"][row, :length].tolist()
        return tokens

    def length(self, index: int) -> int:
        """Return a sample's number of tokens."""
        return self._row(index)[2]

    def _row(self, index: int) -> tuple[dict[str, Any], int, int]:
        """The shard of a sample, its row there and its number of tokens."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        number = bisect_right(self._ends, index)
        if number not in self._open:
            self._open[number] = table(self.folder, self.meta, number)
        shard = self._open[number]
        row = index - (self._ends[number] - len(shard["sample_ids"]))
        return shard, row, int(shard["lengths"][row])


def meta(folder: Path, split: str) -> dict[str, Any]:
    """Return the metadata of a split as ``tokenize`` wrote it; ``finalized`` is whether the split is complete.

    Raises:
        BadInput: If it is missing or invalid.
    """
    path = Path(folder) / split / META
    if not path.exists():
        raise BadInput(f"{path} is missing: {folder} is not a shards folder; run `gradwire tokenize` to make one.")
    metadata = read(path)
    if problem := _wrong_meta(metadata, split):
        raise BadInput(f"{path} is unusable: {problem}; {remedy(Path(folder))}")
    return metadata


def remedy(folder: Path) -> str:
    """Advice for messages about shards that cannot be used: they are made of the corpus again."""
    return f"delete {folder} and run the same command again, after `gradwire tokenize` if that made the folder."


def chat_format_of(meta: dict[str, Any]) -> str | None:
    """The name of the format of a split's chats (`chats.Format`); None if the corpus has none."""
    return meta.get("chat_format") if meta.get("chats") else None


def _wrong_meta(meta: Any, split: str) -> str | None:
    """Why a split's metadata is invalid, or None."""
    if not isinstance(meta, dict) or meta.get("format_version") != FORMAT_VERSION:
        return f"not metadata of format version {FORMAT_VERSION}"
    for name, kind in META_TYPES.items():
        value: Any = meta.get(name)
        if type(value) is not kind or (isinstance(value, int) and value < 0):
            return f"{name} is {reprlib.repr(value)}"
    if meta["split"] != split:
        return f"it belongs to the split {meta['split']}"
    for number, shard in enumerate(meta["shards"]):
        named = isinstance(shard, dict) and shard.get("file") == file_name(number) and type(shard.get("sha256")) is str
        if not named or type(shard.get("samples")) is not int or shard["samples"] < 1:
            return f"its entry of shard {number} is {reprlib.repr(shard)}"
    if meta["finalized"] and split == "val" and type(meta.get("unigram_ppl")) is not float:
        return f"unigram_ppl is {reprlib.repr(meta.get('unigram_ppl'))}"
    samples = sum(shard["samples"] for shard in meta["shards"])
    if samples != meta["processed_samples"] or (meta["finalized"] and not samples):
        return f"its shards have {samples} samples, but processed_samples is {meta['processed_samples']}"
    return None


def file_name(number: int) -> str:
    """Return the file name of a shard."""
    return f"shard-{number:05d}.pt"


def table(folder: Path, meta: dict[str, Any], number: int) -> dict[str, Any]:
    """Load a shard of a split folder, memory-mapped.

    Raises:
        BadInput: If it is missing or damaged, or does not match the metadata or the format.
    """
    shard, path = read(folder / file_name(number)), folder / file_name(number)
    if problem := _wrong_shard(shard, meta["shards"][number]["samples"], meta["max_length"], meta["vocab_size"]):
        raise BadInput(f"the token shard {path} is unusable: {problem}; {remedy(folder.parent)}")
    return shard


def _wrong_shard(shard: Any, samples: int, max_length: int, vocab_size: int) -> str | None:
    """Why a shard is invalid, or None."""
    if not isinstance(shard, dict) or set(shard) - {"is_target"} != {"input_ids", "lengths", "sample_ids"}:
        return "not a dictionary of input_ids, lengths and sample_ids"
    tokens, lengths, ids = shard["input_ids"], shard["lengths"], shard["sample_ids"]
    if not isinstance(ids, list) or len(ids) != samples or not all(isinstance(id_, str) for id_ in ids):
        return f"sample_ids is not a list of {samples} strings"
    if not _numbers(tokens, (samples, max_length), (np.int16, np.int32)):
        return f"input_ids is not an int16 or int32 matrix of {samples} × {max_length}"
    if not _numbers(lengths, (samples,), (np.int32,)):
        return f"lengths is not an int32 vector of {samples}"
    if "is_target" in shard and not _numbers(shard["is_target"], (samples, max_length), (np.bool_,)):
        return f"is_target is not a bool matrix of {samples} × {max_length}"
    for name, values, least, most in (("token", tokens, 0, vocab_size - 1), ("length", lengths, 1, max_length)):
        for extreme in (int(values.min()), int(values.max())):
            if not least <= extreme <= most:
                return f"it has a {name} {extreme}, outside {least} to {most}"
    return None


def _numbers(value: Any, shape: tuple[int, ...], kinds: tuple[type[np.generic], ...]) -> bool:
    return isinstance(value, np.ndarray) and value.dtype in kinds and value.shape == shape


def read(path: Path) -> Any:
    """Load a shard or a metadata file, memory-mapped; its code is never executed, its content is not validated.

    Raises:
        BadInput: If the file is missing or damaged.
    """
    check_regular(path)
    try:
        return torch_files.read(path)
    except FileNotFoundError:
        raise BadInput(f"the token shard {path} is missing; {remedy(path.parents[1])}") from None
    except Exception as error:  # an unreadable file may raise any type
        message = (str(error) or type(error).__name__).splitlines()[0]
        raise BadInput(f"{path} is damaged ({message}); {remedy(path.parents[1])}") from None


def tables(folder: Path, meta: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Iterate over the shards of a split folder; errors as in ``table``."""
    return (table(folder, meta, number) for number in range(len(meta["shards"])))


def splits(folder: Path) -> tuple[str, ...]:
    """Return the splits of a shards folder: ``all``, or train and val."""
    return (ALL,) if (Path(folder) / ALL / META).exists() else SPLITS


def exist(folder: Path) -> bool:
    """Whether a folder is a shards folder, complete or not."""
    return all((Path(folder) / split / META).exists() for split in splits(folder))


def finalized(folder: Path) -> bool:
    """Whether all splits are complete."""
    return exist(folder) and all(meta(folder, split)["finalized"] for split in splits(folder))


def check(folder: Path) -> None:
    """Read all shards of all splits and verify their checksums and their number of tokens.

    Raises:
        BadInput: If a split is missing or incomplete, or a shard is missing, altered or unusable.
    """
    for split in splits(folder):
        shards = Shards(folder, split)
        for shard in shards.meta["shards"]:
            path = shards.folder / shard["file"]
            if not path.exists():
                raise BadInput(f"the token shard {path} is missing; {remedy(Path(folder))}")
            if sha256_file(path) != shard["sha256"]:
                raise BadInput(f"the token shard {path} was modified (its SHA-256 differs); {remedy(Path(folder))}")
        tokens = sum(int(shard["lengths"].sum()) for shard in tables(shards.folder, shards.meta))
        if tokens != shards.meta["tokens"]:
            raise BadInput(
                f"the token shards in {shards.folder} have {tokens} tokens, but {META} says {shards.meta['tokens']}; "
                f"{remedy(Path(folder))}"
            )


def wait_finalized(folder: Path, timeout: float) -> None:
    """Poll until another process has completed the shards; no barrier, so a slow rank does not time out the others.

    Args:
        folder: The shards folder; may not exist yet.
        timeout: Seconds without progress after which the other process counts as dead.

    Raises:
        RunFault: On timeout.
    """
    progress, since = None, time.monotonic()
    while not finalized(folder):
        now = _progress(Path(folder))
        if now != progress:
            progress, since = now, time.monotonic()
        if time.monotonic() - since > timeout:
            raise RunFault(
                f"no progress on the token shards in {folder} for {timeout:g} s; the process that writes them (rank 0) "
                "is not running or has failed."
            )
        time.sleep(POLL_SECONDS)


def _progress(folder: Path) -> list[int]:
    return [path.stat().st_mtime_ns for split in splits(folder) for path in [folder / split / META] if path.exists()]


def target_counts(shard: dict[str, NDArray[Any]], vocab_size: int, pad_id: int) -> NDArray[np.int64]:
    """Count each token as a target of a shard: int64 ``[vocab_size]``.

    Targets are those of ``is_target``, or without it every token of a sample but its first.
    """
    tokens = shard["input_ids"][:, 1:]
    if "is_target" in shard:
        return np.bincount(tokens[shard["is_target"][:, 1:]], minlength=vocab_size)
    counts = np.bincount(tokens.ravel(), minlength=vocab_size)
    counts[pad_id] -= tokens.size - (shard["lengths"] - 1).sum()  # the padding after each sample
    return counts
