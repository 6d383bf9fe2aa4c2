"""Queries of a merged store: a text's gradient, computed as the store's rows were, and the samples nearest to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gradwire.attribution.options import Metric, Over
from gradwire.attribution.query.documents import documents_of
from gradwire.attribution.query.gradient_store import GradientStore
from gradwire.attribution.store.provenance import Provenance
from gradwire.attribution.store.samples import samples
from gradwire.base.errors import BadInput
from gradwire.base.units import amount
from gradwire.lm.data import ChatFormat, tokenize, tokenizer
from gradwire.lm.data.chats import kind
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
        self.store = GradientStore(path)
        self.store.check()
        exact = {"dims": [self.store.manifest.dim], "store": "float32"}  # not rounded
        self.origin = self.store.manifest.moved(places).model_copy(update=exact)
        self.corpus = places.get("corpus")
        self.texts: Texts | None = None
        if Path(self.origin.data_path).exists() or places.get("data_path"):
            self.texts = Texts(self.origin)
        self._device, self.damping = device, damping

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

    def of_samples(self, shards: Shards) -> NDArray[np.float32]:
        """The rows [m, D] of samples that the model's tokenizer has made; zero for those without a target.

        Raises:
            BadInput: If the shards are damaged, their chats are in another format than the store's, or no sample has a
                target.
        """
        check(shards.folder.parent)
        name, wanted = chat_format_of(shards.meta), self.origin.chat_format
        if name and wanted and name != wanted:
            raise BadInput(
                f"chats of {shards.folder.parent} are in the format {name}, those of {self.store.path} in {wanted}: "
                "use the tokenizer and --chat_format of the store."
            )
        rows = np.concatenate(
            [
                self._rows(shards, range(len(shards))[start : start + AT_ONCE])
                for start in range(0, len(shards), AT_ONCE)
            ]
        )
        if not rows.any():
            raise BadInput(f"{shards.folder.parent} has no sample with a target, so its gradient is zero.")
        return rows

    def nearest(self, rows: NDArray[np.float32], metric: Metric, over: Over, count: int) -> list[dict[str, Any]]:
        """Find the samples nearest to the rows [m, D] of a query, with their texts where these are known.

        Raises:
            BadInput: If a row found, or a text, is not what was collected.
        """
        hits = self.store.nearest(rows, count, metric=metric, over=over, damping=self.damping)
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
