"""The verb ``grads run``: collect, aggregate and validate from one configuration file."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from gradwire.attribution.collect.collect import Collection
from gradwire.attribution.options import Count
from gradwire.base.errors import BadInput
from gradwire.base.files import read_yaml
from gradwire.base.flags import NATURAL, RANKS, check_numbers, check_paths, output_folder
from gradwire.base.strict import Strict, add_flags, checked, from_flags, to_flags


class Flags(Strict):
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


def arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags; not as ``Options``, since `main` needs the parser of the verbs that it runs."""
    add_flags(parser, Flags)


def beside(args: argparse.Namespace) -> Path:
    """Return the collection folder."""
    return args.output_dir


def main(args: argparse.Namespace) -> None:
    """Run the steps in order; a failed step ends the verb, and the next call resumes there.

    Raises:
        BadInput: If the configuration is invalid.
        GradwireError: If a step fails.
    """
    flags = from_flags(Flags, args)
    config = read(flags.config_path, {"dim": flags.dim} if flags.dim else {})
    for words in commands(config, flags):
        _, verb, child = args.parse(words)
        check_paths(child)
        check_numbers(child)
        verb.main(args.options_of(verb, child))


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


def commands(config: Config, flags: Flags) -> Iterator[list[str]]:
    """Yield the steps as command lines."""
    folder, world_size = str(flags.output_dir), str(flags.num_gpus)
    launcher = ["--launcher", config.launcher] if config.launcher else []
    ranks = ["launch", "--world_size", world_size, *launcher, "--"]
    if config.train is not None and not flags.skip_training:
        yield [*ranks, "train", *shlex.split(config.train)]
    collected = ["--output_path", folder, *to_flags(config, *Collection.model_fields)]
    yield [*(ranks if flags.num_gpus > 1 else []), "grads", "collect", *collected]
    for dim in config.dim:
        yield ["grads", "aggregate", "--base_path", folder, "--dim", str(dim), "--num_gpus", world_size]
    yield ["grads", "validate", "--output_dir", folder, "--recompute", str(config.recompute)]
