"""The verb ``grads run``: collect, aggregate and validate from one configuration file."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gradwire.attribution.collect import collect
from gradwire.base.errors import BadInput, unknown
from gradwire.base.files import read_yaml
from gradwire.base.flags import COUNT, RANKS, check_numbers, check_paths, output_folder
from gradwire.base.rank_env import RankEnv

REQUIRED = ("model_dir", "data_path", "dim")
OWN = ("train", "recompute", "launcher")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Define the verb's flags."""
    parser.add_argument(
        "--config_path",
        type=Path,
        required=True,
        help="YAML or JSON file with the options of `grads collect` (model_dir, data_path, ...), `recompute: K` for "
        "`grads validate`, `launcher: NAME` for `gradwire launch`, and `train: OPTIONS` to run `gradwire train "
        "OPTIONS` first",
    )
    parser.add_argument("--output_dir", type=output_folder, required=True, help="the collection folder")
    parser.add_argument("--num_gpus", type=RANKS, default=1, help="number of ranks for training and collection")
    parser.add_argument(
        "--dim", type=COUNT, nargs="+", metavar="N", help="columns per row (default: `dim` of the file)"
    )
    parser.add_argument("--skip_training", action="store_true", help="ignore `train` of the file")


def beside(args: argparse.Namespace) -> Path:
    """Return the collection folder."""
    return args.output_dir


def main(args: argparse.Namespace) -> None:
    """Run the steps in order; a failed step ends the verb, and the next call resumes there.

    Raises:
        BadInput: If the configuration is invalid.
        GradwireError: If a step fails.
    """
    config = read(args.config_path, {"dim": args.dim} if args.dim else {})
    for words in commands(config, args.output_dir, args.num_gpus, args.skip_training):
        call(args, words)


def call(args: argparse.Namespace, words: Sequence[str]) -> None:
    """Run a verb in this process.

    Args:
        args: The arguments of the verb that calls it.
        words: The verb and its arguments.
    """
    _, verb, child = args.parse(words)
    check_paths(child)
    check_numbers(child)
    verb.main(child)


def read(path: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Read a configuration file; ``given`` options of the command line override it.

    Raises:
        BadInput: If the file is missing, is not a mapping, lacks an option or has an unknown one.
    """
    config = read_yaml(path)
    if not isinstance(config, dict):
        raise BadInput(f"{path} is not a mapping of options such as `model_dir: results/…/final_model`.")
    config |= given
    known = _options()
    for name in config:
        if name not in known:
            raise unknown(f"option in {path}", str(name), known)
    for name in ("train", "launcher"):
        if not isinstance(config.get(name, ""), str):
            raise BadInput(f"{path}: {name} must be a string, got {config[name]!r}.")
    for name in REQUIRED:
        if name not in config:
            raise BadInput(f"{path} lacks {name}.")
    return config


def _options() -> set[str]:
    """Return the options that a configuration file may set."""
    parser = argparse.ArgumentParser(add_help=False)
    collect.arguments(parser)
    return {*vars(parser.parse_args(["--model_dir=", "--data_path=", "--output_path=.", "--dim=1"])), *OWN} - {
        "output_path",
        *RankEnv._fields,
    }


def commands(config: Mapping[str, Any], collection: Path, num_gpus: int, skip_training: bool) -> Iterator[list[str]]:
    """Yield the steps as command lines."""
    launcher = ["--launcher", config["launcher"]] if "launcher" in config else []
    ranks = ["launch", "--world_size", str(num_gpus), *launcher, "--"]
    if "train" in config and not skip_training:
        yield [*ranks, "train", *shlex.split(config["train"])]
    options = {name: value for name, value in config.items() if name not in OWN}
    yield [*(ranks if num_gpus > 1 else []), "grads", "collect", *_flags({**options, "output_path": collection})]
    for dim in _list(config["dim"]):
        yield ["grads", "aggregate", *_flags({"base_path": collection, "dim": dim, "num_gpus": num_gpus})]
    yield ["grads", "validate", *_flags({"output_dir": collection, "recompute": config.get("recompute")})]


def _flags(options: Mapping[str, Any]) -> list[str]:
    """Format ``{"dim": [8, 9], "restart": True}`` as ``--dim 8 9 --restart``; None and False are omitted."""
    words = []
    for name, value in options.items():
        if value is not None and value is not False:
            words += [f"--{name}", *([] if value is True else map(str, _list(value)))]
    return words


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
