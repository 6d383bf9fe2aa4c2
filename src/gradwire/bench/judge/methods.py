"""Attribution methods, and what `grads lds` and `grads recall` share: a trained model, its stores, scores and costs.

A score is high where training on the sample should lower the query's loss. All but ``random`` come from stores that
`grads collect` writes at the model trained on all samples.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import numpy as np

from gradwire.attribution.collect.run import call
from gradwire.attribution.options import PROJECTION, Projection
from gradwire.attribution.query import curvature
from gradwire.base.errors import BadInput
from gradwire.base.files import read_object, write_json
from gradwire.base.flags import COUNT, NOT_NEGATIVE, POSITIVE, SEED, output_folder
from gradwire.bench.config import Training

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gradwire.attribution.query.search import Store
    from gradwire.bench.judge.retraining import Recipe
    from gradwire.lm.data.shards import Shards

SETTINGS = "settings.json"
COST = "cost.json"  # of a store or of factors: its seconds
RESAMPLES = 1000
INTERVAL = (0.025, 0.975)


class Method(NamedTuple):
    """How a method scores.

    Attributes:
        rows: Gradient type of the samples' rows. None: scores are random.
        metric: ``cosine`` or ``dot``.
        curved: Whether products and norms are those under `curvature`.
        queries: Gradient type of the queries' rows.
    """

    rows: str | None
    metric: str = ""
    curved: bool = False
    queries: str = "sgd"


METHODS = {
    "random": Method(None),
    "dot": Method("sgd", "dot"),
    "cosine": Method("sgd", "cosine"),
    "adam": Method("adam", "cosine"),  # LESS, with the moments and the formula of the training's own optimizer
    "fisher": Method("sgd", "dot", curved=True),  # TRAK's estimator, with the gradient of the loss itself
    "fisher-cosine": Method("sgd", "cosine", curved=True),
    "ekfac": Method("ekfac", "dot", queries="ekfac"),
    "ekfac-cosine": Method("ekfac", "cosine", queries="ekfac"),
}


class Scores(NamedTuple):
    """A method's scores, float64 [samples, queries], its seconds (rows and scores), and the bytes of its rows."""

    values: NDArray[np.float64]
    seconds: float
    store_bytes: int


def arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags of both verbs."""
    fields = Training.model_fields
    parser.add_argument("--data_path", type=Path, required=True, help="a shards folder with a train and a val split")
    parser.add_argument(
        "--output_dir", type=output_folder, required=True, help="folder for all results; resumes what is there"
    )
    parser.add_argument("--max_samples", type=COUNT, help="train on the first N samples only (default: all)")
    parser.add_argument("--queries", type=COUNT, default=32, metavar="N", help="validation samples to use as queries")
    parser.add_argument("--methods", nargs="+", choices=tuple(METHODS), default=list(METHODS), help="methods to judge")
    parser.add_argument("--model", default="tiny", help="a preset, options as JSON, or a folder, as for train")
    parser.add_argument("--steps", type=COUNT, default=fields["steps"].default, help="steps of each training")
    parser.add_argument("--batch_size", type=COUNT, default=fields["batch_size"].default, help="samples per step")
    parser.add_argument("--lr", type=POSITIVE, default=fields["lr"].default, help="peak learning rate of AdamW")
    parser.add_argument("--dim", type=COUNT, required=True, metavar="N", help="columns per row")
    parser.add_argument("--projection", choices=get_args(Projection), default=PROJECTION, help="as for collect")
    parser.add_argument(
        "--damping",
        type=NOT_NEGATIVE,
        default=curvature.DAMPING,
        help="of the fisher methods and of ekfac, in units of the mean curvature",
    )
    parser.add_argument("--seed", type=SEED, default=0, help="of weights, order, projection, subsets and resampling")


class Study:
    """A model trained on all samples, and the gradients of samples and queries there.

    Args:
        args: The verb's arguments, as `arguments` defines them.
        shards: The shards folder; samples are those of its train split, queries the first of its val split.
        samples: Number of samples.
        queries: Number of queries.
    """

    def __init__(self, args: argparse.Namespace, shards: Path, samples: int, queries: int) -> None:
        self.args, self.folder, self.shards = args, args.output_dir, shards
        self.samples, self.queries = samples, queries

    def scores(self, name: str) -> Scores:
        """Score every sample for every query by a method."""
        from gradwire.attribution.query.influence import check_alike
        from gradwire.attribution.query.search import groups_of, similarities, target
        from gradwire.attribution.store.row_file import RowFile

        method = METHODS[name]
        if method.rows is None:
            random = np.random.default_rng(self.args.seed)
            return Scores(random.standard_normal((self.samples, self.queries)), 0.0, 0)
        (train, of_rows), (queries, of_queries) = self._rows[method.rows], self._rows[f"queries of {method.queries}"]
        if method.rows == "ekfac":
            of_rows += self._factors[1]
        check_alike(train, queries)
        began = time.perf_counter()
        rows = RowFile(train.rows.names.rows)
        solve = curvature.solver(rows, self.args.damping if method.curved else None)
        against = target(queries.rows, method.metric, groups_of("max", queries.rows.shape[0]), solve)
        values = np.concatenate(list(similarities(rows, against, method.metric, solve)))
        seconds = time.perf_counter() - began + of_rows + of_queries
        return Scores(values, seconds, train.rows.names.rows.stat().st_size)

    @cached_property
    def _rows(self) -> dict[str, tuple[Store, float]]:
        """The stores, with the seconds that each took: of the samples by gradient type, and of the queries.

        The queries come first: every method bears their cost, and with it that of the first imports.
        """
        methods = [METHODS[name] for name in self.args.methods if METHODS[name].rows is not None]
        queries = {
            f"queries of {kind}": self._collected("val", kind) for kind in dict.fromkeys(m.queries for m in methods)
        }
        return queries | {kind: self._collected("train", kind) for kind in sorted({str(m.rows) for m in methods})}

    @cached_property
    def _factors(self) -> tuple[Path, float]:
        """The folder of EK-FAC's factors, with the seconds that they took."""
        damping = self.args.damping
        factors = self.folder / f"factors-{damping:g}"
        options = {
            "model_dir": self.model_dir,
            "data_path": self.shards,
            "output_dir": factors,
            "split": "train",
            "max_samples": self.samples,
            "damping": damping,
        }
        began = time.perf_counter()
        if not (factors / COST).is_file():
            call(self.args, ["grads", "factors", *(f"--{name}={value}" for name, value in options.items())])
            write_json(factors / COST, {"seconds": time.perf_counter() - began})
        return factors, seconds_of(factors)

    def _collected(self, split: str, kind: str) -> tuple[Store, float]:
        """Collect the samples' or the queries' store, or check the one that is there."""
        from gradwire.attribution.query.search import open_store

        name = "queries" if split == "val" else kind
        optimizer_dir = None
        if kind == "ekfac":
            optimizer_dir, _ = self._factors
            name = f"ekfac-{self.args.damping:g}{'-queries' if split == 'val' else ''}"
        count = self.queries if split == "val" else self.samples
        args, folder = self.args, self.folder / name
        cost = folder / COST
        if not cost.is_file():  # begun and not completed: its time would be that of the rest
            shutil.rmtree(folder, ignore_errors=True)
        options = {
            "model_dir": self.model_dir,
            "data_path": self.shards,
            "output_path": folder,
            "split": split,
            "max_samples": count,
            "dim": args.dim,
            "grad_type": kind,
            "projection": args.projection,
            "seed": args.seed,
            "device": "cpu",
            **({} if optimizer_dir is None else {"optimizer_dir": optimizer_dir}),
        }
        began = time.perf_counter()
        call(args, ["grads", "collect", *(f"--{option}={value}" for option, value in options.items())])
        call(args, ["grads", "aggregate", f"--base_path={folder}", f"--dim={args.dim}"])
        if not cost.is_file():
            write_json(cost, {"seconds": time.perf_counter() - began})
        return open_store(folder / f"dim{args.dim}"), seconds_of(folder)

    @cached_property
    def model_dir(self) -> Path:
        """The model trained on all samples, with Adam's moments."""
        from gradwire.bench.judge import retraining
        from gradwire.lm.data.shards import Shards
        from gradwire.lm.models import folder

        made = self.folder / "model"
        if not made.is_dir():
            with retraining.one_thread():
                train = Shards(self.shards, "train")
                model, optimizer = retraining.trained(recipe_of(self.args), train, range(self.samples), self.samples)
            moments = retraining.moments(model, optimizer)
            tokenizer = self.shards.parent / "tokenizer"
            folder.save(model.state_dict(), model.config, tokenizer, made, {"steps": self.args.steps}, moments)
        return made


def seconds_of(folder: Path) -> float:
    """Return what making a folder took.

    Raises:
        BadInput: If its file does not say.
    """
    seconds = read_object(folder / COST).get("seconds")
    if not isinstance(seconds, float):
        raise BadInput(f"{folder / COST} has no seconds: delete {folder} and run the same command again.")
    return seconds


def recipe_of(args: argparse.Namespace) -> Recipe:
    """Return the trainings' recipe.

    Raises:
        BadInput: If it is invalid.
    """
    from gradwire.base.strict import checked
    from gradwire.bench.judge.retraining import Recipe

    given = {"steps": args.steps, "batch_size": args.batch_size, "lr": args.lr, "warmup_steps": 0, "profile": False}
    return Recipe(args.model, checked(Training, given, ""), args.seed)


def opened(args: argparse.Namespace, queries: int) -> tuple[Shards, Shards, int]:
    """Open and check the splits and the model of ``--data_path``; return them and the number of samples.

    Raises:
        BadInput: If they are invalid, do not match, or have too few samples.
    """
    from gradwire.lm.data.shards import Shards, check, exist
    from gradwire.lm.models import causal

    path = args.data_path
    folder = path / "shards" if not exist(path) and exist(path / "shards") else path
    train, val = Shards(folder, "train"), Shards(folder, "val")
    check(folder)
    causal.check(args.model, train.meta["vocab_size"], train.meta["max_length"])
    samples = len(train) if args.max_samples is None else args.max_samples
    for flag, split, wanted in (("--max_samples", train, samples), ("--queries", val, queries)):
        if wanted > len(split):
            raise BadInput(f"{flag}: {split.folder} has {len(split)} samples, and {wanted} are needed.")
    return train, val, samples


def settings_of(verb: str, args: argparse.Namespace, train: Shards, val: Shards, samples: int) -> dict[str, Any]:
    """Return what the trainings and the stores of a folder depend on."""
    from gradwire.base.source_digest import source_digest
    from gradwire.lm.models import causal, presets, saved

    content = saved.digest(Path(args.model)) if causal.is_saved(args.model) else presets.content(args.model)
    options = ("queries", "steps", "batch_size", "lr", "dim", "projection", "seed")
    return {
        "verb": verb,
        "source": source_digest("gradwire.bench.judge.retraining"),
        "train_digest": train.digest,
        "val_digest": val.digest,
        "samples": samples,
        "model": content,
        **{name: getattr(args, name) for name in options},
    }


def claim(folder: Path, settings: Mapping[str, Any]) -> None:
    """Write the settings of a results folder, or check those that are there.

    Raises:
        BadInput: If the folder has results of other settings, or other files.
    """
    path = folder / SETTINGS
    if not path.is_file() and any(not one.name.endswith(".failed.json") for one in folder.glob("*")):
        raise BadInput(f"{folder} has files of something else: choose a new --output_dir.")
    found = read_object(path) if path.is_file() else settings
    for name in settings:
        if found.get(name) != settings[name]:
            raise BadInput(
                f"{folder} has results of another {name}: {found.get(name)!r} there and {settings[name]!r} here; "
                "choose another --output_dir."
            )
    if not path.is_file():
        write_json(path, settings)


def interval(means: NDArray[np.float64]) -> tuple[float, float]:
    """Return the ends of the 95 % interval of resampled means."""
    low, high = np.quantile(means, INTERVAL).tolist()
    return low, high


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Format a Markdown table; all columns but the first are numbers."""
    from tabulate import tabulate

    sides = ["left"] + ["right"] * (len(rows[0]) - 1)
    return tabulate(rows, headers="keys", tablefmt="pipe", colalign=sides, disable_numparse=True)


def costs(row: Mapping[str, Any]) -> dict[str, str]:
    """Format the cost of a method."""
    return {"seconds": f"{row['seconds']:.1f}", "store bytes": f"{row['store_bytes']:,}"}


def shown(value: float, ends: Sequence[float]) -> str:
    """Format a value with its interval."""
    return f"{value:.3f} [{ends[0]:.3f}, {ends[1]:.3f}]"
