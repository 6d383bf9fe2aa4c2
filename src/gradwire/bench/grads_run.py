"""The command ``grads run``: collect, aggregate and validate from one configuration file."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from gradwire.attribution.collect.collect import Collection
from gradwire.attribution.options import Count, PartOptions
from gradwire.attribution.store import provenance
from gradwire.attribution.store.aggregate import check_asked
from gradwire.base.errors import BadInput
from gradwire.base.files import read_yaml
from gradwire.base.flags import NATURAL, RANKS
from gradwire.base.strict import checked, to_flags
from gradwire.bench.command import Command


class Options(PartOptions):
    """Flags of ``gradwire grads run``."""

    config_path: Path | None = Field(
        None,
        description="YAML or JSON file with the options of `grads collect` (model_dir, data_path, ...), `recompute: K` "
        "for `grads validate`, `launcher: NAME` for `gradwire launch`, and `train: OPTIONS` to run `gradwire train "
        "OPTIONS` first; required without --skip_training",
    )
    output_dir: Path = Field(description="the collection folder")
    num_gpus: Annotated[int, RANKS] | None = Field(
        None, description="number of ranks for training and collection (default: 1; with --skip_training, as collected)"
    )
    dim: tuple[Count, ...] | None = Field(
        None, description="columns per row (default: `dim` of the file; with --skip_training, as collected)"
    )
    skip_training: bool = Field(
        False,
        description="aggregate and validate what was collected, without the model: nothing is trained, collected or "
        "recomputed",
    )


class Config(Collection):
    """A configuration file."""

    train: str | None = None
    recompute: Annotated[int, NATURAL] = 0
    launcher: str | None = None


def output_dir(options: Options) -> Path:
    """Return the collection folder."""
    return options.output_dir


def main(options: Options) -> None:
    """Run the steps in order; a failed step ends the command, and the next call resumes there.

    Raises:
        BadInput: If the configuration is invalid.
        GradwireError: If a step fails.
    """
    given: dict[str, Any] = {"dim": options.dim} if options.dim else {}
    given |= {"discard_parts": True} if options.discard_parts else {}
    collected = {"dim": provenance.read(options.output_dir).dims} if options.skip_training else {}
    config = read(options.config_path, given, collected) if options.config_path else None
    for words in afterwards(config, options) if options.skip_training else commands(config, options):
        Command(words).run()


def read(path: Path, given: Mapping[str, Any], collected: Mapping[str, Any] | None = None) -> Config:
    """Read a configuration file; options of the command line override it, and what was collected fills it up.

    Raises:
        BadInput: If the file is missing, is not a mapping, lacks an option, or has an unknown or invalid one.
    """
    values = read_yaml(path)
    if not isinstance(values, dict):
        raise BadInput(f"{path} is not a mapping of options such as `model_dir: results/…/final_model`.")
    values = {**(collected or {}), **values, **given}
    if isinstance(values.get("dim"), int):
        values["dim"] = [values["dim"]]
    return checked(Config, values, str(path))


def commands(config: Config | None, options: Options) -> Iterator[list[str]]:
    """Yield the steps as command lines.

    Raises:
        BadInput: If there is no configuration.
    """
    if config is None:
        raise BadInput("grads run needs --config_path FILE, or --skip_training to aggregate what was collected.")
    num_gpus = options.num_gpus or 1
    folder, world_size = str(options.output_dir), str(num_gpus)
    launcher = ["--launcher", config.launcher] if config.launcher else []
    ranks = ["launch", "--world_size", world_size, *launcher, "--"]
    if config.train is not None:
        yield [*ranks, "train", *shlex.split(config.train)]
    collected = ["--output_path", folder, *to_flags(config, *Collection.model_fields)]
    yield [*(ranks if num_gpus > 1 else []), "grads", "collect", *collected]
    yield from aggregate(folder, config.dim, config)
    yield ["grads", "validate", "--output_dir", folder, "--recompute", str(config.recompute)]


def afterwards(config: Config | None, options: Options) -> Iterator[list[str]]:
    """Yield the steps after the collection as command lines.

    Raises:
        BadInput: If nothing was collected, or by another number of ranks or in other widths.
    """
    folder, origin = str(options.output_dir), provenance.read(options.output_dir)
    dims = options.dim or origin.dims
    check_asked(origin, options.output_dir, options.num_gpus, dims)
    yield from aggregate(folder, dims, config or options)
    yield ["grads", "validate", "--output_dir", folder, "--dim", *map(str, dims)]


def aggregate(folder: str, dims: Iterable[int], options: PartOptions) -> Iterator[list[str]]:
    """Yield a command line for each width that is merged."""
    for dim in dims:
        yield ["grads", "aggregate", "--base_path", folder, "--dim", str(dim), *to_flags(options, "discard_parts")]
