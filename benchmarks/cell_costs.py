"""Processor time of a cell of the smoke experiment beyond its steps, and of ranks that one process simulates.

``python benchmarks/cell_costs.py [--worlds 2 8] [--repeat 3]`` prints a table. A cell is what a launcher forks for it
from a process that has the imports: the check of its input, and its ranks. Data and settings are those of
``configs/smoke.yaml``. It runs with 12 and with 36 steps; a step costs a 24th of the difference, and the rest is what a
cell costs without one. The cheapest of the repetitions counts: the first compiles kernels.
"""

from __future__ import annotations

import argparse
import os
import resource
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tabulate import tabulate

from gradwire.base.failures import CHECK
from gradwire.bench.config.file import check, read
from gradwire.bench.launch import fork, ranks
from gradwire.bench.training.train import PRELOAD
from gradwire.cli import main as gradwire

STEPS, MORE = 12, 36
SMOKE = Path(__file__).parents[1] / "configs" / "smoke.yaml"


class Case(NamedTuple):
    """A cell: its strategy, its compressor, its ranks, and whether one process simulates them."""

    strategy: str
    method: str
    world: int
    simulated: bool = False

    @property
    def processes(self) -> int:
        """Number of processes that train."""
        return 1 if self.simulated else self.world


CASES = (
    *(Case("ddp", method, 2) for method in ("none", "int8")),
    *(Case("fsdp2", method, 2) for method in ("none", "int8")),
    *(Case("ddp", "onebit", 8, simulated) for simulated in (False, True)),
)


def shards(folder: Path) -> Path:
    """Make the shards of the smoke experiment."""
    data = check(read(SMOKE)).dataset
    corpus = str(folder / "corpus.json")
    gradwire(["download", "--source", data.source, "--max_mb", str(data.max_mb), "--output", corpus])
    sizes = {name: str(getattr(data, name)) for name in ("vocab_size", "max_length", "shard_size", "val_fraction")}
    flags = [word for name, value in sizes.items() for word in (f"--{name}", value)]
    gradwire(["tokenize", "--data_path", corpus, "--output_dir", str(folder / "tokens"), *flags])
    return folder / "tokens" / "shards"


def words_of(case: Case, steps: int, data: Path, output: Path) -> list[str]:
    """The command of a rank."""
    training = check(read(SMOKE)).training
    given = {name: getattr(training, name) for name in ("warmup_steps", "lr_warmup_steps", "batch_size", "eval_every")}
    given |= {"profile_steps": training.profile_steps, "steps": steps, "data_path": data, "output_dir": output}
    given |= {"strategy": case.strategy, "comm_compress": case.method, "device": "cpu"}
    given |= {"simulated_ranks": case.world} if case.simulated else {}
    return ["-m", "gradwire", "train", *(str(word) for name, value in given.items() for word in (f"--{name}", value))]


def forked(words: list[str], variables: list[Mapping[str, str]]) -> float:
    """Run a command in forks of this process; their processor seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    end, _ = socket.socketpair()
    processes = [fork.FORK.Process(target=fork._run, args=(end, words, mine)) for mine in variables]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert not process.exitcode, f"{' '.join(words)} failed"
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def cost(case: Case, steps: int, data: Path) -> float:
    """Processor seconds of a cell."""
    with tempfile.TemporaryDirectory() as output:
        words, threads = words_of(case, steps, data, Path(output)), {"OMP_NUM_THREADS": "1"}
        size = ["--world_size", str(case.processes)]
        checked = forked([*words, *size], [threads | {CHECK: "1"}])
        return checked + forked(words, [place | threads for place in ranks.places(case.processes, "127.0.0.1", 0)])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    os.environ.update(ranks.rank_variables(2))
    fork._import(PRELOAD)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        data = shards(Path(folder))
        for case in (case for case in CASES if case.world in args.worlds):
            few, more = (min(cost(case, steps, data) for _ in range(args.repeat)) for steps in (STEPS, MORE))
            step = (more - few) / (MORE - STEPS)
            label = f"{case.strategy}, {case.method}, {case.world} ranks" + (" simulated" if case.simulated else "")
            rows.append([label, f"{few:.2f}", f"{1000 * step:.0f}", f"{few - STEPS * step:.2f}"])
            print(*rows[-1], sep=" | ", flush=True)
    header = ["cell", f"s, {STEPS} steps", "ms a step", "s beyond its steps"]
    print(tabulate(rows, header, tablefmt="pipe", disable_numparse=True))


if __name__ == "__main__":
    main()
