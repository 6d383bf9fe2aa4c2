"""One run as one row: its record, its profile and its perplexity merged, or the reason why there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from gradwire.config import SCHEMA_VERSION, Run
from gradwire.errors import BadInput
from gradwire.failures import failure_file
from gradwire.files import read_json

Model = TypeVar("Model", bound=BaseModel)
Text = str | None
Count = int | None
Number = float | None
Status = Literal["ok", "failed", "skipped", "diverged"]


class Row(BaseModel):
    """Data read from a file: the types must be right, NaN and infinity are refused, other keys are left behind."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, frozen=True, extra="ignore")


class Result(Row):
    """A line of ``results.jsonl``. Null is "not measured" or "does not apply", never 0.

    Times are in milliseconds: ``comm_time_ms_total`` and ``comm_time_ms_by_op`` are the profiled steps' mean times the
    measured steps, all others are per step. Bytes are sums over ranks and all optimizer steps.
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
    # What the table needs besides.
    parameters: Count = None
    measured_steps: Count = None
    unigram_ppl: Number = None
    bytes_closed_form_total: Count = None
    compute_time_ms: Number = None
    algorithm: Text = None
    loss_digest: Text = None


RESULT_FIELDS = tuple(Result.model_fields)


class Record(Result):
    """What ``train`` writes; the fields that other verbs measure are null in it."""

    measured_steps: int


class Failure(Row):
    """What ``<verb>.failed.json`` tells."""

    reason: str
    exit_code: int
    last_step: int | None


class Profile(Row):
    """What a row takes from ``profile.json``: the mean profiled step."""

    comm_time_ms_per_step: float
    comm_time_ms_by_op_per_step: dict[str, float]
    comm_ratio: float
    compute_ms_per_step: float
    encode_ms_per_step: float
    decode_ms_per_step: float
    exposed_comm_ms: float
    overlap_ratio: Number

    def fields(self, measured_steps: int) -> dict[str, Any]:
        """The row's fields."""
        return {
            "comm_time_ms_total": measured_steps * self.comm_time_ms_per_step,
            "comm_time_ms_by_op": {op: measured_steps * ms for op, ms in self.comm_time_ms_by_op_per_step.items()},
            "comm_ratio": self.comm_ratio,
            "compute_time_ms": self.compute_ms_per_step,
            "compress_time_ms": self.encode_ms_per_step or None,  # without any encoding the field does not apply
            "decompress_time_ms": self.decode_ms_per_step or None,
            "exposed_comm_ms": self.exposed_comm_ms,
            "overlap_ratio": self.overlap_ratio,
        }


class Perplexity(Row):
    """What a row takes from ``perplexity.json``."""

    avg_loss: float
    ppl: float

    def fields(self) -> dict[str, Any]:
        """The row's fields; they replace the training run's own evaluation."""
        return {"val_loss": self.avg_loss, "val_ppl": self.ppl, "quality_from": "perplexity"}


def result(folder: Path, run: Run) -> Result:
    """The row of one run, whatever its folder holds; what cannot be used is a failed row that says why."""
    try:
        return _merged(folder, run)
    except BadInput as error:
        return without_measurements(run, "failed", str(error))


def without_measurements(run: Run, status: Status, reason: str) -> Result:
    """The row of a run that has no measurements."""
    return Result(run_name=run.path, status=status, reason=reason, **run._asdict())


def _merged(folder: Path, run: Run) -> Result:
    """Merge a run's files.

    A run that diverged has no perplexity, and no other verb can fail it.

    Raises:
        BadInput: With the reason why the run has no result.
    """
    _raise_failure_of("train", folder)
    path = folder / "record.json"
    if not path.exists():
        raise BadInput("did not run: there is no record.json")
    record = _load(Record, path)
    if Run(record.strategy, record.compressor, record.world_size, record.link, record.seed) != run:
        raise BadInput(f"{path} is the record of another run, {record.run_name}; delete it and train this cell again.")
    if record.schema_version != SCHEMA_VERSION:
        raise BadInput(f"{path} has schema version {record.schema_version}, not {SCHEMA_VERSION}; train it again.")
    if record.status == "diverged":
        return record
    merged = record.model_dump()
    _raise_failure_of("trace", folder)
    if (folder / "profile.json").exists():
        merged |= _load(Profile, folder / "profile.json").fields(record.measured_steps)
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
        BadInput: If it is no JSON, or a field is missing or of the wrong type.
    """
    try:
        return model.model_validate(read_json(path))
    except ValidationError as error:
        problem = error.errors()[0]
        field = ".".join(map(str, problem["loc"]))
        raise BadInput(f"{path} is unusable: {field}: {problem['msg']}; delete it and run its step again.") from None
