"""The command ``run``: an experiment from its file to its page with Snakemake, in any folder, with a live view."""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated, Any, NamedTuple, NoReturn

from pydantic import Field

from gradwire.base.errors import FAULT, BadInput, RunFault, Stopped, unknown
from gradwire.base.extras import require
from gradwire.base.failures import failure_file
from gradwire.base.files import read_json, read_yaml
from gradwire.base.flags import Positional, Short
from gradwire.base.parent_watch import PARENT
from gradwire.base.strict import Strict
from gradwire.bench.config import Run
from gradwire.bench.config.file import Experiment, check, read
from gradwire.bench.report.rows.record import read_results
from gradwire.bench.report.rows.runs import unusable
from gradwire.bench.report.rows.status import State, look, remaining
from gradwire.bench.steps import duration
from gradwire.bench.workflow.dry_run import trainings

FOLDER = Path(__file__).parent / "files"  # `workflow/` of the checkout
PROFILES = FOLDER / "profiles"
REFRESH = 1.0  # seconds between two views
DRY_RUN = {"-n", "--dry-run", "--dryrun"}  # Snakemake's names
COMMANDS = {"tokenizer": "tokenize", "shards": "tokenize"}  # of the rules that do not have their command's name


class Options(Strict):
    """Arguments of ``gradwire run``."""

    file: Annotated[Path, Positional("FILE")] = Field(Path("experiment.yaml"), description="the experiment's file")
    snakemake: Annotated[tuple[str, ...], Positional("OPTION")] = Field(
        (), description="options of Snakemake, after FILE and --"
    )
    cores: str | None = Field(None, description="cores to use (default: all; on a cluster, those of the profile)")
    profile: str = Field(
        "default",
        description=f"how to run it: {', '.join(sorted(folder.name for folder in PROFILES.iterdir()))}, or a folder "
        "with a profile.yaml",
    )
    dry_run: Annotated[bool, Short("-n")] = Field(False, description="list jobs and trainings, and run none")
    verbose: bool = Field(False, description="show Snakemake's own output")


def main(options: Options) -> None:
    """Run what is missing of the experiment; print one screen of it, with the paths of its page and tables.

    Raises:
        BadInput: If the file is invalid, its source cannot be read, or jobs failed on bad input only.
        ModuleNotFoundError: If Snakemake is not installed.
        RunFault: If a job failed otherwise, or a run has no result.
        Stopped: If a signal stopped it.
    """
    experiment = experiment_in(options.file)
    experiment.dataset.built.content()  # reads a local source: an empty folder is refused before Snakemake starts
    require("gradwire run", "snakemake", "snakemake_interface_logger_plugins")
    words = words_of(options)
    results, dry_run = Path("results") / experiment.name, not DRY_RUN.isdisjoint(words)
    if not dry_run:
        move_aside(results)
    if options.verbose:
        os.execv(sys.executable, [sys.executable, "-m", "snakemake", *words])
    view = View(results)
    with journal(dry_run, results) as log:
        if code := follow([sys.executable, "-m", "gradwire.bench.workflow.events", *words], log, view):
            fail(results, view, code, None if dry_run else log.name)
    if not view.total:
        print("nothing to do: every job is done")
    elif dry_run:
        print(f"{view.total} jobs: {', '.join(f'{n} {rule}' for rule, n in view.jobs.items())}")
        if trained := [job.run for job in view.running.values() if job.rule == "train" and job.run is not None]:
            print(f"trainings:\n{trainings(trained)}")
    if not dry_run and (results / "report.html").exists():
        from gradwire.bench.report.tables.glance import terminal
        from gradwire.bench.report.tables.results import Results

        print(f"\n{terminal(Results.read(results))}")
        check_results(results)


def experiment_in(file: Path) -> Experiment:
    """The checked experiment of a file.

    Raises:
        BadInput: With the file's name, if it is invalid.
    """
    mapping = read(file)
    try:
        return check(mapping)
    except BadInput as error:
        raise BadInput(f"{file}: {str(error).removeprefix('configuration: ')}") from None


def move_aside(results: Path) -> None:
    """Rename the files of runs that cannot be read to ``<name>.unusable``, so that Snakemake makes them again."""
    for path, reason in unusable(results):
        aside = path.with_name(f"{path.name}.unusable")
        path.rename(aside)
        print(f"moved to {aside}: {reason}")


def check_results(results: Path) -> None:
    """Check that every run has a result.

    Raises:
        RunFault: If one failed although all jobs are done: its files are not those of the run.
    """
    rows, complaints = read_results(results / "results.jsonl")
    failed = [f"{row.run_name}: {row.reason}" for row in rows if row.status == "failed"]
    if failed or complaints:
        lost = f"{len(failed)} run{'s have' if len(failed) != 1 else ' has'} no result"
        raise RunFault(f"{lost}: {'; '.join([*failed, *complaints])}")


def journal(dry_run: bool, results: Path) -> IO[str]:
    """The file for what Snakemake prints: in the experiment's folder, which a dry run does not make."""
    if dry_run:
        return tempfile.TemporaryFile("w+")
    log = results / "logs" / "snakemake.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    return log.open("a")


def words_of(options: Options) -> list[str]:
    """Snakemake's options.

    Raises:
        BadInput: If the profile or the number of cores is invalid.
    """
    profile = PROFILES / options.profile if (PROFILES / options.profile).is_dir() else Path(options.profile)
    if not (profile / "profile.yaml").is_file():
        raise unknown("profile", options.profile, (folder.name for folder in PROFILES.iterdir()))
    cores = options.cores or (None if "executor" in read_yaml(profile / "profile.yaml") else "all")
    if cores is not None and cores != "all" and not (cores.isdecimal() and int(cores)):
        raise BadInput(f"--cores takes a number of cores or all, not {cores!r}.")
    words = ["--snakefile", str(FOLDER / "Snakefile"), "--configfile", str(options.file)]
    words += ["--workflow-profile", str(profile), *(["--cores", cores] if cores else [])]
    return [*words, *(["--dry-run"] if options.dry_run else []), *options.snakemake]


def follow(command: list[str], output: IO[str], view: View) -> int:
    """Run Snakemake and show its progress; its exit code. A signal that stops this process stops Snakemake too.

    Raises:
        Stopped: If a signal came.
    """
    environment = {**os.environ, PARENT: str(os.getpid())}
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=output,
        text=True,
        process_group=0,
    ) as process:
        try:
            with terminating():
                for event in events(process):
                    if event is not None:
                        view.take(event)
                    view.refresh()
        except KeyboardInterrupt:
            os.killpg(process.pid, signal.SIGINT)  # its jobs save what they have
            process.wait()
            raise Stopped("stopped; the same command goes on from what is done.") from None
        finally:
            view.close()
    return process.returncode


@contextmanager
def terminating() -> Iterator[None]:
    """Take SIGTERM, which a scheduler sends, as the interrupt of a terminal."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def events(process: subprocess.Popen[str]) -> Iterator[dict[str, Any] | None]:
    """Yield the events of a process until it ends, and None after every ``REFRESH`` seconds without one."""
    lines: queue.Queue[str] = queue.Queue()

    def pump() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put("")

    threading.Thread(target=pump, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=REFRESH)
        except queue.Empty:
            yield None
            continue
        if not line:
            return
        if line.startswith("{"):  # others are what Snakemake's own shell commands print
            yield json.loads(line)


def fail(results: Path, view: View, code: int, log: str | None) -> NoReturn:
    """Raise the error for a failed Snakemake.

    Raises:
        BadInput: With the jobs that failed and their reasons, if each is bad input, or with what the workflow refused.
        RunFault: With the jobs that failed and their reasons, or Snakemake's own message.
    """
    failed = view.failures.values()
    if not failed and code == BadInput.exit_code and view.errors:
        raise BadInput(view.errors[-1])
    error = BadInput if {job.exit_code for job in failed} == {BadInput.exit_code} else RunFault
    reasons = list(map(str, failed)) or [" ".join(text.split()) for text in view.errors[-1:]] or ["a job failed"]
    reason = "; ".join(text.rstrip(".") for text in reasons)
    page = f" The page has the other runs: {results / 'report.html'}." if (results / "report.html").exists() else ""
    rest = f" Log: {log}. The same command runs what is missing." if log else ""
    raise error(f"{reason}.{page}{rest}")


class Job(NamedTuple):
    """A job of the workflow.

    Attributes:
        rule: Its rule, such as ``train``.
        run: The run that it belongs to; None for a job of no single run.
    """

    rule: str
    run: Run | None = None

    @classmethod
    def of(cls, event: Mapping[str, Any]) -> Job:
        """The job that an event starts."""
        wildcards = {"islands": "", **event["wildcards"]}
        return cls(event["rule"], Run.of(wildcards) if wildcards.keys() >= set(Run._fields) else None)

    def __str__(self) -> str:
        return self.rule if self.run is None else f"{self.rule} {self.run.path}"


class Failure(NamedTuple):
    """A failed job, why, and the exit code of its command."""

    job: Job
    reason: str
    exit_code: int

    @classmethod
    def of(cls, job: Job, event: Mapping[str, Any]) -> Failure:
        """The failure that an event reports, with the reason that the command wrote next to its outputs."""
        command = COMMANDS.get(job.rule, job.rule)
        files = (failure_file(folder, command) for path in event["output"] for folder in Path(path).parents)
        if (file := next((file for file in files if file.is_file()), None)) is None:
            return cls(job, f"see {', '.join(event['log'])}", FAULT)
        failure = read_json(file)
        return cls(job, failure["reason"], failure["exit_code"])

    def __str__(self) -> str:
        return f"{self.job}: {self.reason}"


def said(job: Job, states: Mapping[Run, State]) -> str:
    """The state of a training: its step and step time while it runs, its result when it is done."""
    state = states.get(job.run) if job.rule == "train" and job.run is not None else None
    return f": {state.text}" if state is not None and state.text else ""


class View:
    """Snakemake's events as lines: one for each finished job, or one that is rewritten on a terminal.

    Args:
        results_dir: The experiment's folder.
    """

    def __init__(self, results_dir: Path) -> None:
        self.results_dir = results_dir
        self.done = 0
        self.jobs: dict[str, int] = {}
        self.running: dict[int, Job] = {}
        self.failures: dict[int, Failure] = {}
        self.errors: list[str] = []
        self.in_place = sys.stdout.isatty()

    def take(self, event: Mapping[str, Any]) -> None:
        """Follow an event, and print what it finishes or fails."""
        kind = event["event"]
        if kind == "run_info":
            self.jobs = event["jobs"]
        elif kind == "job_info" and event["rule"] != "all":
            self.running[event["job"]] = Job.of(event)
        elif kind == "error":
            self.errors.append(event["text"])
        elif kind == "job_error":
            failure = Failure.of(self.running.pop(event["job"]), event)
            if event["job"] not in self.failures:  # else it was tried again
                self.print(f"failed: {failure.job}; its log: {', '.join(event['log'])}")
            self.failures[event["job"]] = failure
        elif kind == "job_finished" and (job := self.running.pop(event["job"], None)) is not None:
            self.failures.pop(event["job"], None)
            self.done += 1
            if not self.in_place:
                self.print(f"{self.count} {job}{said(job, self.states())}")

    @property
    def total(self) -> int:
        """The number of jobs that Snakemake runs; 0 if there is nothing to do."""
        return sum(self.jobs.values())

    @property
    def count(self) -> str:
        """How many jobs are done."""
        return f"{self.done:>{len(str(self.total))}}/{self.total}"

    def states(self) -> dict[Run, State]:
        """The state of every run; empty before the experiment's folder is written."""
        try:
            return look(self.results_dir)
        except BadInput:
            return {}

    def refresh(self) -> None:
        """Rewrite the line on a terminal."""
        if self.in_place:
            print(f"\r\033[K{self.line()[: shutil.get_terminal_size().columns - 1]}", end="", flush=True)

    def line(self) -> str:
        """Jobs done, jobs that run, and the time left."""
        if not self.total:
            return "reading the experiment"
        states = self.states()
        jobs = [f"{job}{said(job, states)}" for job in self.running.values()]
        left = remaining(states, self.results_dir)
        return " | ".join([f"{self.count} jobs", *jobs, *([f"about {duration(left)} left"] if left else [])])

    def print(self, line: str) -> None:
        """Print a line that stays."""
        print(f"{chr(13)}\033[K{line}" if self.in_place else line, flush=True)

    def close(self) -> None:
        """Remove the line that is rewritten."""
        if self.in_place:
            print("\r\033[K", end="", flush=True)
