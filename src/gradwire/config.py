"""The experiment as typed data: the dataset, the training settings, the compressor cells and the grid over them.

The same classes check ``config.yaml``, fill its defaults in, give ``gradwire train`` its flags and generate the JSON
schema for editors (``workflow/schemas/config.schema.json``). torch is imported only where a
compressor's own options have to be checked.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from gradwire.communication import CommOptimizer, Communication, check_communication, preset
from gradwire.compressors import registry
from gradwire.compressors.reduction import ReducerOptions
from gradwire.compressors.schedule import ByStep, Schedule
from gradwire.data import sources
from gradwire.defaults import (
    MAX_LENGTH,
    SHARD_SIZE,
    VAL_FRACTION,
    VOCAB_SIZE,
)
from gradwire.errors import BadInput, unknown
from gradwire.explain import explain, short
from gradwire.files import digest
from gradwire.flags import COUNT, LENGTH, NATURAL, RANKS, SEED, VOCABULARY, check_shard
from gradwire.models import presets
from gradwire.parsing import read_yaml
from gradwire.units import UNSHAPED, bits_per_second

SCHEMA_VERSION = 1  # of record.json and results.jsonl
BASELINE = "none"  # the label of the framework untouched in fp32

Strategy = Literal["naive", "bucket", "ddp", "fsdp1", "fsdp2"]
ParamCompress = Literal["none", "bf16", "int8"]
Precision = Literal["fp32", "bf16"]
Split = Literal["train", "val"]
SampleLoss = Literal["mean", "sum"]
GradType = Literal["sgd", "adam", "sign"]
AdamVariant = Literal["torch", "less"]
Projection = Literal["rademacher", "normal", "sjlt", "srht", "factored", "none"]
GradMethod = Literal["auto", "loop", "vmap", "hooks"]
Model = TypeVar("Model", bound=BaseModel)
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+-]*$", max_length=100)]  # becomes a folder


def _rate(link: str) -> str:
    """A link that `tc` can make, or none."""
    try:
        if link != UNSHAPED:
            bits_per_second(link)
    except BadInput as error:
        raise ValueError(str(error).rstrip(".")) from None
    return link


def _known_model(model: str | dict[str, Any]) -> str | dict[str, Any]:
    """A model whose name, or names of options, are known."""
    try:
        options = presets.options(presets.text(model))
        if isinstance(model, dict) and options is not None:  # imports transformers, so only where there is a need
            from gradwire.models.architecture import check_options

            check_options(options)
    except BadInput as error:
        raise ValueError(str(error).rstrip(".")) from None
    return model


ModelOption = Annotated[str | dict[str, Any], AfterValidator(_known_model)]
Link = Annotated[str, Field(pattern=r"^(none|\d+(\.\d+)?[kmgt]?bit)$"), AfterValidator(_rate)]  # as tc spells it
Count = Annotated[int, Field(**COUNT.limits)]
Natural = Annotated[int, Field(**NATURAL.limits)]
Seed = Annotated[int, Field(**SEED.limits)]
Ranks = Annotated[int, Field(**RANKS.limits)]


class Strict(BaseModel):
    """A frozen mapping that refuses keys it does not know, and numbers that are not finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Dataset(Strict, extra="allow"):
    """Where the text comes from and how it is cut into samples.

    Other keys are options of the source (`gradwire.data.sources`), which checks them.
    """

    source: str = Field("pydocs", description="where the corpus comes from; its options are keys beside it")
    max_mb: float | None = Field(None, gt=0, description="stop the download after so many MB of text")
    tokenizer: str = Field("bpe", description="`bpe` trains one on the corpus; else a tokenizer folder such as GPT-2's")
    vocab_size: int = Field(VOCAB_SIZE, **VOCABULARY.limits, description="vocabulary of a trained tokenizer")
    max_length: int = Field(MAX_LENGTH, **LENGTH.limits, description="tokens of a sample at most")
    shard_size: Count = Field(SHARD_SIZE, description="samples in a shard file")
    val_fraction: float = Field(VAL_FRACTION, gt=0, lt=1, description="share of the documents held out for validation")

    @model_validator(mode="after")
    def _the_source_takes_its_options(self) -> Self:
        try:
            known = sources.source_class(self.source).model_fields
            for key in self.source_options.keys() - known.keys():
                raise unknown(f"key of a dataset with source {self.source}", key, [*Dataset.model_fields, *known])
            sources.build(self.source, self.source_options)
        except BadInput as error:
            raise ValueError(str(error).rstrip(".")) from None
        return self

    @model_validator(mode="after")
    def _a_shard_fits_into_memory(self) -> Self:
        try:
            check_shard(self.max_length, self.shard_size)
        except BadInput as error:
            raise ValueError(str(error).rstrip(".")) from None
        return self

    @property
    def source_options(self) -> dict[str, Any]:
        """The options of the source, as given."""
        return self.model_extra or {}

    @property
    def corpus_folder(self) -> str:
        """``<label of the source>/<digest of what the corpus depends on>``, below ``results/data/``.

        Raises:
            BadInput: If the source cannot be read.
        """
        source = sources.build(self.source, self.source_options)
        return f"{source.label}/{digest([self.source, source.content(), self.max_mb])}"

    @property
    def tokens_folder(self) -> str:
        """The digest of how the corpus is cut into tokens; a folder below the corpus's."""
        return digest([self.tokenizer, self.vocab_size, self.max_length, self.shard_size, self.val_fraction])


class Training(Strict):
    """How every cell of the experiment is trained. Each field is also a flag of ``gradwire train``."""

    batch_size: Count = Field(8, description="samples per rank and micro-batch")
    global_batch_size: int | None = Field(
        None, **COUNT.limits, description="samples of all ranks per optimizer step; if given it sets batch_size"
    )
    grad_accum_steps: Count = Field(1, description="micro-batches per optimizer step")
    steps: Count = Field(60, description="optimizer steps")
    warmup_steps: Natural = Field(3, description="first steps left out of step times")
    lr: float = Field(3e-3, gt=0, description="peak learning rate of AdamW")
    lr_warmup_steps: Natural = Field(6, description="steps of linear warm-up before the cosine decay")
    weight_decay: float = Field(0.1, ge=0, description="AdamW's weight decay, on matrices only")
    clip_grad_norm: float = Field(1.0, gt=0, description="the global gradient norm is clipped to this")
    eval_every: Natural = Field(20, description="steps between evaluations; 0: only at the end")
    checkpoint_every: Natural = Field(0, description="steps between checkpoints; 0: only when stopped by a signal")
    keep_checkpoints: Count = Field(2, description="newest checkpoints that stay")
    evaluate: bool = Field(True, description="evaluate after the last step; off where only times are of interest")
    profile: bool = Field(True, description="profile some steps on every rank")
    profile_steps: Count = Field(3, description="steps to profile")
    precision: Precision = Field("fp32", description="of the forward pass; bf16: autocast, with float32 weights")
    gradient_checkpointing: bool = Field(False, description="recompute activations in the backward pass")
    bucket_mb: float = Field(25.0, ge=0, description="MiB of a bucket of ddp and bucket; smaller if that makes four")
    compile: bool = Field(False, description="compile the model's blocks with torch.compile")
    dp_max_grad_norm: float | None = Field(
        None, gt=0, description="train privately (DP-SGD): each sample's gradient is clipped to this"
    )
    dp_noise_multiplier: float = Field(
        0.0, ge=0, description="standard deviation of the noise on their sum, in units of dp_max_grad_norm"
    )
    dp_delta: float = Field(1e-5, gt=0, lt=1, description="delta of the privacy budget")
    dp_sampling: Literal["poisson", "shuffled"] = Field(
        "poisson", description="how a private step's samples are drawn; shuffled claims no amplification"
    )
    backend: Literal["auto", "nccl", "gloo"] = Field("auto", description="collectives; auto: nccl with a GPU per rank")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where there is a GPU, else cpu")

    @model_validator(mode="after")
    def _some_steps_are_timed(self) -> Self:
        if self.warmup_steps + self.profiled_steps >= self.steps:
            raise ValueError(
                f"of {self.steps} steps none is left to time after {self.warmup_steps} warm-up and "
                f"{self.profiled_steps} profiled ones; raise `steps`"
            )
        return self

    @model_validator(mode="after")
    def _private_training_is_not_compiled(self) -> Self:
        if self.compile and self.private:
            raise ValueError(
                "compile is set with dp_max_grad_norm: private training reads each layer's inputs and gradients, which "
                "compiled blocks do not show; leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _noise_goes_with_clipping(self) -> Self:
        if self.dp_noise_multiplier and self.dp_max_grad_norm is None:
            raise ValueError(
                f"dp_noise_multiplier is {self.dp_noise_multiplier:g} without dp_max_grad_norm: noise hides a sample "
                "only if its gradient is clipped; give dp_max_grad_norm too"
            )
        return self

    @model_validator(mode="after")
    def _clipping_is_exact(self) -> Self:
        if self.private and self.precision != "fp32":
            raise ValueError(
                f"precision is {self.precision} with dp_max_grad_norm: samples are clipped by the norms of their "
                "float32 gradients; leave precision out"
            )
        return self

    def shared_out(self, world_size: int) -> Training:
        """The same with its global batch, if it was given one, shared out to the ranks: `batch_size` is set.

        Raises:
            BadInput: If the ranks and their micro-batches do not divide it.
        """
        total, parts = self.global_batch_size, world_size * self.grad_accum_steps
        if total is None:
            return self
        if total % parts:
            raise BadInput(
                f"global_batch_size {total} cannot be shared out evenly to {world_size} rank(s) x "
                f"{self.grad_accum_steps} micro-batch(es): give a multiple of {parts}."
            )
        return self.model_copy(update={"batch_size": total // parts})

    @property
    def private(self) -> bool:
        """Whether each sample's gradient is clipped."""
        return self.dp_max_grad_norm is not None

    @property
    def profiled_steps(self) -> int:
        """Steps whose times the profiler disturbs: its own warm-up step and the recorded ones."""
        return 1 + self.profile_steps if self.profile else 0


class Reduction(ReducerOptions):
    """The reducer's options in a cell; ``collectives.Reducer`` explains them."""

    schedule: dict[str, ByStep] = Field(
        default_factory=dict, description="an option's value from a step on, as {density: {0: 0.25, 20: 0.05}}"
    )


class Cell(Strict):
    """One compressor setting: a method, its options, the reducer's options, and what travels.

    Args:
        label: The cell's name: its folder and the record's ``compressor``.
        method: The registered method.
        options: The method's own options.
        reduction: The reducer's options, as given (defaults left out).
        param_compress: How parameters travel to the ranks that compute with them (fsdp2).
        communication: What travels, and the options of an optimizer that communicates, likewise.
    """

    label: Name
    method: str
    options: dict[str, Any]
    reduction: Reduction
    communication: Communication
    param_compress: ParamCompress = "none"

    @classmethod
    def parse(cls, label: str, mapping: Any) -> Cell:
        """Read the flat mapping that ``compressors:`` and ``--comm_config_json`` share.

        Raises:
            BadInput: If it is no mapping, or names an unknown method or option, or an option has the wrong type.
        """
        where = f"compressor cell {short(label)!r}"
        if not isinstance(mapping, Mapping):
            raise BadInput(f"{where}: expected a mapping of options such as {{}}, got {json.dumps(mapping)}.")
        given = dict(mapping)
        chosen = preset(given.get("comm_optimizer"))
        method = given.pop("method", chosen.method or label)
        if not isinstance(method, str):
            raise BadInput(f"{where}: `method` must be a name, got {json.dumps(method)}.")
        reduction = {key: given.pop(key) for key in Reduction.model_fields if key in given}
        communication = {key: given.pop(key) for key in Communication.model_fields if key in given}
        others = {key: given.pop(key) for key in OTHERS if key in given}
        try:
            method = "+".join(registry.members(method))
            if given or "+" in method or "schedule" in reduction:  # imports torch, so only where there is a need
                cells = [*Reduction.model_fields, *Communication.model_fields, *OTHERS, "method"]
                known = [*registry.options(method), *cells]
                for key in given:
                    if key not in known:
                        raise unknown(f"option of {method}", key, known)
                registry.build(method, **given)
            optimizer = communication.setdefault("comm_optimizer", "gradient")
            if optimizer not in get_args(CommOptimizer):
                raise unknown("comm_optimizer", str(optimizer), get_args(CommOptimizer))
            if optimizer == "gradient":
                del communication["comm_optimizer"]
            else:
                reduction = {"error_feedback": True, **chosen.reduction, **reduction}
            parts = {"options": given, "reduction": reduction, "communication": communication, **others}
            cell = checked(cls, {"label": label, "method": method, **parts}, "")
            check_communication(cell.communication, method, cell.reduction)
            if cell.reduction.schedule:
                Schedule(method, given, cell.reduction.schedule)
            return cell
        except BadInput as error:
            raise BadInput(f"{where}: {error}") from None

    @property
    def methods(self) -> list[str]:
        """The compressors that it runs: its method, what stores its residuals, what encodes parameters."""
        stored = self.reduction.error_feedback and self.reduction.residual_dtype != "float32"
        parameters = [] if self.param_compress == "none" else [self.param_compress]
        return [self.method, *([self.reduction.residual_dtype] if stored else []), *parameters]

    @property
    def hooked(self) -> bool:
        """Whether a reducer is attached; ``none: {}`` leaves the framework untouched."""
        return self.method != "none" or bool(self.reduction.model_fields_set)

    def flat(self) -> dict[str, Any]:
        """The mapping it was read from, method included: what ``--comm_config_json`` takes."""
        reduction = self.reduction.model_dump(mode="json", exclude_unset=True)
        communication = self.communication.model_dump(mode="json", exclude_unset=True)
        others = self.model_dump(include=set(OTHERS), exclude_defaults=True)
        return {"method": self.method, **self.options, **reduction, **communication, **others}

    def check_strategy(self, strategy: str) -> None:
        """Refuse a strategy that cannot do what the cell asks for.

        Raises:
            BadInput: If parameters shall be compressed where no rank gathers them, or not through us; if an optimizer
                communicates, and the strategy shards gradients.
        """
        if self.param_compress != "none" and strategy != "fsdp2":
            raise BadInput(
                f"compressor cell {self.label!r}: param_compress is {self.param_compress!r}, and only strategy fsdp2 "
                f"can do that, not {strategy}; leave it out, or leave these runs out of the grid."
            )
        if not self.communication.averages_gradients and strategy in ("fsdp1", "fsdp2"):
            raise BadInput(
                f"compressor cell {self.label!r}: comm_optimizer {self.communication.comm_optimizer} needs each rank's "
                f"whole gradient, and strategy {strategy} shards it; take naive, bucket or ddp."
            )


def check_private(training: Training, cell: Cell, strategy: str) -> None:
    """Refuse private training where samples' norms would not be those of the gradients that travel.

    Raises:
        BadInput: Under fsdp1, with compressed parameters, or with an optimizer that communicates.
    """
    if not training.private:
        return
    reason = None
    if strategy == "fsdp1":
        reason = "strategy fsdp1 flattens parameters, and no layer knows its own; take fsdp2"
    elif cell.param_compress != "none":
        reason = f"param_compress {cell.param_compress} trains with other weights than the norms are of; leave it out"
    elif not cell.communication.averages_gradients:
        reason = f"comm_optimizer {cell.communication.comm_optimizer} sends no gradients; leave it out"
    if reason is not None:
        raise BadInput(f"dp_max_grad_norm (private training), compressor cell {cell.label!r}: {reason}.")


OTHERS = ("param_compress",)  # a cell's keys that are neither its method's, nor the reducer's, nor an optimizer's
# Flags of `train` that are a cell's keys too.
FLAGS = {"comm_compress": "method", "comm_optimizer": "comm_optimizer", "param_compress": "param_compress"}


class Run(NamedTuple):
    """One run of the experiment: a cell under a strategy, a world size, a link and a seed."""

    strategy: str
    compressor: str
    world_size: int
    link: str
    seed: int

    @property
    def path(self) -> str:
        """The run's folder below ``runs/``."""
        return f"{self.strategy}/{self.compressor}/ws{self.world_size}/{self.link}/seed{self.seed}"


class Selection(Strict):
    """Some runs of the grid; a field left out takes them all."""

    strategies: tuple[Strategy, ...] | None = None
    compressors: tuple[str, ...] | None = None
    world_sizes: tuple[Ranks, ...] | None = None
    links: tuple[Link, ...] | None = None
    seeds: tuple[Seed, ...] | None = None

    def holds(self, run: Run) -> bool:
        """Whether ``run`` is selected."""
        chosen = (self.strategies, self.compressors, self.world_sizes, self.links, self.seeds)
        return all(values is None or value in values for value, values in zip(run, chosen, strict=True))

    def check(self, runs: Sequence[Run], where: str) -> None:
        """Refuse a selection that misses what it names.

        Args:
            runs: The runs of the grid.
            where: Its place in the configuration.

        Raises:
            BadInput: If a value is no run's, or all of them together are no run's.
        """
        for position, name in enumerate(Selection.model_fields):
            known = {str(run[position]) for run in runs}
            for value in getattr(self, name) or ():
                if str(value) not in known:
                    raise unknown(f"value of {where}.{name}", str(value), known)
        if not any(map(self.holds, runs)):
            raise BadInput(f"{where}: it selects none of the grid's {len(runs)} runs.")


class Exclusion(Selection):
    """Runs that are left out, and why; they get a row with status ``skipped``."""

    reason: str


class Gradients(Selection):
    """Which runs' per-sample gradients are collected, and how."""

    dim: tuple[Count, ...] = Field((256,), min_length=1, description="dimensions of the projections")
    grad_type: GradType = Field("sgd", description="what a row is made of")
    adam_variant: AdamVariant = Field("torch", description="Adam's formula, where it is the type")
    loss: SampleLoss = Field("mean", description="of a sample, over the tokens that it predicts")
    projection: Projection = Field("rademacher", description="how gradients are projected")
    method: GradMethod = Field("auto", description="how gradients are computed")
    split: Split = Field("val", description="whose samples")
    max_samples: int | None = Field(None, **COUNT.limits, description="stop after so many samples")
    save_interval: Count = Field(64, description="samples between two files")
    recompute: Natural = Field(4, description="rows that validation computes again")
    norms: bool = Field(False, description="write norms.parquet too: the norm of every sample's gradient")


class Grid(Strict):
    """One product of settings."""

    strategies: tuple[Strategy, ...] = ("fsdp2",)
    world_sizes: tuple[Ranks, ...] = (2,)
    seeds: tuple[Seed, ...] = (0,)
    links: tuple[Link, ...] = (UNSHAPED,)
    compressors: tuple[str, ...] | Literal["all"] = "all"


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, Mapping) else value


Grids = Annotated[tuple[Grid, ...], BeforeValidator(_as_list, json_schema_input_type=Grid | tuple[Grid, ...])]


class Targets(Strict):
    """Perplexities whose time, steps and bytes each run is measured by."""

    ppl: tuple[Annotated[float, Field(gt=1)], ...] = Field((), description="validation perplexities")
    relative_to: Name | None = Field(None, description="a label: its final perplexity with the same seed")

    @model_validator(mode="after")
    def _something_is_asked(self) -> Self:
        if not self.ppl and self.relative_to is None:
            raise ValueError("give `ppl` or `relative_to`")
        return self


class Experiment(Strict):
    """A whole experiment: everything that ``results/<name>/`` is made from."""

    name: Name = Field(description="the experiment's folder under results/")
    question: str | None = Field(None, description="what the experiment asks: the title of its page")
    dataset: Dataset = Field(default_factory=Dataset)
    model: ModelOption = Field(
        "tiny", description=f"{presets.MEANING}; or inline options, such as {{architecture: llama, hidden_size: 256}}"
    )
    timing: bool | None = Field(
        None, description="one run at a time, so that its times are its own; default: where there are links"
    )
    quality_from: str | None = Field(
        None,
        description="results.jsonl of another experiment; its perplexities stand for the same labels'",
    )
    targets: Targets | None = Field(None, description="perplexities to reach: {ppl: [60, 55]} or {relative_to: LABEL}")
    training: Training = Field(default_factory=Training)
    compressors: dict[Name, dict[str, Any]] = Field(min_length=1, description="label: cell")
    grid: Grids = Field(description="a product or a list of them; their union is run")
    exclude: tuple[Exclusion, ...] = ()
    gradients: Gradients | None = None

    @property
    def model_text(self) -> str:
        """The model as ``train --model`` takes it."""
        return presets.text(self.model)

    def cells(self) -> dict[str, Cell]:
        """The compressor cells by label, each checked."""
        return {label: Cell.parse(label, mapping) for label, mapping in self.compressors.items()}

    def asked(self) -> list[Run]:
        """Every run of the grid, once, excluded ones too."""
        runs: dict[Run, None] = {}
        for grid in self.grid:
            labels = tuple(self.compressors) if grid.compressors == "all" else grid.compressors
            for label in labels:
                if label not in self.compressors:
                    raise unknown("compressor in the grid", label, self.compressors)
            product = itertools.product(grid.strategies, labels, grid.world_sizes, grid.links, grid.seeds)
            runs.update(dict.fromkeys(itertools.starmap(Run, product)))
        return list(runs)

    def excluded(self, run: Run) -> str | None:
        """Why ``run`` is left out, or None."""
        return next((exclusion.reason for exclusion in self.exclude if exclusion.holds(run)), None)

    def runs(self) -> list[Run]:
        """The runs that are really made, in the order they should start: interleaved, against drift of the machine.

        Seed by seed; within a seed a permutation drawn from the seed, with a baseline (label ``none``) first and last.
        """
        chosen = [run for run in self.asked() if self.excluded(run) is None]
        ordered: list[Run] = []
        for seed in sorted({run.seed for run in chosen}):
            of_seed = [run for run in chosen if run.seed == seed]
            random.Random(seed).shuffle(of_seed)
            baselines = [run for run in of_seed if run.compressor == BASELINE]
            others = [run for run in of_seed if run.compressor != BASELINE]
            middle = (len(baselines) + 1) // 2
            ordered += [*baselines[:middle], *others, *baselines[middle:]]
        return ordered

    @property
    def needs_links(self) -> bool:
        """Whether a run wants a link of a chosen rate."""
        return any(run.link != UNSHAPED for run in self.runs())

    @property
    def timed(self) -> bool:
        """Whether times are what the experiment is about."""
        return self.needs_links if self.timing is None else self.timing

    def gradient_runs(self, runs: Iterable[Run]) -> list[Run]:
        """Those of ``runs`` whose per-sample gradients are collected."""
        return [run for run in runs if self.gradients is not None and self.gradients.holds(run)]

    def norm_runs(self, runs: Iterable[Run]) -> list[Run]:
        """Those of them whose gradients' norms are wanted."""
        return self.gradient_runs(runs) if self.gradients is not None and self.gradients.norms else []


def checked(model: type[Model], value: Any, where: str) -> Model:
    """``model`` built from ``value``, or one message that names the place, what was given and what is allowed."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        problems = explain(model, error)
        raise BadInput(f"{where}: {problems}." if where else f"{problems}.") from None


def experiment(mapping: Mapping[str, Any]) -> Experiment:
    """The experiment that a configuration file describes, with every cell and grid checked.

    Raises:
        BadInput: With the first problems found, each with its place in the file.
    """
    made = checked(Experiment, mapping, "configuration")
    cells = made.cells()
    selections: dict[str, Selection] = {f"exclude.{at}": exclusion for at, exclusion in enumerate(made.exclude)}
    if made.gradients is not None:
        selections["gradients"] = made.gradients
    for where, selection in selections.items():
        selection.check(made.asked(), where)
    if not made.runs():
        raise BadInput("configuration: the grid is empty, or `exclude` leaves nothing of it.")
    if made.targets is not None and made.targets.relative_to not in (None, *made.compressors):
        raise unknown("compressor in targets.relative_to", str(made.targets.relative_to), made.compressors)
    if made.gradients is not None and not made.gradient_runs(made.runs()):
        raise BadInput("gradients: `exclude` leaves nothing of the runs that it selects.")
    for run in made.runs():
        made.training.shared_out(run.world_size)
        cells[run.compressor].check_strategy(run.strategy)
        check_private(made.training, cells[run.compressor], run.strategy)
    return made


def json_schema() -> dict[str, Any]:
    """The JSON schema of a configuration file, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Experiment.model_json_schema()}


def add_flags(parser: argparse.ArgumentParser, model: type[BaseModel]) -> None:
    """Give ``parser`` a flag for each field of ``model``, with its type, default and description."""
    for name, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True)
        if field.annotation is bool:
            parser.add_argument(
                f"--{name}", action=argparse.BooleanOptionalAction, default=default, help=field.description
            )
            continue
        choices = get_args(field.annotation) if _is_literal(field) else None
        kinds = [kind for kind in get_args(field.annotation) if kind is not NoneType]  # of `int | None`: int
        kind = str if choices else kinds[0] if kinds else field.annotation
        parser.add_argument(f"--{name}", type=kind, choices=choices, default=default, help=field.description)  # type: ignore[arg-type]


def _is_literal(field: FieldInfo) -> bool:
    return getattr(field.annotation, "__origin__", None) is Literal


def from_flags(model: type[Model], args: argparse.Namespace) -> Model:
    """The ``model`` that parsed flags describe.

    Raises:
        BadInput: If a value is out of range.
    """
    return checked(model, {name: getattr(args, name) for name in model.model_fields}, "arguments")


def to_flags(settings: BaseModel, *names: str) -> list[str]:
    """The flags that give ``settings`` back: ``["--steps", "60", "--no-profile", ...]``; None is left out.

    Args:
        settings: A model whose fields are flags of a verb.
        names: Only these fields; all where none is named.
    """
    words: list[str] = []
    for name, value in settings:
        if names and name not in names:
            continue
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, tuple):
            words += [f"--{name}", *map(str, value)]
        elif value is not None:
            words += [f"--{name}", str(value)]
    return words


def load(path: Path) -> Experiment:
    """Read and check a configuration file."""
    return experiment(read_yaml(path))
