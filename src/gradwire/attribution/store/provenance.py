"""Provenance of a collection folder of gradients: ``collect.json``, written once and checked by every later call."""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from gradwire.attribution.options import AdamVariant, GradMethod, GradType, Projection, RowType, RowUnit, SampleLoss
from gradwire.base.errors import BadInput
from gradwire.base.files import digest, write_json

if TYPE_CHECKING:
    from gradwire.attribution.collect.tokens import Tokens
    from gradwire.lm.data.shards import Shards

FILE = "collect.json"
FORMAT: Literal[4] = 4  # of the store; before, 3 had rows of samples only, 2 one row type, 1 unbound rows
PLACES = ("model_dir", "data_path", "optimizer_dir", "lora_dir", "corpus")  # may move; their digests must not change
FOUND = ("fingerprints", "computed_by", "modules")  # known only once the model is loaded
Positive = Annotated[int, Field(ge=1, lt=2**63)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
Record = TypeVar("Record")


@dataclass(frozen=True)
class Provenance:
    """Everything that the rows of a collection depend on.

    Attributes:
        format: ``FORMAT``, which other versions of gradwire do not read.
        source: Digest of the source code that computes the rows.
        model_dir: Folder of the model.
        model_digest: Digest of its configuration and weights.
        data_path: Folder of the shards.
        data_digest: Digest of the split's samples.
        split: ``train`` or ``val``; ``all`` of a corpus file.
        samples: Number of samples, from the start of the split; with rows of tokens, of `tokens.Tokens`.
        world_size: Number of ranks.
        dims: Widths of the rows, ascending.
        grad_type: ``sgd`` (the gradient), ``adam``, ``sign`` or ``ekfac``.
        loss: The loss of a sample: ``mean`` or ``sum`` over its valid targets.
        method: How gradients are computed.
        projection: How gradients are projected.
        seed: Seed of the projection.
        save_interval: Samples per file and rank.
        store: The row type.
        row_of: What a row is the gradient of: a ``sample``, a ``token`` that it predicts, or a sample with respect to a
            ``module``'s parameters.
        strategy: ``ddp``: every rank holds the full model; ``fsdp2``: its weights are sharded.
        adam_variant: Formula of the ``adam`` gradient type.
        optimizer_dir: Folder of Adam's moments, or of EK-FAC's factors; None for that of the adapter or the model.
        optimizer_digest: Their digest; None unless ``grad_type`` is ``adam`` or ``ekfac``.
        lora: Digest of a saved LoRA adapter, or rank and seed of a new one; None for the full model.
        lora_dir: Folder of the saved adapter.
        metadata: Additional columns of the tables.
        corpus: Corpus file of the shards; None if shards were given.
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
    dims: Annotated[list[Positive], Field(min_length=1)]
    grad_type: GradType | Literal["ekfac"]
    loss: SampleLoss
    method: GradMethod
    projection: Projection
    seed: Seed
    save_interval: Positive
    store: RowType = "float32"
    row_of: RowUnit = "sample"
    strategy: Literal["ddp", "fsdp2"] = "ddp"
    adam_variant: AdamVariant = "torch"
    optimizer_dir: str | None = None
    optimizer_digest: str | None = None
    lora: str | dict[str, int] | None = None
    lora_dir: str | None = None
    metadata: list[str] = field(default_factory=list)
    corpus: str | None = None
    fingerprints: dict[str, str] = field(default_factory=dict)
    computed_by: str = ""
    modules: list[str] = field(default_factory=list)

    @property
    def identity(self) -> str:
        """Digest of all fields except `PLACES`; part of each row's digest."""
        bound = [one.name for one in fields(Provenance) if one.name not in PLACES]
        return digest({name: getattr(self, name) for name in bound}, length=64)

    @property
    def step_dir(self) -> Path:
        """The folder of Adam's moments or of EK-FAC's factors."""
        return Path(self.optimizer_dir or self.lora_dir or self.model_dir)

    def lora_options(self) -> dict[str, Any]:
        """Return the arguments of `lm.models.lora.attach`.

        Raises:
            BadInput: If the saved adapter has changed.
        """
        if isinstance(self.lora, dict):
            return dict(self.lora)
        from gradwire.lm.models import lora

        adapter = Path(self.lora_dir or "")
        if lora.digest(adapter) != self.lora:
            raise BadInput(f"the LoRA adapter in {adapter} is not the one that was collected with.")
        return {"adapter": adapter}

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


def read(collection: Path) -> Provenance:
    """Read the provenance of a collection folder.

    Raises:
        BadInput: If it is missing, damaged or of a different version of gradwire.
    """
    if not (collection / FILE).is_file():
        raise BadInput(
            f"{collection} is not a gradient collection: {FILE} is missing; run `gradwire grads collect` first."
        )
    return typed(collection / FILE, Provenance)


def typed(path: Path, kind: type[Record]) -> Record:
    """Read a JSON object into a dataclass, with strict types.

    Raises:
        BadInput: If the file does not match, or has a different ``FORMAT``.
    """
    try:
        return TypeAdapter(kind).validate_json(path.read_bytes(), strict=True)
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}.") from error
    except ValidationError as error:
        problems = {".".join(map(str, one["loc"])): one["msg"] for one in error.errors()}
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
            "Choose another --output_path, or pass --restart to delete its gradients."
        )


def differences(collection: Path, intended: Provenance) -> list[str]:
    """Describe how a collection folder's provenance differs from the intended one; empty if the folder is new."""
    begun = any(collection.glob("rank_*/dim*"))  # look first: other ranks write FILE before their first row
    if not (collection / FILE).is_file():
        return [f"{FILE} is missing, but the folder holds gradients"] if begun else []
    try:
        found, wanted = asdict(read(collection)), asdict(intended)
    except BadInput as error:
        return [f"{error}".removesuffix(".")]
    return [
        f"{name} is {found[name]!r} there and {wanted[name]!r} here"
        for name in wanted
        if name not in PLACES and (wanted[name] or name not in FOUND) and found[name] != wanted[name]
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
        write_json(collection / FILE, asdict(provenance))


def check_dense(model_dir: Path) -> None:
    """Check that a model is not a mixture of experts, whose per-sample gradients are not supported.

    Raises:
        BadInput: If it is one.
    """
    from gradwire.lm.models import saved

    saved.check(model_dir)
    if count := saved.experts(model_dir):
        raise BadInput(
            f"the model in {model_dir} is a mixture of {count} experts ({saved.model_type(model_dir)}), which has no "
            "gradient rows: routing may tie samples to each other. Use a dense model."
        )


def units(shards: Shards, row_of: RowUnit) -> Shards | Tokens:
    """Return what rows are of: the samples of a split, or their targets."""
    from gradwire.attribution.collect.tokens import Tokens

    return Tokens(shards) if row_of == "token" else shards


def samples(provenance: Provenance) -> Shards | Tokens:
    """Open the samples of a collection; it uses the first ``provenance.samples`` of them.

    Raises:
        BadInput: If they are missing or have changed.
    """
    from gradwire.lm.data import shards

    folder = Path(provenance.data_path)
    shards.check(folder)
    found = units(shards.Shards(folder, provenance.split), provenance.row_of)
    if found.digest != provenance.data_digest:
        raise BadInput(f"the samples in {folder} are not those that were collected: their digest differs.")
    if not provenance.world_size <= provenance.samples <= len(found):
        raise BadInput(
            f"{FILE} says {provenance.samples} samples on {provenance.world_size} ranks, and {folder} has {len(found)} "
            "samples: the file was changed; collect the gradients again."
        )
    return found


def row_ids(provenance: Provenance, shards: Shards | Tokens) -> list[str]:
    """Return the ids of the collection's rows, in data order."""
    samples = (shards[position].sample_id for position in range(provenance.samples))
    return [row_id for sample_id in samples for row_id in provenance.row_ids(sample_id)]
