"""Settings of one training run: the flags of ``gradwire train``, checked against the data."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from gradwire.base.errors import BadInput
from gradwire.base.files import digest, parse_json, read_json
from gradwire.base.flags import COUNT, LORA_RANK, NATURAL, RANKS, SEED
from gradwire.base.rank_env import RankEnvOptions
from gradwire.base.source_digest import source_digest
from gradwire.base.strict import Strict
from gradwire.base.units import UNSHAPED
from gradwire.bench.config import FLAGS, Cell, Strategy, Training, check_private
from gradwire.comm.communication import CommOptimizer
from gradwire.comm.compressors.registry import sources
from gradwire.comm.reduction import ParamCompress
from gradwire.comm.topology import STRATEGIES, check_simulated, check_topology
from gradwire.lm.data import CHAT_FORMAT, LENGTH, MAX_LENGTH, SKIP_INVALID, VOCAB_SIZE, VOCABULARY, ChatFormat
from gradwire.lm.models import presets, saved

if TYPE_CHECKING:
    StrategyName = str
else:  # those of other packages included
    StrategyName = Literal[tuple(STRATEGIES.available())]

UNIDENTIFYING = {"checkpoint_every", "keep_checkpoints", "keep_model_every"}  # they change no result


class CorpusOptions(Strict):
    """Flags for a corpus file."""

    group: ClassVar = ("corpus", "how to tokenize a corpus file; shards are already tokenized")

    tokenizer: str = Field("bpe", description="bpe: train one; or a folder: load its")
    vocab_size: Annotated[int, VOCABULARY] = Field(VOCAB_SIZE, description="vocabulary size of bpe")
    max_length: Annotated[int, LENGTH] | None = Field(
        None, description=f"maximum tokens per sample (default: the shards', else {MAX_LENGTH})"
    )
    chat_format: ChatFormat | None = Field(None, description=CHAT_FORMAT)
    skip_invalid: bool = Field(False, description=SKIP_INVALID)
    cache_dir: Path | None = Field(None, description="folder for the shards (default: the user's cache)")


class Options(CorpusOptions, Training, RankEnvOptions):
    """Flags of ``gradwire train``."""

    data_path: Path = Field(description="a shards folder, or a corpus file (JSON or .jsonl)")
    output_dir: Path = Field(description="the run's folder")
    model: str = Field("tiny", description=f"{presets.MEANING}; or options as JSON: architecture, ...")
    strategy: StrategyName = Field("fsdp2", description="data-parallel strategy")
    islands: Annotated[int, RANKS] = Field(1, description="islands of ranks, for strategy hsdp or a link between them")
    comm_compress: str | None = Field(None, description="gradient compressor (default: the cell's, else none)")
    comm_config_json: str = Field("{}", description="the compressor's and the reducer's options, a JSON object")
    comm_optimizer: CommOptimizer | None = Field(
        None, description="what is averaged: gradients, or an optimizer's momenta (default: the cell's, else gradient)"
    )
    param_compress: ParamCompress | None = Field(
        None, description="compression of fsdp2's parameter all-gathers (default: the cell's, else none)"
    )
    label: str | None = Field(None, description="the cell's name in tables (default: the compressor's name)")
    seed: Annotated[int, SEED] = Field(0, description="seed of the model, the data order and the compressor")
    lora_rank: Annotated[int, LORA_RANK] | None = Field(
        None,
        description="train a new LoRA adapter of this rank, for --model, a folder of a saved model; final_model/ and "
        "models/ then hold adapters",
    )
    epochs: Annotated[int, COUNT] | None = Field(
        None, description="passes over the data, instead of --steps; keeps a model after each, or as --keep_model_every"
    )
    resume: bool = Field(False, description="resume from the newest valid checkpoint in --output_dir, if any")
    restart: bool = Field(
        False, description="with --resume: start over if the checkpoint has another configuration or source"
    )
    simulated_ranks: Annotated[int, RANKS] | None = Field(
        None, description="ranks that take turns in this process, for results without times (default: this rank alone)"
    )
    verify_sync: Annotated[int, NATURAL] = Field(
        0, description="every K steps, report ranks that are missing or whose parameters differ; 0: never"
    )

    @property
    def training(self) -> Training:
        """The flags that are settings of a training."""
        return Training(**{name: getattr(self, name) for name in Training.model_fields})


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
        simulated_ranks: Number of ranks that take turns in one process; None for ranks with a process each.
        lora_rank: Rank of the LoRA adapter that is trained; None to train the model itself.
        epochs: Passes over the data, which `over` turns into steps; None for the steps of ``training``.
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
    simulated_ranks: int | None = None
    lora_rank: int | None = None
    epochs: int | None = None

    def over(self, samples: int, world_size: int) -> Settings:
        """The same run with its epochs as steps, and a model kept after each epoch.

        Args:
            samples: Number of training samples.
            world_size: Number of ranks.
        """
        if self.epochs is None:
            return self
        training = self.training
        of_epoch = max(1, samples // (training.batch_size * training.grad_accum_steps * world_size))
        kept = training.keep_model_every or of_epoch
        changed = training.model_copy(update={"steps": self.epochs * of_epoch, "keep_model_every": kept})
        return replace(self, training=changed)

    def shared_out(self, world_size: int, link: str | None) -> Settings:
        """The same run with the global batch divided among ranks; see `Training.shared_out`.

        Args:
            world_size: Number of ranks.
            link: The link between them; None if the ranks have not been started.

        Raises:
            BadInput: If it cannot be divided, or the ranks cannot form the islands or be simulated.
        """
        if self.simulated_ranks is not None:
            check_simulated(self.strategy, link or UNSHAPED)
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
            **({"lora_rank": self.lora_rank} if self.lora_rank else {}),
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
        named.append(cell.communication.module)
    if strategy in STRATEGIES.built_in():
        named.append(f"{STRATEGIES.package}.{strategy}")
    return ["gradwire.bench.training.train", *named]


def settings_of(options: Options) -> Settings:
    """Build the settings from the flags.

    Raises:
        BadInput: For an unknown compressor or option, JSON that is not an object, or options that contradict each other
            or the strategy.
    """
    text = options.comm_config_json
    try:
        keys: Any = parse_json(text)
    except ValueError as error:
        raise BadInput(f"--comm_config_json is not valid JSON ({error}): {text[:80]}") from None
    if not isinstance(keys, dict):
        raise BadInput(f"--comm_config_json must be a JSON object such as {{}}, got {text[:80]}.")
    for name, key in FLAGS.items():
        flag = getattr(options, name)
        if flag is not None and keys.setdefault(key, flag) != flag:
            raise BadInput(f"--{name} is {flag}, and --comm_config_json has {keys[key]!r}; omit one of them.")
    method = keys.setdefault("method", "none")
    cell = Cell.parse(options.label or str(method), keys)
    cell.check_strategy(options.strategy)
    if options.lora_rank and not saved.is_saved(options.model):
        raise BadInput(
            f"--lora_rank {options.lora_rank} trains an adapter of a saved model, and --model {options.model} is no "
            "folder with weights: give one, such as the final_model/ of a run."
        )
    if options.epochs and options.steps != Training.model_fields["steps"].default:
        raise BadInput(f"--epochs {options.epochs} decides the number of steps: omit it, or --steps {options.steps}.")
    training = cell.applied_to(options.training)
    check_private(training, cell, options.strategy)
    if options.simulated_ranks is not None:
        if options.verify_sync:
            raise BadInput("--verify_sync waits for ranks with a process each; omit it, or --simulated_ranks.")
        training = training.model_copy(update={"profile": False})
    taken = {field.name for field in fields(Settings)} - {"training", "cell"}
    return Settings(training=training, cell=cell, **{name: getattr(options, name) for name in taken})


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
