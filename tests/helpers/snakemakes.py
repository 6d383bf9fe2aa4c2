"""Snakemake, imported once: `Snakemakes` runs each call in a fork of one process; as a script, this is that process."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

PRELOAD = ("snakemake.cli", "snakemake.workflow", "pulp", "gradwire.bench.config", "gradwire.bench.training.settings")


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


def serve() -> None:
    """Fork for each line of standard input, and answer with the exit code."""
    for module in PRELOAD:
        __import__(module)
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
