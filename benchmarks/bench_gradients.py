"""Per-sample gradients: how fast rows, projections, norms and queries are.

``python benchmarks/bench_gradients.py methods|projections|norms|query``, each a table. Samples are random tokens,
distinct, all of one length. Rounds are interleaved, and ratios are medians over them.

``query --store DIR --prompt TEXT --output_dir DIR`` measures an answer over a large store, which repeats the rows of a
real one, each with noise of a tenth of its norm: scores are near those of real rows, and all distinct.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradwire.attribution import projections
from gradwire.attribution.collect.rows import RowMaker
from gradwire.attribution.persample import loop
from gradwire.attribution.persample import norms as of_batch
from gradwire.attribution.persample.batch import losses_of
from gradwire.attribution.store import store
from gradwire.attribution.store.provenance import FORMAT, Provenance
from gradwire.lm.data.batches import collate
from gradwire.lm.data.shards import Sample
from gradwire.lm.models import causal


class Samples(list):
    """Shards, as `RowMaker` reads them."""

    meta = {"pad_id": 0}  # noqa: RUF012


def samples(count: int, length: int, vocabulary: int) -> Samples:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, vocabulary, (count, length), generator=generator)
    return Samples(Sample(f"s{row}", tokens[row]) for row in range(count))


def made_from(dim: int, count: int, method: str, projection: str) -> Provenance:
    return Provenance(
        **dict.fromkeys(("source", "model_dir", "model_digest", "data_path", "data_digest"), ""),
        format=FORMAT,
        split="train",
        samples=count,
        world_size=1,
        dims=[dim],
        grad_type="sgd",
        loss="mean",
        method=method,
        projection=projection,
        seed=0,
        save_interval=count,
    )


def maker(args: argparse.Namespace, method: str, projection: str, batch_size: int) -> RowMaker:
    origin = made_from(args.dim, args.samples, method, projection)
    model = causal.build(args.model, args.vocabulary, args.length, seed=0).to(args.device)
    return RowMaker(model, origin, torch.device(args.device), batch_size=batch_size)


def timed(device: str, work: Callable[[], Any]) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def interleaved(device: str, jobs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, np.ndarray]:
    for job in jobs.values():
        job()
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(rounds):
        for name, job in jobs.items():
            seconds[name].append(timed(device, job))
    return {name: np.array(of) for name, of in seconds.items()}


def spread(ratios: np.ndarray) -> str:
    draws = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return f"{np.median(ratios):.2f} [{low:.2f}, {high:.2f}]"


def show(rows: Sequence[Sequence[Any]], headers: Sequence[str]) -> None:
    from tabulate import tabulate  # not above: benchmarks/gpu imports this module, also where it is not installed

    print(tabulate(rows, headers, tablefmt="pipe"))


PLAIN = "forward + backward, no rows"


def plain_passes(args: argparse.Namespace, data: Samples) -> Callable[[], None]:
    plain = causal.build(args.model, args.vocabulary, args.length, seed=0).to(args.device)
    batches = [
        collate(data[first : first + args.batch_size], 0, args.batch_size).to(args.device)
        for first in range(0, args.samples, args.batch_size)
    ]

    def forward_backward() -> None:
        for batch in batches:
            losses_of(plain, batch).sum().backward()
            plain.zero_grad(set_to_none=True)

    return forward_backward


def rows_by(args: argparse.Namespace, data: Samples, method: str, projection: str) -> Callable[[], Any]:
    made = maker(args, method, projection, 1 if method == "loop" else args.batch_size)
    return lambda: made.blocks(data, range(args.samples))


def methods(args: argparse.Namespace) -> None:
    data = samples(args.samples, args.length, args.vocabulary)
    jobs: dict[str, Callable[[], Any]] = {PLAIN: plain_passes(args, data)}
    for projection in args.projections:
        for method in ("loop", "vmap", "hooks"):
            jobs[f"{projection}, {method}"] = rows_by(args, data, method, projection)
    seconds = interleaved(args.device, jobs, args.rounds)
    base = seconds[PLAIN]
    table = []
    for name, of in seconds.items():
        projection = name.partition(",")[0]
        loop = seconds.get(f"{projection}, loop")
        table.append(
            [
                name,
                f"{args.samples / np.median(of):,.1f}",
                spread(loop / of) if loop is not None else "",
                spread(base / of),
            ]
        )
    show(table, ["rows", "samples/s", "× the loop", "× forward + backward"])


READ, PRODUCT = "read once (sum)", "matrix product alone"


def projection_jobs(args: argparse.Namespace, names: Sequence[str]) -> dict[str, Callable[[], Any]]:
    """Each projection of a stack of gradients, reading it once, and the dense matrix product."""
    numel, height = args.numel, args.batch_size
    stack = torch.randn(height, numel, device=args.device)
    shapes = {"w": (numel // 512, 512)}
    jobs: dict[str, Callable[[], Any]] = {READ: lambda: stack.sum()}
    for name in names:
        projector = projections.build(name, shapes, 0)
        jobs[name] = lambda projector=projector: projector.project(stack, [args.dim])
    width = (
        2**16 if args.device == "cuda" else max(1, projections.matrices.TILE // args.dim)
    )  # a GPU starts few products
    tile = torch.randn(min(width, numel), args.dim, device=args.device)

    def product() -> None:
        for first in range(0, numel - len(tile) + 1, len(tile)):
            stack[:, first : first + len(tile)] @ tile

    return jobs | {PRODUCT: product}


def project(args: argparse.Namespace) -> None:
    """Each projection of a stack of gradients, against reading it once and against the dense matrix product."""
    jobs = projection_jobs(args, ("sjlt", "factored", "rademacher"))
    seconds = interleaved(args.device, jobs, args.rounds)
    read, floor = seconds[READ], seconds[PRODUCT]
    table = [
        [name, f"{1e3 * np.median(of):,.1f}", spread(of / read), spread(of / floor)] for name, of in seconds.items()
    ]
    print(f"{args.batch_size} gradients of {args.numel:,} entries to {args.dim} columns, {args.device}\n")
    show(table, ["", "ms", "× reading", "× matrix product"])


def norm_jobs(args: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """Norms of a batch, and its plain passes."""
    model = causal.build(args.model, args.vocabulary, args.length, seed=0).to(args.device)
    data = samples(args.batch_size, args.length, args.vocabulary)
    batch = collate(data, 0, args.batch_size).to(args.device)

    def plain() -> None:
        losses_of(model, batch).sum().backward()
        model.zero_grad(set_to_none=True)

    return {
        "forward": lambda: losses_of(model, batch).sum(),
        "forward + backward": plain,
        "norms": lambda: of_batch.norms(model, batch),
        "norms, by the loop": lambda: loop.gradients(model, batch, "mean"),
    }


def norms(args: argparse.Namespace) -> None:
    """A norm pass against a plain forward and backward pass of the same batch, and against the loop over samples."""
    seconds = interleaved(args.device, norm_jobs(args), args.rounds)
    plain = seconds["forward + backward"]
    show(
        [[name, f"{1e3 * np.median(of):,.0f}", spread(of / plain)] for name, of in seconds.items()],
        ["", "ms", "× forward + backward"],
    )


def noisy(rows: np.ndarray, count: int) -> Iterator[np.ndarray]:
    """``count`` rows in blocks of at most ``len(rows)``."""
    random = np.random.default_rng(0)
    for start in range(0, count, len(rows)):
        block = rows[: min(len(rows), count - start)]
        norms = np.linalg.norm(block, axis=1, keepdims=True) / np.sqrt(block.shape[1])
        yield (block + 0.1 * norms * random.standard_normal(block.shape)).astype(np.float32)


def enlarge(source: Path, folder: Path, count: int) -> None:
    """Write a store of ``count`` rows made from those of another, with digests and checksums that are right."""
    import pyarrow as pa

    from gradwire.attribution.query.gradient_store import GradientStore
    from gradwire.attribution.store import provenance, row_file
    from gradwire.base.files import sha256_file

    real = GradientStore(source)
    folder.mkdir(parents=True)
    names, tables, ids = store.all_names(folder), [], []
    with row_file.tensor_writer(names.rows, (count, real.manifest.dim)) as writer:
        for copy, block in enumerate(noisy(real[:], count)):
            copied = [f"{id_}~{copy}" for id_ in real.ids[: len(block)]]
            meta = real.meta.slice(0, len(block)).set_column(0, "sample_id", pa.array(copied, pa.string()))
            tables.append(store.with_digests(real.manifest.identity, meta, torch.from_numpy(block)))
            ids += copied
            writer.append(block)
    store.write_metadata(names, pa.concat_tables(tables), ids)
    sums = {name: sha256_file(folder / name) for name in provenance.FILES}
    made = {"rows": count, "sha256": sums, "data_path": "none"}
    provenance.write_manifest(folder, real.manifest.model_copy(update=made))


def query(args: argparse.Namespace) -> None:
    """The parts of an answer of `grads query`."""
    from gradwire.attribution.query.search import groups_of, nearest, scored, target
    from gradwire.attribution.query.searcher import Searcher
    from gradwire.attribution.store.row_file import RowFile

    large = args.output_dir / f"rows{args.rows}"
    if not large.exists():
        enlarge(args.store, large, args.rows)
    began = time.perf_counter()
    searcher = Searcher(large, {}, "cpu")
    opened = time.perf_counter()
    _ = searcher.model_dir, searcher._maker
    loaded = time.perf_counter()
    rows = searcher.of_prompt(args.prompt)
    file, mean = RowFile(searcher.store.rows.names.rows), groups_of("mean", len(rows))
    against = {metric: target(rows, metric, mean) for metric in ("dot", "cosine")}
    jobs = {
        "gradient of the prompt": lambda: searcher.of_prompt(args.prompt),
        "reading the rows alone": lambda: [None for _ in file.chunks(64)],
        "scores, dot": lambda: scored(file, against["dot"], "dot"),
        "scores, cosine": lambda: scored(file, against["cosine"], "cosine"),
        "search, cosine: scores, order, verified rows": lambda: nearest(
            searcher.store.rows, against["cosine"], "cosine", 10
        ),
    }
    measured = interleaved("cpu", jobs, args.rounds)
    table = [["opening: checksums, ids", f"{1e3 * (opened - began):,.0f}"]]
    table.append(["loading the model", f"{1e3 * (loaded - opened):,.0f}"])
    for name, of in measured.items():
        low, middle, high = 1e3 * np.percentile(of, [0, 50, 100])
        table.append([name, f"{middle:,.0f} [{low:,.0f}, {high:,.0f}]"])
    show(table, [f"{file.shape[0]:,} rows of {file.shape[1]} columns", "ms"])


COMMANDS = {"methods": methods, "projections": project, "norms": norms, "query": query}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=COMMANDS)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--dim", type=int, default=4096)
    parser.add_argument("--numel", type=int, default=2**23)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the CPU")
    parser.add_argument("--projections", nargs="+", default=["factored", "sjlt", "rademacher"])
    parser.add_argument("--store", type=Path, help="query: a real merged store, with its model in place")
    parser.add_argument("--rows", type=int, default=100_000, help="query: of the large store")
    parser.add_argument("--prompt", default="A decorator is a function that returns another function.")
    parser.add_argument("--output_dir", type=Path, help="query: folder of the large store; kept if it is there")
    args = parser.parse_args(words)
    torch.set_num_threads(args.threads)
    COMMANDS[args.what](args)


if __name__ == "__main__":
    main()
