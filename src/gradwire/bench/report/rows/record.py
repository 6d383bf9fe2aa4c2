"""One run as one row, and the files of rows, ``results.jsonl`` and ``results.csv``.

`load_results` returns an experiment's rows as a pandas frame.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, computed_field

from gradwire.base.errors import BadInput
from gradwire.bench.config import BASELINE, SCHEMA_VERSION, Run
from gradwire.comm.communication import LOCAL, preset

if TYPE_CHECKING:
    import pandas as pd


Text = str | None
Count = int | None
Number = float | None
BF16 = "bf16-native"  # the label of the second baseline: the collective itself in bf16
ADAMW = "adamw"
OWN_QUALITY = ("train", "perplexity")  # of the same run, so that its steps explain it
Status = Literal["ok", "failed", "skipped", "diverged"]


class Row(BaseModel):
    """Data read from a file: types are checked, NaN and infinity are errors, unknown keys are ignored."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, frozen=True, extra="ignore")


class Result(Row):
    """A line of ``results.jsonl``. Null is "not measured" or "does not apply", never 0.

    Times are in milliseconds: ``comm_time_ms_total`` and ``comm_time_ms_by_op`` are the profiled steps' mean times the
    measured steps, all others are per step. Bytes are sums over ranks and all optimizer steps.

    - ``extra_collectives``: collectives of a rank's reductions beyond one payload collective each, over the whole run.
    - ``world``: ``processes``, or ``simulated`` for ranks that take turns in one process, which have no times.
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
      (else ``none``) and seed, without a link, on the same kind of machine.
    - ``mem_residual_gb``, ``mem_replica_gb``, ``mem_outer_gb``: a rank's residuals, replicas of sharded parameters
      (``int4-diff``), and anchors and outer momentum of local updates; parts of the peak.
    - ``time_to_target_ppl_s``, ``steps_to_target_ppl``, ``ppl_at_fixed_time``: see `bench.report.tables.across_runs`.
    - ``steps_to_target``, ``time_to_target_s``, ``bytes_to_target``: target -> value, null where the run never reached
      it; see there too.
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
    world: Text = None
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
    epsilon_prv: Number = None
    epsilon_rdp: Number = None
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
        local = (self.compress_config or {}).get("comm_optimizer") in LOCAL
        return self.step_time_ms_mean if local else self.step_time_ms_p50

    @property
    def inner(self) -> str:
        """The optimizer that takes its steps."""
        config = self.compress_config or {}
        return str(config.get("inner") or preset(config.get("comm_optimizer")).options.get("inner") or ADAMW)

    @property
    def averages(self) -> bool:
        """Whether it averages every step's gradients as they are."""
        return self.compress_method == BASELINE and "comm_optimizer" not in (self.compress_config or {})

    @property
    def own_quality(self) -> bool:
        """Whether its perplexity, if it has one, is not another run's."""
        return self.quality_from in (None, *OWN_QUALITY)

    @property
    def hooked(self) -> bool:
        """Whether a reducer averaged the gradients, not the framework."""
        return self.bytes_source == "metered"

    @property
    def sharded(self) -> bool:
        """Whether the strategy shards the model: replicas gather no parameters, and have no bytes of them."""
        return self.bytes_parameters_raw_total is not None

    @property
    def as_computed(self) -> bool | None:
        """Whether the measured gradient bytes equal the closed form; None if not measured.

        A reducer's messages are counted in all steps, the framework's in the traces of the profiled steps.
        """
        measured = self.bytes_compressed_total if self.hooked else self.bytes_traced_total
        if self.world_size == 1 or measured is None or self.bytes_closed_form_total is None:
            return None
        return measured == self.bytes_closed_form_total

    @property
    def mostly_float32(self) -> bool:
        """Whether the compressor encoded less than half of its elements."""
        return (self.fallback_fraction or 0) > 0.5

    @property
    def run(self) -> Run:
        """The run."""
        return Run(self.strategy, self.compressor, self.world_size, self.link, self.seed, self.islands)

    @property
    def hardware(self) -> tuple[Any, ...]:
        """The device, processor and cores, which two runs must share for their times to be comparable."""
        return tuple((self.environment or {}).get(key) for key in ("device", "processor", "cores"))

    @property
    def machine(self) -> str:
        """The conditions of its times: device, processor, vector instructions, cores, threads and versions."""
        environment = self.environment or {}
        device, processor, cores = self.hardware
        parts = [
            *dict.fromkeys((self.device, device, processor)),
            environment.get("cpu_capability"),
            f"{cores or '?'} cores",
            f"{environment.get('threads', '?')} threads",
            f"gradwire {environment.get('gradwire', '?')}",
            f"torch {environment.get('packages', {}).get('torch', '?')}",
            environment.get("preloaded"),
        ]
        return ", ".join(str(part) for part in parts if part)

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


def without_measurements(run: Run, status: Status, reason: str) -> Result:
    """Return the row of a run that has no measurements."""
    return Result(run_name=run.path, status=status, reason=reason, **run._asdict())


def read_results(path: Path) -> tuple[list[Result], list[str]]:
    """Read the rows of a ``results.jsonl``; return them with complaints about unusable lines, which are left out.

    Raises:
        BadInput: If the file cannot be read.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise BadInput(f"{path}: no results can be read there ({error.strerror}).") from None
    rows, complaints = [], []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(_row(line))
        except ValueError as error:
            complaints.append(f"{path}: line {number} is left out: {error}")
    return rows, complaints


def _row(line: bytes) -> Result:
    """Parse one line.

    Raises:
        ValueError: If it is not a row, or has another schema version.
    """
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"it is not valid JSON ({error})") from None
    version = value.get("schema_version") if isinstance(value, dict) else None
    if version != SCHEMA_VERSION:
        raise ValueError(f"its schema version is {json.dumps(version)}, not {SCHEMA_VERSION}")
    try:
        return Result.model_validate(value)
    except ValidationError as error:
        raise ValueError(first_problem(error)) from None


def first_problem(error: ValidationError) -> str:
    """Return the first invalid field of a file, and why it is invalid."""
    problem = error.errors()[0]
    return f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"


def jsonl(results: Sequence[Result]) -> str:
    """Format rows as strict JSON objects, one per line."""
    return "".join(json.dumps(row.model_dump(), ensure_ascii=False, allow_nan=False) + "\n" for row in results)


def csv_text(results: Sequence[Result]) -> str:
    """Format the same rows as CSV; mappings are JSON, null is empty."""

    import pandas as pd

    def plain(value: Any) -> Any:
        return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value

    lines = [[plain(value) for value in row.model_dump().values()] for row in results]
    return pd.DataFrame(lines, columns=[*RESULT_FIELDS], dtype=object).to_csv(index=False, lineterminator="\n")


def load_results(results_dir: str | Path) -> pd.DataFrame:
    """Read an experiment's results as a pandas frame, one row per run.

    Args:
        results_dir: The experiment's folder, which has ``results.jsonl``, or that file.

    Returns:
        A frame with a column for every field of ``results.jsonl``; what does not apply is None or NaN.

    Raises:
        BadInput: If there are no results.

    Warns:
        UserWarning: For each line that cannot be used, with its number and the reason.
    """
    import pandas as pd

    path = Path(results_dir)
    path = path / "results.jsonl" if path.is_dir() else path
    rows, complaints = read_results(path)
    for complaint in complaints:
        warnings.warn(complaint, stacklevel=2)
    if not rows:
        raise BadInput(f"{path} has no result.")
    return pd.DataFrame([row.model_dump() for row in rows], columns=[*RESULT_FIELDS])
