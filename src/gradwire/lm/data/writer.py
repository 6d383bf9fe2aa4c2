"""Write token shards atomically; a run killed at any point resumes to a bit-identical result.

After each shard the split's metadata records the number of documents written, and of samples of the next one; a resumed
run skips them without tokenizing. Serialization is deterministic: the same samples give the same bytes, independent of
the process and the file name.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from gradwire.base.errors import BadInput
from gradwire.base.files import atomic_write, sha256_file
from gradwire.base.prefetch import prefetch
from gradwire.lm.data import corpus
from gradwire.lm.data.chats import Format, Spans
from gradwire.lm.data.document import Document, FirstSeen, Invalid
from gradwire.lm.data.shards import (
    ALL,
    FORMAT_VERSION,
    META,
    SPLITS,
    file_name,
    finalized,
    meta,
    tables,
    target_counts,
)
from gradwire.lm.data.tokenizer import Tokenizer, progress

BATCH_CHARACTERS = 500_000  # tokenized at once: enough for all cores, yet small in memory

Waiting = list[tuple[str, Document]]  # documents with their splits


class Encoded(NamedTuple):
    """A document's tokens, and which of them are targets (None: all)."""

    tokens: Sequence[int]
    is_target: NDArray[np.bool_] | None = None


def split_of(document_id: str, val_fraction: float) -> str:
    """Return ``val`` for about ``val_fraction`` of all ids, else ``train``, by the id alone; ``all`` if it is 0."""
    if not val_fraction:
        return ALL
    place = int.from_bytes(hashlib.blake2b(document_id.encode(), digest_size=8).digest(), "big") / 2**64
    return "val" if place < val_fraction else "train"


def cuts(length: int, max_length: int) -> list[tuple[int, int]]:
    """Cut a document of ``length`` tokens into samples: the (start, end) of each.

    It is cut every ``max_length`` tokens. If the last sample would have one token, and so no target, the sample before
    it is one token shorter. So every sample of a document of at least two tokens has a target.
    """
    edges = [*range(0, length, max_length), length]
    if len(edges) > 2 and edges[-1] - edges[-2] == 1:
        edges[-2] -= 1
    return list(pairwise(edges))


def sample_ids(document_id: str, count: int) -> list[str]:
    """Return the ids of a document's samples: the document's id for one, ``<id>#<k>`` for several."""
    return [document_id] if count == 1 else [f"{document_id}#{k}" for k in range(count)]


class SplitWriter:
    """Writes the shards and the metadata of one split; resumes an earlier writer with the same settings."""

    def __init__(self, folder: Path, settings: dict[str, Any], restart: bool) -> None:
        """Open a split.

        Args:
            folder: The split's folder.
            settings: The constant part of the metadata.
            restart: Delete shards with other settings; False raises an error.

        Raises:
            BadInput: If the folder holds shards with other settings.
        """
        self.folder = folder
        self.meta = _resumed(folder, settings, restart) or {
            **settings,
            "tokens": 0,
            "processed_documents": 0,
            "processed_samples": 0,
            "next_document_samples": 0,
            "shards": [],
            "finalized": False,
        }
        self.documents = self.meta["processed_documents"]
        self._partial = self.meta["next_document_samples"]
        self.targets = np.zeros(settings["vocab_size"], dtype=np.int64)  # count by token
        narrow = settings["vocab_size"] <= np.iinfo(np.int16).max + 1
        self._tokens = np.empty((settings["shard_size"], settings["max_length"]), np.int16 if narrow else np.int32)
        self._is_target = np.empty(self._tokens.shape, dtype=bool)
        self._clear()

    def _clear(self) -> None:
        self._tokens.fill(self.meta["pad_id"])
        self._is_target.fill(False)
        self._partly = False  # whether a sample states targets
        self._lengths: list[int] = []
        self._ids: list[str] = []

    def count(self, shards: Iterable[dict[str, Any]]) -> None:
        """Add the targets of ``shards`` to ``targets``."""
        for shard in shards:
            self.targets += target_counts(shard, self.meta["vocab_size"], self.meta["pad_id"])

    def add(self, document_id: str, encoding: Encoded) -> None:
        """Add the document's samples that are not written yet; write each full shard."""
        row = np.asarray(encoding.tokens, dtype=self._tokens.dtype)
        is_target = np.ones(len(row), bool) if encoding.is_target is None else encoding.is_target
        places = cuts(len(row), self.meta["max_length"])
        ids = sample_ids(document_id, len(places))
        for k in range(self._partial, len(places)):
            start, end = places[k]
            self._tokens[len(self._ids), : end - start] = row[start:end]
            self._is_target[len(self._ids), : end - start] = is_target[start:end]
            self._partly |= encoding.is_target is not None
            self._lengths.append(end - start)
            self._ids.append(ids[k])
            last = k + 1 == len(places)
            self.documents += last
            self._partial = 0 if last else k + 1
            if len(self._ids) == len(self._tokens):
                self.flush()

    def flush(self) -> None:
        """Write the buffered samples as a shard, then record it in the metadata."""
        if not self._ids:
            return
        count = len(self._ids)
        path = self.folder / file_name(len(self.meta["shards"]))
        shard: dict[str, Any] = {
            "input_ids": self._tokens[:count].copy(),
            "lengths": np.array(self._lengths, np.int32),
            "sample_ids": self._ids,
        }
        if self._partly:
            shard["is_target"] = self._is_target[:count].copy()
        _save(path, {name: of if name == "sample_ids" else torch.from_numpy(of) for name, of in shard.items()})
        self.count([shard])
        self.meta["shards"].append({"file": path.name, "samples": count, "sha256": sha256_file(path)})
        self.meta["tokens"] += sum(self._lengths)
        self.meta["processed_samples"] += count
        self.meta["processed_documents"] = self.documents
        self.meta["next_document_samples"] = self._partial
        self.save_meta()
        self._clear()

    def finalize(self, **results: float) -> None:
        """Mark the split complete."""
        self.meta.update(results, finalized=True)
        self.save_meta()

    def save_meta(self) -> None:
        """Write the metadata; via JSON, since pickle output depends on which equal strings are one object in memory."""
        _save(self.folder / META, json.loads(json.dumps(self.meta)))


def write_shards(
    folder: Path,
    corpus_path: Path,
    tokenizer: Tokenizer,
    chats: Format,
    settings: dict[str, Any],
    restart: bool = False,
) -> None:
    """Tokenize a corpus into ``folder``, or resume that.

    Args:
        folder: The shards folder.
        corpus_path: The corpus.
        tokenizer: The tokenizer to use.
        chats: The format of chats.
        settings: max_length, shard_size, val_fraction (0: one split, ``all``), skip_invalid, dataset, dataset_digest,
            tokenizer_digest and source.
        restart: Delete shards with other settings; False raises an error.

    Raises:
        BadInput: If the folder holds shards with other settings. Also if the corpus is invalid, leaves a split empty,
            or gives two samples the same id; the folder is then deleted.
    """
    settings = {
        "format_version": FORMAT_VERSION,
        **settings,
        "chat_format": chats.name,
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
        "pad_id": tokenizer.pad_id,
    }
    splits = SPLITS if settings["val_fraction"] else (ALL,)
    writers = {split: SplitWriter(folder / split, {**settings, "split": split}, restart) for split in splits}
    if finalized(folder):
        return
    all_writers = [*writers.values()]
    try:
        with progress(lambda: f"tokenizing, {sum(writer.documents for writer in all_writers):,} documents written"):
            _write(writers, corpus_path, tokenizer, chats)
    except BadInput:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _write(writers: dict[str, SplitWriter], corpus_path: Path, tokenizer: Tokenizer, chats: Format) -> None:
    """Read the whole corpus, write the missing shards, and finalize all splits."""
    val_fraction = next(iter(writers.values())).meta["val_fraction"]
    for writer in writers.values():
        writer.count(tables(writer.folder, writer.meta))
    done = {split: writer.meta["processed_documents"] for split, writer in writers.items()}
    skipped = Invalid() if next(iter(writers.values())).meta["skip_invalid"] else None
    documents = Noticed(corpus.documents(corpus_path, chats=chats, skipped=skipped))
    batches = prefetch(_batches(remaining(documents, done, val_fraction)))
    for batch, encodings in prefetch((batch, encode(tokenizer, [text for _, text in batch])) for batch in batches):
        for (split, document), encoding in zip(batch, encodings, strict=True):
            writers[split].add(document.id, encoding)
    if skipped is not None and skipped.count:
        print(f"gradwire tokenize: NOTE: left out by --skip_invalid: {skipped.report(corpus_path)}", file=sys.stderr)
    for split, writer in writers.items():
        writer.flush()
        if not writer.meta["shards"]:
            raise BadInput(
                f"{corpus_path} is too small: none of its documents is in {split} with --val_fraction "
                f"{val_fraction:g}; use more documents or another fraction."
            )
        if not writer.targets.any():
            raise BadInput(f"{corpus_path}: no sample in {split} has a target; use more documents or --max_length.")
    note_unknown(np.sum([writer.targets for writer in writers.values()], axis=0), tokenizer)
    if documents.named_like_parts:
        refuse_shared_ids(writers.values(), corpus_path)
    counts = {"chats": documents.chats, "left_out": 0 if skipped is None else skipped.count}
    if "val" in writers:
        loss = unigram_loss(writers["train"].targets, writers["val"].targets)
        writers.pop("val").finalize(unigram_loss=loss, unigram_ppl=math.exp(loss), **counts)
    for writer in writers.values():
        writer.finalize(**counts)


class Noticed:
    """Yields documents, counts the chats, and records whether an id contains ``#``, as the ids of a cut document do."""

    def __init__(self, documents: Iterable[Document]) -> None:
        self._documents = documents
        self.named_like_parts = False
        self.chats = 0

    def __iter__(self) -> Iterator[Document]:
        for document in self._documents:
            self.named_like_parts |= "#" in document.id
            self.chats += document.is_chat
            yield document


def remaining(
    documents: Iterable[Document], done: dict[str, int], val_fraction: float
) -> Iterator[tuple[str, Document]]:
    """Skip the first ``done[split]`` documents of each split; yield the others with their split."""
    met: Counter[str] = Counter()
    for document in documents:
        split = split_of(document.id, val_fraction)
        met[split] += 1
        if met[split] > done[split]:
            yield split, document


def note_unknown(targets: np.ndarray, tokenizer: Tokenizer) -> None:
    """Print how many targets, of which there are ``targets`` by token, are the tokenizer's unknown token."""
    if tokenizer.unknown_id is not None and (count := targets[tokenizer.unknown_id]):
        print(
            f"gradwire tokenize: NOTE: the tokenizer does not know all of the corpus: {count:,} of {targets.sum():,} "
            "targets are its unknown token.",
            file=sys.stderr,
        )


def refuse_shared_ids(writers: Iterable[SplitWriter], corpus_path: Path) -> None:
    """Check that sample ids are unique.

    Document ids are, so only sample k of a document ``X`` and a document with the id ``X#k`` can collide.

    Raises:
        BadInput: If two samples share an id.
    """
    seen = FirstSeen()
    for writer in writers:
        for shard in tables(writer.folder, writer.meta):
            for sample_id in shard["sample_ids"]:
                if seen.add(sample_id, 0) is not None:
                    whole = sample_id.rpartition("#")[0]
                    raise BadInput(
                        f"{corpus_path}: two samples have the id {sample_id!r}: that of a document, and of a part of "
                        f"the document {whole!r}, which is cut into {whole}#0, {whole}#1, …; rename one."
                    )


def encode(tokenizer: Tokenizer, documents: Sequence[Document]) -> list[Encoded]:
    """Return the tokens and targets of documents, each with an end-of-text token unless a chat template ends it.

    That token is a target if the text ends with one: then it ends what is learnt.
    """
    plain = iter(tokenizer.encode_batch([document.text for document in documents if document.spans is None]))
    partial = [document for document in documents if document.spans is not None]
    partly, templated = (
        iter(tokenizer.encode_places([each.text for each in partial if each.templated is special], special))
        for special in (False, True)
    )
    encodings: list[Encoded] = []
    for document in documents:
        if document.spans is None:
            encodings.append(Encoded([*next(plain), tokenizer.eos_id]))
            continue
        tokens, places = next(templated if document.templated else partly)
        is_target = are_targets(places, document.spans)
        if not document.templated:
            ends = document.spans[-1][1] == len(document.text)
            tokens, is_target = [*tokens, tokenizer.eos_id], np.append(is_target, ends)
        encodings.append(Encoded(tokens, is_target))
    return encodings


def are_targets(places: Sequence[tuple[int, int]], spans: Spans) -> NDArray[np.bool_]:
    """Whether each token has a character of a span.

    Args:
        places: Each token's characters [start, end) in the text.
        spans: The targets' characters in the text.
    """
    starts, ends = np.array(places, dtype=np.int64).reshape(-1, 2).T
    inside = np.zeros(len(starts), dtype=bool)
    for start, end in spans:
        inside |= (starts < end) & (ends > start)
    return inside


def _batches(waiting: Iterable[tuple[str, Document]]) -> Iterator[Waiting]:
    batch, characters = [], 0
    for split, document in waiting:
        batch.append((split, document))
        characters += len(document.text)
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _resumed(folder: Path, settings: dict[str, Any], restart: bool) -> dict[str, Any] | None:
    """Return the metadata of an earlier writer; without any, delete the folder and return None."""
    try:
        existing = meta(folder.parent, folder.name) if (folder / META).exists() else None
    except BadInput:
        if not restart:
            raise
        existing = None
    changed = [key for key, value in settings.items() if existing is not None and existing.get(key) != value]
    if existing is None or (changed and restart):
        shutil.rmtree(folder, ignore_errors=True)
        return None
    for key in changed:
        raise BadInput(
            f"{folder} holds shards made with {key} {existing.get(key)}, not {settings[key]}; use another "
            "--output_dir, or --restart to replace them."
        )
    return existing


def _save(path: Path, value: dict[str, Any]) -> None:
    """Save through an open file: ``torch.save`` stores a given file name in the archive."""
    with atomic_write(path) as part, part.open("wb") as stream:
        torch.save(value, stream)


def unigram_loss(train: np.ndarray, val: np.ndarray) -> float:
    """Return the mean negative log-likelihood (nats per token) of the validation targets under a unigram model.

    The model is the training frequencies with add-one smoothing over the vocabulary:
    p(token) = (count + 1) / (total + vocabulary).

    Args:
        train: Counts of the training targets, ``[vocab_size]``.
        val: Counts of the validation targets, ``[vocab_size]``.
    """
    log_p = np.log(train + 1.0) - math.log(train.sum() + len(train))
    return float(-(val @ log_p) / val.sum())
