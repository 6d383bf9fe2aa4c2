"""The smoke experiment with every rule in the image: ``make test-container``, which builds the image before."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import job_counts

from gradwire.base.files import read_json
from gradwire.bench.image import CONTAINERS, image_file, image_name

pytestmark = [pytest.mark.container, pytest.mark.timeout(1500)]

ROOT = CONTAINERS.parent
SMOKE = ROOT / "configs" / "smoke.yaml"
IN_IMAGE = ("--workflow-profile", str(ROOT / "profiles" / "container"))
EXPERIMENT = ("--snakefile", str(ROOT / "Snakefile"), "--configfile", str(SMOKE))
ALL = {
    "download": 1,
    "tokenizer": 1,
    "shards": 1,
    "train": 3,
    "trace": 3,
    "perplexity": 3,
    "summarize": 1,
    "report": 1,
    "all": 1,
}
ALL |= dict.fromkeys(("grads_collect", "grads_aggregate", "grads_validate", "norms"), 1)


def snakemake(folder: Path, *arguments: str) -> None:
    """Run the smoke experiment in an empty folder, away from the checkout."""
    command = [sys.executable, "-m", "snakemake", "--cores", "2", *EXPERIMENT, "--directory", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def jobs(folder: Path, *arguments: str, snakefile: Path = ROOT / "Snakefile") -> dict[str, int]:
    where = ("--snakefile", str(snakefile), "--configfile", str(SMOKE), "--directory", str(folder))
    return job_counts(*where, *arguments)


def runs(folder: Path) -> dict[str, Path]:
    """The folder of each cell, by its name."""
    found = folder.glob("results/smoke/runs/*/*/*/*/*/record.json")
    return {str(record.parent.relative_to(folder)): record.parent for record in found}


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> Path:
    """A folder in which the whole experiment ran in the image."""
    folder = tmp_path_factory.mktemp("inside")
    snakemake(folder, *IN_IMAGE)
    return folder


def test_every_rank_of_every_cell_ran_in_the_image(done):
    built = read_json(CONTAINERS / "images.lock.json")["cpu"]["built"]
    manifests = [read_json(file) for run in runs(done).values() for file in (run / "environment").glob("rank*.json")]
    assert len(manifests) == 6
    assert built != "not yet"
    for manifest in manifests:
        assert manifest["image"] == image_name("cpu")
        assert manifest["distribution"] == built["system"]
        assert manifest["python"] == built["python"]
        assert manifest["packages"]["torch"] == built["torch"]
        # Two ranks share the two cores of the job, although nothing of the host's environment gets in by itself.
        assert manifest["threads"] == 1
        assert manifest["thread_variables"]["OMP_NUM_THREADS"] == "1"


def test_rules_that_start_no_ranks_ran_in_the_image_too(done):
    source = read_json(next(done.glob("results/data/pydocs/*/corpus.source.json")))
    assert source["revision"] == read_json(CONTAINERS / "images.lock.json")["cpu"]["built"]["python"]


def test_nothing_is_left_to_do_and_another_image_means_another_run(done, tmp_path):
    assert jobs(done, *IN_IMAGE) == {}
    shutil.copytree(ROOT / "src", tmp_path / "src")
    shutil.copytree(ROOT / "workflow", tmp_path / "workflow")
    shutil.copy(ROOT / "Snakefile", tmp_path)
    shutil.copytree(CONTAINERS, tmp_path / "containers", ignore=shutil.ignore_patterns("cache", "images"))
    with (tmp_path / "containers" / "check.py").open("a") as recipe:
        recipe.write("# an edit\n")
    other = image_file("cpu", tmp_path / "containers")
    other.parent.mkdir()
    other.symlink_to(image_file("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path / "src"))
        assert jobs(done, *IN_IMAGE, snakefile=tmp_path / "Snakefile") == ALL


def test_losses_are_those_of_the_same_experiment_without_an_image(done, tmp_path):
    # The corpus is the documentation of the Python that makes it, so both train on the one that was made inside.
    shutil.copytree(done / "results" / "data", tmp_path / "results" / "data")
    snakemake(tmp_path, "--until", "train")
    inside, outside = runs(done), runs(tmp_path)
    assert inside.keys() == outside.keys()
    assert len(inside) == 3
    for name, run in outside.items():
        record = read_json(run / "record.json")
        assert read_json(run / "environment" / "rank0.json")["image"] is None
        assert record["loss_digest"] == read_json(inside[name] / "record.json")["loss_digest"], name
