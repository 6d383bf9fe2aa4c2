"""Attribution methods, and a model trained on all samples whose gradients they compare: for `lds.py` and `recall.py`.

A score is high where training on the sample should lower the query's loss. All but ``random`` are of gradients at the
model trained on all samples: of rows that `grads collect` writes there, or without ``--dim`` those of `grads score`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tabulate import tabulate
from torch import nn

from gradwire import cli
from gradwire.attribution.options import PROJECTION
from gradwire.base.errors import GradwireError
from gradwire.base.files import write_json
from gradwire.base.source_digest import source_digest
from gradwire.bench.config import Training
from gradwire.bench.training.build import BETA1, decayed
from gradwire.bench.training.objective import loss_sum
from gradwire.bench.training.step import set_learning_rate
from gradwire.lm.data.batches import collate
from gradwire.lm.data.shards import Shards
from gradwire.lm.models import causal

RESAMPLES = 1000


class Method(NamedTuple):
    """Gradient type of the samples' rows, metric, gradient type of the queries' rows, and whether under `fisher`."""

    rows: str
    metric: str
    queries: str = "sgd"
    curved: bool = False


METHODS = {
    "random": Method("", ""),
    "dot": Method("sgd", "dot"),
    "cosine": Method("sgd", "cosine"),
    "adam": Method("adam", "cosine"),  # LESS, with the moments and the formula of the training's own optimizer
    "fisher": Method("sgd", "dot", curved=True),  # TRAK's estimator, with the gradient of the loss itself
    "fisher-cosine": Method("sgd", "cosine", curved=True),
    "ekfac": Method("ekfac", "dot", "ekfac"),
    "ekfac-cosine": Method("ekfac", "cosine", "ekfac"),
}


class Scores(NamedTuple):
    """Scores of a method, float64 [samples, queries], its seconds (rows and scores), and the bytes that it stores."""

    values: NDArray[np.float64]
    seconds: float
    store_bytes: int


def entry(main: Callable[[], None]) -> None:
    """Run a script; bad input is one line, with the exit code of a command of gradwire."""
    try:
        main()
    except GradwireError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def parser_of(description: str) -> argparse.ArgumentParser:
    """Return a parser with the flags of both scripts."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--data_path", type=Path, required=True, help="a shards folder with a train and a val split")
    parser.add_argument("--output_dir", type=Path, required=True, help="folder for all results; a call resumes there")
    parser.add_argument("--max_samples", type=int, help="train on the first N samples only (default: all)")
    parser.add_argument("--queries", type=int, default=32, help="validation samples to use as queries")
    parser.add_argument("--methods", nargs="+", choices=METHODS, help="default: all; without --dim, none of fisher")
    parser.add_argument("--model", default="tiny", help="a preset, options as JSON, or a folder, as for train")
    parser.add_argument("--steps", type=int, default=Training.model_fields["steps"].default, help="of each training")
    parser.add_argument("--batch_size", type=int, default=Training.model_fields["batch_size"].default)
    parser.add_argument("--lr", type=float, default=Training.model_fields["lr"].default, help="peak rate of AdamW")
    parser.add_argument("--dim", type=int, help="columns per row (default: whole gradients, by `grads score`)")
    parser.add_argument("--projection", default=PROJECTION, help="as for grads collect")
    parser.add_argument("--damping", type=float, default=0.1, help="of fisher and ekfac, relative to mean curvature")
    parser.add_argument("--seed", type=int, default=0, help="of weights, order, projection, subsets and resampling")
    return parser


def methods_of(given: argparse.Namespace) -> list[str]:
    """Return the methods to judge; the curvature of those of fisher is that of rows."""
    methods: list[str] = given.methods or [name for name in METHODS if given.dim or not METHODS[name].curved]
    if not given.dim and any(METHODS[name].curved for name in methods):
        sys.exit("methods of fisher need rows: give --dim")
    return methods


def opened(given: argparse.Namespace, queries: int) -> tuple[Shards, Shards, int]:
    """Return both splits of the data and the number of training samples; note the settings in the output folder."""
    train, val = Shards(given.data_path, "train"), Shards(given.data_path, "val")
    samples = given.max_samples or len(train)
    if samples > len(train) or queries > len(val):
        sys.exit(f"{given.data_path} has {len(train)} training and {len(val)} validation samples: too few")
    apart = ("output_dir", "methods", "dim", "projection", "damping", "subsets", "workers", "top_k")
    settings = {name: str(value) for name, value in vars(given).items() if name not in apart}
    settings |= {"script": Path(sys.argv[0]).stem, "train": train.digest, "val": val.digest}
    settings |= {"source": source_digest("gradwire.bench.training.step")}
    noted = given.output_dir / "settings.json"
    if noted.is_file() and json.loads(noted.read_text()) != settings:
        sys.exit(f"{noted.parent} has results of other settings or another version: choose another --output_dir")
    write_json(noted, settings)
    return train, val, samples


class Study:
    """A model trained on all samples, and the scores of samples for queries there.

    Args:
        given: The flags.
        shards: The shards folder; samples are the first of its train split, queries the first of its val split.
        samples: Number of samples.
        queries: Number of queries.
    """

    def __init__(self, given: argparse.Namespace, shards: Path, samples: int, queries: int) -> None:
        self.given, self.shards, self.samples, self.queries = given, shards, samples, queries
        self.folder = given.output_dir
        if not (self.folder / "model").is_dir():
            torch.set_num_threads(1)
            model, optimizer = trained(given, Shards(shards, "train"), range(samples), samples)
            state = {name: optimizer.state[p] for name, p in model.named_parameters() if p in optimizer.state}
            moments = {"state": state, "param_groups": optimizer.param_groups}
            tokenizer, meta = shards.parent / "tokenizer", {"steps": given.steps}
            causal.save(model.state_dict(), model.config, tokenizer, self.folder / "model", meta, moments)
        self.at_model = ("--model_dir", self.folder / "model", "--data_path", shards)
        self.of_train = ("--split", "train", "--max_samples", samples)

    def scores(self, name: str) -> Scores:
        """Score every sample for every query by a method."""
        given, method = self.given, METHODS[name]
        if name == "random":
            random = np.random.default_rng(given.seed)
            return Scores(random.standard_normal((self.samples, self.queries)), 0.0, 0)
        damping = f"-{given.damping:g}" if method.curved or method.rows == "ekfac" else ""
        metric = ("--metric", method.metric)
        if given.dim:
            queries, of_queries = self._rows("val", method.queries)  # first: it has the imports
            train, of_rows = self._rows("train", method.rows)
            folder = self.folder / f"influence-{name}{damping}-{given.projection}-{given.dim}"
            curved = ("--curvature", "fisher", "--damping", given.damping) if method.curved else ()
            words = ["influence", "--train", train, "--validation", queries, "--matrix", *metric, *curved]
            seconds, stored = of_rows + of_queries, train / "all_orig.pt"
        else:
            seconds, factors = self._factors(method.rows)
            folder = self.folder / f"scores-{method.rows}{damping}-{method.metric}"
            asked = ("--query_path", self.shards, "--query_split", "val", "--queries", self.queries)
            kind = ("--grad_type", method.rows, *factors, "--device", "cpu")
            words = ["score", *self.at_model, *self.of_train, *asked, *kind, *metric]
            stored = folder / "matrix.npy"
        seconds += run(folder, [*words, "--output_dir", folder])
        return Scores(np.load(folder / "matrix.npy").astype(np.float64), seconds, stored.stat().st_size)

    def _rows(self, split: str, kind: str) -> tuple[Path, float]:
        """Collect rows; return their store and the seconds that they took, with those of the factors for samples."""
        given = self.given
        of_factors, factors = self._factors(kind)
        name = f"{split}-{kind}{f'-{given.damping:g}' if factors else ''}-{given.projection}-{given.dim}"
        folder, dim = self.folder / name, ("--dim", given.dim, "--discard_parts")
        of_split = self.of_train if split == "train" else ("--split", "val", "--max_samples", self.queries)
        how = ("--grad_type", kind, "--projection", given.projection, "--seed", given.seed, "--device", "cpu")
        collect = ["collect", *self.at_model, "--output_path", folder, *of_split, *how, *dim, *factors]
        seconds = run(folder, collect, ["aggregate", "--base_path", folder, *dim])
        return folder / f"dim{given.dim}", seconds + (of_factors if split == "train" else 0.0)

    def _factors(self, kind: str) -> tuple[float, tuple[Any, ...]]:
        """Compute EK-FAC's factors for rows that need them; return the seconds that they took, and the flag."""
        if kind != "ekfac":
            return 0.0, ()
        folder = self.folder / f"factors-{self.given.damping:g}"
        damped = ("--damping", self.given.damping, "--output_dir", folder)
        return run(folder, ["factors", *self.at_model, *self.of_train, *damped]), ("--optimizer_dir", folder)


def run(folder: Path, *commands: Sequence[Any]) -> float:
    """Run commands of `gradwire grads` that fill a folder, unless it is full; return the seconds that they took."""
    file = folder / "seconds.json"
    if not file.is_file():
        shutil.rmtree(folder, ignore_errors=True)  # of a call that was killed: its time would be that of the rest
        began = time.perf_counter()
        for words in commands:
            if code := cli.main(["grads", *map(str, words)]):
                sys.exit(code)
        write_json(file, time.perf_counter() - began)
    return float(json.loads(file.read_text()))


def trained(
    given: argparse.Namespace, shards: Shards, members: Sequence[int], samples: int
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Train a model on ``members`` of the first ``samples`` samples, as `gradwire train` does."""
    options = {"steps": given.steps, "batch_size": given.batch_size, "lr": given.lr}
    training = Training.model_validate({**options, "warmup_steps": 0, "profile": False})
    model = causal.build(given.model, shards.meta["vocab_size"], shards.meta["max_length"], given.seed)
    groups = decayed(model.named_parameters(), {name for name, p in model.named_parameters() if p.ndim >= 2}, training)
    optimizer = torch.optim.AdamW(groups, lr=training.lr, betas=(BETA1, training.beta2))
    model.train()
    stream = in_order(members, samples, given.seed)
    for step in range(training.steps):
        chosen = [shards[position] for position in islice(stream, training.batch_size)]
        batch = collate(chosen, shards.meta["pad_id"], len(chosen))
        set_learning_rate(optimizer, training, step)
        optimizer.zero_grad()
        (loss_sum(model, batch) / max(1, batch.n_targets)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), training.clip_grad_norm)
        optimizer.step()
    return model, optimizer


def in_order(members: Sequence[int], samples: int, seed: int) -> Iterator[int]:
    """Yield members forever, each epoch in its order of all ``samples``: two trainings differ in their samples only."""
    wanted = set(members)
    for epoch in count():
        order = np.random.default_rng([seed, epoch]).permutation(samples).tolist()
        yield from (position for position in order if position in wanted)


def interval(means: NDArray[np.float64]) -> list[float]:
    """Return the ends of the 95 % interval of resampled means."""
    return [float(end) for end in np.quantile(means, (0.025, 0.975))]


def shown(value: float, ends: Sequence[float]) -> str:
    """Format a value with its interval."""
    return f"{value:.3f} [{ends[0]:.3f}, {ends[1]:.3f}]"


def write(given: argparse.Namespace, name: str, result: Mapping[str, Any], cells: Sequence[Mapping[str, str]]) -> None:
    """Write a result, and print its table: a row for each of its methods, with their costs."""
    options = {flag: value for flag, value in vars(given).items() if not isinstance(value, Path)}
    write_json(given.output_dir / name, {**options, **result})
    rows = [
        {"method": of["method"], **shown, "seconds": f"{of['seconds']:.1f}", "store bytes": f"{of['store_bytes']:,}"}
        for of, shown in zip(result["methods"], cells, strict=True)
    ]
    sides = ["left"] + ["right"] * (len(rows[0]) - 1)
    print(tabulate(rows, headers="keys", tablefmt="pipe", colalign=sides, disable_numparse=True))
