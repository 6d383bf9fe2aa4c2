"""The runs of an experiment: which were requested, and the row of each, merged from the files of its commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pydantic import Field, ValidationError

from gradwire.base.errors import BadInput
from gradwire.base.failures import failure_file
from gradwire.base.files import read_json
from gradwire.bench.config import SCHEMA_VERSION, Run, Targets
from gradwire.bench.report.rows.record import Number, Result, Row, first_problem, without_measurements

Model = TypeVar("Model", bound=Row)
EXPECTED = "expected.json"  # in the experiment's folder: the requested runs
SHARED = "times are shared: other runs may have used the machine at the same time (`timing: true` runs one at a time)"


class Asked(NamedTuple):
    """The request for one run.

    Attributes:
        excluded: Why it is left out, or None.
        quality_from: The results file with its perplexity, or None.
        shared: Whether other runs may use the machine at the same time.
        targets: The perplexities that it is measured by, if any.
    """

    excluded: str | None = None
    quality_from: str | None = None
    shared: bool = False
    targets: Targets | None = None


def asked_for(results_dir: Path, experiment: Path | None = None) -> dict[Run, Asked]:
    """Return the requested runs: those of a list, by default ``expected.json``, or without a list those on disk.

    Raises:
        BadInput: If the list is unusable.
    """
    if experiment is None and (results_dir / EXPECTED).exists():
        experiment = results_dir / EXPECTED
    if experiment is None:
        return dict.fromkeys(runs_on_disk(results_dir), Asked())
    cells = read_json(experiment)
    try:
        return {
            Run(**{field: cell[field] for field in Run._fields if field != "islands" or field in cell}): Asked(
                cell["excluded"],
                cell.get("quality_from"),
                cell.get("shared", False),
                Targets(**cell["targets"]) if cell.get("targets") else None,
            )
            for cell in cells
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        fields = ", ".join(Run._fields)
        raise BadInput(f"{experiment} is not a list of runs with {fields}, excluded ({error!r}).") from None


def runs_on_disk(results_dir: Path) -> list[Run]:
    """Return the runs that have a folder."""
    paths = (results_dir / "runs").glob("*/*/ws*/*/seed*")
    return [run for path in paths if (run := Run.at("/".join(path.parts[-5:])))]


def unusable(results_dir: Path) -> list[tuple[Path, str]]:
    """The files of runs that cannot be read, and why; a record of another schema version can be read elsewhere."""
    bad = []
    for run in runs_on_disk(results_dir):
        for name, model in MEASURED.items():
            path = results_dir / "runs" / run.path / name
            try:
                if path.is_file() and read_json(path).get("schema_version", SCHEMA_VERSION) == SCHEMA_VERSION:
                    _load(model, path)
            except (BadInput, AttributeError) as error:
                bad.append((path, str(error)))
    return bad


class Record(Result):
    """The record of ``train``; fields that other commands measure are null."""

    measured_steps: int
    moved_from: list[dict[str, Any]] = Field([], exclude=True)  # strategies and ranks that took the first steps


class Failure(Row):
    """The contents of ``<command>.failed.json``."""

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
        sent = record.bytes_compressed_total, record.bytes_parameters_total
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
            "effective_bw_compressed_gbps": self.gbps(record, *sent),
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
    """The fields of ``perplexity.json`` in a row, which replace the training run's own evaluation."""

    avg_loss: float
    ppl: float


MEASURED: dict[str, type[Row]] = {"record.json": Record, "profile.json": Profile, "perplexity.json": Perplexity}


def result(folder: Path, run: Run) -> Result:
    """Return the row of one run; an unusable folder gives a failed row with the reason."""
    try:
        return _merged(folder, run)
    except BadInput as error:
        return without_measurements(run, "failed", str(error))


def _merged(folder: Path, run: Run) -> Result:
    """Merge a run's files.

    A diverged run has no perplexity, and failures of other commands do not count.

    Raises:
        BadInput: If the run has no result, with the reason.
    """
    _raise_failure_of("train", folder)
    path = folder / "record.json"
    if not path.exists():
        raise BadInput("did not run: record.json is missing")
    record = _load(Record, path)
    if record.run != run:
        raise BadInput(f"{path} is the record of another run, {record.run_name}; delete it and train this run again.")
    if record.schema_version != SCHEMA_VERSION:
        version = f"schema version {record.schema_version}, not {SCHEMA_VERSION}"
        raise BadInput(f"{path} has {version}; delete it and train this run again.")
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
        measured = _load(Perplexity, folder / "perplexity.json")
        merged |= {"val_loss": measured.avg_loss, "val_ppl": measured.ppl, "quality_from": "perplexity"}
    return Result(**merged)


def _raise_failure_of(command: str, folder: Path) -> None:
    path = failure_file(folder, command)
    if path.exists():
        failure = _load(Failure, path)
        after = "" if failure.last_step is None else f" after step {failure.last_step}"
        raise BadInput(f"{command} failed{after} (exit {failure.exit_code}): {failure.reason}")


def _load(model: type[Model], path: Path) -> Model:
    """Read and check one JSON file of a run.

    Raises:
        BadInput: If it is not valid JSON, or a field is missing or of the wrong type.
    """
    again = " `gradwire run` moves it aside and makes it again." if path.name in MEASURED else ""
    try:
        return model.model_validate(read_json(path))
    except ValidationError as error:
        problem = f"{path} is unusable: {first_problem(error)}; delete it and run its step again."
        raise BadInput(f"{problem}{again}") from None
    except BadInput as error:
        raise BadInput(f"{error}{again}") from None
