"""Per-sample gradients: how fast, against the batch-1 loop and against a plain forward and backward pass.

``python benchmarks/bench_gradients.py methods|ceiling|memory|projections|ranks|aggregate``, each a table of its own.
Samples are random tokens, distinct, all of one length. Rounds are interleaved, and ratios are medians over them.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradwire.attribution import projections
from gradwire.attribution.collect import rows
from gradwire.attribution.collect.methods import METHODS
from gradwire.attribution.persample import loop
from gradwire.attribution.persample.batch import losses_of, shapes
from gradwire.attribution.persample.norms import norms
from gradwire.attribution.store import aggregate as aggregate_verb
from gradwire.attribution.store import merge, store
from gradwire.attribution.store.provenance import FORMAT, Provenance
from gradwire.bench.codecs.timing import kept_memory
from gradwire.lm.data.batches import collate
from gradwire.lm.data.shards import Sample
from gradwire.lm.models import causal


class Samples(list):
    """What `RowMaker` wants of shards."""

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


def maker(args: argparse.Namespace, method: str, projection: str, batch_size: int) -> rows.RowMaker:
    origin = made_from(args.dim, args.samples, method, projection)
    model = causal.build(args.model, args.vocabulary, args.length, seed=0).to(args.device)
    return rows.RowMaker(model, origin, torch.device(args.device), batch_size=batch_size)


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


LOOP, FROZEN = "loop", "forward + backward of frozen weights"
SIX_LAYERS = json.dumps({"architecture": "gpt2", "n_embd": 256, "n_layer": 6, "n_head": 8})


def frozen_passes(args: argparse.Namespace, data: Samples) -> Callable[[], None]:
    """What any rows by hooks need: the activations' gradients, down to the embeddings."""
    model = causal.build(args.model, args.vocabulary, args.length, seed=0).to(args.device).eval().requires_grad_(False)
    batch = collate(data, 0, args.samples).to(args.device)
    read: list[torch.Tensor] = []

    def leaf(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        read.append(output.requires_grad_())
        return output

    model.get_input_embeddings().register_forward_hook(leaf)

    def forward_backward() -> None:
        torch.autograd.grad(losses_of(model, batch).sum(), [read.pop()])

    return forward_backward


def ceiling(args: argparse.Namespace) -> None:
    """One thread, 6.85 M parameters, 16 samples of 64 tokens: gradients and rows against their limits."""
    args.samples, args.batch_size, args.length, args.vocabulary = 16, 16, 64, 8192
    args.model, args.projections = SIX_LAYERS, ["factored", "sjlt"]
    torch.set_num_threads(1)
    data = samples(args.samples, args.length, args.vocabulary)
    model = causal.build(args.model, args.vocabulary, args.length, seed=0).to(args.device)
    batch = collate(data, 0, args.samples).to(args.device)
    stack = torch.zeros(args.samples, model.num_parameters(), device=args.device)
    out = maker(args, "hooks", "sjlt", args.batch_size).by_name(stack)
    sjlt = projections.build("sjlt", shapes(model), 0)
    jobs: dict[str, Callable[[], Any]] = {LOOP: lambda: loop.gradients(model, batch, out=out)}
    jobs |= {PLAIN: plain_passes(args, data), FROZEN: frozen_passes(args, data)}
    jobs |= {f"gradients, {name}": partial(METHODS[name], model, batch, out=out) for name in ("vmap", "hooks")}
    jobs["norms, hooks"] = lambda: norms(model, batch)
    for projection in args.projections:
        for method in ("loop", "hooks"):
            jobs[f"rows, {projection}, {method}"] = rows_by(args, data, method, projection)
    jobs |= {READ: stack.sum, "sjlt of the gradients": lambda: sjlt.project(stack, [args.dim])}
    with kept_memory():  # as in a rank; otherwise pages that the kernel takes back and zeroes are a tenth of a pass
        seconds = interleaved(args.device, jobs, args.rounds)
    columns = [seconds[of] for of in (LOOP, FROZEN)]
    table = [
        [name, f"{1e3 * np.median(of):,.0f}", *(spread(column / of) for column in columns), spread(of / seconds[READ])]
        for name, of in seconds.items()
    ]
    size = f"{args.samples} × {args.length} tokens, {args.dim} columns"
    print(f"{model.num_parameters():,} parameters, {size}, one thread\n")
    show(table, ["", "ms", "× the loop", "× frozen", "time / reading once"])


def memory(args: argparse.Namespace) -> None:
    """Peak memory of each method, each in a process of its own."""
    table = []
    for projection in args.projections:
        for method in ("loop", "vmap", "hooks"):
            words = [sys.executable, __file__, "one", "--method", method, "--projections", projection]
            for name in ("model", "device", "samples", "batch_size", "dim", "length", "vocabulary"):
                words += [f"--{name}", str(getattr(args, name))]
            table.append([f"{projection}, {method}", subprocess.check_output(words, text=True).strip()])
    show(table, ["rows", "MB above the model"])


def one(args: argparse.Namespace) -> None:
    data = samples(args.samples, args.length, args.vocabulary)
    made = maker(args, args.method, args.projections[0], 1 if args.method == "loop" else args.batch_size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    made.blocks(data, range(args.samples))
    if args.device == "cuda":
        print(f"{torch.cuda.max_memory_allocated() / 1e6:,.0f}")
    else:
        print(f"{(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3:,.0f}")


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
    tile = torch.randn(max(1, projections.dense.TILE // args.dim), args.dim, device=args.device)

    def product() -> None:
        for first in range(0, numel - len(tile) + 1, len(tile)):
            stack[:, first : first + len(tile)] @ tile

    return jobs | {PRODUCT: product}


def project(args: argparse.Namespace) -> None:
    """Each projection of a stack of gradients, against reading it once and against the dense matrix product."""
    jobs = projection_jobs(args, ("sjlt", "srht", "factored", "rademacher", "normal"))
    seconds = interleaved(args.device, jobs, args.rounds)
    read, floor = seconds[READ], seconds[PRODUCT]
    table = [
        [name, f"{1e3 * np.median(of):,.1f}", spread(of / read), spread(of / floor)] for name, of in seconds.items()
    ]
    print(f"{args.batch_size} gradients of {args.numel:,} entries to {args.dim} columns, {args.device}\n")
    show(table, ["", "ms", "× reading", "× matrix product"])


def ranks(args: argparse.Namespace) -> None:
    """Two ranks against one, one thread each: the steady part of `grads collect`, start-up left out."""
    ratios = []
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, "worker", *sys.argv[2:]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for worker in workers:
        worker.stdout.readline()
    for _ in range(args.rounds):
        spans = []
        for count in (1, 2):
            began = time.perf_counter()
            for worker in workers[:count]:
                worker.stdin.write(f"{args.samples // count}\n")
                worker.stdin.flush()
            for worker in workers[:count]:
                worker.stdout.readline()
            spans.append(time.perf_counter() - began)
        ratios.append(spans[0] / spans[1])
    for worker in workers:
        worker.stdin.close()
    print(f"two ranks against one, one thread each: {spread(np.array(ratios))}")


def worker(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    data = samples(args.samples, args.length, args.vocabulary)
    made = maker(args, "hooks", args.projections[0], args.batch_size)
    made.blocks(data, range(args.batch_size))
    print("ready", flush=True)
    for line in sys.stdin:
        made.blocks(data, range(int(line)))
        print("done", flush=True)


def aggregate(args: argparse.Namespace) -> None:
    """Merge ranks' files, against copying the same bytes on this disk."""
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        per_rank = int(args.gigabytes * 1e9 / 4 / args.dim)
        total = per_rank * args.ranks
        origin = made_from(args.dim, total, "loop", "rademacher")
        for rank in range(args.ranks):
            ids = [f"s{position}" for position in range(rank, total, args.ranks)]
            block = torch.randn(per_rank, args.dim, generator=torch.Generator().manual_seed(rank))
            metadata = [{"sample_id": id_, "loss": 1.0, "n_targets": 1, "norm": 1.0, "flag": None} for id_ in ids]
            store.write(store.all_names(Path(folder) / str(rank)), store.bind(block, metadata, origin))
            del block
        words = [sys.executable, __file__, "merge", "--folder", folder, "--ranks", str(args.ranks)]
        words += ["--dim", str(args.dim), "--samples", str(total)]
        merged, copied, peaks = [], [], []
        for _ in range(args.rounds):
            subprocess.run(["sync", "-f", folder], check=True)
            found = json.loads(subprocess.check_output(words, text=True))
            merged.append(found["seconds"])
            peaks.append(found["mb"])
            subprocess.run(["sync", "-f", folder], check=True)
            copied.append(timed("cpu", lambda: copy(Path(folder), args.ranks)))
        size = args.ranks * args.gigabytes
        rate, plain = size / np.array(merged), size / np.array(copied)
        print(
            f"{args.ranks} ranks × {args.gigabytes} GB, {args.rounds} rounds: merged at {np.median(rate):.2f} GB/s, "
            f"peak {max(peaks):,.0f} MB resident; cp and sync at {np.median(plain):.2f} GB/s; "
            f"ratio {spread(rate / plain)}"
        )


def copy(folder: Path, count: int) -> None:
    """Copy the ranks' rows, and wait for the disk."""
    for rank in range(count):
        subprocess.run(["cp", store.all_names(folder / str(rank)).rows, folder / f"copy{rank}"], check=True)
    subprocess.run(["sync", "-f", folder], check=True)


def merge_all(args: argparse.Namespace) -> None:
    """What `grads aggregate` does once it has read the samples' ids: all checks, files and checksums."""
    began = time.perf_counter()
    origin = made_from(args.dim, args.samples, "loop", "rademacher")
    sources = [merge.read_rank(Path(args.folder) / str(rank), args.dim, origin) for rank in range(args.ranks)]
    merged = merge.merge(sources, [f"s{position}" for position in range(args.samples)], 1e-4)
    place = argparse.Namespace(base_path=Path(args.folder), output_dir=None, dim=args.dim, normalize=False, export=[])
    aggregate_verb.write(merged, store.all_names(aggregate_verb.target(place)), place)
    seconds = time.perf_counter() - began
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    print(json.dumps({"seconds": seconds, "mb": int(peak.split()[1]) / 1e3}))  # getrusage's would be the parent's


VERBS = {
    "methods": methods,
    "ceiling": ceiling,
    "memory": memory,
    "one": one,
    "projections": project,
    "ranks": ranks,
    "worker": worker,
    "aggregate": aggregate,
    "merge": merge_all,
}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=VERBS)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--dim", type=int, default=4096)
    parser.add_argument("--numel", type=int, default=2**23)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--projections", nargs="+", default=["factored", "sjlt", "rademacher"])
    parser.add_argument("--method", default="hooks")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--gigabytes", type=float, default=0.25, help="of each rank")
    parser.add_argument("--folder", help="where the files go")
    args = parser.parse_args(words)
    VERBS[args.what](args)


if __name__ == "__main__":
    main()
