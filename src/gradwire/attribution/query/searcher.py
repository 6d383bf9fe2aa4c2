"""Queries of a merged store: a text's gradient, computed as the store's rows were, and the samples nearest to it.

Also the documents of samples: those of a list, and those with the highest scores.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradwire.attribution.options import number_of
from gradwire.attribution.query.search import Solve, groups_of, nearest, open_store, solver, target
from gradwire.attribution.store.provenance import Provenance
from gradwire.attribution.store.row_file import RowFile
from gradwire.attribution.store.samples import samples
from gradwire.attribution.store.store import document
from gradwire.base.errors import BadInput
from gradwire.base.units import amount
from gradwire.lm.data import ChatFormat, tokenize, tokenizer
from gradwire.lm.data import corpus as corpora
from gradwire.lm.data.chats import kind
from gradwire.lm.data.document import Document, Invalid, content
from gradwire.lm.data.shards import Sample, Shards, chat_format_of, check
from gradwire.lm.models import saved

if TYPE_CHECKING:
    from gradwire.attribution.collect.rows import RowMaker, Samples

AT_ONCE = 64  # samples whose gradients are computed between two copies to NumPy


class Prompt:
    """One text as the only sample of a data set."""

    def __init__(self, tokens: Sequence[int], pad_id: int) -> None:
        import torch

        self.sample, self.meta = Sample("prompt", torch.tensor(tokens)), {"pad_id": pad_id}

    def __getitem__(self, index: int) -> Sample:
        return [self.sample][index]


class Searcher:
    """A merged store with the model that its rows are gradients of, which is loaded for the first text.

    Args:
        path: The ``dim<N>/`` folder.
        places: Current paths of what the store was collected from (`provenance.PLACES`), where they have changed. Its
            ``corpus`` gives whole documents instead of samples.
        device: ``auto``, ``cpu`` or ``cuda``.
        damping: Of the store's curvature; None to search without it.

    Raises:
        BadInput: If the store or its samples are invalid.
    """

    def __init__(
        self, path: Path, places: Mapping[str, Path | None], device: str = "auto", damping: float | None = None
    ) -> None:
        self.store = open_store(path)
        known = {name: getattr(self.store.manifest, name) for name in Provenance.model_fields}
        given = {name: str(place) for name, place in places.items() if place is not None}
        exact = {"dims": [self.store.manifest.dim], "store": "float32"}  # not rounded
        self.origin = Provenance(**{**known, **given, **exact})
        self.corpus = places.get("corpus")
        self.texts: Texts | None = None
        if Path(self.origin.data_path).exists() or "data_path" in given:
            self.texts = Texts(self.origin)
        self._device, self.damping = device, damping

    def load(self) -> None:
        """Load the model now.

        Raises:
            BadInput: If it is invalid or not that of the store.
        """
        _ = self.model_dir, self._maker, self._solve

    def stored(self, sample_id: str) -> NDArray[np.float32]:
        """The row [1, D] of a sample of the store.

        Raises:
            BadInput: If there is none.
        """
        if sample_id not in self.store.rows.ids:
            raise BadInput(f"{self.store.path} has no sample {sample_id!r}; its ids begin {self.store.rows.ids[:3]}.")
        return self.store.rows.take([self.store.rows.ids.index(sample_id)])

    def of_prompt(self, text: str) -> NDArray[np.float32]:
        """The row [1, D] of a text, of which every token but the first is a target.

        Raises:
            BadInput: If the text has no target, or more tokens than the model reads.
        """
        reader = tokenizer.load(self.model_dir)
        tokens = reader.encode_batch([text])[0]
        if len(tokens) < 2:
            raise BadInput(
                f"the prompt has {amount(len(tokens), 'token')} and so nothing to predict; type a longer text."
            )
        most = saved.max_length(self.model_dir)
        if len(tokens) > most:
            raise BadInput(
                f"the query has {len(tokens)} tokens, and the model in {self.model_dir} reads {most}: shorten it, or "
                "pass it as a document by --data_path, which is cut into samples."
            )
        return self._rows(Prompt(tokens, reader.pad_id), [0])

    @property
    def chat_format(self) -> ChatFormat | None:
        """How the store's chats were read; None if it has none."""
        name = self.origin.chat_format
        return None if name is None else kind(name)

    def _check_format(self, name: str | None, where: str) -> None:
        """Check that chats are in the format of the store's, if both have chats.

        Raises:
            BadInput: If they are not.
        """
        if name and self.origin.chat_format and name != self.origin.chat_format:
            raise BadInput(
                f"the chats of {where} are in the format {name}, those of {self.store.path} in "
                f"{self.origin.chat_format}: use the tokenizer and --chat_format of the store."
            )

    def of_samples(self, shards: Shards) -> NDArray[np.float32]:
        """The rows [m, D] of samples that the model's tokenizer has made; zero for those without a target.

        Raises:
            BadInput: If the shards are damaged, or no sample has a target.
        """
        check(shards.folder.parent)
        self._check_format(chat_format_of(shards.meta), str(shards.folder.parent))
        rows = np.concatenate(
            [
                self._rows(shards, range(len(shards))[start : start + AT_ONCE])
                for start in range(0, len(shards), AT_ONCE)
            ]
        )
        if not rows.any():
            raise BadInput(f"{shards.folder.parent} has no sample with a target, so its gradient is zero.")
        return rows

    def nearest(self, rows: NDArray[np.float32], metric: str, over: str, count: int) -> list[dict[str, Any]]:
        """Find the samples nearest to the rows [m, D] of a query, with their texts where these are known.

        Raises:
            BadInput: If a row found, or a text, is not what was collected.
        """
        against = target(rows, metric, groups_of(over, len(rows)), self._solve)
        hits = nearest(self.store, against, metric, count, self._solve)
        samples = [self.origin.sample_id(hit.sample_id) for hit in hits]
        documents = documents_of(samples, self.corpus) if self.corpus else {}

        def text(position: int, id_: str) -> dict[str, Any]:
            if whole := documents.get(self.origin.sample_id(id_)):
                return {"title": whole.title, "text": whole.body}
            return {"text": self.texts.of(position, id_)} if self.texts else {}

        return [
            {"rank": rank, "sample_id": hit.sample_id, "score": hit.score, **text(hit.position, hit.sample_id)}
            for rank, hit in enumerate(hits, 1)
        ]

    @cached_property
    def model_dir(self) -> Path:
        """The folder of the model, whose tokenizer made the store's samples.

        Raises:
            BadInput: If it is missing, or has another tokenizer.
        """
        folder = Path(self.origin.model_dir)
        if not folder.is_dir():
            raise BadInput(
                f"{folder}, the model of {self.store.path}, is missing: pass its current folder as --model_dir."
            )
        if self.texts:
            tokenize.check_fit(self.texts.shards.folder.parent, str(folder), None)
        return folder

    def _rows(self, samples: Samples, positions: Sequence[int]) -> NDArray[np.float32]:
        (block,) = self._maker.blocks(samples, positions).values()
        return block.rows.numpy()

    @cached_property
    def _solve(self) -> Solve:
        """The curvature of the store's rows."""
        return solver(RowFile(self.store.rows.path), self.damping)

    @cached_property
    def _maker(self) -> RowMaker:
        """The computation of the store's rows.

        Raises:
            BadInput: If the model, its adapter or moments, or the projection differ from those of the store.
        """
        import torch

        from gradwire.attribution.collect.rows import RowMaker
        from gradwire.comm.collectives import world

        device = world.choose("auto", self._device, 1, world.detect_gpus()).device_type
        as_one = {"row_of": "sample", "modules": []}  # a query is compared as a whole with parts
        maker = RowMaker.load(self.origin.model_copy(update=as_one), torch.device(device))
        made, noted = maker.made_from.fingerprints, self.store.manifest.fingerprints
        for dim, fingerprint in made.items():
            if noted.get(dim) != fingerprint:
                raise BadInput(
                    f"{self.store.path} differs in fingerprints: its projection {self.origin.projection!r} of seed "
                    f"{self.origin.seed} to {dim} columns is not the one that this version computes; collect the "
                    "gradients again."
                )
        return maker


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
        sample = position // max(1, len(self.origin.modules))
        sample_id = self.shards.sample_id(sample)
        if row_id not in self.origin.row_ids(sample_id):
            raise BadInput(
                f"{self.shards.folder} has sample {sample_id!r} for row {position}, and the store "
                f"{row_id!r}: collect the gradients again."
            )
        return self.tokenizer.decode(self.shards.tokens(sample))


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


def unrepeated(rows: Iterable[tuple[str, str]], corpus: Path, count: int) -> tuple[list[int], int]:
    """Return the positions of the first ``count`` rows, without those that repeat the content of one before.

    A row repeats another if it is of the same part, token or module of a document with the same content.

    Args:
        rows: The id of each row and that of its sample.
        corpus: The corpus file.
        count: How many rows to return.

    Returns:
        The positions, and the number of rows that were passed over.

    Raises:
        BadInput: If a sample's document is not in the corpus.
    """
    contents = {each.id: _digest(each) for each in corpora.documents(corpus, skipped=Invalid())}
    met: set[tuple[bytes, str]] = set()
    places: list[int] = []
    for place, (id_, sample_id) in enumerate(rows):
        whole = sample_id if sample_id in contents else document(sample_id)
        if whole not in contents:
            raise BadInput(f"{corpus} has no document of sample {sample_id!r}.")
        if (content_of_row := (contents[whole], id_.removeprefix(whole))) not in met:
            met.add(content_of_row)
            places.append(place)
        if len(places) == count:
            break
    return places, (places[-1] + 1 - len(places)) if places else 0


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
    contents = {each.id: _digest(each) for each in corpora.documents(path, skipped=Invalid())}
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
    documents = {each.id: each for each in corpora.documents(path, skipped=Invalid()) if each.id in ids}
    return Selected([documents[id_] for id_ in chosen.values()], len(best), repeated)


def _digest(selected: Document) -> bytes:
    """A digest of a document's content, without its id."""
    return hashlib.blake2b(json.dumps(content(selected), sort_keys=True).encode(), digest_size=16).digest()
