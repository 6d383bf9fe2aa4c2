"""Faults, each injected from outside, and the plain rerun after each: a clear message, no orphan, the same results."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from data_samples import values, write_corpus

from gradwire.base.files import sha256_file
from gradwire.bench.launch.ranks import THREADS

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1200)]
INJECTOR = Path(__file__).with_name("inject.py")
JUMP, DAY = Path(__file__).with_name("jump.c"), 24 * 3600
NOW = [sys.executable, "-c", "import sys, time; sys.stderr.write(str(time.time()))"]
ROOT = Path(__file__).parents[2]
CLEAN = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", *THREADS)}
GRADWIRE = (sys.executable, "-m", "gradwire")
CELL = json.dumps({"rounding": "stochastic", "error_feedback": True})
TRAINING = {"batch_size": 2, "steps": 12, "warmup_steps": 1, "eval_every": 0, "checkpoint_every": 2, "device": "cpu"}
COLLECTING = {"dim": 8, "save_interval": 8, "projection": "rademacher", "device": "cpu"}
Words = list[str]


def flags(given: dict[str, object]) -> Words:
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    stderr: str

    @property
    def last(self) -> str:
        return self.stderr.strip().splitlines()[-1]


def start(words: Words, cwd: Path, **variables: str) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(words, cwd=cwd, env={**CLEAN, **variables}, start_new_session=True, **pipes)


def finished(process: subprocess.Popen[str]) -> Ended:
    _, stderr = process.communicate(timeout=900)
    return Ended(process.returncode, stderr)


def run(words: Words, cwd: Path, **variables: str) -> Ended:
    return finished(start(words, cwd, **variables))


def struck(words: Words, cwd: Path, rank: str, signal: str, pattern: Path | str, **variables: str) -> Ended:
    """Run a command while another process waits for its moment."""
    process = start(words, cwd, **variables)
    command = [sys.executable, INJECTOR, str(process.pid), rank, signal, str(pattern)]
    injected = subprocess.run(command, capture_output=True, text=True, check=False)
    assert injected.returncode == 0, injected.stderr + process.communicate()[1]
    return finished(process)


def orphans(folder: Path, patience: float = 5.0) -> Words:
    """The command lines of processes that name this folder; those that are about to end get a few seconds."""
    deadline = time.monotonic() + patience
    while True:
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                line = path.read_bytes().decode()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if str(folder) in line and path.parent.name != str(os.getpid()):
                found.append(line.replace("\0", " "))
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def tree(folder: Path, *patterns: str) -> dict[str, str]:
    """Digests of the files that hold results."""
    found = (path for pattern in patterns for path in folder.glob(pattern))
    return {str(path.relative_to(folder)): sha256_file(path) for path in sorted(found) if path.is_file()}


class Laboratory:
    """Data to train on, and what every command gives when nothing goes wrong."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_corpus(folder / "corpus.json", values(400))
        self.succeed(self.tokenize(folder / "data"))
        self.shards = folder / "data/shards"
        self.succeed(self.train(folder / "run"))
        self.record = json.loads((folder / "run/record.json").read_text())

    def succeed(self, words: Words) -> None:
        done = run(words, self.folder)
        assert done.code == 0, done.stderr

    def tokenize(self, output: Path) -> Words:
        made = {"vocab_size": 300, "max_length": 24, "shard_size": 20, "val_fraction": 0.1}
        return [*GRADWIRE, "tokenize", *flags({"data_path": self.folder / "corpus.json", "output_dir": output, **made})]

    def train(self, output: Path, launcher: str = "spawn", **changes: object) -> Words:
        data = changes.pop("data_path", getattr(self, "shards", None))
        given = {"data_path": data, "output_dir": output, "comm_compress": "int8", "comm_config_json": CELL}
        launch = [*GRADWIRE, "launch", "--world_size", "2", "--launcher", launcher, "--", "train"]
        return [*launch, *flags({**given, **TRAINING, **changes}), "--no-profile", "--resume", "--restart"]

    def collect(self, output: Path, **changes: object) -> Words:
        given = {"model_dir": self.folder / "run/final_model", "data_path": self.shards, "output_path": output}
        launch = [*GRADWIRE, "launch", "--world_size", "2", "--launcher", "spawn", "--", "grads", "collect"]
        return [*launch, *flags({**given, **COLLECTING, "split": "val", **changes})]

    def same_run(self, output: Path) -> str:
        """That a rerun's results are those of the unbroken run; in words, for the table."""
        record = json.loads((output / "record.json").read_text())
        for name in ("loss_digest", "val_loss", "bytes_compressed_total", "status"):
            assert record[name] == self.record[name], name
        kept = ("final_model/model.safetensors", "final_model/optimizer.safetensors")
        assert tree(output, *kept) == tree(self.folder / "run", *kept)
        assert not list(output.glob("*.failed.json"))
        return "same losses, bytes and weights"


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> Laboratory:
    return Laboratory(tmp_path_factory.mktemp("laboratory"))


def rerun_trains(lab: Laboratory, folder: Path) -> str:
    """The plain rerun of a training that broke off, and no process or finished output of it before."""
    assert not orphans(folder)
    assert not (folder / "record.json").exists()
    again = run(lab.train(folder), lab.folder)
    assert again.code == 0, again.stderr
    return lab.same_run(folder)


# ------------------------------------------------------------------------------------------------- a rank is killed
PHASES = {
    "rendezvous": ("1", "{lab}"),
    "training": ("0", "{run}/checkpoints/step00000002"),
    "saving a checkpoint": ("1", "{run}/checkpoints/step0000000[4-9].part"),
    "saving the model": ("0", "{run}/final_model.*.part"),
}


@pytest.mark.parametrize("phase", PHASES)
def test_kill_9_of_a_rank_that_trains(phase, lab, tmp_path, table):
    rank, pattern = PHASES[phase]
    launcher = {"training": "fork", "saving a checkpoint": "torchrun"}.get(phase, "spawn")
    ended = struck(
        lab.train(tmp_path, launcher), lab.folder, rank, "KILL", pattern.format(lab=lab.folder, run=tmp_path)
    )
    message = f"gradwire launch: rank {rank}: was killed by SIGKILL (out of memory?) and left no message."
    assert (ended.code, ended.last) == (3, message)
    assert json.loads((tmp_path / "train.failed.json").read_text())["rank"] == int(rank)
    rerun = rerun_trains(lab, tmp_path)
    table(f"kill -9 of rank {rank}, {phase}", f"exit 3: {ended.last}", rerun)


def test_kill_9_while_tokenizing(lab, tmp_path, table):
    ended = struck(lab.tokenize(tmp_path), lab.folder, "-", "KILL", tmp_path / "shards/train/shard-0000[1-9].pt")
    assert ended.code == -9 and not orphans(tmp_path)
    refused = run(lab.train(tmp_path / "run", data_path=tmp_path / "shards"), lab.folder)
    assert refused.code == 2 and "gradwire tokenize" in refused.stderr
    again = run(lab.tokenize(tmp_path), lab.folder)
    assert again.code == 0, again.stderr
    assert tree(tmp_path, "shards/*/*") == tree(lab.folder / "data", "shards/*/*")
    table("kill -9, tokenizing", f"training on it: exit 2: {refused.last}", "same shards, to the byte")


def test_kill_9_while_collecting_and_while_aggregating(lab, tmp_path, table):
    reference, broken = tmp_path / "reference", tmp_path / "broken"
    results = ("*/dim8/*.pt", "*/dim8/*.pkl", "dim8/all_orig.pt", "dim8/all_ids.pkl")
    aggregate = {run_: [*GRADWIRE, "grads", "aggregate"] for run_ in (reference, broken)}
    for folder, words in aggregate.items():
        words += flags({"base_path": folder, "output_dir": folder, "num_gpus": 2, "dim": 8})
    lab.succeed(lab.collect(reference))

    ended = struck(lab.collect(broken), lab.folder, "1", "KILL", broken / "rank_1/dim8/grads-*.pt")
    message = "gradwire launch: rank 1: was killed by SIGKILL (out of memory?) and left no message."
    assert (ended.code, ended.last) == (3, message)
    assert not orphans(broken)
    assert not (broken / "rank_1/dim8/all_ids.pkl").exists()
    lab.succeed(lab.collect(broken))
    assert tree(broken, *results[:2]) == tree(reference, *results[:2])
    lab.succeed(aggregate[reference])
    table("kill -9 of rank 1, collecting", f"exit 3: {ended.last}", "same gradients, to the byte")

    ended = struck(aggregate[broken], lab.folder, "-", "KILL", broken / "dim8/*.part")
    assert ended.code == -9 and not orphans(broken)
    assert not (broken / "dim8/manifest.json").exists()
    assert list(broken.glob("dim8/*.part"))
    validate = [*GRADWIRE, "grads", "validate", *flags({"output_dir": broken, "num_gpus": 2, "dim": 8})]
    refused = run([*validate, "--check_aggregated"], lab.folder)
    assert refused.code in (1, 2)
    lab.succeed(aggregate[broken])
    assert not list(broken.glob("dim8/*.part"))
    assert tree(broken, *results) == tree(reference, *results)
    table("kill -9, aggregating", f"validation: exit {refused.code}: {refused.last}", "same gradients, to the byte")


# -------------------------------------------------------------------------------------------------- a rank hangs
def assert_hung(ended: Ended) -> None:
    assert ended.code == 3
    assert ended.last.startswith("gradwire launch: rank 1: hung: rank 0 timed out waiting for it (")
    assert ended.last.endswith("it was ended.")


def test_a_hung_rank_that_trains_is_found_and_named(lab, tmp_path, table):
    words = lab.train(tmp_path, "fork", timeout=10)
    ended = struck(words, lab.folder, "1", "STOP", tmp_path / "checkpoints/step00000002")
    assert_hung(ended)
    table("rank 1 hangs (SIGSTOP), training", f"exit 3: {ended.last}", rerun_trains(lab, tmp_path))


def test_a_hung_rank_that_collects_is_found_and_named(lab, tmp_path, table):
    ended = struck(lab.collect(tmp_path, timeout=10), lab.folder, "1", "STOP", tmp_path / "rank_1/dim8/grads-*.pt")
    assert_hung(ended)
    assert not orphans(tmp_path)
    assert not (tmp_path / "rank_1/dim8/all_ids.pkl").exists()
    lab.succeed(lab.collect(tmp_path))
    assert (tmp_path / "rank_1/dim8/all_ids.pkl").exists()
    table("rank 1 hangs (SIGSTOP), collecting", f"exit 3: {ended.last}", "all gradients")


# ------------------------------------------------------------------------------------------------------- the disk
@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[None]:
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", *options, str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts file systems: needs root")


@needs_root
def test_a_full_disk(lab, tmp_path, table):
    folder = tmp_path / "run"
    with mounted(folder, "-t", "tmpfs", "-o", "size=4m", "small"):
        ended = run(lab.train(folder), lab.folder)
        assert ended.code == 3
        assert "cannot be written: No space left on device." in ended.last
        assert "Traceback" not in ended.stderr
        assert not list(folder.glob("checkpoints/*"))
        subprocess.run(["mount", "-o", "remount,size=64m", str(folder)], check=True)
        rerun = rerun_trains(lab, folder)
    table("disk full (4 MB), training", f"exit 3: {ended.last}", rerun)

    folder = tmp_path / "data"
    with mounted(folder, "-t", "tmpfs", "-o", "size=60k", "small"):
        ended = run(lab.tokenize(folder), lab.folder)
        assert ended.code == 3
        assert "cannot be written: No space left on device." in ended.stderr
        assert "Traceback" not in ended.stderr
        subprocess.run(["mount", "-o", "remount,size=64m", str(folder)], check=True)
        lab.succeed(lab.tokenize(folder))
        assert tree(folder, "shards/*/*") == tree(lab.folder / "data", "shards/*/*")
    said = next(line for line in ended.stderr.splitlines() if "NOTE" not in line and "No space left" in line)
    table("disk full (60 kB), tokenizing", f"exit 3: {said}", "same shards, to the byte")


@needs_root
def test_a_read_only_output_folder(lab, tmp_path, table):
    folder = tmp_path / "run"
    folder.mkdir()
    subprocess.run(["mount", "--bind", str(folder), str(folder)], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(folder)], check=True)
        ended = run(lab.train(folder), lab.folder)
    finally:
        subprocess.run(["umount", str(folder)], check=True)
    assert ended.code == 2
    assert "cannot be written: Read-only file system; give another path." in ended.last
    assert "Traceback" not in ended.stderr
    table("read-only output folder", f"exit 2, before any rank starts: {ended.last}", rerun_trains(lab, folder))


# ------------------------------------------------------------------------------------------------------ checksums
def flip(path: Path) -> None:
    """Change a byte from outside."""
    size = path.stat().st_size // 2
    subprocess.run(
        ["sh", "-c", 'printf "\\377\\000" | dd of="$0" bs=1 seek=$1 conv=notrunc', path, str(size)], check=True
    )


def test_checksums_that_do_not_match(lab, tmp_path, table):
    data = shutil.copytree(lab.folder / "data", tmp_path / "data")
    flip(data / "shards/train/shard-00001.pt")
    ended = run(lab.train(tmp_path / "refused", data_path=data / "shards"), lab.folder)
    assert ended.code == 2 and "SHA-256 differs" in ended.last
    shutil.rmtree(data / "shards")  # as the message says
    lab.succeed(lab.tokenize(data))
    assert tree(data, "shards/*/*") == tree(lab.folder / "data", "shards/*/*")
    table("checksum of a shard", f"exit 2: {ended.last}", "after what it says to do: same shards")

    folder = tmp_path / "run"
    ended = struck(lab.train(folder), lab.folder, "0", "KILL", folder / "checkpoints/step00000006")
    assert ended.code == 3
    newest = max(path for path in (folder / "checkpoints").iterdir() if path.suffix != ".part")
    flip(newest / "state1.pt")
    again = run(lab.train(folder), lab.folder)
    assert again.code == 0
    named = next(line for line in again.stderr.splitlines() if "NOTE" in line)
    assert str(newest / "state1.pt") in named
    table("checksum of the newest checkpoint", named, lab.same_run(folder))


# ------------------------------------------------------------------------------------------------------ the clock
@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
@pytest.mark.parametrize("jump", [2 * DAY, -2 * DAY])
def test_the_clock_jumps(jump, lab, tmp_path, table):
    """Of the wall clock, as an administrator or NTP does it; the monotonic clock never jumps."""
    clock, folder, library = tmp_path / "clock", tmp_path / "run", tmp_path / "jump.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, JUMP, "-ldl"], check=True)
    clock.write_text("0")
    process = start(lab.train(folder), lab.folder, LD_PRELOAD=str(library), JUMP=str(clock))
    while not (folder / "checkpoints/step00000002").exists():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    subprocess.run(["sh", "-c", 'echo "$1" > "$0"', str(clock), str(jump)], check=True)
    ended = finished(process)
    assert ended.code == 0, ended.stderr
    jumped = run(NOW, tmp_path, LD_PRELOAD=str(library), JUMP=str(clock))
    assert float(jumped.stderr) - time.time() == pytest.approx(jump, abs=60), "else nothing jumped"
    record = json.loads((folder / "record.json").read_text())
    assert 0 < record["step_time_ms_mean"] < 60_000
    table(f"the clock jumps by {jump / DAY:+.0f} days", "exit 0, times as measured", lab.same_run(folder))


# ------------------------------------------------------------------------------------------------------ Snakemake
SMALL = {
    "name": "small",
    "dataset": {"source": "pydocs", "max_mb": 0.05, "vocab_size": 300, "max_length": 32, "val_fraction": 0.1},
    "training": {**TRAINING, "steps": 30, "profile_steps": 1},
    "compressors": {"int8": {}},
    "grid": [{"strategies": ["fsdp2"], "world_sizes": [2], "seeds": [0]}],
}
OF_RUN = "results/small/runs/fsdp2/int8/ws2/none/seed0"


def checkout(folder: Path) -> Path:
    """A copy of the project with a small experiment."""
    folder.mkdir()
    for name in ("src", "workflow", "profiles", "containers"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("images", "cache"))
    for name in ("Snakefile", "config.yaml"):
        shutil.copy(ROOT / name, folder / name)
    (folder / "experiment.yaml").write_text(yaml.safe_dump(SMALL))
    return folder


def snakemake(folder: Path) -> tuple[Words, Path]:
    """The command as `make run` calls it, and where; the experiment's path lets `orphans` find its process."""
    words = [sys.executable, "-m", "snakemake", "--cores", "2", "--configfile", str(folder / "experiment.yaml")]
    return words, folder


def outcome(folder: Path) -> dict[str, object]:
    """The results of a run of the experiment."""
    record = json.loads((folder / OF_RUN / "record.json").read_text())
    perplexity = json.loads((folder / OF_RUN / "perplexity.json").read_text())
    kept = ("loss_digest", "val_loss", "bytes_compressed_total", "status")
    return {name: record[name] for name in kept} | {"ppl": perplexity["ppl"]}


def test_two_snakemakes_in_one_folder_and_one_that_is_killed(tmp_path, table):
    two, killed = checkout(tmp_path / "two"), checkout(tmp_path / "killed")
    package = {folder: {"PYTHONPATH": str(folder / "src")} for folder in (two, killed)}

    first = start(*snakemake(two), **package[two])
    while not (two / "results/small/expected.json").exists():
        assert first.poll() is None, first.communicate()[1]
        time.sleep(0.05)
    second = run(*snakemake(two), **package[two])
    assert second.code != 0
    refusal = next(line for line in second.stderr.splitlines() if "is in use by another process" in line)
    assert f"({first.pid})" in refusal
    ended = finished(first)
    assert ended.code == 0, ended.stderr
    table("two `make run` in one folder", f"the second: exit {second.code}: {refusal}", "the first ends as if alone")

    shutil.copytree(two / "results/data", killed / "results/data")
    shutil.copytree(two / ".snakemake", killed / ".snakemake")  # what Snakemake knows of how the data was made
    pattern = killed / OF_RUN / "checkpoints/step*4"
    ended = struck(*snakemake(killed), "-", "KILL", pattern, **package[killed])
    assert ended.code == -9
    assert not orphans(killed, patience=30)
    assert not (killed / OF_RUN / "record.json").exists()
    stopped = json.loads((killed / OF_RUN / "train.failed.json").read_text())
    assert stopped["exit_code"] == 75
    again = run(*snakemake(killed), **package[killed])
    assert again.code == 0, again.stderr
    assert outcome(killed) == outcome(two)
    table("kill -9 of Snakemake, training", f"its cell: exit 75: {stopped['reason']}", "same losses and perplexity")
