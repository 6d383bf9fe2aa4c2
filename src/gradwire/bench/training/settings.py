"""Settings of one training run: the parsed arguments of ``gradwire train``, checked against the data."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gradwire.base.errors import BadInput
from gradwire.base.files import digest, read_json
from gradwire.base.model_flags import from_flags
from gradwire.base.parsing import parse_json
from gradwire.base.source_digest import source_digest
from gradwire.bench.config import FLAGS, Cell, Strategy, Training, check_private
from gradwire.comm.compressors.registry import sources
from gradwire.comm.topology import STRATEGIES, check_topology
from gradwire.lm.models import presets

UNIDENTIFYING = {"checkpoint_every", "keep_checkpoints", "keep_model_every", "log"}  # they change no result


@dataclass(frozen=True)
class Settings:
    """Settings of one run.

    Args:
        training: Steps, learning rate and the like.
        cell: The compressor setting.
        strategy: The data-parallel strategy.
        model: A preset's name, a folder, or inline options as JSON.
        islands: Number of islands that the ranks form; 1 but for strategy hsdp and on a link between islands.
        seed: Seeds the model, the order of the data and the compressor.
        data_path: A shards folder or a corpus file.
        output_dir: The run's folder.
        resume: Resume from the newest checkpoint in ``output_dir``.
        restart: Start over if that checkpoint has another configuration or source, instead of raising an error.
        verify_sync: Steps between checks that the ranks agree; 0 disables them.
    """

    training: Training
    cell: Cell
    strategy: Strategy
    model: str
    seed: int
    data_path: Path
    output_dir: Path
    resume: bool
    verify_sync: int = 0
    restart: bool = False
    islands: int = 1

    def shared_out(self, world_size: int, link: str | None) -> Settings:
        """The same run with the global batch divided among ranks; see `Training.shared_out`.

        Args:
            world_size: Number of ranks.
            link: The link between them; None if the ranks have not been started.

        Raises:
            BadInput: If it cannot be divided, or the ranks cannot form the islands.
        """
        check_topology(self.strategy, world_size, self.islands, link)
        return replace(self, training=self.training.shared_out(world_size))

    def identity(self, world_size: int, data: str) -> str:
        """A digest of everything that determines the result; runs with equal identities are repetitions.

        Args:
            world_size: Number of ranks.
            data: The digest of the shards.
        """
        return digest(
            {
                **self._content(data, UNIDENTIFYING),
                "strategy": self.strategy,
                "world_size": world_size,
                "islands": self.islands,
            }
        )

    def task(self, data: str) -> str:
        """A digest of what is trained, and by which source, whatever the strategy and the number of ranks.

        Args:
            data: The digest of the shards.
        """
        shared_out = {"batch_size"} if self.training.global_batch_size else set()
        source = source_digest(*modules(self.cell))
        return digest({**self._content(data, UNIDENTIFYING | shared_out), "source": source})

    def _content(self, data: str, left_out: set[str]) -> dict[str, Any]:
        return {
            "training": self.training.model_dump(mode="json", exclude=left_out),
            "cell": self.cell.flat(),
            "model": presets.content(self.model),
            "seed": self.seed,
            "data": data,
        }

    def source(self) -> str:
        """A digest of the source that trains the run."""
        return source_digest(*modules(self.cell, self.strategy))


def modules(cell: Cell, strategy: str = "") -> list[str]:
    """The modules that a cell's training depends on; without a strategy, those of any.

    Methods, strategies and optimizers are imported by name, so following imports does not find them. Those of other
    packages are not tracked.
    """
    named = [source for name in cell.methods for source in sources(name)]
    if not cell.communication.averages_gradients:
        named.append(f"gradwire.comm.parallel.optimizers.{cell.communication.module}")
    if strategy in STRATEGIES.built_in():
        named.append(f"{STRATEGIES.package}.{strategy}")
    return ["gradwire.bench.training.train", *named]


def from_arguments(args: argparse.Namespace) -> Settings:
    """Build the settings from the command line.

    Raises:
        BadInput: For an unknown compressor or option, JSON that is not an object, a value out of range, options that
            contradict each other or the strategy, or a logger that is not installed.
    """
    try:
        options: Any = parse_json(args.comm_config_json)
    except ValueError as error:
        raise BadInput(f"--comm_config_json is not valid JSON ({error}): {args.comm_config_json[:80]}") from None
    if not isinstance(options, dict):
        raise BadInput(f"--comm_config_json must be a JSON object such as {{}}, got {args.comm_config_json[:80]}.")
    for name, key in FLAGS.items():
        flag = getattr(args, name)
        if flag is not None and options.setdefault(key, flag) != flag:
            raise BadInput(f"--{name} is {flag}, and --comm_config_json has {options[key]!r}; omit one of them.")
    method = options.setdefault("method", "none")
    cell = Cell.parse(args.label or str(method), options)
    cell.check_strategy(args.strategy)
    training = cell.own(from_flags(Training, args))
    if training.log == "wandb" and find_spec("wandb") is None:
        raise BadInput("--log wandb needs Weights & Biases: pip install 'gradwire[wandb]'.")
    check_private(training, cell, args.strategy)
    return Settings(
        training=training,
        cell=cell,
        strategy=args.strategy,
        model=args.model,
        seed=args.seed,
        data_path=Path(args.data_path),
        output_dir=Path(args.output_dir),
        resume=args.resume,
        verify_sync=args.verify_sync,
        restart=args.restart,
        islands=args.islands,
    )


def check_enough_data(n_samples: int, batch_size: int, world_size: int) -> None:
    """Check that the training split has a batch for every rank.

    Raises:
        BadInput: If there is less than one batch per rank.
    """
    if n_samples < batch_size * world_size:
        raise BadInput(
            f"the training split has {n_samples} samples, but {world_size} ranks of --batch_size {batch_size} need "
            f"{batch_size * world_size} for one step; use more data, fewer ranks or a smaller batch."
        )


def check_run_folder(folder: Path, identity: str) -> None:
    """Check that the run folder does not hold a finished run of another configuration.

    Raises:
        BadInput: If ``folder`` holds a record with another identity.
    """
    record = folder / "record.json"
    if record.exists() and read_json(record).get("identity") != identity:
        raise BadInput(
            f"{folder} is a run folder of another configuration (its record.json differs in settings or data); "
            "choose another --output_dir or delete the folder."
        )
