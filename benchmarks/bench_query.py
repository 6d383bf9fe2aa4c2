"""Latency of `grads query`: the parts of an answer over a large store, and the memory of its search.

``python benchmarks/bench_query.py --store DIR --rows 100000 --prompt TEXT --output_dir DIR``. The large store repeats
the rows of a real one, each with noise of a tenth of its norm: scores are near those of real rows, and all distinct.

``--validation DIR`` compares indices with exact search instead: each row of that store is a query. Recall is the share
of exact search's ``--top_k`` samples that are found through the index.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from bench_gradients import interleaved, show

from gradwire import cli
from gradwire.attribution.query import index
from gradwire.attribution.query.search import BLOCK_BYTES, groups_of, nearest, open_store, scored, target
from gradwire.attribution.query.searcher import Searcher
from gradwire.attribution.store import provenance, row_file, store
from gradwire.base.files import sha256_file, write_json

NOISE = 0.1  # of a row's norm


def noisy(rows: np.ndarray, count: int, seed: int) -> Iterator[np.ndarray]:
    """``count`` rows in blocks of at most ``len(rows)``."""
    random = np.random.default_rng(seed)
    for start in range(0, count, len(rows)):
        block = rows[: min(len(rows), count - start)]
        norms = np.linalg.norm(block, axis=1, keepdims=True) / np.sqrt(block.shape[1])
        yield (block + NOISE * norms * random.standard_normal(block.shape)).astype(np.float32)


def enlarge(source: Path, folder: Path, count: int, seed: int) -> None:
    """Write a store of ``count`` rows made from those of another, with digests and checksums that are right."""
    real = open_store(source)
    folder.mkdir(parents=True)
    names, tables, ids = store.all_names(folder), [], []
    with row_file.tensor_writer(names.rows, (count, real.manifest.dim)) as writer:
        for copy, block in enumerate(noisy(real.rows.read(0, real.rows.shape[0]), count, seed)):
            own = [f"{id_}~{copy}" for id_ in real.rows.ids[: len(block)]]
            meta = real.rows.meta.slice(0, len(block)).set_column(0, "sample_id", pa.array(own, pa.string()))
            tables.append(store.with_digests(real.manifest.identity, meta, torch.from_numpy(block)))
            ids += own
            writer.append(block)
    store.write_metadata(names, pa.concat_tables(tables), ids)
    sums = {name: sha256_file(folder / name) for name in provenance.FILES}
    made = {"rows": count, "sha256": sums, "data_path": "none"}
    provenance.write_manifest(folder, real.manifest.model_copy(update=made))


def rss() -> dict[str, float]:
    """Resident memory now and its peak, in MiB."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(lines[name].split()[0]) / 1024 for name in ("RssAnon", "VmHWM")}


def recalls(large: Path, validation: Path, args: argparse.Namespace) -> None:
    """Time searches of one row with and without an index, and compare what they find."""
    found, asked = open_store(large), open_store(validation).rows
    targets = [target(asked.take([row]), "cosine", groups_of("mean", 1)) for row in range(asked.shape[0])]
    proposed, table = {}, []
    for words in ("flat", "ivf", "ivf --probe 4", "pq", "pq --bytes 256"):
        kind, *more = words.split()
        began = time.perf_counter()
        cli.main(["grads", "index", "--store", str(large), "--kind", kind, *more])
        built = time.perf_counter()
        made = index.Index(found)
        read, size = time.perf_counter(), (large / index.FILE).stat().st_size
        table.append([words, f"{size / 1e6:,.0f}", f"{built - began:,.0f}", f"{read - built:.1f}"])
        seconds, proposed[words] = [], []
        for one in targets:
            start = time.perf_counter()
            among = made.near(one, "cosine", args.top_k)
            hits = nearest(found, one, "cosine", args.top_k, among=among)
            seconds.append(time.perf_counter() - start)
            proposed[words].append({hit.position for hit in hits})
        table[-1].append(f"{1e3 * np.median(seconds):,.0f}")
        del made
    exact, seconds = [], []
    for one in targets:
        start = time.perf_counter()
        exact.append({hit.position for hit in nearest(found, one, "cosine", args.top_k)})
        seconds.append(time.perf_counter() - start)
    for row, of in zip(table, proposed.values(), strict=True):
        row.append(f"{np.mean([len(one & best) / len(best) for one, best in zip(of, exact, strict=True)]):.3f}")
    table.append(["exact", "", "", "", f"{1e3 * np.median(seconds):,.0f}", "1"])
    show(table, ["index", "MB", "s to build", "s to read", "ms per query", f"recall of {args.top_k}"])
    print(f"{found.rows.shape[0]:,} rows of {found.rows.shape[1]} columns, {len(targets)} queries")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", type=Path, required=True, help="a real merged store, with its model in place")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--prompt", default="A decorator is a function that returns another function.")
    parser.add_argument("--output_dir", type=Path, required=True, help="folder of the large store; kept if it is there")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--validation", type=Path, help="a merged store whose rows are the queries of indices")
    parser.add_argument("--top_k", type=int, default=10)
    args = parser.parse_args()
    large = args.output_dir / f"rows{args.rows}"
    if not large.exists():
        enlarge(args.store, large, args.rows, args.seed)
    if args.validation:
        recalls(large, args.validation, args)
        return
    start = time.perf_counter()
    searcher = Searcher(large, {}, "cpu")
    opened = time.perf_counter()
    searcher.load()
    loaded = time.perf_counter()
    rows = searcher.of_prompt(args.prompt)
    file = row_file.RowFile(searcher.store.rows.names.rows)
    high = BLOCK_BYTES // (4 * file.shape[1]) or 1
    mean = groups_of("mean", len(rows))
    before = rss()
    jobs = {
        "gradient of the prompt": lambda: searcher.of_prompt(args.prompt),
        "reading the rows alone": lambda: [None for _ in file.chunks(high)],
        **{
            f"scores, {metric}": lambda metric=metric: scored(file, target(rows, metric, mean), metric)
            for metric in ("dot", "cosine")
        },
        "search, cosine: scores, order, verified rows": lambda: nearest(
            searcher.store, target(rows, "cosine", mean), "cosine", 10
        ),
    }
    size = file.shape[0] * file.shape[1] * 4
    table = [
        ["opening: checksums, ids", f"{1e3 * (opened - start):,.0f}", ""],
        ["loading the model", f"{1e3 * (loaded - opened):,.0f}", ""],
    ]
    measured = {name: 1e3 * of for name, of in interleaved("cpu", jobs, args.rounds).items()}
    for name, of in measured.items():
        rate = "" if name.startswith("gradient") else f"{size / np.median(of) / 1e6:.1f}"
        table.append([name, f"{np.median(of):,.0f} [{min(of):,.0f}, {max(of):,.0f}]", rate])
    show(table, ["", "ms", "GB/s of rows"])
    print(f"{file.shape[0]:,} rows of {file.shape[1]} columns, {size / 2**20:,.0f} MiB")
    print("MiB before and after the searches:", before, rss())
    found = {name: of.tolist() for name, of in measured.items()}
    write_json(args.output_dir / "query_latency.json", {"rows": file.shape, "ms": found, "memory_mib": [before, rss()]})


if __name__ == "__main__":
    main()
