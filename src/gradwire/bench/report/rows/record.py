"""One run as one row: its record, profile and perplexity merged, or the reason for a missing result."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, computed_field

from gradwire.base.errors import BadInput
from gradwire.base.failures import failure_file
from gradwire.base.files import read_json
from gradwire.base.units import UNSHAPED
from gradwire.bench.config import BASELINE, SCHEMA_VERSION, Run
from gradwire.bench.statistics import quality

Model = TypeVar("Model", bound=BaseModel)
Text = str | None
Count = int | None
Number = float | None
BF16 = "bf16-native"  # the label of the second baseline: the collective itself in bf16
SAME_IN_EVERY_STEP = ("gradient", "onebit_adam", "demo")  # what these send after their dense steps
OWN_QUALITY = ("train", "perplexity")  # of the same run, so that its steps explain it
Status = Literal["ok", "failed", "skipped", "diverged"]
Alone = dict[tuple[str, str], dict[tuple[Any, ...], list[float]]]  # tokens/s by strategy and label, and hardware


class Row(BaseModel):
    """Data read from a file: types are checked, NaN and infinity are errors, unknown keys are ignored."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, frozen=True, extra="ignore")


class Result(Row):
    """A line of ``results.jsonl``. Null is "not measured" or "does not apply", never 0.

    Times are in milliseconds: ``comm_time_ms_total`` and ``comm_time_ms_by_op`` are the profiled steps' mean times the
    measured steps, all others are per step. Bytes are sums over ranks and all optimizer steps.

    - ``extra_collectives``: collectives of a rank's reductions beyond one payload collective each, over the whole run.
    - ``precision``: of the forward pass in training; ``gradient_dtype``: of the gradients that are compressed;
      ``evaluation_precision``: of the forward pass behind ``val_ppl``.
    - ``density``, ``sparsity``: share of the elements that sparsifiers sent of what they encoded, and the rest.
    - ``fallbacks``: unrequested encodings as float32 on all ranks; ``fallback_fraction``: their share of the
      compressor's elements, null without any.
    - ``grad_*``: the delivered gradient against the exact mean of the step's gradients, the mean over sampled steps;
      null where the framework reduces, or an optimizer sends something else.
    - ``effective_bw_*_gbps``: Gbit/s of a rank: the bytes of a step, gradients' and gathered parameters', as float32 or
      as sent, over the communication time of a step.
    - ``scaling_efficiency``: tokens/s per rank against those at a world size of 1 with the same strategy and label
      (else ``none``), without a link, on the same kind of machine: the mean over its seeds.
    - ``mem_residual_gb``, ``mem_replica_gb``, ``mem_outer_gb``: a rank's residuals, replicas of sharded parameters
      (``int4-diff``), and anchors and outer momentum of local updates; parts of the peak.
    - ``time_to_target_ppl_s``, ``steps_to_target_ppl``, ``ppl_at_fixed_time``: see `bench.statistics.quality`.
    - ``steps_to_target``, ``time_to_target_s``, ``bytes_to_target``: target -> value, null where the run never reached
      it; see `bench.report.rows.targets`.
    """

    schema_version: int = SCHEMA_VERSION
    run_name: str
    compressor: str
    strategy: str
    backend: Text = None
    link: str
    device: Text = None
    status: Status
    reason: Text = None
    environment: dict[str, Any] | None = None
    world_size: int
    model: Text = None
    dataset: str | dict[str, Any] | None = None
    max_length: Count = None
    batch_size: Count = None
    compress_method: Text = None
    compress_config: dict[str, Any] | None = None
    optimizer: Text = None
    steps: Count = None
    seed: int
    step_time_ms_mean: Number = None
    step_time_ms_p50: Number = None
    step_time_ms_p90: Number = None
    step_time_ms_p95: Number = None
    tokens_per_s: Number = None
    comm_time_ms_total: Number = None
    comm_ratio: Number = None
    comm_time_ms_by_op: dict[str, float] | None = None
    bytes_raw_total: Count = None
    bytes_compressed_total: Count = None
    compression_ratio: Number = None
    bytes_source: Text = None
    train_loss: Number = None
    val_loss: Number = None
    val_ppl: Number = None
    quality_from: Text = None
    # Measured where they apply.
    compress_time_ms: Number = None
    decompress_time_ms: Number = None
    extra_collectives: Count = None
    extra_collective_time_ms: Number = None
    index_bytes: Count = None
    index_share: Number = None
    density: Number = None
    sparsity: Number = None
    padding_bytes: Count = None
    residual_norm: Number = None
    grad_rel_error: Number = None
    grad_rel_error_linf: Number = None
    grad_cos_sim: Number = None
    mem_peak_alloc_gb: Number = None
    mem_peak_reserved_gb: Number = None
    mem_residual_gb: Number = None
    time_to_target_ppl_s: Number = None
    steps_to_target_ppl: Count = None
    ppl_at_fixed_time: Number = None
    overlap_ratio: Number = None
    exposed_comm_ms: Number = None
    effective_bw_raw_gbps: Number = None
    effective_bw_compressed_gbps: Number = None
    scaling_efficiency: Number = None
    bytes_interface_total: Count = None
    bytes_agreement_total: Count = None
    bytes_parameters_raw_total: Count = None
    bytes_parameters_total: Count = None
    compression_ratio_steady: Number = None
    compression_ratio_bf16: Number = None
    exempt_fraction: Number = None
    fallbacks: Count = None
    nonfinite_steps: Count = None
    clipped_steps: Count = None
    epsilon: Number = None
    delta: Number = None
    noise_multiplier: Number = None
    clipped_fraction: Number = None
    islands: int = 1
    bytes_inside_raw_total: Count = None
    bytes_inside_total: Count = None
    bytes_inside_closed_form_total: Count = None
    bytes_between_raw_total: Count = None
    bytes_between_total: Count = None
    bytes_between_closed_form_total: Count = None
    bytes_interface_between_total: Count = None
    compression_ratio_between: Number = None
    compression_ratio_between_steady: Number = None
    mem_replica_gb: Number = None
    mem_outer_gb: Number = None
    steps_to_target: dict[str, int | None] | None = None
    time_to_target_s: dict[str, float | None] | None = None
    bytes_to_target: dict[str, int | None] | None = None
    # For the table.
    lr: Number = None
    noise_multiplier_accounted: Number = None
    sampling: Text = None
    adjacency: Text = None
    accountant: Text = None
    parameters: Count = None
    architecture: Text = None
    precision: str = "fp32"  # records from before the option have none
    gradient_dtype: Text = None
    evaluation_precision: Text = None
    measured_steps: Count = None
    unigram_ppl: Number = None
    bytes_closed_form_total: Count = None
    bytes_traced_total: Count = None  # framework reductions: those of the mean profiled step, times the steps
    bytes_by_op: dict[str, int] | None = None
    compute_time_ms: Number = None
    transfer_time_ms: Number = None
    algorithm: Text = None
    fallback_fraction: Number = None
    loss_digest: Text = None
    target_reached: bool | None = None  # false: censored, never reached; null: no baseline
    meter_agrees: bool | None = None  # meter and trace on the profiled steps' payload, encoding and decoding
    meter_over_trace: dict[str, float] | None = None

    @property
    def typical_step_ms(self) -> Number:
        """The median step; the mean with an optimizer that does not send the same in every step."""
        same = (self.compress_config or {}).get("comm_optimizer", "gradient") in SAME_IN_EVERY_STEP
        return self.step_time_ms_p50 if same else self.step_time_ms_mean

    @computed_field  # type: ignore[prop-decorator]
    @property
    def all_bytes_ratio(self) -> Number:
        """How many times fewer bytes travel than with float32: gradients, gathered parameters, and the steps' flags."""
        if self.world_size == 1 or self.bytes_raw_total is None or self.bytes_compressed_total is None:
            return None
        if self.bytes_parameters_total and self.bytes_parameters_raw_total is None:
            return None
        raw = self.bytes_raw_total + (self.bytes_parameters_raw_total or 0)
        sent = self.bytes_compressed_total + (self.bytes_parameters_total or 0) + (self.bytes_agreement_total or 0)
        return raw / sent if sent else None


RESULT_FIELDS = (*Result.model_fields, *Result.model_computed_fields)


class Record(Result):
    """The record of ``train``; fields that other verbs measure are null."""

    measured_steps: int
    moved_from: list[dict[str, Any]] = Field([], exclude=True)  # strategies and ranks that took the first steps


class Failure(Row):
    """The contents of ``<verb>.failed.json``."""

    reason: str
    exit_code: int
    last_step: int | None


class Profile(Row):
    """The fields of ``profile.json`` in a row: the mean profiled step."""

    comm_time_ms_per_step: float
    comm_time_ms_by_op_per_step: dict[str, float]
    comm_ratio: float
    transfer_ms_per_step: Number = None
    compute_ms_per_step: float
    encode_ms_per_step: float
    decode_ms_per_step: float
    exposed_comm_ms: float
    overlap_ratio: Number
    reduced_bytes_per_step: Number = None
    meter_agrees: bool | None = None
    meter_over_trace: dict[str, float] | None = None

    def fields(self, record: Record) -> dict[str, Any]:
        """The row's fields."""
        measured_steps = record.measured_steps
        return {
            "comm_time_ms_total": measured_steps * self.comm_time_ms_per_step,
            "comm_time_ms_by_op": {op: measured_steps * ms for op, ms in self.comm_time_ms_by_op_per_step.items()},
            "comm_ratio": self.comm_ratio,
            "transfer_time_ms": self.transfer_ms_per_step,
            "compute_time_ms": self.compute_ms_per_step,
            "compress_time_ms": self.encode_ms_per_step or None,  # does not apply without encoding
            "decompress_time_ms": self.decode_ms_per_step or None,
            "exposed_comm_ms": self.exposed_comm_ms,
            "overlap_ratio": self.overlap_ratio,
            "effective_bw_raw_gbps": self.gbps(record, record.bytes_raw_total, record.bytes_parameters_raw_total),
            "effective_bw_compressed_gbps": self.gbps(
                record, record.bytes_compressed_total, record.bytes_parameters_total
            ),
            "bytes_traced_total": self.traced(record),
            "meter_agrees": self.meter_agrees,
            "meter_over_trace": self.meter_over_trace,
        }

    def traced(self, record: Record) -> int | None:
        """Gradient bytes of the whole run by its trace; None if a reducer counted them."""
        if self.reduced_bytes_per_step is None or record.steps is None or record.bytes_source != "closed_form":
            return None
        if record.strategy == "hsdp":  # a trace does not have the group of a collective
            return None
        return round(record.steps * self.reduced_bytes_per_step)

    def gbps(self, record: Record, gradients: int | None, parameters: int | None) -> float | None:
        """Gbit/s of a rank: its share of the run's bytes over the communication time; None without either."""
        if not gradients or not record.steps or not self.comm_time_ms_per_step:
            return None
        bits = 8 * (gradients + (parameters or 0)) / record.world_size / record.steps
        return bits / (self.comm_time_ms_per_step / 1000) / 1e9


class Perplexity(Row):
    """The fields of ``perplexity.json`` in a row."""

    avg_loss: float
    ppl: float

    def fields(self) -> dict[str, Any]:
        """The row's fields; they replace the training run's own evaluation."""
        return {"val_loss": self.avg_loss, "val_ppl": self.ppl, "quality_from": "perplexity"}


def result(folder: Path, run: Run) -> Result:
    """Read the row of one run; an unusable folder gives a failed row with the reason."""
    try:
        return _merged(folder, run)
    except BadInput as error:
        return without_measurements(run, "failed", str(error))


def compared(results: Sequence[Result], results_dir: Path) -> list[Result]:
    """Add the fields that need several runs: quality against time, and efficiency against one rank."""
    curves = {}
    for row in results:
        steps = results_dir / "runs" / row.run_name / "steps.parquet"
        if (row.quality_from in OWN_QUALITY or row.status == "diverged") and steps.exists():
            try:
                curves[run_of(row)] = quality.read(steps)
            except BadInput as error:
                print(f"gradwire summarize: {row.run_name} has no quality over time: {error}", file=sys.stderr)
    timed = quality.against_time(curves, {run_of(row) for row in results if row.status == "ok"})
    alone: Alone = {}
    for row in results:
        if (row.status, row.world_size, row.link) == ("ok", 1, UNSHAPED) and row.tokens_per_s:
            of_cell = alone.setdefault((row.strategy, row.compressor), {})
            of_cell.setdefault(hardware(row), []).append(row.tokens_per_s)
    return [
        row.model_copy(update=timed.get(run_of(row), {}) | {"scaling_efficiency": scaling_efficiency(row, alone)})
        for row in results
    ]


def scaling_efficiency(row: Result, alone: Alone) -> float | None:
    """Tokens/s per rank over one rank's on like hardware; None without such a run."""
    base = alone.get((row.strategy, row.compressor)) or alone.get((row.strategy, BASELINE), {})
    rates = base.get(hardware(row))
    if row.status != "ok" or row.world_size == 1 or not row.tokens_per_s or not rates:
        return None
    return row.tokens_per_s / row.world_size / fmean(rates)


def hardware(row: Result) -> tuple[Any, ...]:
    """The hardware that two runs must share for their times to be comparable."""
    return tuple((row.environment or {}).get(key) for key in ("device", "processor", "cores"))


def run_of(row: Result) -> Run:
    """The run of a row."""
    return Run(row.strategy, row.compressor, row.world_size, row.link, row.seed, row.islands)


def without_measurements(run: Run, status: Status, reason: str) -> Result:
    """The row of a run that has no measurements."""
    return Result(run_name=run.path, status=status, reason=reason, **run._asdict())


def _merged(folder: Path, run: Run) -> Result:
    """Merge a run's files.

    A diverged run has no perplexity, and failures of other verbs do not count.

    Raises:
        BadInput: If the run has no result, with the reason.
    """
    _raise_failure_of("train", folder)
    path = folder / "record.json"
    if not path.exists():
        raise BadInput("did not run: record.json is missing")
    record = _load(Record, path)
    if run_of(record) != run:
        raise BadInput(f"{path} is the record of another run, {record.run_name}; delete it and train this run again.")
    if record.schema_version != SCHEMA_VERSION:
        raise BadInput(f"{path} has schema version {record.schema_version}, not {SCHEMA_VERSION}; train it again.")
    if record.moved_from:
        raise BadInput(
            f"{path} is of a run that began on other ranks: its bytes and times are of its steps from "
            f"{record.moved_from[-1]['step']} on only; train this run from its first step."
        )
    if record.status == "diverged":
        return record
    merged = record.model_dump(exclude=set(Result.model_computed_fields))
    _raise_failure_of("trace", folder)
    if (folder / "profile.json").exists():
        merged |= _load(Profile, folder / "profile.json").fields(record)
    _raise_failure_of("perplexity", folder)
    if (folder / "perplexity.json").exists():
        merged |= _load(Perplexity, folder / "perplexity.json").fields()
    return Result(**merged)


def _raise_failure_of(verb: str, folder: Path) -> None:
    path = failure_file(folder, verb)
    if path.exists():
        failure = _load(Failure, path)
        after = "" if failure.last_step is None else f" after step {failure.last_step}"
        raise BadInput(f"{verb} failed{after} (exit {failure.exit_code}): {failure.reason}")


def _load(model: type[Model], path: Path) -> Model:
    """Read and check one JSON file of a run.

    Raises:
        BadInput: If it is not valid JSON, or a field is missing or of the wrong type.
    """
    try:
        return model.model_validate(read_json(path))
    except ValidationError as error:
        problem = error.errors()[0]
        field = ".".join(map(str, problem["loc"]))
        raise BadInput(f"{path} is unusable: {field}: {problem['msg']}; delete it and run its step again.") from None
