"""The documents of samples in a corpus file: those of a list, those without repeats, and those with the best scores."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from gradwire.attribution.options import number_of
from gradwire.attribution.store.store import document
from gradwire.base.errors import BadInput
from gradwire.lm.data import corpus as corpora
from gradwire.lm.data.document import Document, Invalid, content


def documents_of(ids: Sequence[str], corpus: Path) -> dict[str, Document]:
    """Return the samples' documents by sample id, in one streaming read of the corpus.

    Raises:
        BadInput: If a document is missing.
    """
    wanted = {id_: id_ for id_ in ids} | {document(id_): document(id_) for id_ in ids}
    documents = {text.id: text for text in corpora.documents(corpus, skipped=Invalid()) if text.id in wanted}
    missing = [id_ for id_ in ids if id_ not in documents and document(id_) not in documents]
    if missing:
        raise BadInput(f"{corpus} has no document of sample {missing[0]!r} ({len(missing)} such samples).")
    return {id_: documents.get(id_) or documents[document(id_)] for id_ in ids}


class Contents:
    """What each document of a corpus file says, by digests: it tells which of them repeat one another."""

    def __init__(self, corpus: Path) -> None:
        self.corpus = corpus
        self._digests = {each.id: _digest(each) for each in corpora.documents(corpus, skipped=Invalid())}

    def document(self, sample_id: str) -> str:
        """Return the id of a sample's document.

        Raises:
            BadInput: If the corpus has none.
        """
        id_ = sample_id if sample_id in self._digests else document(sample_id)
        if id_ not in self._digests:
            raise BadInput(f"{self.corpus} has no document of sample {sample_id!r}.")
        return id_

    def unrepeated(self, rows: Iterable[tuple[str, str]], count: int) -> tuple[list[int], int]:
        """Return the positions of the first ``count`` rows, without those that repeat the content of one before.

        A row repeats another if it is of the same part, token or module of a document with the same content.

        Args:
            rows: The id of each row and that of its sample.
            count: How many rows to return.

        Returns:
            The positions, and the number of rows that were passed over.

        Raises:
            BadInput: If a sample's document is not in the corpus.
        """
        places: dict[tuple[bytes, str], int] = {}
        repeated = 0
        for place, (id_, sample_id) in enumerate(rows):
            if len(places) == count:
                break
            whole = self.document(sample_id)
            said = (self._digests[whole], id_.removeprefix(whole))
            repeated += said in places
            places.setdefault(said, place)
        return [*places.values()], repeated


class Selected(NamedTuple):
    """Documents of a corpus, by descending score.

    Attributes:
        documents: The documents that are selected.
        total: How many documents have a score.
        repeated: How many were passed over, because one before them has the same content.
    """

    documents: list[Document]
    total: int
    repeated: int


def select(path: Path, scores: Mapping[str, float], top_k: str) -> Selected:
    """Select the documents of a corpus file whose best samples have the highest scores.

    Args:
        path: The corpus file; it is read twice, as a stream.
        scores: The score of each sample, by its id.
        top_k: As for `number_of`, of the documents that have a score.

    Raises:
        BadInput: If a sample's document is not in the file.
    """
    contents, best = Contents(path), dict[str, float]()
    for sample_id, score in scores.items():
        id_ = contents.document(sample_id)
        best[id_] = max(score, best.get(id_, score))
    order = sorted(best, key=lambda id_: -best[id_])  # equal scores in the order of the data
    places, repeated = contents.unrepeated(((id_, id_) for id_ in order), number_of(top_k, len(best)))
    chosen = [order[place] for place in places]
    documents = documents_of(chosen, path)
    return Selected([documents[id_] for id_ in chosen], len(best), repeated)


def _digest(selected: Document) -> bytes:
    """A digest of a document's content, without its id."""
    return hashlib.blake2b(json.dumps(content(selected), sort_keys=True).encode(), digest_size=16).digest()
