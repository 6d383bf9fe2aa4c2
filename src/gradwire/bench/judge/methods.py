"""Attribution methods, and what `grads lds` and `grads recall` share: a trained model, its stores, scores and costs.

A score is high where training on the sample should lower the query's loss. All but ``random`` are of gradients at the
model trained on all samples: of rows that `grads collect` writes there, or without ``--dim`` those of `grads score`.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self

import numpy as np
from pydantic import Field, model_validator

from gradwire.attribution.options import PROJECTION, Count, Projection, RowGradient
from gradwire.attribution.query.curvature import DAMPING, solver
from gradwire.base.errors import BadInput
from gradwire.base.files import read_object, write_json
from gradwire.base.flags import NOT_NEGATIVE, POSITIVE, SEED, output_folder
from gradwire.base.machine import one_thread
from gradwire.base.strict import Strict, checked
from gradwire.bench.config import Training
from gradwire.lm.data.defaults import Split

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gradwire.attribution.query.search import Store
    from gradwire.bench.judge.retraining import Recipe
    from gradwire.lm.data.shards import Shards

SETTINGS = "settings.json"
COST = "cost.json"  # of a store or of factors: its seconds
RESAMPLES = 1000
INTERVAL = (0.025, 0.975)
TRAINING = Training.model_fields
MethodName = Literal["random", "dot", "cosine", "adam", "fisher", "fisher-cosine", "ekfac", "ekfac-cosine"]


class Method(NamedTuple):
    """How a method scores.

    Attributes:
        rows: Gradient type of the samples' rows. None: scores are random.
        metric: ``cosine`` or ``dot``.
        curved: Whether products and norms are those under `curvature`.
        queries: Gradient type of the queries' rows.
    """

    rows: RowGradient | None
    metric: str = ""
    curved: bool = False
    queries: RowGradient = "sgd"


METHODS: dict[MethodName, Method] = {
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
    """A method's scores, float64 [samples, queries], its seconds (rows and scores), and the bytes that it stores."""

    values: NDArray[np.float64]
    seconds: float
    store_bytes: int


class JudgeOptions(Strict):
    """Flags of both verbs."""

    data_path: Path = Field(description="a shards folder with a train and a val split")
    output_dir: Annotated[Path, output_folder] = Field(description="folder for all results; resumes what is there")
    max_samples: Count | None = Field(None, description="train on the first N samples only (default: all)")
    queries: Count = Field(32, description="validation samples to use as queries")
    methods: tuple[MethodName, ...] | None = Field(
        None, description="methods to judge (default: all; without --dim, all but those of fisher)"
    )
    model: str = Field("tiny", description="a preset, options as JSON, or a folder, as for train")
    steps: Count = Field(TRAINING["steps"].default, description="steps of each training")
    batch_size: Count = Field(TRAINING["batch_size"].default, description="samples per step")
    lr: Annotated[float, POSITIVE] = Field(TRAINING["lr"].default, description="peak learning rate of AdamW")
    dim: Count | None = Field(
        None, description="columns per row (default: no rows; scores of whole gradients by `grads score`)"
    )
    projection: Projection = Field(PROJECTION, description="as for collect")
    damping: Annotated[float, NOT_NEGATIVE] = Field(
        DAMPING, description="of the fisher methods and of ekfac, in units of the mean curvature"
    )
    seed: Annotated[int, SEED] = Field(0, description="of weights, order, projection, subsets and resampling")

    @model_validator(mode="after")
    def _check_rows(self) -> Self:
        if self.dim is None and (curved := [name for name in self.methods or () if METHODS[name].curved]):
            raise ValueError(f"--methods {curved[0]} is given without --dim: its curvature is that of rows")
        return self

    @property
    def chosen_methods(self) -> tuple[MethodName, ...]:
        """The methods to judge."""
        return self.methods or tuple(name for name in METHODS if self.dim is not None or not METHODS[name].curved)

    @property
    def recipe(self) -> Recipe:
        """The trainings' recipe.

        Raises:
            BadInput: If it is invalid.
        """
        from gradwire.bench.judge.retraining import Recipe

        trained = {"steps": self.steps, "batch_size": self.batch_size, "lr": self.lr}
        return Recipe(self.model, checked(Training, {**trained, "warmup_steps": 0, "profile": False}, ""), self.seed)


def beside(options: JudgeOptions) -> Path:
    """Return the results folder."""
    return options.output_dir


class Study:
    """A model trained on all samples, and the gradients of samples and queries there.

    Args:
        options: The options of the verb.
        shards: The shards folder; samples are those of its train split, queries the first of its val split.
        samples: Number of samples.
        queries: Number of queries.
    """

    def __init__(self, options: JudgeOptions, shards: Path, samples: int, queries: int) -> None:
        self.options, self.folder, self.shards = options, options.output_dir, shards
        self.samples, self.queries = samples, queries

    def scores(self, name: MethodName) -> Scores:
        """Score every sample for every query by a method."""
        from gradwire.attribution.query.influence import check_alike
        from gradwire.attribution.query.search import groups_of, similarities, target
        from gradwire.attribution.store.row_file import RowFile

        method = METHODS[name]
        if method.rows is None:
            random = np.random.default_rng(self.options.seed)
            return Scores(random.standard_normal((self.samples, self.queries)), 0.0, 0)
        if self.options.dim is None:
            return self._streamed(method)
        (train, of_rows), (queries, of_queries) = self._rows[method.rows], self._rows[f"queries of {method.queries}"]
        if method.rows == "ekfac":
            of_rows += self._factors[1]
        check_alike(train, queries)
        began = time.perf_counter()
        rows = RowFile(train.rows.names.rows)
        solve = solver(rows, self.options.damping if method.curved else None)
        against = target(queries.rows, method.metric, groups_of("max", queries.rows.shape[0]), solve)
        values = np.concatenate(list(similarities(rows, against, method.metric, solve)))
        seconds = time.perf_counter() - began + of_rows + of_queries
        return Scores(values, seconds, train.rows.names.rows.stat().st_size)

    def _streamed(self, method: Method) -> Scores:
        """Score by `grads score`, or read the scores that are there."""
        from gradwire.attribution.collect import score

        factors, of_factors = self._factors if method.rows == "ekfac" else (None, 0.0)
        name = f"{method.rows}-{self.options.damping:g}" if factors else method.rows
        folder = self.folder / f"scores-{name}-{method.metric}"
        if not (folder / COST).is_file():  # begun and not completed: its time would be that of the rest
            shutil.rmtree(folder, ignore_errors=True)
        began = time.perf_counter()
        score.main(
            score.Options(
                model_dir=self.model_dir,
                data_path=self.shards,
                split="train",
                max_samples=self.samples,
                query_path=self.shards,
                query_split="val",
                queries=self.queries,
                grad_type=method.rows,
                metric=method.metric,
                optimizer_dir=factors,
                device="cpu",
                output_dir=folder,
            )
        )
        if not (folder / COST).is_file():
            write_json(folder / COST, {"seconds": time.perf_counter() - began})
        matrix = folder / score.MATRIX
        values = np.load(matrix, allow_pickle=False).astype(np.float64)
        return Scores(values, seconds_of(folder) + of_factors, matrix.stat().st_size)

    @cached_property
    def _rows(self) -> dict[str, tuple[Store, float]]:
        """The stores, with the seconds that each took: of the samples by gradient type, and of the queries.

        The queries come first: every method bears their cost, and with it that of the first imports.
        """
        methods = [METHODS[name] for name in self.options.chosen_methods if METHODS[name].rows is not None]
        queries = {
            f"queries of {kind}": self._collected("val", kind) for kind in dict.fromkeys(m.queries for m in methods)
        }
        return queries | {kind: self._collected("train", kind) for kind in sorted({m.rows for m in methods if m.rows})}

    @cached_property
    def _factors(self) -> tuple[Path, float]:
        """The folder of EK-FAC's factors, with the seconds that they took."""
        from gradwire.attribution.collect import factors

        made = self.folder / f"factors-{self.options.damping:g}"
        began = time.perf_counter()
        if not (made / COST).is_file():
            factors.main(
                factors.Options(
                    model_dir=self.model_dir,
                    data_path=self.shards,
                    split="train",
                    max_samples=self.samples,
                    output_dir=made,
                    damping=self.options.damping,
                )
            )
            write_json(made / COST, {"seconds": time.perf_counter() - began})
        return made, seconds_of(made)

    def _collected(self, split: Split, kind: RowGradient) -> tuple[Store, float]:
        """Collect the samples' or the queries' store, or check the one that is there."""
        from gradwire.attribution.collect import collect
        from gradwire.attribution.query.search import open_store
        from gradwire.attribution.store import aggregate

        name: str = "queries" if split == "val" else kind
        optimizer_dir = None
        if kind == "ekfac":
            optimizer_dir, _ = self._factors
            name = f"ekfac-{self.options.damping:g}{'-queries' if split == 'val' else ''}"
        dim, projection = self.options.dim, self.options.projection
        assert dim is not None
        folder = self.folder / f"{name}-{projection}-{dim}"
        cost = folder / COST
        if not cost.is_file():  # begun and not completed: its time would be that of the rest
            shutil.rmtree(folder, ignore_errors=True)
        rows = collect.Options(
            model_dir=self.model_dir,
            data_path=self.shards,
            output_path=folder,
            split=split,
            max_samples=self.queries if split == "val" else self.samples,
            dim=(dim,),
            grad_type=kind,
            projection=projection,
            seed=self.options.seed,
            device="cpu",
            optimizer_dir=optimizer_dir,
            discard_parts=True,
        )
        began = time.perf_counter()
        collect.main(rows)
        aggregate.main(aggregate.Options(base_path=folder, dim=dim, discard_parts=True))
        if not cost.is_file():
            write_json(cost, {"seconds": time.perf_counter() - began})
        return open_store(folder / f"dim{dim}"), seconds_of(folder)

    @cached_property
    def model_dir(self) -> Path:
        """The model trained on all samples, with Adam's moments."""
        from gradwire.bench.judge import retraining
        from gradwire.lm.data.shards import Shards
        from gradwire.lm.models import causal

        made = self.folder / "model"
        if not made.is_dir():
            with one_thread():
                train = Shards(self.shards, "train")
                model, optimizer = retraining.trained(self.options.recipe, train, range(self.samples), self.samples)
            moments = retraining.moments(model, optimizer)
            tokenizer = self.shards.parent / "tokenizer"
            causal.save(model.state_dict(), model.config, tokenizer, made, {"steps": self.options.steps}, moments)
        return made


def seconds_of(folder: Path) -> float:
    """Return what making a folder took.

    Raises:
        BadInput: If its file does not have it.
    """
    seconds = read_object(folder / COST).get("seconds")
    if not isinstance(seconds, float):
        raise BadInput(f"{folder / COST} has no seconds: delete {folder} and run the same command again.")
    return seconds


def opened(options: JudgeOptions, queries: int) -> tuple[Shards, Shards, int]:
    """Open and check the splits and the model of ``--data_path``; return them and the number of samples.

    Raises:
        BadInput: If they are invalid, do not match, or have too few samples.
    """
    from gradwire.lm.data.shards import Shards, check, exist
    from gradwire.lm.models import causal

    path = options.data_path
    folder = path / "shards" if not exist(path) and exist(path / "shards") else path
    train, val = Shards(folder, "train"), Shards(folder, "val")
    check(folder)
    causal.check(options.model, train.meta["vocab_size"], train.meta["max_length"])
    samples = len(train) if options.max_samples is None else options.max_samples
    for flag, split, wanted in (("--max_samples", train, samples), ("--queries", val, queries)):
        if wanted > len(split):
            raise BadInput(f"{flag}: {split.folder} has {len(split)} samples, and {wanted} are needed.")
    return train, val, samples


def settings_of(verb: str, options: JudgeOptions, train: Shards, val: Shards, samples: int) -> dict[str, Any]:
    """Return what the trainings and the stores of a folder depend on."""
    from gradwire.base.source_digest import source_digest
    from gradwire.lm.models import causal, presets, saved

    content = saved.digest(Path(options.model)) if causal.is_saved(options.model) else presets.content(options.model)
    names = ("queries", "steps", "batch_size", "lr", "seed")
    return {
        "verb": verb,
        "source": source_digest("gradwire.bench.judge.retraining"),
        "train_digest": train.digest,
        "val_digest": val.digest,
        "samples": samples,
        "model": content,
        **{name: getattr(options, name) for name in names},
    }


def claim(folder: Path, settings: Mapping[str, Any]) -> None:
    """Write the settings of a results folder, or check those that are there.

    Raises:
        BadInput: If the folder has results of other settings, or other files.
    """
    path = folder / SETTINGS
    if not path.is_file() and any(not file.name.endswith(".failed.json") for file in folder.glob("*")):
        raise BadInput(f"{folder} has files of something else: choose a new --output_dir.")
    noted = read_object(path) if path.is_file() else settings
    for name in settings:
        if noted.get(name) != settings[name]:
            raise BadInput(
                f"{folder} has results of another {name}: {noted.get(name)!r} there and {settings[name]!r} here; "
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
