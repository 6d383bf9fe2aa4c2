"""The checks of a gradient store. Each has a name, and reports problems with the affected files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import entry_points
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import torch

from gradwire.attribution import projections
from gradwire.attribution.collect.rows import RowMaker
from gradwire.attribution.collect.types import TOLERANCE
from gradwire.attribution.projections.base import Band
from gradwire.attribution.store import provenance, store
from gradwire.attribution.store.provenance import BOUND, Provenance
from gradwire.attribution.store.row_types import least_deviation
from gradwire.attribution.store.samples import Tokens, row_ids
from gradwire.attribution.store.store import Block, Names
from gradwire.base.errors import BadInput, bounded
from gradwire.lm.data import corpus
from gradwire.lm.data.shards import Shards
from gradwire.lm.data.writer import split_of

RECOMPUTED = 5  # times the tolerance of the gradient type, because the device may differ
CUSTOM = "gradwire.gradient_checks"
NAMED = 3  # problems listed per check


class Check(NamedTuple):
    """One check. It passes if it found no problem; ``scope`` names the object of the check."""

    name: str
    scope: str
    problems: list[str]

    def report(self) -> dict[str, Any]:
        """Return the check's entry in ``validation.json``."""
        spelled = [
            *self.problems[:NAMED],
            *([f"{len(self.problems)} problems in all"] if self.problems[NAMED:] else []),
        ]
        return {"name": self.name, "passed": not self.problems, "detail": bounded("; ".join(spelled) or self.scope)}


class Stored(NamedTuple):
    """A complete block (``all_*``) of a folder, its files and its width."""

    names: Names
    dim: int
    block: Block


class Audit:
    """The checks of one collection folder. Each method appends to ``checks``, and the blocks it reads to ``stored``."""

    def __init__(self, collection: Path, origin: Provenance, shards: Shards | Tokens) -> None:
        self.collection, self.origin, self.shards = collection, origin, shards
        self.samples = [shards[position].sample_id for position in range(origin.samples)]
        self.ids = row_ids(origin, shards)
        self.checks: list[Check] = []
        self.stored: list[Stored] = []

    def corpus(self, path: Path) -> None:
        """Check that every document of the corpus file has a sample.

        Raises:
            BadInput: If the file is missing or has changed.
        """
        meta = self.shards.meta
        if corpus.sha256(path) != meta["dataset_digest"]:
            raise BadInput(f"the corpus {path} is not that of the collection; pass the original as --corpus.")
        documents = (document.id for document in corpus.documents(path))
        meant = [id_ for id_ in documents if split_of(id_, meta["val_fraction"]) == meta["split"]]
        count, shards = self.origin.samples, self.shards
        ids = shards.sample_ids(count) if isinstance(shards, Tokens) else self.samples
        problems = _other_documents(meant, ids, count == len(shards))
        self.checks.append(Check("every document of the corpus has samples", f"{path}", list(problems)))

    def folders(self, dims: Sequence[int] | None) -> None:
        """Check that only the collection's own folders exist, for the given widths or for all."""
        expected = {place / f"dim{dim}" for dim in self.origin.dims for place in (self.collection, *self._ranks())}
        widths = [f"dim{dim}" for dim in dims] if dims else ["dim*"]
        present = {
            path for width in widths for name in (width, f"rank_*/{width}") for path in self.collection.glob(name)
        }
        strange = [f"{path} belongs to no rank or width of the collection" for path in sorted(present - expected)]
        self.checks.append(Check("no folders of other ranks or widths", f"{self.collection}", strange))

    def rank(self, rank: int, dim: int) -> None:
        """Check a rank's output: complete blocks, joined in order, with the samples assigned to the rank."""
        folder, ends = store.rank_folder(self.collection, rank, dim), self.origin.ends()
        whole = store.all_names(folder)
        names = [*(store.part_names(folder, end) for end in ends), whole]
        blocks, unreadable = _read(names, dim, self.origin)
        samples = [self.samples[position] for position in self.origin.sampler_indices(rank)]
        ids = [row_id for sample_id in samples for row_id in self.origin.row_ids(sample_id)]
        self._add(
            f"rank_{rank}/dim{dim}",
            folder,
            [
                ("files complete and paired", [*_missing(names), *_strange(folder, ends)]),
                ("files readable, counts equal, rows finite", unreadable),
                ("row i belongs to id i", _unbound(blocks, self.origin)),
                ("norms match the gradients", _unlikely(blocks, self._band(dim))),
                ("all_* concatenates the blocks in order", _not_joined(blocks, whole)),
                ("ids are those of the rank's samples, in order", _other_ids(blocks, whole, ids)),
            ],
        )
        self._keep(blocks, whole, dim)

    def aggregated(self, dim: int) -> None:
        """Check the merged matrix, its manifest, and each row against the ranks checked before."""
        folder = self.collection / f"dim{dim}"
        whole = store.all_names(folder)
        blocks, unreadable = _read([whole], dim, self.origin)
        ranks = [stored.block for stored in self.stored if stored.dim == dim]
        self._add(
            f"dim{dim}",
            folder,
            [
                ("files complete", _missing([whole])),
                ("files readable, counts equal, rows finite", unreadable),
                ("the manifest matches", _denied(folder, self._manifest(dim))),
                ("row i belongs to id i", _unbound(blocks, self.origin)),
                ("norms match the gradients", _unlikely(blocks, self._band(dim))),
                ("every id once, in data order", _other_ids(blocks, whole, self.ids)),
            ],
        )
        if len(ranks) == self.origin.world_size:
            self._add(f"dim{dim}", folder, [("every row comes from a rank", _not_from(blocks, ranks))])
        self._keep(blocks, whole, dim)

    def recomputed(self, maker: RowMaker, positions: Sequence[int]) -> None:
        """Recompute the rows of some samples, and compare them with all their stored rows.

        Args:
            maker: Computes float32 rows; `least_deviation` knows what other types lose.
            positions: The samples.
        """
        again = maker.blocks(self.shards, positions)
        places = {id_: row_of_sample for block in again.values() for row_of_sample, id_ in enumerate(block.ids)}
        deviations = [
            (
                stored.names.rows,
                row,
                id_,
                least_deviation(again[stored.dim].bounds(places[id_]), stored.block.bounds(row)),
            )
            for stored in self.stored
            for row, id_ in enumerate(stored.block.ids)
            if id_ in places
        ]
        tolerance = RECOMPUTED * TOLERANCE[self.origin.grad_type]
        largest = max((float(deviation) for *_, deviation in deviations), default=0.0)
        problems = [
            f"{path}: row {row} is not the gradient of {id_!r}: relative deviation {float(deviation):.1e}"
            for path, row, id_, deviation in deviations
            if not deviation <= tolerance
        ]
        ids = ", ".join(self.samples[position] for position in positions)
        self.checks.append(Check("recomputed rows agree", f"{ids}: deviation at most {largest:.1e}", problems))

    def custom(self) -> None:
        """Run the checks of other packages, registered as entry points ``gradwire.gradient_checks``.

        Each is a function of the collection folder and the blocks read so far that returns the problems it found.
        """
        for entry in entry_points(group=CUSTOM):
            try:
                problems = list(entry.load()(self.collection, self.stored))
            except Exception as error:
                raise BadInput(f"the check {entry.name} ({entry.value}) raised {error!r}") from error
            self.checks.append(Check(entry.name, f"{self.collection}", problems))

    def _ranks(self) -> list[Path]:
        return [self.collection / f"rank_{rank}" for rank in range(self.origin.world_size)]

    def _band(self, dim: int) -> Band:
        return projections.build(self.origin.projection, {}, self.origin.seed).band(dim)

    def _manifest(self, dim: int) -> dict[str, Any]:
        """Return the expected manifest, without the files' checksums."""
        bound = {name: getattr(self.origin, name) for name in BOUND}
        return {**bound, "dim": dim, "rows": len(self.ids)}

    def _add(self, name: str, folder: Path, labelled: Sequence[tuple[str, Iterable[str]]]) -> None:
        self.checks += [Check(f"{name}: {label}", f"{folder}", list(problems)) for label, problems in labelled]

    def _keep(self, blocks: dict[Names, Block], whole: Names, dim: int) -> None:
        if whole in blocks:
            self.stored.append(Stored(whole, dim, blocks[whole]))


def _other_documents(documents: Sequence[str], ids: Sequence[str], to_the_end: bool) -> Iterator[str]:
    """Yield the documents without a sample in ``ids``, and the first sample that belongs to no document."""
    position = 0
    for document in documents:
        if position == len(ids) and not to_the_end:
            return
        first = position
        if ids[position : position + 1] == [document]:
            position += 1
            continue
        while ids[position : position + 1] == [f"{document}#{position - first}"]:
            position += 1
        if position == first:
            yield f"document {document!r} has no sample"
    if position < len(ids):
        yield f"sample {ids[position]!r} belongs to no document"


def _missing(names: Sequence[Names]) -> list[str]:
    return [f"{path} is missing" for block in names for path in block if not path.is_file()]


def _strange(folder: Path, ends: Sequence[int]) -> list[str]:
    return [f"{folder} has files of an unexpected block {end}" for end in store.parts(folder) if end not in ends]


def _read(names: Sequence[Names], dim: int, origin: Provenance) -> tuple[dict[Names, Block], list[str]]:
    """Read blocks; return those that are readable, and the problems of the others."""
    blocks, problems = {}, []
    for block_names in names:
        if not block_names.exist():
            continue
        try:
            block = store.read(block_names)
            store.check_type(block_names.rows, block.codec, origin, dim)
        except BadInput as error:
            problems.append(str(error))
            continue
        if not torch.isfinite(block.rows).all():
            problems.append(f"{block_names.rows} has entries that are not finite")
        else:
            blocks[block_names] = block
    return blocks, problems


def _unbound(blocks: dict[Names, Block], origin: Provenance) -> Iterator[str]:
    for names, block in blocks.items():
        yield from store.unbound(names, block, origin.identity)


def _unlikely(blocks: dict[Names, Block], band: Band) -> Iterator[str]:
    """Yield rows whose norm is implausible for a random projection of the gradient: a χ² test of each row."""
    for names, block in blocks.items():
        squares = block.rows.double().square().sum(1).tolist()
        for row, (square, norm) in enumerate(zip(squares, block.meta["norm"].to_pylist(), strict=True)):
            ratio = square / norm**2 if norm else 0.0
            if norm and not band.low <= ratio <= band.high:
                comparison = f"{ratio:.3g} times that of its gradient, outside {band.low:.3g} to {band.high:.3g}"
                yield f"{names.rows}: row {row} of {block.ids[row]!r} has a squared norm {comparison}"
            elif not norm and square:
                yield f"{names.rows}: row {row} of {block.ids[row]!r} is not zero, but its gradient is"


def _not_joined(blocks: dict[Names, Block], whole: Names) -> Iterator[str]:
    """Check that the whole is the parts concatenated; comparing the tables suffices, since rows are bound."""
    parts = [block.meta for names, block in blocks.items() if names != whole]
    if whole in blocks and parts and pa.concat_tables(parts) != blocks[whole].meta:
        yield f"{whole.meta} is not the concatenation of the blocks"


def _other_ids(blocks: dict[Names, Block], whole: Names, ids: Sequence[str]) -> Iterator[str]:
    if whole in blocks:
        for row, (have, want) in enumerate(zip_longest(blocks[whole].ids, ids)):
            if have != want:
                yield f"{whole.ids}: row {row} is {have!r}, not {want!r}"


def _not_from(blocks: dict[Names, Block], ranks: Sequence[Block]) -> Iterator[str]:
    known = {digest for block in ranks for digest in block.meta["digest"].to_pylist()}
    for names, block in blocks.items():
        for row, digest in enumerate(block.meta["digest"].to_pylist()):
            if digest not in known:
                yield f"{names.rows}: no rank wrote row {row} for {block.ids[row]!r}"


def _denied(folder: Path, expected: dict[str, Any]) -> Iterator[str]:
    try:
        merged = provenance.read_manifest(folder)
    except BadInput as error:
        yield str(error)
        return
    for key, value in expected.items():
        if getattr(merged, key) != value:
            yield f"{folder / provenance.MANIFEST} has {key} {getattr(merged, key)!r}, not {value!r}"
    yield from provenance.differing(folder, merged)
