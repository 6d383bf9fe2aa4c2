"""Row types against NumPy, and the store, its validation and its readers with each of them.

Of `row_file.py`, `scaled_rows.py`, `store/store.py`.
"""

from __future__ import annotations

import json
import math
import shutil
import struct

import blocks
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from changed_store import copied, sign
from diagonals import diagonals
from small_model import origin

from gradwire import cli
from gradwire.attribution.store import provenance, store
from gradwire.attribution.store.merge import merge
from gradwire.attribution.store.row_file import BoundRows, RowFile
from gradwire.attribution.store.row_types import least_deviation
from gradwire.attribution.store.scaled_rows import HEADER, SCALED
from gradwire.base.errors import BadInput, CheckFailed
from gradwire.base.files import sha256_file

TYPES = ("float32", *SCALED)
SAMPLES, DIM, INTERVAL = 11, 64, 4


def some_rows(dim, seed=0):
    """Normal rows, a heavy-tailed one, one of tiny numbers, one with zeros and one of zeros alone; column-major."""
    rows = torch.randn(7, dim, generator=torch.Generator().manual_seed(seed))
    rows[2] = rows[2] ** 5
    rows[3] *= 1e-20
    rows[4, ::2] = 0
    rows[5] = 0
    return rows.T.contiguous().T


def by_numpy(name, row):
    """The bytes of a row and the numbers that they are read as, from the formulas in float64."""
    largest = np.abs(row).max()
    x = row.astype(np.float64) / (largest or 1)
    if name == "float16":
        codes = x.astype("<f2")
        values, body = codes.astype(np.float64), codes.tobytes()
    elif name == "int8":
        values = np.rint(x * 127) * 2
        body = bytes((values / 2 + 127).astype(np.uint8))
    elif name == "int4":
        values = np.rint(x * 7) * 2
        numbers = [int(value) // 2 + 7 for value in values] + [0] * (len(row) % 2)
        body = bytes(low + 16 * high for low, high in zip(numbers[::2], numbers[1::2], strict=True))
    else:
        values = np.where(x >= 0, 1.0, -1.0)
        body = np.packbits(values > 0, bitorder="little").tobytes()
    length = np.linalg.norm(values)
    scale = np.float32(np.linalg.norm(row.astype(np.float64)) / length if length else 0)
    return struct.pack("<ff", scale, largest) + body, values * scale


@pytest.mark.parametrize("dim", [1, 2, 64, 37])
@pytest.mark.parametrize("name", SCALED)
def test_rows_are_written_by_the_formulas(name, dim):
    rows, codec = some_rows(dim), store.codec_of(name, dim)
    stored = codec.encode(rows)
    assert stored.shape == (7, codec.row_bytes) and stored.dtype == torch.uint8
    bits = {"float16": 16, "int8": 8, "int4": 4, "onebit": 1}[name]
    assert codec.row_bytes == 8 + -(-dim * bits // 8)
    decoded = codec.decode(stored)
    assert decoded.dtype == torch.float32
    for row, have, read in zip(rows.numpy(), stored.numpy(), decoded.numpy(), strict=True):
        want, numbers = by_numpy(name, row)
        assert have[HEADER:].tobytes() == want[HEADER:]
        np.testing.assert_allclose(struct.unpack("<ff", have[:HEADER]), struct.unpack("<ff", want[:HEADER]), rtol=3e-7)
        np.testing.assert_allclose(read, numbers, rtol=3e-7)


@pytest.mark.parametrize("name", TYPES)
def test_norms_are_kept_and_bounds_hold_the_row(name):
    rows, codec = some_rows(333), store.codec_of(name, 333)
    stored = codec.encode(rows)
    norms = rows.double().norm(dim=1)
    torch.testing.assert_close(codec.decode(stored).double().norm(dim=1), norms, rtol=3e-7, atol=0)
    low, high, norm, largest = codec.bounds(stored)
    torch.testing.assert_close(norm, norms, rtol=3e-7, atol=0)
    torch.testing.assert_close(largest, rows.double().abs().amax(dim=1), rtol=0, atol=0)
    rounding = 3e-7 * rows.abs().amax(dim=1, keepdim=True)
    assert ((rows >= low - rounding) & (rows <= high + rounding)).all()
    wide = {"float32": 0, "float16": 2.0**-10, "int8": 1 / 127, "int4": 1 / 7, "onebit": 1}[name]
    assert ((high - low) <= wide * (1 + 1e-6) * rows.abs().amax(dim=1, keepdim=True)).all()


@pytest.mark.parametrize("other", TYPES)
@pytest.mark.parametrize("name", TYPES)
def test_the_least_deviation_never_exceeds_the_true_one_and_finds_other_rows(name, other):
    """Rows that differ by rounding, in one entry, or in length agree; other rows do not."""
    rows = some_rows(501)[:3]
    one, two = (store.codec_of(kind, 501) for kind in (name, other))

    def deviations(changed):
        true = (rows - changed).double().norm(dim=1) / torch.maximum(rows.norm(dim=1), changed.norm(dim=1)).double()
        return least_deviation(one.bounds(one.encode(rows)), two.bounds(two.encode(changed))), true

    noise = torch.randn(3, 501, generator=torch.Generator().manual_seed(1))
    peak = torch.zeros(3, 501).scatter_(1, rows.abs().argmax(dim=1, keepdim=True), 1.0)
    length = rows.norm(dim=1, keepdim=True)
    for size in (0, 1e-6, 1e-4, 1e-2):
        for change in (noise / 501**0.5, peak, rows / length):
            found, true = deviations(rows + size * length * change)
            assert (found <= true + 1e-6).all()
    assert (deviations(rows * 1.1)[0] > 0.09).all()
    if "onebit" not in (name, other) or "float32" in (name, other):
        assert (deviations(rows.roll(1, 1))[0] > 0.3).all()  # as long, and another direction


@pytest.mark.parametrize("name", SCALED)
def test_a_forged_largest_magnitude_is_found(name):
    """It would widen the intervals until any row fits."""
    rows, codec = some_rows(64)[:2], store.codec_of(name, 64)
    stored = codec.encode(rows)
    stored[1, 4:HEADER] = codec.encode(8 * rows)[1, 4:HEADER]
    exact = store.codec_of("float32", 64)
    found = least_deviation(codec.bounds(stored), exact.bounds(rows))
    assert found[0] < 1e-6 and found[1] > 1


@pytest.mark.parametrize("name", TYPES)
def test_rows_that_are_not_finite_stay_so(name):
    codec = store.codec_of(name, 64)
    for number in (math.nan, math.inf):
        rows = some_rows(64)
        rows[1, 5] = number
        finite = codec.decode(codec.encode(rows)).isfinite().all(dim=1).tolist()
        assert finite == [True, False, True, True, True, True, True]


# --- files


def block_of(name, rows, ids):
    records = [{"sample_id": id_, "loss": 1.0, "n_targets": 1, "norm": 1.0, "flag": None} for id_ in ids]
    return store.bind(rows, records, made_of(name, rows.shape[1]))


def made_of(name, dim):
    return origin(5, dims=[dim], method="loop", projection="rademacher", store=name)


@pytest.mark.parametrize("name", TYPES)
def test_files_are_read_as_float32_whole_or_in_part(tmp_path, name):
    rows, names = some_rows(37), store.all_names(tmp_path)
    store.write(names, block_of(name, rows, list("abcdefg")))
    codec = store.codec_of(name, 37)
    decoded = codec.decode(codec.encode(rows))
    assert torch.equal(blocks.read(names).rows, decoded) and torch.equal(blocks.read_rows(names.rows), decoded)
    file = RowFile(names.rows)
    assert file.shape == (7, 37)
    np.testing.assert_array_equal(file.read(2, 5), decoded[2:5])
    np.testing.assert_array_equal(file.take([6, 0, 6]), decoded[[6, 0, 6]])
    np.testing.assert_array_equal(np.concatenate([block.copy() for block in file.chunks(3)]), decoded)
    assert names.rows.stat().st_size < 7 * codec.row_bytes + 3000
    if name in SCALED:
        found = torch.load(names.rows, weights_only=True)
        assert (found["type"], found["dim"], found["rows"].shape) == (name, 37, (7, codec.row_bytes))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"type": "int3"}, "has no rows of a known type: type 'int3', dim 37"),
        ({"type": "float32"}, "has no rows of a known type"),
        ({"type": ["int8"]}, "has no rows of a known type"),
        ({"type": "int4"}, "has 45 bytes per row; int4 of 37 has 27"),
        ({"dim": 2**62}, f"has 45 bytes per row; int8 of {2**62} has {2**62 + 8}"),
        ({"dim": 0}, "has no rows of a known type"),
        ({"dim": True}, "has no rows of a known type"),
        ({"dim": 37.0}, "has no rows of a known type"),
        ({"rows": [1, 2]}, "is not a dense uint8 matrix"),
        ({"rows": torch.ones(3, 45)}, "is not a dense uint8 matrix"),
        ({"rows": torch.ones(45, dtype=torch.uint8)}, "is not a dense uint8 matrix"),
        ({"rows": torch.ones(3, 46, dtype=torch.uint8)[:, :45]}, "a part of a larger tensor"),
    ],
)
def test_a_file_that_names_a_wrong_type_is_refused(tmp_path, change, message):
    path = tmp_path / "rows.pt"
    right = {"type": "int8", "dim": 37, "rows": store.codec_of("int8", 37).encode(some_rows(37))}
    torch.save(right, path)
    assert RowFile(path).shape == (7, 37)
    torch.save({**right, **change}, path)
    with pytest.raises(BadInput, match=str(path)) as printed:
        RowFile(path)
    assert message in str(printed.value)


@pytest.mark.parametrize("name", TYPES)
def test_merging_keeps_bytes_and_compares_what_two_ranks_computed(tmp_path, name):
    rows = some_rows(37)[:5]
    again = rows[0] * (1 + 1e-5 * torch.randn(37, generator=torch.Generator().manual_seed(3)))

    def source(place, ids, rows):
        store.write(store.all_names(tmp_path / place), block_of(name, rows, ids))
        return BoundRows(store.all_names(tmp_path / place), 37, made_of(name, 37))

    first = source("0", ["a", "c", "e"], rows[[0, 2, 4]])
    second = source("1", ["b", "d", "a"], torch.stack([rows[1], rows[3], again]))
    result = merge([first, second], list("abcde"), 1e-4)
    stored = store.codec_of(name, 37).encode(rows)
    assert torch.equal(torch.from_numpy(np.concatenate(list(result.chunks()))), stored)
    assert result.duplicates == 1 and result.deviation <= 2e-5
    for number, other in enumerate((rows[0] * 1.01, rows[1])):
        wrong = source(f"2{number}", ["b", "d", "a"], torch.stack([rows[1], rows[3], other]))
        with pytest.raises(CheckFailed, match=r"two rows of sample 'a' differ"):
            merge([first, wrong], list("abcde"), 1e-4)
    with pytest.raises(BadInput, match=f"has rows of type {name}, not (int8|int4)"):
        BoundRows(store.all_names(tmp_path / "0"), 37, made_of("int8" if name != "int8" else "int4", 37))


# --- collections of each type


def collect(small, run, name, *more):
    words = ["--model_dir", small.model, "--data_path", small.shards, "--output_path", run, "--store", name]
    words += ["--dim", DIM, "--max_samples", SAMPLES, "--save_interval", INTERVAL, "--projection", "sjlt", *more]
    return cli.main(["grads", "collect", *map(str, words)])


def aggregate(run, *more):
    return cli.main(["grads", "aggregate", "--base_path", str(run), "--dim", str(DIM), *more])


def validate(run, *more):
    return cli.main(["grads", "validate", "--output_dir", str(run), *more])


@pytest.fixture(scope="module")
def unmerged(small, tmp_path_factory):
    """A collected run of each type."""
    base = tmp_path_factory.mktemp("unmerged")
    for name in TYPES:
        assert collect(small, base / name, name) == 0
    return base


@pytest.fixture(scope="module")
def runs(unmerged, tmp_path_factory):
    """A collected and merged run of each type."""
    base = copied(unmerged, tmp_path_factory.mktemp("merged") / "runs")
    for name in TYPES:
        assert aggregate(base / name) == 0
    return base


@pytest.mark.parametrize("name", SCALED)
def test_a_collection_of_each_type_is_that_of_float32_encoded(unmerged, runs, name):
    for base, place in ((unmerged, f"rank_0/dim{DIM}"), (runs, f"dim{DIM}")):
        exact = blocks.read(store.all_names(base / "float32" / place))
        found = blocks.read(store.all_names(base / name / place))
        assert torch.equal(found.stored, found.codec.encode(exact.rows))
        assert found.ids == exact.ids and found.meta.drop_columns("digest") == exact.meta.drop_columns("digest")
    assert json.loads((runs / name / f"dim{DIM}" / "manifest.json").read_text())["store"] == name


@pytest.mark.parametrize("name", TYPES)
def test_every_type_is_valid_and_every_row_agrees_with_its_recomputation(runs, capsys, name):
    assert validate(runs / name, "--recompute", str(SAMPLES)) == 0
    checks = json.loads((runs / name / "validation.json").read_text())["checks"]
    detail = next(check["detail"] for check in checks if check["name"] == "recomputed rows agree")
    assert float(detail.rpartition(" ")[2]) < 1e-5


@pytest.mark.parametrize("unit", ["token", "module"])
def test_rows_of_tokens_and_modules_are_stored_as_samples_are(small, tmp_path, unit):
    """Rows are those of float32, encoded; each agrees with its recomputation, and two that are swapped do not."""
    words = ["--rows", unit, "--max_samples", 2, "--projection", "rademacher", "--save_interval", 99]
    for name in ("float32", "onebit"):
        assert collect(small, tmp_path / name, name, *words) == 0 and aggregate(tmp_path / name) == 0
        assert validate(tmp_path / name, "--recompute", "99") == 0
    exact = blocks.read(store.all_names(tmp_path / "float32" / f"dim{DIM}"))
    assert len(exact.ids) > 10 and all("@" in id_ for id_ in exact.ids)
    run = tmp_path / "onebit"
    found = blocks.read(store.all_names(run / f"dim{DIM}"))
    assert torch.equal(found.stored, found.codec.encode(exact.rows)) and found.ids == exact.ids
    swapped = found.stored[[1, 0, *range(2, len(exact.ids))]]
    signed = store.with_digests(provenance.read(run).identity, found.meta, swapped)
    store.write(store.all_names(run / "rank_0" / f"dim{DIM}"), found._replace(stored=swapped, meta=signed))
    assert aggregate(run, "--discard_parts") == 0
    assert validate(run, "--recompute", "99") == 1
    checks = json.loads((run / "validation.json").read_text())["checks"]
    (failed,) = (check for check in checks if not check["passed"])
    assert failed["name"] == "recomputed rows agree" and failed["detail"].count("is not the gradient of") == 2


@pytest.mark.parametrize("name", SCALED)
def test_a_collection_resumes_with_its_own_type_only(small, unmerged, tmp_path, capsys, name):
    run = copied(unmerged / name, tmp_path / "run")
    folder = run / "rank_0" / f"dim{DIM}"
    store.all_names(folder).ids.unlink()
    assert collect(small, run, "float32") == 2
    assert f"store is '{name}' there and 'float32' here" in capsys.readouterr().err
    assert collect(small, run, name) == 0
    for path in folder.iterdir():
        assert sha256_file(path) == sha256_file(unmerged / name / "rank_0" / f"dim{DIM}" / path.name)


@pytest.mark.parametrize("name", TYPES)
def test_influence_reads_every_type_and_compares_it_with_float32(runs, tmp_path, name):
    words = ["--train", runs / name / f"dim{DIM}", "--validation", runs / "float32" / f"dim{DIM}"]
    assert cli.main(["grads", "influence", *map(str, [*words, "--output_dir", tmp_path])]) == 0
    train, other = (blocks.read(store.all_names(runs / kind / f"dim{DIM}")).rows.double() for kind in (name, "float32"))
    train, other = (rows / rows.norm(dim=1, keepdim=True) for rows in (train, other))
    scores = pq.read_table(tmp_path / "scores.parquet")["score"].to_numpy()
    np.testing.assert_allclose(scores, (train @ other.T).mean(1), rtol=1e-6)


def rewrite(run, place, change, bind=True):
    """Change a block's stored rows; by default with digests and checksums to match, as a careful forger would."""
    names = store.all_names(run / place)
    block = blocks.read(names)
    stored = change(block.stored.clone())
    meta = store.with_digests(provenance.read(run).identity, block.meta, stored) if bind else block.meta
    store.write(names, block._replace(stored=stored, meta=meta))
    sign(run / f"dim{DIM}")
    return names.rows


def times(factor, row=5):
    """Scale a row: all of float32's numbers, the header of the others."""

    def scale(stored):
        numbers = stored if stored.dtype == torch.float32 else stored[:, :HEADER].contiguous().view(torch.float32)
        numbers[row] *= factor
        if numbers is not stored:
            stored[:, :HEADER] = numbers.view(torch.uint8)
        return stored

    return scale


def flip(stored):
    """Change a bit of the last number or code of a row."""
    stored.view(torch.uint8)[6, -1] ^= 1
    return stored


def scale_and_bind(run):
    """Only its norm shows it."""
    path = rewrite(run, f"dim{DIM}", times(1 / 3))
    shutil.copy(store.merged_names(run, DIM).meta, run / f"rank_0/dim{DIM}")
    return path


def flip_a_bit(run):
    return rewrite(run, f"dim{DIM}", flip, bind=False)


def swap_and_bind(run):
    return rewrite(run, f"dim{DIM}", lambda stored: stored[[0, 3, 2, 1, *range(4, SAMPLES)]])


def another_type(run):
    """The same numbers as another type, bound and signed."""
    names = store.all_names(run / f"dim{DIM}")
    block = blocks.read(names)
    codec = store.codec_of("int8" if block.codec.name != "int8" else "int4", DIM)
    store.write(names, block._replace(codec=codec, stored=codec.encode(block.rows)))
    sign(run / f"dim{DIM}")
    return names.rows


FAULTS = [swap_and_bind, scale_and_bind, flip_a_bit, another_type]


@pytest.mark.parametrize(("name", "plant"), diagonals(TYPES, FAULTS))
def test_validation_finds_the_fault_in_every_type(runs, tmp_path, capsys, name, plant):
    run = copied(runs / name, tmp_path / "run")
    path = plant(run)
    assert validate(run) == 1
    assert str(path) in capsys.readouterr().err


def longer(stored, codec):
    return times(1.05, slice(None))(stored)


def of_others(stored, codec):
    return stored[[*range(1, SAMPLES), 0]]


def negated(stored, codec):
    return codec.encode(-codec.decode(stored))


@pytest.mark.parametrize(("name", "change"), diagonals(TYPES, [longer, of_others, negated]))
def test_recomputing_finds_rows_that_are_consistently_false(small, runs, tmp_path, capsys, name, change):
    """Norms and digests match in all files."""
    run = copied(runs / name, tmp_path / "run")
    names = store.merged_names(run, DIM)
    block = blocks.read(names)
    stored = change(block.stored.clone(), block.codec)
    norms = block.codec.decode(stored).double().norm(dim=1) / block.rows.double().norm(dim=1)
    norm = (torch.tensor(block.meta["norm"].to_pylist()) * norms).tolist()
    meta = block.meta.set_column(block.meta.schema.get_field_index("norm"), "norm", [norm])
    meta = store.with_digests(provenance.read(run).identity, meta, stored)
    store.write(names, block._replace(stored=stored, meta=meta))
    shutil.copy(names.meta, run / f"rank_0/dim{DIM}")
    shutil.copy(names.rows, run / f"rank_0/dim{DIM}")
    store.discard_blocks(run / f"rank_0/dim{DIM}")
    sign(run / f"dim{DIM}")
    assert validate(run) == 0
    assert validate(run, "--recompute", "2") == 1
    assert "is not the gradient of" in capsys.readouterr().err
