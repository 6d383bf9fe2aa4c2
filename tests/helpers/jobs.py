"""How many jobs of each rule a dry run has: ``python tests/helpers/jobs.py [ARGUMENTS] -- all=1 train=18 ...``.

A root Snakefile without a target prints "Nothing to be done" and exits 0, so a dry run that only succeeds
proves nothing: its job table is what has to be asserted.
"""

from __future__ import annotations

import re
import subprocess
import sys


def job_counts(*arguments: str, **options) -> dict[str, int]:
    """The job table of ``snakemake -n`` with ``arguments``: rule -> number of jobs; empty if nothing is to be done."""
    command = [sys.executable, "-m", "snakemake", "-n", "--cores", "2", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    output = done.stdout + done.stderr
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} exited with {done.returncode}:\n{output}")
    return job_table(output)


def job_table(output: str) -> dict[str, int]:
    """The job table in what a dry run printed."""
    if "Nothing to be done" in output:
        return {}
    table = output[output.index("Job stats:") :].split("\n\n")[0]
    return {rule: int(count) for rule, count in re.findall(r"^(\w+) +(\d+)$", table, re.MULTILINE) if rule != "total"}


def main(words: list[str]) -> None:
    """Compare the job table with the counts that were given; exits with 1 and both if they differ."""
    split = words.index("--")
    expected = {rule: int(count) for rule, count in (word.split("=") for word in words[split + 1 :])}
    found = job_counts(*words[:split])
    if found != expected:
        sys.exit(f"the dry run lists {found}\n     expected was {expected}")
    print(f"dry run: {found or 'nothing to be done'}")


if __name__ == "__main__":
    main(sys.argv[1:])
