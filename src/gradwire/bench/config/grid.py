"""The grid of an experiment: its runs, and selections of them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BeforeValidator, Field, model_validator

from gradwire.attribution.options import PROJECTION, GradType, Projection, RowOptions
from gradwire.base.errors import BadInput, unknown
from gradwire.base.flags import COUNT
from gradwire.base.strict import Strict
from gradwire.base.units import UNSHAPED
from gradwire.bench.config.values import Count, Link, Natural, Ranks, Seed, Strategy
from gradwire.lm.data import Split

PATH = "{strategy}/{compressor}/ws{world_size}{islands}/{link}/seed{seed}"  # of a run's folder, by its wildcards
ISLANDS = "-islands"
NUMBERS = {"world_size": r"\d+", "islands": rf"({ISLANDS}\d+)?", "seed": r"\d+"}  # wildcards that are


class Run(NamedTuple):
    """One run of the experiment: a compressor label, strategy, world size, link, seed and number of islands."""

    strategy: str
    compressor: str
    world_size: int
    link: str
    seed: int
    islands: int = 1

    @property
    def path(self) -> str:
        """The run's folder below ``runs/``."""
        return PATH.format(**self.wildcards)

    @classmethod
    def at(cls, path: str) -> Run | None:
        """The run of a `path`; None if it is not a run's."""
        groups = {name: f"(?P<{name}>{NUMBERS.get(name, '[^/]+')})" for name in cls._fields}
        match = re.fullmatch(PATH.format(**groups), path)
        return match and cls.of(match.groupdict())

    @property
    def wildcards(self) -> dict[str, str]:
        """The fields as they are in a path; a single island is left out."""
        values = {name: str(value) for name, value in self._asdict().items()}
        return values | {"islands": "" if self.islands == 1 else f"{ISLANDS}{self.islands}"}

    @classmethod
    def of(cls, wildcards: Mapping[str, str]) -> Run:
        """The run with these `wildcards`."""
        strategy, compressor, world_size, link, seed, islands = (wildcards[name] for name in cls._fields)
        number = int(islands.removeprefix(ISLANDS) or 1)
        return cls(strategy, compressor, int(world_size), link, int(seed), number)


class Selection(Strict):
    """Some runs of the grid; an omitted field selects all values."""

    strategies: tuple[Strategy, ...] | None = None
    compressors: tuple[str, ...] | None = None
    world_sizes: tuple[Ranks, ...] | None = None
    links: tuple[Link, ...] | None = None
    seeds: tuple[Seed, ...] | None = None
    islands: tuple[Ranks, ...] | None = None

    def holds(self, run: Run) -> bool:
        """Whether ``run`` is selected."""
        chosen = (self.strategies, self.compressors, self.world_sizes, self.links, self.seeds, self.islands)
        return all(values is None or value in values for value, values in zip(run, chosen, strict=True))

    def check(self, runs: Sequence[Run], where: str) -> None:
        """Check that the grid has the selected values.

        Args:
            runs: The runs of the grid.
            where: The selection's place in the configuration.

        Raises:
            BadInput: If no run has one of the values, or no run is selected.
        """
        for position, name in enumerate(Selection.model_fields):
            known = {str(run[position]) for run in runs}
            for value in getattr(self, name) or ():
                if str(value) not in known:
                    raise unknown(f"value of {where}.{name}", str(value), known)
        if not any(map(self.holds, runs)):
            raise BadInput(f"{where}: selects none of the {len(runs)} runs of the grid.")


class Exclusion(Selection):
    """Runs to leave out, with the reason; they get a row with status ``skipped``."""

    reason: str


class Gradients(RowOptions, Selection):
    """Runs whose per-sample gradients are collected, and the settings for them."""

    dim: tuple[Count, ...] = Field((256,), min_length=1, description="dimensions of the projections")
    grad_type: GradType = Field("sgd", description="kind of gradient in a row")
    projection: Projection = Field(PROJECTION, description="method of projection")
    split: Split = Field("val", description="split of the samples")
    max_samples: int | None = Field(None, **COUNT.limits, description="number of samples; default: all")
    recompute: Natural = Field(4, description="number of rows that validation recomputes")
    query: str | None = Field(None, min_length=1, description="prompt whose nearest samples each store is asked for")
    norms: bool = Field(False, description="also write norms.parquet, the norm of every sample's gradient")


class Grid(Strict):
    """A product of settings; each combination is a run."""

    strategies: tuple[Strategy, ...] = ("fsdp2",)
    world_sizes: tuple[Ranks, ...] = (2,)
    seeds: tuple[Seed, ...] = (0,)
    links: tuple[Link, ...] = (UNSHAPED,)
    islands: tuple[Ranks, ...] = Field(
        (1,), description="numbers of islands that the ranks form, for strategy hsdp or a link between them"
    )
    compressors: tuple[str, ...] | Literal["all"] = "all"
    simulated: bool = Field(
        False, description="a run's ranks take turns in one process: equal results, on one core or GPU, without times"
    )
    steps: Count | None = Field(
        None,
        description="optimizer steps of runs for times only, fewer than `training.steps`: they are not evaluated, "
        "have no dense steps after the warm-up, and take the perplexities of the other runs with their labels",
    )

    @model_validator(mode="after")
    def _runs_for_times_have_processes(self) -> Self:
        if self.simulated and self.steps is not None:
            raise ValueError("`steps` is for runs whose times are asked for, and simulated runs have none: omit one")
        return self

    def runs(self, labels: Iterable[str]) -> list[Run]:
        """Every run of the product, with the labels of all cells in ``labels``."""
        labels = labels if self.compressors == "all" else self.compressors
        product = itertools.product(self.strategies, labels, self.world_sizes, self.links, self.seeds, self.islands)
        return [Run(*values) for values in product]


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, Mapping) else value


Grids = Annotated[tuple[Grid, ...], BeforeValidator(_as_list, json_schema_input_type=Grid | tuple[Grid, ...])]
