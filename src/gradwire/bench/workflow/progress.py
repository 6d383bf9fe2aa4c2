"""The view of a running experiment: how many jobs are done, what runs now, its step time, and the time left."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gradwire.base.errors import FAULT, BadInput
from gradwire.base.failures import failure_file
from gradwire.base.files import read_json
from gradwire.bench.config import Run
from gradwire.bench.report.rows.status import State, duration, look, remaining

VERBS = {"tokenizer": "tokenize", "shards": "tokenize"}  # of the rules that do not have their verb's name


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
    """A failed job, why, and the exit code of its verb."""

    job: Job
    reason: str
    exit_code: int

    @classmethod
    def of(cls, job: Job, event: Mapping[str, Any]) -> Failure:
        """The failure that an event reports, with the reason that the verb wrote next to its outputs."""
        verb = VERBS.get(job.rule, job.rule)
        files = (failure_file(folder, verb) for path in event["output"] for folder in Path(path).parents)
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
