"""The verb ``grads run``: collect, aggregate and validate from one configuration file."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from gradwire.attribution.collect.collect import Collection
from gradwire.attribution.options import Count
from gradwire.base.errors import BadInput
from gradwire.base.files import read_yaml
from gradwire.base.flags import NATURAL, RANKS, output_folder
from gradwire.base.strict import Strict, checked, to_flags
from gradwire.bench.command import Command


class Options(Strict):
    """Flags of ``gradwire grads run``."""

    config_path: Path = Field(
        description="YAML or JSON file with the options of `grads collect` (model_dir, data_path, ...), `recompute: K` "
        "for `grads validate`, `launcher: NAME` for `gradwire launch`, and `train: OPTIONS` to run `gradwire train "
        "OPTIONS` first"
    )
    output_dir: Annotated[Path, output_folder] = Field(description="the collection folder")
    num_gpus: Annotated[int, RANKS] = Field(1, description="number of ranks for training and collection")
    dim: tuple[Count, ...] | None = Field(None, description="columns per row (default: `dim` of the file)")
    skip_training: bool = Field(False, description="ignore `train` of the file")


class Config(Collection):
    """A configuration file."""

    train: str | None = None
    recompute: Annotated[int, NATURAL] = 0
    launcher: str | None = None


def beside(options: Options) -> Path:
    """Return the collection folder."""
    return options.output_dir


def main(options: Options) -> None:
    """Run the steps in order; a failed step ends the verb, and the next call resumes there.

    Raises:
        BadInput: If the configuration is invalid.
        GradwireError: If a step fails.
    """
    config = read(options.config_path, {"dim": options.dim} if options.dim else {})
    for words in commands(config, options):
        Command(words).run()


def read(path: Path, given: Mapping[str, Any]) -> Config:
    """Read a configuration file; ``given`` options of the command line override it.

    Raises:
        BadInput: If the file is missing, is not a mapping, lacks an option, or has an unknown or invalid one.
    """
    values = read_yaml(path)
    if not isinstance(values, dict):
        raise BadInput(f"{path} is not a mapping of options such as `model_dir: results/…/final_model`.")
    values |= given
    if isinstance(values.get("dim"), int):
        values["dim"] = [values["dim"]]
    return checked(Config, values, str(path))


def commands(config: Config, options: Options) -> Iterator[list[str]]:
    """Yield the steps as command lines."""
    folder, world_size = str(options.output_dir), str(options.num_gpus)
    launcher = ["--launcher", config.launcher] if config.launcher else []
    ranks = ["launch", "--world_size", world_size, *launcher, "--"]
    if config.train is not None and not options.skip_training:
        yield [*ranks, "train", *shlex.split(config.train)]
    collected = ["--output_path", folder, *to_flags(config, *Collection.model_fields)]
    yield [*(ranks if options.num_gpus > 1 else []), "grads", "collect", *collected]
    for dim in config.dim:
        yield ["grads", "aggregate", "--base_path", folder, "--dim", str(dim), "--num_gpus", world_size]
    yield ["grads", "validate", "--output_dir", folder, "--recompute", str(config.recompute)]
