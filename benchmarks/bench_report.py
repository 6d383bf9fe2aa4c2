"""The report of many runs: size of the page, build time, and time until a browser can use it.

    python benchmarks/bench_report.py --runs 510

Runs are synthetic (tests/made_results.py), with files in the form of real ones.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import made_results

from gradwire.bench.report.tables.table import markdown

STRATEGIES = ("ddp", "fsdp2")
PLACES = ((2, "none"), (2, "1gbit"), (2, "100mbit"), (4, "none"), (8, "none"))
SEEDS = (0, 1, 2)
OPENINGS = 5
TIMES = """async () => {
    const entry = performance.getEntriesByType("navigation")[0];
    const heading = document.querySelectorAll("#table-cells thead button")[11];
    await new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)));
    const painted = performance.now();
    heading.click();
    await new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)));
    return [entry.domInteractive, painted, performance.now() - painted];
}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=510, help="least number of runs")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of each")
    args = parser.parse_args()
    labels = [*made_results.WORSE]
    while len(labels) * len(STRATEGIES) * len(PLACES) * len(SEEDS) < args.runs:
        labels.append(f"variant-{len(labels)}")
    with tempfile.TemporaryDirectory() as temporary:
        results = made_results.rows(labels, STRATEGIES, PLACES, SEEDS)
        folder = made_results.write(Path(temporary) / "demo", results, args.steps)
        began, used = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [sys.executable, "-m", "gradwire", "report", "--results_dir", str(folder)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
        page = folder / "report.html"
        lines = [
            ["runs", f"{len(results)}", "500"],
            ["cells", f"{len(results) // len(SEEDS)}", ""],
            ["figures", f"{len(list((folder / 'figures').glob('*.svg')))}", ""],
            ["page, MB", f"{page.stat().st_size / 1e6:.2f}", "8"],
            ["build, s", f"{wall:.1f}", "15"],
            ["build, s of processor time", f"{cpu:.1f}", ""],
            *browser(page),
        ]
    load = f"{os.getloadavg()[0]:.1f} processes wanted {os.cpu_count()} cores in the last minute."
    print(markdown(lines, ["", "measured", "target: at most"]), load, sep="\n\n")


def browser(page: Path) -> list[list[str]]:
    """Milliseconds until the page can be used, and those of a sort of its table: medians."""
    from playwright.sync_api import sync_playwright

    times = []
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for _ in range(OPENINGS):
            opened = started.new_page(viewport={"width": 1440, "height": 900})
            opened.goto(page.as_uri(), timeout=300_000)
            times.append(opened.evaluate(TIMES))
            opened.close()
        started.close()
    titles = ["parsed, ms", "script run and painted, ms", "table sorted and painted, ms"]
    targets = ["", "2000", ""]
    values = [f"{median(column):,.0f}" for column in zip(*times, strict=True)]
    return [list(line) for line in zip(titles, values, targets, strict=True)]


if __name__ == "__main__":
    main()
