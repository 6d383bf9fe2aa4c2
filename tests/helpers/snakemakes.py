"""Snakemake, imported once, on a copy of the checkout: `Snakemakes` runs each call in a fork of one process.

As a script, this is that process.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml
from jobs import job_table

PRELOAD = (
    *("snakemake.cli", "snakemake.workflow", "snakemake.report.html_reporter", "smart_open", "pulp"),
    *("gradwire.bench.config", "gradwire.bench.training.settings"),
)

ROOT = Path(__file__).parents[2]
STUB = ROOT / "tests/bench/workflow/stub_gradwire"
SMALL = {
    "name": "small",
    "dataset": {"source": "pydocs", "max_mb": 0.15, "vocab_size": 300, "max_length": 32, "val_fraction": 0.1},
    "training": {"device": "cpu", "steps": 7, "warmup_steps": 1, "profile_steps": 2, "batch_size": 2, "eval_every": 0},
    "compressors": {"none": {}, "int8": {}},
    "grid": [{"strategies": ["fsdp2"], "world_sizes": [2], "seeds": [0]}],
    "gradients": {
        "compressors": ["none"],
        "dim": [16],
        "max_samples": 9,
        "query": 'what\'s {it} "for"?',
        "world_sizes": [2],
    },
}


class Snakemakes:
    """Calls of ``python -m snakemake`` in one folder and environment.

    Args:
        folder: Where they run.
        environment: Their variables; the package that PYTHONPATH leads to is the one that the Snakefile imports.
    """

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__], cwd=folder, env=environment, stdin=-1, stdout=-1, text=True
        )

    def __call__(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run one; ``variables`` are added to the environment."""
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "output"
            self.process.stdin.write(json.dumps([arguments, variables, str(output)]) + "\n")
            self.process.stdin.flush()
            code = int(self.process.stdout.readline())
            return subprocess.CompletedProcess(arguments, code, output.read_text())

    def close(self) -> None:
        """End the process."""
        self.process.communicate()


class Checkout:
    """A copy of the project that a test may edit and run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("src", "workflow", "profiles", "Snakefile", "config.yaml"):
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, folder / name)
        built = shutil.ignore_patterns("cache", "images")  # an image's name follows from the rest
        shutil.copytree(ROOT / "containers", folder / "containers", ignore=built)
        shutil.copy(STUB, folder / "gradwire")
        # The copy's own package comes first, in Snakemake and in every job.
        self.snakemakes = Snakemakes(folder, {**os.environ, "PYTHONPATH": str(folder / "src")})

    def configure(self, experiment: dict) -> None:
        (self.folder / "experiment.yaml").write_text(yaml.safe_dump(experiment))

    def snakemake(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return self.snakemakes("--cores", "2", "--configfile", "experiment.yaml", *arguments, **variables)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the jobs, each by a stub."""
        return self.snakemake(*arguments, PATH=f"{self.folder}:{os.environ['PATH']}")

    def jobs(self, **variables: str) -> dict[str, int]:
        done = self.snakemake("-n", **variables)
        assert done.returncode == 0, done.stdout
        return job_table(done.stdout)

    def results(self, name: str) -> list[dict]:
        lines = (self.folder / "results" / name / "results.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def edit(self, path: str) -> None:
        with (self.folder / path).open("a") as source:
            source.write("\n# an edit\n")


def serve() -> None:
    """Fork for each line of standard input, and answer with the exit code."""
    for module in PRELOAD:
        __import__(module)
    from snakemake.cli import get_argument_parser

    get_argument_parser()  # imports plug-ins
    gc.freeze()  # a collection in a fork would copy the pages of all that was imported
    for line in sys.stdin:
        arguments, variables, output = json.loads(line)
        child = os.fork()
        if child == 0:
            run(arguments, variables, output)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def run(arguments: list[str], variables: dict[str, str], output: str) -> None:
    """Be ``python -m snakemake``, its output in a file; does not return."""
    written = os.open(output, os.O_WRONLY | os.O_CREAT)
    for number in (0, 1, 2):
        os.dup2(os.open(os.devnull, os.O_RDONLY) if number == 0 else written, number)
    os.environ.update(variables)
    sys.argv = ["snakemake", *arguments]
    code = 1
    try:
        runpy.run_module("snakemake", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
