"""The distributions hold the whole package and its workflow, and train without the repository."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.full
NEEDED = (
    "pyproject.toml",
    "MANIFEST.in",
    "README.md",
    "LICENSE",
    "src",
    "workflow",
    "profiles",
    "Snakefile",
    "config.yaml",
    "configs",
)
LINKED = "gradwire/bench/workflow/files"  # to `workflow/`


def run(*command: object, cwd: Path, path: Path | None = None) -> str:
    """A command's standard output; the only gradwire that it finds is in `path`."""
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(path or ""), "XDG_CACHE_HOME": str(cwd / "cache")},
        capture_output=True,
        text=True,
        timeout=480,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the source distribution, built from a copy of the sources, and the wheel, built from it."""
    folder = tmp_path_factory.mktemp("built")
    for name in NEEDED:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / name, folder / name)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", cwd=folder)
    return folder / "dist"


@pytest.fixture(scope="module")
def wheel(built) -> Path:
    (file,) = built.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def sdist(built, tmp_path_factory) -> Path:
    """The unpacked source distribution."""
    (file,) = built.glob("*.tar.gz")
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(file) as archive:
        archive.extractall(folder, filter="data")
    return next(folder.iterdir())


def files_of(folder: Path) -> set[str]:
    files = (file for file in folder.rglob("*") if file.is_file() and file.suffix != ".pyc")
    return {str(file.relative_to(folder)) for file in files}


def test_the_wheel_holds_every_file_of_the_package_and_of_the_workflow(wheel):
    held = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("gradwire/")}
    workflow = {f"{LINKED}/{name}" for name in files_of(ROOT / "workflow")}
    assert f"{LINKED}/rules/train.smk" in workflow
    assert held == {name for name in files_of(ROOT / "src") if name.startswith("gradwire/")} | workflow


def test_the_source_distribution_holds_the_workflow_twice_as_files(sdist):
    assert not any(file.is_symlink() for file in sdist.rglob("*"))
    for folder in (sdist / "workflow", sdist / "src" / LINKED):
        assert files_of(folder) == files_of(ROOT / "workflow")
    assert (sdist / "profiles" / "default" / "profile.yaml").is_file()  # Snakemake loads it by itself


def test_snakemake_plans_the_experiment_in_the_source_distribution(sdist):
    command = (sys.executable, "-m", "snakemake", "--dry-run", "--cores", "all", "--quiet", "--configfile")
    run(*command, "configs/smoke.yaml", cwd=sdist, path=sdist / "src")


def test_the_wheel_names_its_licence_and_its_needs(wheel):
    archive = zipfile.ZipFile(wheel)
    (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    printed = archive.read(metadata).decode()
    assert "License-Expression: Apache-2.0" in printed and "Requires-Dist: torch>=" in printed
    assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())


def test_two_ranks_train_from_the_wheel_in_an_empty_folder(wheel, tmp_path):
    installed, work = tmp_path / "installed", tmp_path / "work"
    work.mkdir()
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps")
    run(*pip, "--target", installed, wheel, cwd=work)
    where = "import gradwire.comm.compressors.methods; print(gradwire.__file__)"
    assert Path(run(sys.executable, "-c", where, cwd=work, path=installed).strip()).is_relative_to(installed)
    words = ["gradient", "sample", "wire", "rank", "shard", "token", "byte", "sum", "mean", "row"]
    texts = [" ".join(words[(i * j + j) % 10] for j in range(20)) for i in range(40)]
    (work / "my.jsonl").write_text("\n".join(json.dumps({"id": f"{i}", "text": text}) for i, text in enumerate(texts)))
    gradwire = installed / "bin" / "gradwire"
    train = ("train", "--data_path", "my.jsonl", "--output_dir", "run", "--comm_compress", "int8", "--vocab_size", 290)
    sizes = ("--max_length", 24, "--batch_size", 2, "--steps", 2, "--warmup_steps", 0, "--lr_warmup_steps", 1)
    printed = run(gradwire, "launch", "--world_size", 2, "--", *train, *sizes, "--no-profile", cwd=work, path=installed)
    record = json.loads((work / "run" / "record.json").read_text())
    assert (record["status"], record["steps"], record["world_size"]) == ("ok", 2, 2)
    assert record["bytes_compressed_total"] > 0 and "ratio" in printed


@pytest.mark.timeout(600)
def test_an_experiment_runs_from_the_wheel_in_an_empty_folder(wheel, tmp_path):
    """The first minutes of a new user: install, `gradwire init`, `gradwire run`, the page."""
    installed, work = tmp_path / "installed", tmp_path / "work"
    work.mkdir()
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps")
    run(*pip, "--target", installed, wheel, cwd=work)
    gradwire = installed / "bin" / "gradwire"
    assert "gradwire run experiment.yaml" in run(gradwire, "init", cwd=work, path=installed)
    small = "{extends: experiment.yaml, name: small, model: micro, training: {steps: 7, warmup_steps: 1}, " + (
        "dataset: {max_mb: 0.15, vocab_size: 300, max_length: 32}, grid: {seeds: [0]}}"
    )
    (work / "small.yaml").write_text(small)
    printed = run(gradwire, "run", "small.yaml", cwd=work, path=installed)
    assert printed.rstrip().endswith("page: results/small/report.html") and "11/11 report" in printed
    frame = [json.loads(line) for line in (work / "results/small/results.jsonl").read_text().splitlines()]
    assert {(row["compressor"], row["status"]) for row in frame} == {("none", "ok"), ("int8", "ok")}
    assert all(row["environment"]["gradwire"] for row in frame)
    log = (work / "results/small/logs/snakemake.log").read_text()
    assert f"{installed}/gradwire/bench/workflow/files/rules" in log or "localrule" in log
