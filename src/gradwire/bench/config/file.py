"""An experiment's file: strict, merged with the file that it extends, and checked with every cell and grid."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from gradwire.base.errors import BadInput, unknown
from gradwire.base.files import digest, read_yaml
from gradwire.base.strict import Strict, checked
from gradwire.base.units import UNSHAPED
from gradwire.bench.config.cell import Cell, check_private
from gradwire.bench.config.grid import Exclusion, Gradients, Grid, Grids, Run, Selection
from gradwire.bench.config.values import BASELINE, Count, ModelOption, Name, Training
from gradwire.comm.topology import check_simulated, check_topology
from gradwire.lm.data import (
    CHAT_FORMAT,
    LENGTH,
    MAX_LENGTH,
    SHARD_SIZE,
    VAL_FRACTION,
    VOCAB_SIZE,
    VOCABULARY,
    ChatFormat,
    check_shard,
    sources,
)
from gradwire.lm.models import presets

EXTENDS = "extends"  # the key of the file that an experiment differs from in little


class Dataset(Strict, extra="allow"):
    """The source of the text and its division into samples.

    Other keys are options of the source (`gradwire.lm.data.sources`), which checks them.
    """

    source: str = Field("pydocs", description="source of the corpus; its options are further keys")
    max_mb: float | None = Field(None, gt=0, description="MB of text after which the download stops")
    tokenizer: str = Field("bpe", description="`bpe` trains one on the corpus; else a tokenizer folder such as GPT-2's")
    vocab_size: Annotated[int, VOCABULARY] = Field(VOCAB_SIZE, description="vocabulary of a trained tokenizer")
    chat_format: ChatFormat | None = Field(None, description=CHAT_FORMAT)
    max_length: Annotated[int, LENGTH] = Field(MAX_LENGTH, description="largest number of tokens in a sample")
    shard_size: Count = Field(SHARD_SIZE, description="samples per shard file")
    val_fraction: float = Field(VAL_FRACTION, gt=0, lt=1, description="share of the documents held out for validation")

    @model_validator(mode="after")
    def _the_source_takes_its_options(self) -> Self:
        known = sources.source_class(self.source).model_fields
        for key in self.source_options.keys() - known.keys():
            raise unknown(f"key of a dataset with source {self.source}", key, [*Dataset.model_fields, *known])
        sources.build(self.source, self.source_options)
        return self

    @model_validator(mode="after")
    def _a_shard_fits_into_memory(self) -> Self:
        check_shard(self.max_length, self.shard_size)
        return self

    @property
    def source_options(self) -> dict[str, Any]:
        """The options of the source, as given."""
        return self.model_extra or {}

    @property
    def built(self) -> sources.Source:
        """The source with its options."""
        return sources.build(self.source, self.source_options)

    @property
    def corpus_folder(self) -> str:
        """``<label of the source>/<digest of the corpus settings>``, below ``results/data/``.

        Raises:
            BadInput: If the source cannot be read.
        """
        source = self.built
        return f"{source.label}/{digest([self.source, source.content(), self.max_mb])}"

    @property
    def tokens_folder(self) -> str:
        """Digest of the tokenizer and sample settings; a folder below the corpus's."""
        chosen = [] if self.chat_format is None else [self.chat_format]
        return digest([self.tokenizer, self.vocab_size, self.max_length, self.shard_size, self.val_fraction, *chosen])


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
    """A whole experiment, whose results are in ``results/<name>/``."""

    name: Name = Field(description="folder of the experiment, below results/")
    question: str | None = Field(None, description="what the experiment asks: the title of its page")
    dataset: Dataset = Field(default_factory=Dataset)
    model: ModelOption = Field(
        "tiny", description=f"{presets.MEANING}; or inline options, such as {{architecture: llama, hidden_size: 256}}"
    )
    timing: bool | None = Field(
        None, description="run one training at a time, for undisturbed times; default: if the grid has links"
    )
    quality_from: str | None = Field(
        None, description="results.jsonl of another experiment, whose perplexities count for the same labels"
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
        """The checked compressor settings by label."""
        return {label: Cell.parse(label, mapping) for label, mapping in self.compressors.items()}

    def products(self) -> dict[Run, Grid]:
        """The product of the grid that asks for each run, excluded ones included.

        Raises:
            BadInput: If a label is unknown, or two products ask for one run in two ways: they have one folder.
        """
        products: dict[Run, Grid] = {}
        for product in self.grid:
            for run in product.runs(self.compressors):
                if run.compressor not in self.compressors:
                    raise unknown("compressor in the grid", run.compressor, self.compressors)
                first = products.setdefault(run, product)
                if (first.simulated, first.steps) != (product.simulated, product.steps):
                    raise BadInput(
                        f"grid: two products ask for {run.path}, with another `steps` or `simulated`: omit it from one."
                    )
        return products

    def asked(self) -> list[Run]:
        """Every run of the grid once, including excluded ones."""
        return list(self.products())

    def training_of(self, run: Run) -> Training:
        """The training settings of a run.

        Raises:
            BadInput: If a run for times only has too few steps to time one.
        """
        steps = self.short().get(run)
        if steps is None:
            return self.training
        short = {**self.training.model_dump(), "steps": steps, "eval_every": 0, "evaluate": False}
        return checked(Training, short, f"configuration: grid with steps: {steps}")

    def cell_of(self, run: Run) -> Cell:
        """The compressor setting of a run."""
        mapping = dict(self.compressors[run.compressor])
        if self.short().get(run) is not None and "dense_steps" in mapping:
            encoded = 1  # step of the warm-up, as it is the first of its kind
            mapping["dense_steps"] = min(mapping["dense_steps"], max(1, self.training.warmup_steps - encoded))
        return Cell.parse(run.compressor, mapping)

    def short(self) -> dict[Run, int]:
        """The runs for times only, with their numbers of steps."""
        return {run: grid.steps for run, grid in self.products().items() if grid.steps is not None}

    def simulated(self) -> set[Run]:
        """The runs whose ranks take turns in one process."""
        return {run for run, grid in self.products().items() if grid.simulated}

    def excluded(self, run: Run) -> str | None:
        """The reason for leaving out ``run``, or None."""
        return next((exclusion.reason for exclusion in self.exclude if exclusion.holds(run)), None)

    def runs(self) -> list[Run]:
        """The runs to make, in starting order: interleaved, so that drift of the machine is shared.

        Seed by seed; within a seed in a random order drawn from it, with a baseline (label ``none``) first and last.
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
        """Whether a run needs a shaped link."""
        return any(run.link != UNSHAPED for run in self.runs())

    @property
    def timed(self) -> bool:
        """Whether runs are made one at a time, for their times."""
        return self.needs_links if self.timing is None else self.timing

    def gradient_runs(self, runs: Iterable[Run]) -> list[Run]:
        """Select the runs whose per-sample gradients are collected."""
        return [run for run in runs if self.gradients is not None and self.gradients.holds(run)]

    def norm_runs(self, runs: Iterable[Run]) -> list[Run]:
        """Select the runs whose gradient norms are written."""
        return self.gradient_runs(runs) if self.gradients is not None and self.gradients.norms else []


def experiment(mapping: Mapping[str, Any]) -> Experiment:
    """Parse an experiment, with every cell and grid checked.

    Raises:
        BadInput: If something is invalid, with its place in the file.
    """
    made = checked(Experiment, mapping, "configuration")
    cells = made.cells()
    selections: dict[str, Selection] = {f"exclude.{index}": exclusion for index, exclusion in enumerate(made.exclude)}
    if made.gradients is not None:
        selections["gradients"] = made.gradients
    for where, selection in selections.items():
        selection.check(made.asked(), where)
    if not made.runs():
        raise BadInput("configuration: the grid is empty, or `exclude` removes all of it.")
    if made.targets is not None and made.targets.relative_to not in (None, *made.compressors):
        raise unknown("compressor in targets.relative_to", str(made.targets.relative_to), made.compressors)
    if made.gradients is not None and not made.gradient_runs(made.runs()):
        raise BadInput("gradients: `exclude` removes all selected runs.")
    simulated = made.simulated()
    for run in simulated:
        check_simulated(run.strategy, run.link)
    if simulated and made.timed:
        raise BadInput("grid: simulated runs have no times: set timing: false, or omit `simulated`.")
    for run in made.runs():
        made.training_of(run).shared_out(run.world_size)
        check_topology(run.strategy, run.world_size, run.islands, run.link)
        cells[run.compressor].check_strategy(run.strategy)
        check_private(made.training, cells[run.compressor], run.strategy)
    check_one_topology(made.runs())
    check_short(made)
    return made


def check_short(experiment: Experiment) -> None:
    """Check that runs for times only are short, and that others give them their perplexities.

    Raises:
        BadInput: If they are not, or a label has none.
    """
    short, whole = experiment.short(), experiment.training.steps
    evaluated = {run.compressor for run in experiment.runs() if run not in short}
    for run, steps in short.items():
        if steps >= whole:
            raise BadInput(f"grid: steps is {steps}: give fewer than the {whole} of `training`.")
        if run.compressor not in evaluated and experiment.quality_from is None:
            raise BadInput(
                f"grid: the runs of {run.compressor} have {steps} steps, and no run of all {whole} gives their "
                "perplexity: add one without `steps`, or `quality_from`."
            )


def check_one_topology(runs: Iterable[Run]) -> None:
    """Check that runs of one strategy and world size have one number of islands, but for hsdp on each link.

    Raises:
        BadInput: If they do not: the report compares cells by strategy and world size, and would average them.
    """
    numbers: dict[tuple[str, int, str | None], int] = {}
    for run in runs:
        link = None if run.strategy == "hsdp" else run.link
        islands = numbers.setdefault((run.strategy, run.world_size, link), run.islands)
        if islands != run.islands:
            raise BadInput(
                f"grid: {run.world_size} ranks form {islands} and {run.islands} islands under {run.strategy}; a report "
                f"compares one number of islands per world size, so put the others into an experiment of their own."
            )


def json_schema() -> dict[str, Any]:
    """The JSON schema of a configuration file, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Experiment.model_json_schema()}


def read(path: Path, extended_by: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a configuration file, merged over the file that its ``extends`` names.

    Args:
        path: A YAML file, or a JSON file if its name ends in ``.json``.
        extended_by: The files that extend this one, outermost first.

    Raises:
        BadInput: If a file cannot be read or is not a mapping; if it extends itself, or another without its own name;
            if an empty mapping is to replace one with keys.
    """
    path = Path(path)
    if not path.exists():
        raise BadInput(f"there is no file {path}: `gradwire init` writes one.")
    given = read_yaml(path)
    if not isinstance(given, Mapping):
        raise BadInput(f"{path}: expected a mapping with name, compressors and grid.")
    if misspelt := get_close_matches(EXTENDS, set(map(str, given)) - {EXTENDS}, cutoff=0.75):
        raise BadInput(f"{path}: {unknown('key', misspelt[0], [*Experiment.model_fields, EXTENDS])}")
    base = given.get(EXTENDS)
    if base is None:
        return dict(given)
    if not isinstance(base, str) or not base:
        raise BadInput(f"{path}: {EXTENDS} takes the path of a file, relative to this one.")
    base_path, chain = path.parent / base, (*extended_by, path.resolve())
    if not base_path.exists():
        raise BadInput(f"{path}: {EXTENDS}: there is no file {base_path}.")
    if base_path.resolve() in chain:
        raise BadInput(f"{path}: {EXTENDS}: {base} extends this file itself.")
    if "name" not in given:
        raise BadInput(f"{path}: give it another name; that of {base} is the folder of that experiment's results.")
    return merged(read(base_path, chain), {key: given[key] for key in given if key != EXTENDS}, str(path))


def merged(base: Mapping[str, Any], given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Merge two configurations: mappings key by key; any other value, such as a list, replaces the base's.

    Raises:
        BadInput: If an empty mapping is to replace one with keys.
    """
    result = dict(base)
    for key, value in given.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        if both and result[key] and not value:
            raise BadInput(f"{where}: {key}: {{}} changes nothing, as mappings are merged; null removes a section.")
        result[key] = merged(result[key], value, f"{where}: {key}") if both else value
    return result


def check(mapping: Mapping[str, Any]) -> Experiment:
    """The experiment that a configuration describes, with every cell, the grid, the model and the tokenizer checked.

    Raises:
        BadInput: With the first problems found, each with its place in the file and the nearest valid name.
    """
    made = experiment(mapping)
    presets.options(made.model_text)
    if made.dataset.tokenizer != "bpe":
        check_tokenizer(made.dataset.tokenizer)
    if isinstance(made.model, dict):
        check_model(made.model, made.dataset)
    return made


def check_tokenizer(choice: str) -> None:
    """Check that a tokenizer's folder can be read.

    Raises:
        BadInput: If it cannot.
    """
    if not Path(choice).is_dir():
        raise BadInput(
            f"dataset.tokenizer: there is no folder {choice!r}; give bpe, which trains one, or a tokenizer's folder."
        )
    from gradwire.lm.data.tokenizer import backend_of

    backend_of(Path(choice))


def check_model(options: Mapping[str, Any], dataset: Dataset) -> None:
    """Check that inline options make a model, without weights.

    Raises:
        BadInput: If they do not.
    """
    from gradwire.lm.models import architecture  # imports transformers, so only if necessary

    sizes = {key: value for key, value in options.items() if key != "vocab_size"}  # the vocabulary is not made yet
    architecture.on_meta(architecture.configuration(sizes, dataset.vocab_size, dataset.max_length))
