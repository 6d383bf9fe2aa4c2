"""Selection of whole documents by the scores of their samples; of exact duplicates the first in order is taken."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from gradwire.attribution.options import number_of
from gradwire.attribution.store.store import document
from gradwire.base.errors import BadInput
from gradwire.lm.data import corpus
from gradwire.lm.data.document import Document, Invalid, content


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
    contents = {each.id: _digest(each) for each in corpus.documents(path, skipped=Invalid())}
    best: dict[str, float] = {}
    for sample_id, score in scores.items():
        id_ = sample_id if sample_id in contents else document(sample_id)
        if id_ not in contents:
            raise BadInput(f"{path} has no document of sample {sample_id!r}.")
        best[id_] = max(score, best.get(id_, score))
    wanted, chosen, repeated = number_of(top_k, len(best)), dict[bytes, str](), 0
    for id_ in sorted(best, key=lambda id_: -best[id_]):  # equal scores in the order of the data
        if len(chosen) == wanted:
            break
        repeated += contents[id_] in chosen
        chosen.setdefault(contents[id_], id_)
    ids = {*chosen.values()}
    documents = {each.id: each for each in corpus.documents(path, skipped=Invalid()) if each.id in ids}
    return Selected([documents[id_] for id_ in chosen.values()], len(best), repeated)


def _digest(selected: Document) -> bytes:
    """A digest of a document's content, without its id."""
    return hashlib.blake2b(json.dumps(content(selected), sort_keys=True).encode(), digest_size=16).digest()
