"""Texts of a store's samples: from the shards that they were collected from, or of their documents in a corpus."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradwire.attribution.store.provenance import Provenance
from gradwire.attribution.store.samples import samples
from gradwire.attribution.store.store import document
from gradwire.base.errors import BadInput
from gradwire.lm.data import corpus as corpora
from gradwire.lm.data import tokenizer


class Texts:
    """The texts of samples, as the model read them.

    Args:
        origin: The provenance of the rows, with the present folder of the shards.

    Raises:
        BadInput: If the shards are not those that were collected.
    """

    def __init__(self, origin: Provenance) -> None:
        self.origin, self.shards = origin, samples(origin)
        self.tokenizer = tokenizer.load(self.shards.folder.parent.parent / "tokenizer")

    def of(self, position: int, row_id: str) -> str:
        """Decode the sample of a row.

        Raises:
            BadInput: If the sample at this position has another id.
        """
        sample = self.shards[position // max(1, len(self.origin.modules))]
        if row_id not in self.origin.row_ids(sample.sample_id):
            raise BadInput(
                f"{self.shards.folder} has sample {sample.sample_id!r} for row {position}, and the store "
                f"{row_id!r}: collect the gradients again."
            )
        return self.tokenizer.decode(sample.input_ids.tolist())


def documents_of(ids: Sequence[str], corpus: Path) -> dict[str, dict[str, Any]]:
    """Return the samples' documents as in a corpus file, by sample id, in one streaming read of the corpus.

    Raises:
        BadInput: If a document is missing.
    """
    wanted = {id_: id_ for id_ in ids} | {document(id_): document(id_) for id_ in ids}
    found = {one.id: corpora.content(one) for one in corpora.documents(corpus) if one.id in wanted}
    missing = [id_ for id_ in ids if id_ not in found and document(id_) not in found]
    if missing:
        raise BadInput(f"{corpus} has no document of sample {missing[0]!r} ({len(missing)} such samples).")
    return {id_: found.get(id_) or found[document(id_)] for id_ in ids}
