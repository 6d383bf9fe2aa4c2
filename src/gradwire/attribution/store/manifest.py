"""``manifest.json`` of a merged store: its provenance and the checksums of its files."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from gradwire.attribution.store import provenance
from gradwire.attribution.store.provenance import Provenance
from gradwire.base.files import sha256_file, write_json

FILE = "manifest.json"
OWN = ("all_orig.pt", "all_ids.pkl", "all_meta.parquet")  # of `store.all_names`
NORMALIZED = "all_normalized.pt"
EXPORTS = {"safetensors": "all_orig.safetensors", "parquet": "all_orig.parquet"}
FURTHER = (NORMALIZED, *EXPORTS.values())


@dataclass(frozen=True, kw_only=True)
class Manifest(Provenance):
    """The provenance of the rows, and the result of merging them.

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
    duplicates: int
    duplicates_deviation: float
    sha256: dict[str, str]

    @property
    def fingerprint(self) -> str | None:
        """The projector's digest at the width of these rows; None in a manifest without it."""
        return self.fingerprints.get(str(self.dim))


def read(folder: Path) -> Manifest:
    """Read the manifest of a ``dim<N>/`` folder.

    Raises:
        BadInput: If it is missing, damaged or of a different version of gradwire.
    """
    return provenance.typed(folder / FILE, Manifest)


def write(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, and delete optional files of an earlier one that it does not list."""
    for name in set(FURTHER) - set(manifest.sha256):
        (folder / name).unlink(missing_ok=True)
    write_json(folder / FILE, asdict(manifest))


def differing(folder: Path, manifest: Manifest) -> list[str]:
    """Describe the files of a folder that do not match its manifest, one sentence each."""
    there = {name for name in FURTHER if (folder / name).exists()}
    unnamed = sorted({*OWN, *there} - set(manifest.sha256))
    if elsewhere := [name for name in manifest.sha256 if Path(name).name != name]:
        return [f"{folder / FILE} lists {elsewhere[0]!r}, which is not the name of a file beside it"]
    return [f"{folder / name} is not listed in {folder / FILE}" for name in unnamed] + [
        f"{folder / name} does not match {folder / FILE}: its SHA-256 differs"
        for name, checksum in manifest.sha256.items()
        if not (folder / name).is_file() or sha256_file(folder / name) != checksum
    ]
