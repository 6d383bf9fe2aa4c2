"""The checks of a gradient store. Each has a name, and reports problems with the affected files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
import torch

from gradwire.attribution import projections
from gradwire.attribution.projections.base import Band
from gradwire.attribution.store import provenance, store
from gradwire.attribution.store.provenance import BOUND, Provenance
from gradwire.attribution.store.row_file import BoundRows
from gradwire.attribution.store.row_types import least_deviation
from gradwire.attribution.store.samples import Tokens, row_ids
from gradwire.attribution.store.store import Block, Names
from gradwire.base.errors import BadInput, CheckFailed, bounded
from gradwire.lm.data import corpus
from gradwire.lm.data.chats import chosen, kind
from gradwire.lm.data.document import Document, Invalid
from gradwire.lm.data.shards import Shards
from gradwire.lm.data.tokenizer import chat_template
from gradwire.lm.data.writer import split_of

RECOMPUTED = 5  # times the tolerance of the gradient type, because the device may differ
CUSTOM = "gradwire.gradient_checks"
NAMED = 3  # problems listed per check
CHUNK_BYTES = 1 << 22  # of float32 rows at once

RowsOf: TypeAlias = Callable[[Shards | Tokens, Sequence[int]], Mapping[int, Block]]
"""The rows of some samples, by width."""


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


class Listed(NamedTuple):
    """The ids and the metadata of a block."""

    ids: list[str]
    meta: pa.Table


class Problems(NamedTuple):
    """The problems of a block's rows, by their check."""

    unreadable: list[str]
    unbound: list[str]
    unlikely: list[str]


class Audit:
    """The checks of blocks. Each method appends to ``checks``, and the blocks it reads to ``stored``."""

    def __init__(self, origin: Provenance) -> None:
        self.origin = origin
        self.checks: list[Check] = []
        self.stored: list[Stored] = []

    def merged(self, names: Names, dim: int, expected: Mapping[str, Any]) -> Listed | None:
        """Check a merged block and its manifest, which has these fields among others."""
        name, folder, missing = f"dim{dim}", names.rows.parent, _missing(names)
        self._add(name, folder, [("files complete", missing)])
        denied = list(_denied(folder, expected))
        listed = self._rows(name, names, dim)
        self._add(name, folder, [("the manifest matches", [text for text in denied if text not in missing])])
        return listed

    def _rows(self, name: str, names: Names, dim: int) -> Listed | None:
        """Check each row of a block; add the block to ``stored`` if it is readable."""
        listed, problems = None, Problems([], [], [])
        if names.exist():
            try:
                rows = BoundRows(names, dim, self.origin)
            except BadInput as error:
                problems.unreadable.append(str(error))
            else:
                problems = _examined(rows, self._band(dim))
                if not problems.unreadable:
                    listed = Listed(rows.ids, rows.meta)
                    mapped = Block(torch.from_numpy(store.read_stored(names.rows)[0]), rows.ids, rows.meta, rows.codec)
                    self.stored.append(Stored(names, dim, mapped))
        self._add(
            name,
            names.rows.parent,
            [
                ("files readable, counts equal, rows finite", problems.unreadable),
                ("row i belongs to id i", problems.unbound),
                ("norms match the gradients", problems.unlikely),
            ],
        )
        return listed

    def _band(self, dim: int) -> Band:
        return projections.build(self.origin.projection, {}, self.origin.seed).band(dim)

    def _add(self, name: str, folder: Path, labelled: Sequence[tuple[str, Iterable[str]]]) -> None:
        self.checks += [Check(f"{name}: {label}", f"{folder}", list(problems)) for label, problems in labelled]


class CollectionAudit(Audit):
    """The checks of one collection folder."""

    def __init__(self, collection: Path, origin: Provenance, shards: Shards | Tokens) -> None:
        super().__init__(origin)
        self.collection, self.shards = collection, shards
        self.samples = [shards.sample_id(position) for position in range(origin.samples)]
        self.ids = row_ids(origin, shards)
        self._digests: dict[int, list[pa.ChunkedArray]] = {dim: [] for dim in origin.dims}  # of each rank's rows

    def corpus(self, path: Path) -> None:
        """Check that every document of the corpus file has a sample.

        Raises:
            BadInput: If the file is missing or has changed.
        """
        meta = self.shards.meta
        if corpus.sha256(path) != meta["dataset_digest"]:
            raise BadInput(f"the corpus {path} is not that of the collection; pass the original as --corpus.")
        documents = (document.id for document in self._documents(path))
        meant = [id_ for id_ in documents if split_of(id_, meta["val_fraction"]) == meta["split"]]
        count, shards = self.origin.samples, self.shards
        ids = shards.sample_ids(count) if isinstance(shards, Tokens) else self.samples
        problems = _other_documents(meant, ids, count == len(shards))
        self.checks.append(Check("every document of the corpus has samples", f"{path}", list(problems)))

    def _documents(self, path: Path) -> Iterator[Document]:
        """The corpus's documents, without the invalid ones if the collection has left them out."""
        if not self.shards.meta.get("skip_invalid"):
            return corpus.documents(path)
        template = chat_template(self.shards.folder.parent.parent / "tokenizer")
        chats = chosen(kind(self.shards.meta["chat_format"]), template)
        return corpus.documents(path, chats=chats, skipped=Invalid())

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
        """Check a rank's output: all its rows, with the samples assigned to the rank; of parts, those that are kept."""
        name, folder = f"rank_{rank}/dim{dim}", store.rank_folder(self.collection, rank, dim)
        names = store.all_names(folder)
        samples = [self.samples[position] for position in self.origin.sampler_indices(rank)]
        ids = [row_id for sample_id in samples for row_id in self.origin.row_ids(sample_id)]
        discarded = self._discarded(dim)
        blocks = self._blocks(folder)
        expected = [*([names.ids, names.meta] if discarded else names), *chain.from_iterable(blocks)]
        self._add(name, folder, [("files complete", _missing(expected))])
        listed = self._listed(name, names) if discarded else self._rows(name, names, dim)
        self._add(
            name,
            folder,
            [
                ("ids are those of the rank's samples, in order", _other_ids(names, listed, ids)),
                ("blocks have the rank's rows", self._other_blocks(blocks, names, listed, dim)),
            ],
        )
        if listed is not None:
            self._digests[dim].append(listed.meta["digest"])

    def _discarded(self, dim: int) -> bool:
        """Whether the ranks' rows were deleted once they were merged."""
        ranks = (store.rank_names(self.collection, rank, dim) for rank in range(self.origin.world_size))
        return not any(names.rows.is_file() for names in ranks) and (self.collection / f"dim{dim}").is_dir()

    def _blocks(self, folder: Path) -> list[Names]:
        """Return the blocks that a rank's folder must have: those of the collection, or none if they were discarded."""
        ends = store.block_ends(folder)
        return [store.part_names(folder, end) for end in sorted({*ends, *self.origin.ends()} if ends else [])]

    def _other_blocks(self, blocks: Sequence[Names], names: Names, listed: Listed | None, dim: int) -> Iterator[str]:
        """Yield the blocks that cannot be read or have other rows than the rank, compared by their digests."""
        digests: list[str] = listed.meta["digest"].to_pylist() if listed else []
        of_rank, of_blocks = set(digests), list[str]()
        for block in filter(Names.exist, blocks):
            try:
                rows = BoundRows(block, dim, self.origin)
                rows.verify(_height(rows))
            except BadInput as error:
                yield str(error)
                return
            of_blocks += rows.meta["digest"].to_pylist()
            if listed and not of_rank.issuperset(of_blocks):
                yield f"{block.rows} has a row that is not one of {names.ids}"
                return
        if listed and blocks and all(map(Names.exist, blocks)) and len(of_blocks) != len(digests):
            yield f"the blocks of {names.rows.parent} have {len(of_blocks)} rows, {names.ids} has {len(digests)}"

    def aggregated(self, dim: int) -> None:
        """Check the merged matrix, its manifest, and each row against the ranks checked before."""
        names, ranks = store.merged_names(self.collection, dim), self._digests[dim]
        merged = self.merged(names, dim, self._manifest(dim))
        labelled = [("every id once, in data order", _other_ids(names, merged, self.ids))]
        if len(ranks) == self.origin.world_size:
            labelled.append(("every row comes from a rank", _not_from(names, merged, ranks)))
        self._add(f"dim{dim}", names.rows.parent, labelled)

    def recomputed(self, rows: RowsOf, positions: Sequence[int]) -> None:
        """Recompute the rows of some samples, and compare them with all their stored rows.

        Args:
            rows: Computes float32 rows; `least_deviation` knows what other types lose.
            positions: The samples.
        """
        again = rows(self.shards, positions)
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
        tolerance = RECOMPUTED * self.origin.tolerance
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

    def _listed(self, name: str, names: Names) -> Listed | None:
        """Check the ids and the metadata that a rank keeps of rows that have moved."""
        listed, problems = None, list[str]()
        if not (names.ids.is_file() and names.meta.is_file()):
            return None
        try:
            listed = Listed(store.read_ids(names.ids), store.read_meta(names.meta))
            if listed.ids != listed.meta["sample_id"].to_pylist():
                problems = [f"{names.ids} and {names.meta} have different ids"]
        except BadInput as error:
            problems = [str(error)]
        self._add(name, names.ids.parent, [("files readable, counts equal", problems)])
        return listed

    def _ranks(self) -> list[Path]:
        return [self.collection / f"rank_{rank}" for rank in range(self.origin.world_size)]

    def _manifest(self, dim: int) -> dict[str, Any]:
        """Return the expected manifest, without the files' checksums."""
        bound = {name: getattr(self.origin, name) for name in BOUND}
        return {**bound, "dim": dim, "rows": len(self.ids)}


def conclude(reports: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Check that every check of a folder has passed.

    Raises:
        CheckFailed: If not, with the affected files.
    """
    if failed := [report for report in reports if not report["passed"]]:
        details = "".join(f"\n  {report['name']}: {report['detail']}" for report in failed)
        raise CheckFailed(f"{len(failed)} of {len(reports)} checks of {folder} failed:{details}")


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


def _missing(files: Iterable[Path]) -> list[str]:
    return [f"{path} is missing" for path in files if not path.is_file()]


def _height(rows: BoundRows) -> int:
    """Return how many rows to read at once."""
    return max(1, CHUNK_BYTES // (4 * rows.codec.dim))


def _examined(rows: BoundRows, band: Band) -> Problems:
    """Check each row of a block, in chunks: its numbers, its digest, and its norm.

    Its norm must be plausible for a random projection of the gradient: a χ² test of each row.
    """
    infinite, wrong, unlikely = False, list[int](), list[str]()
    for first in range(0, len(rows.ids), height := _height(rows)):
        chunk = rows.block(first, min(first + height, len(rows.ids)))
        decoded = chunk.rows
        infinite = infinite or not bool(torch.isfinite(decoded).all())
        wrong += [first + row for row in store.mismatched(rows.identity, chunk.ids, chunk.meta, chunk.stored.numpy())]
        squares = decoded.double().square().sum(1).tolist()
        for row, (square, norm) in enumerate(zip(squares, chunk.meta["norm"].to_pylist(), strict=True), first):
            ratio = square / norm**2 if norm else 0.0
            if norm and not band.low <= ratio <= band.high:
                comparison = f"{ratio:.3g} times that of its gradient, outside {band.low:.3g} to {band.high:.3g}"
                unlikely.append(f"{rows.path}: row {row} of {rows.ids[row]!r} has a squared norm {comparison}")
            elif not norm and square:
                unlikely.append(f"{rows.path}: row {row} of {rows.ids[row]!r} is not zero, but its gradient is")
    if infinite:
        return Problems([f"{rows.path} has entries that are not finite"], [], [])
    return Problems([], store.unbound(rows.names, rows.ids, wrong, len(rows.ids)), unlikely)


def _other_ids(names: Names, listed: Listed | None, ids: Sequence[str]) -> Iterator[str]:
    if listed is not None:
        for row, (have, want) in enumerate(zip_longest(listed.ids, ids)):
            if have != want:
                yield f"{names.ids}: row {row} is {have!r}, not {want!r}"


def _not_from(names: Names, merged: Listed | None, ranks: Sequence[pa.ChunkedArray]) -> Iterator[str]:
    if merged is not None:
        written = pa.chunked_array((chunk for digests in ranks for chunk in digests.chunks), pa.string())
        known = pc.is_in(merged.meta["digest"], written)
        for row in pc.indices_nonzero(pc.invert(known)).to_pylist():
            yield f"{names.rows}: no rank wrote row {row} for {merged.ids[row]!r}"


def _denied(folder: Path, expected: Mapping[str, Any]) -> Iterator[str]:
    try:
        merged = provenance.read_manifest(folder)
    except BadInput as error:
        yield str(error)
        return
    for key, value in expected.items():
        if getattr(merged, key) != value:
            yield f"{folder / provenance.MANIFEST} has {key} {getattr(merged, key)!r}, not {value!r}"
    yield from provenance.differing(folder, merged)
