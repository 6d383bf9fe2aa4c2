"""Provenance of gradient rows: ``collect.json`` of a collection folder, and ``manifest.json`` of its merged rows."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar

from pydantic import Field, ValidationError

from gradwire.attribution.options import Projection, RowOptions, RowStrategy, RowUnit
from gradwire.base.errors import BadInput, RunFault
from gradwire.base.files import digest, read_object, sha256_file, write_json

FILE = "collect.json"
MANIFEST = "manifest.json"
CHECKED, SETTLED = "checked.json", 2  # sizes and times of files whose checksums were right; seconds
FORMAT: Literal[4] = 4  # of the store; before, 3 had rows of samples only, 2 one row type, 1 unbound rows
PLACES = ("model_dir", "data_path", "optimizer_dir", "lora_dir", "corpus")  # may move; their digests must not change
LATER = ("chat_format", "of_modules", "bf16")  # fields that stores of this format did not always have
FOUND = ("fingerprints", "computed_by", "modules")  # known only once the model is loaded
FILES = ("all_orig.pt", "all_ids.pkl", "all_meta.parquet")  # of `store.all_names`
# Largest difference between two computations of a row, relative to its norm: float32 sums in different order, with a
# wide margin. Adam may divide by rounding noise, and signs may flip for entries near the noise level.
TOLERANCE = {"sgd": 1e-4, "adam": 5e-3, "sign": 1e-2, "ekfac": 1e-2}
TOLERANCE_BF16 = 0.1  # of rows of a model in bfloat16, whose rounding depends on the shapes of a batch
Positive = Annotated[int, Field(ge=1, lt=2**63)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
Record = TypeVar("Record", bound="Provenance")


class Provenance(RowOptions):
    """Everything that the rows of a collection depend on: `RowOptions`, and

    Attributes:
        format: ``FORMAT``, which other versions of gradwire do not read.
        source: Digest of the source code that computes the rows.
        model_dir: Folder of the model.
        model_digest: Digest of its configuration and weights.
        data_path: Folder of the shards.
        data_digest: Digest of the split's samples.
        split: ``train`` or ``val``; ``all`` of a corpus file.
        samples: Number of samples, from the start of the split; with rows of tokens, of `samples.Tokens`.
        world_size: Number of ranks.
        dims: Widths of the rows, ascending.
        seed: Seed of the projection.
        row_of: Unit of a row, of whose loss it is the gradient: a ``sample``, a ``token`` that it predicts, or a sample
            with respect to a ``module``'s parameters.
        of_modules: Patterns of the modules whose parameters the gradient is of; empty for all.
        bf16: Whether the model computes in bfloat16.
        strategy: ``ddp``: every rank holds the full model; ``fsdp2``: its weights are sharded.
        optimizer_dir: Folder of Adam's moments, or of EK-FAC's factors; None for that of the adapter or the model.
        optimizer_digest: Their digest; None unless ``grad_type`` is ``adam`` or ``ekfac``.
        lora: Digest of a saved LoRA adapter, or rank and seed of a new one; None for the full model.
        lora_dir: Folder of the saved adapter.
        metadata: Additional columns of the tables.
        corpus: Corpus file of the shards; None if shards were given.
        chat_format: Format of the samples' chats (`chats.Format`); None if there are none.
        fingerprints: The projector's digest by width; empty until the model is loaded.
        computed_by: The method that ``auto`` resolved to; empty until the model is loaded.
        modules: The modules that each sample has a row for; empty until the model is loaded, and for other rows.
    """

    format: Literal[4]
    source: str
    model_dir: str
    model_digest: str
    data_path: str
    data_digest: str
    split: Literal["train", "val", "all"]
    samples: Positive
    world_size: Positive
    dims: list[Positive] = Field(min_length=1)
    projection: Projection
    seed: Seed
    row_of: RowUnit = "sample"
    of_modules: list[str] = Field(default_factory=list)
    bf16: bool = False
    strategy: RowStrategy = "ddp"
    optimizer_dir: str | None = None
    optimizer_digest: str | None = None
    lora: str | dict[str, int] | None = None
    lora_dir: str | None = None
    metadata: list[str] = Field(default_factory=list)
    corpus: str | None = None
    chat_format: str | None = None
    fingerprints: dict[str, str] = Field(default_factory=dict)
    computed_by: str = ""
    modules: list[str] = Field(default_factory=list)

    @property
    def identity(self) -> str:
        """Digest of all fields except `PLACES`, and of those of `LATER` that are set; part of each row's digest."""
        bound = {name: getattr(self, name) for name in BOUND}
        return digest({name: value for name, value in bound.items() if name not in LATER or value}, length=64)

    @property
    def tolerance(self) -> float:
        """Largest difference between two computations of a row, relative to its norm."""
        return max(TOLERANCE[self.grad_type], TOLERANCE_BF16 if self.bf16 else 0)

    @property
    def step_dir(self) -> Path:
        """The folder of Adam's moments or of EK-FAC's factors."""
        return Path(self.optimizer_dir or self.lora_dir or self.model_dir)

    def moved(self, places: Mapping[str, Path | None]) -> Self:
        """Return the same with the current paths of what has moved, by the names of `PLACES`."""
        return self.model_copy(update={name: str(place) for name, place in places.items() if place is not None})

    def row_ids(self, sample_id: str) -> list[str]:
        """Return the ids of a sample's rows."""
        return [f"{sample_id}@{module}" for module in self.modules] if self.row_of == "module" else [sample_id]

    def sample_id(self, row_id: str) -> str:
        """Return the id of the sample that a row is of."""
        return row_id if self.row_of == "sample" else row_id.rpartition("@")[0]

    def sampler_indices(self, rank: int) -> list[int]:
        """Return a rank's positions in the data, as split by ``DistributedSampler``: padded by repetition."""
        from torch.utils.data import DistributedSampler

        return list(DistributedSampler(range(self.samples), self.world_size, rank, shuffle=False))

    def ends(self) -> list[int]:
        """Return the N of every ``grads-<N>.pt``, the same on each rank."""
        share = -(-self.samples // self.world_size)
        return [*range(self.save_interval, share, self.save_interval), share]


BOUND = tuple(name for name in Provenance.model_fields if name not in PLACES)


class Manifest(Provenance):
    """The provenance of merged rows, and

    Attributes:
        dim: Columns of a row.
        order: How the rows are ordered.
        rows: Number of rows.
        duplicates: Number of rows that repeat another row of the same sample.
        duplicates_deviation: Largest difference between such rows, relative to the row's norm.
        sha256: The checksum of each file, by name.
    """

    dim: int
    order: str
    rows: int
    duplicates: int = 0
    duplicates_deviation: float = 0.0
    sha256: dict[str, str]

    @property
    def fingerprint(self) -> str | None:
        """The projector's digest at the width of these rows; None in a manifest without it."""
        return self.fingerprints.get(str(self.dim))


def read(collection: Path) -> Provenance:
    """Read the provenance of a collection folder.

    Raises:
        BadInput: If it is missing, damaged or of a different version of gradwire.
    """
    if not (collection / FILE).is_file():
        raise BadInput(
            f"{collection} is not a gradient collection: {FILE} is missing; pass the folder that `grads collect` "
            "wrote, not a dim<N> folder in it."
        )
    return _read(collection / FILE, Provenance)


def _read(path: Path, kind: type[Record]) -> Record:
    """Read a JSON object into a model, with strict types.

    Raises:
        BadInput: If the file does not match, or has a different ``FORMAT``.
    """
    try:
        return kind.model_validate_json(path.read_bytes(), strict=True)
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}.") from error
    except ValidationError as error:
        problems = {".".join(map(str, each["loc"])): each["msg"] for each in error.errors()}
        if "format" in problems:
            raise BadInput(f"{path} was written by another version of gradwire; collect the gradients again.") from None
        name, problem = next(iter(problems.items()))
        where = f"{path}, {name}" if name else f"{path}"
        raise BadInput(f"{where}: {problem}. The file was changed or damaged; collect the gradients again.") from None


def agree(collection: Path, intended: Provenance) -> None:
    """Check that a collection folder is new or has the intended provenance.

    Raises:
        BadInput: If it holds gradients of a different configuration.
    """
    differ = differences(collection, intended)
    if differ:
        raise BadInput(
            f"{collection} is a collection folder of another configuration: {'; '.join(differ)}. "
            "Choose another folder, or delete this one (`grads collect --restart` deletes its gradients)."
        )


def differences(collection: Path, intended: Provenance) -> list[str]:
    """Describe how a collection folder's provenance differs from the intended one; empty if the folder is new."""
    begun = any(collection.glob("rank_*/dim*"))  # look first: other ranks write FILE before their first row
    if not (collection / FILE).is_file():
        return [f"{FILE} is missing, but the folder holds gradients"] if begun else []
    try:
        noted, wanted = read(collection).model_dump(), intended.model_dump()
    except BadInput as error:
        return [f"{error}".removesuffix(".")]
    return [
        f"{name} is {noted[name]!r} there and {wanted[name]!r} here"
        for name in wanted
        if name not in PLACES and (wanted[name] or name not in FOUND) and noted[name] != wanted[name]
    ]


def discard(collection: Path) -> None:
    """Delete all gradients of a collection folder, and ``collect.json`` last."""
    for folder in (*collection.glob("rank_*"), *collection.glob("dim*")):
        shutil.rmtree(folder)
    (collection / "validation.json").unlink(missing_ok=True)
    (collection / FILE).unlink(missing_ok=True)


def claim(collection: Path, provenance: Provenance) -> None:
    """Write the provenance unless an earlier call did; each rank calls this before its first row."""
    if not (collection / FILE).is_file():
        write_json(collection / FILE, provenance.model_dump())


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a ``dim<N>/`` folder.

    Raises:
        BadInput: If it is missing, damaged or of a different version of gradwire.
    """
    return _read(folder / MANIFEST, Manifest)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest."""
    write_json(folder / MANIFEST, manifest.model_dump())


def differing(folder: Path, manifest: Manifest, known: Mapping[str, str] | None = None) -> list[str]:
    """Describe the files of a folder that do not match its manifest, one sentence each.

    Args:
        folder: The folder.
        manifest: Its manifest.
        known: Checksums of files that need not be read; None: of no file.
    """
    known = known or {}
    unnamed = sorted({*FILES} - set(manifest.sha256))
    if elsewhere := [name for name in manifest.sha256 if Path(name).name != name]:
        return [f"{folder / MANIFEST} lists {elsewhere[0]!r}, which is not the name of a file in that folder"]
    missing = [name for name in manifest.sha256 if not (folder / name).is_file()]
    return [
        *(f"{folder / name} is not listed in {folder / MANIFEST}" for name in unnamed),
        *(f"{folder / name} is missing" for name in missing),
        *(
            f"{folder / name} does not match {folder / MANIFEST}: its SHA-256 differs"
            for name, checksum in manifest.sha256.items()
            if name not in missing and (known.get(name) or sha256_file(folder / name)) != checksum
        ),
    ]


def differing_since(folder: Path, manifest: Manifest) -> list[str]:
    """As `differing`, but a file with the size and the time of an earlier check is not read again.

    `CHECKED` remembers them, unless the folder cannot be written. A file of the last `SETTLED` seconds is not
    remembered: a change right after its check could leave its time as it is.
    """
    now, path = time.time_ns(), folder / CHECKED
    noted = read_object(path) if path.is_file() else {}
    seen = {name: (folder / name).stat() for name in manifest.sha256 if (folder / name).is_file()}
    states = {name: [of.st_size, of.st_mtime_ns, manifest.sha256[name]] for name, of in seen.items()}
    known = {name: manifest.sha256[name] for name, state in states.items() if noted.get(name) == state}
    wrong = differing(folder, manifest, known)
    settled = {name: state for name, state in states.items() if seen[name].st_mtime_ns < now - SETTLED * 10**9}
    if not wrong and noted != settled:
        with suppress(RunFault):
            write_json(path, settled)
    return wrong
