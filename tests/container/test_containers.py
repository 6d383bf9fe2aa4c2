"""The image's name follows from recipe and locks, and all that speaks of an image says the same of it.

Of `bench/image.py`.
"""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from diagonals import swept

from gradwire.base.errors import BadInput
from gradwire.base.files import read_json
from gradwire.bench.image import (
    CONTAINERS,
    RECIPE,
    VARIANTS,
    Package,
    check_apptainer,
    check_image,
    crossing,
    image_file,
    image_name,
    inputs,
    packages,
    variant_for,
)

ROOT = CONTAINERS.parent
WORKFLOW = ROOT / "workflow"
WHEEL = re.compile(r"([a-z0-9._-]+)==(\S+) --hash=sha256:([0-9a-f]{64})")
SHA256 = re.compile(r"[0-9a-f]{64}")


@pytest.fixture
def folder(tmp_path) -> Path:
    """A copy of what names an image."""
    copy = tmp_path / "containers"
    shutil.copytree(CONTAINERS, copy, ignore=shutil.ignore_patterns("cache", "images"))
    return copy


@pytest.fixture(autouse=True)
def next_to_the_recipe(monkeypatch) -> None:
    """The modules that lock and build are not part of the package."""
    monkeypatch.syspath_prepend(CONTAINERS)


def wheels(variant: str) -> dict[str, str]:
    """Name and version of what a lock names; every line of it is a wheel with one digest."""
    lines = (CONTAINERS / "lock" / f"{variant}.txt").read_text().splitlines()
    found = [WHEEL.fullmatch(line) for line in lines if not line.startswith("#")]
    assert all(found)
    return {match[1]: match[2] for match in found if match}


def requirements() -> set[str]:
    import lock

    return {"torch", *(re.split(r"[<>=;]", name)[0] for name in lock.requirements())}


def names(folder: Path) -> dict[str, str]:
    return {variant: image_name(variant, folder) for variant in VARIANTS}


def append(file: Path, text: str) -> None:
    file.write_text(file.read_text() + text)


def test_a_copy_of_recipe_and_locks_names_the_same_image(folder):
    assert names(folder) == names(CONTAINERS)


@pytest.mark.parametrize("name", RECIPE)
def test_another_recipe_is_another_image(folder, name):
    append(folder / name, "# an edit\n")
    assert not set(names(folder).values()) & set(names(CONTAINERS).values())


@pytest.mark.parametrize(
    ("lock", "line", "changed"),
    [
        ("cpu.txt", f"more==1 --hash=sha256:{'0' * 64}\n", {"cpu"}),
        ("cuda.txt", f"more==1 --hash=sha256:{'0' * 64}\n", {"cuda"}),
        ("debian.txt", f"more 1 {'0' * 64} cuda\n", {"cuda"}),
        ("debian.txt", f"more 1 {'0' * 64} cpu,cuda\n", {"cpu", "cuda"}),
    ],
)
def test_another_lock_is_another_image_where_it_goes_in(folder, lock, line, changed):
    append(folder / "lock" / lock, line)
    before, after = names(CONTAINERS), names(folder)
    assert {variant for variant in VARIANTS if before[variant] != after[variant]} == changed


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_list_of_images_is_of_these_inputs_and_says_what_nobody_built(variant):
    entry = read_json(CONTAINERS / "images.lock.json")[variant]
    assert entry["name"] == image_name(variant), "run `make image-lock` or `make image`"
    assert entry["inputs"] == inputs(variant)
    built = entry["built"]
    if built != "not yet":
        locked = wheels(variant)
        assert SHA256.fullmatch(built["sha256"])
        assert built["torch"] == locked["torch"] or built["torch"].startswith(f"{locked['torch']}+")
        assert built["nccl"] == locked.get("nvidia-nccl-cu13")
        assert (built["cuda"] is None) == (variant == "cpu")


def test_every_package_is_locked_by_version_and_digest():
    for variant in VARIANTS:
        locked = packages(variant)
        assert {"python3", "libc6", "dpkg"} <= {package.name for package in locked}
        assert all(SHA256.fullmatch(package.sha256) and package.version[0].isdigit() for package in locked)
        assert len({package.name for package in locked}) == len(locked)
        assert requirements() | {"pip"} <= set(wheels(variant))
    assert {package.name for package in packages("cuda")} - {package.name for package in packages("cpu")} >= {"gcc"}


def test_both_images_have_one_version_of_everything_and_torch_in_two_builds():
    cpu, cuda = wheels("cpu"), wheels("cuda")
    assert cpu["torch"] == f"{cuda['torch']}+cpu"
    assert not [name for name in cpu if name.startswith(("nvidia", "cuda"))]
    assert {name: cuda[name] for name in cpu.keys() - {"torch"}} == {name: cpu[name] for name in cpu.keys() - {"torch"}}
    assert f"TORCH ?= torch=={cuda['torch']}\n" in (ROOT / "Makefile").read_text()


def test_wheels_have_the_versions_that_plain_runs_have():
    plain: dict[str, set[str]] = {}  # where a version depends on Python's, there are several
    locked = "".join((ROOT / name).read_text() for name in ("requirements.lock", "requirements-dev.lock"))
    for name, version in re.findall(r"^([a-z0-9-]+)==([^\s;]+)", locked, re.MULTILINE):
        plain.setdefault(name, set()).add(version)
    inside = {re.sub(r"[._]", "-", name): version for name, version in wheels("cpu").items()}
    assert inside.keys() - plain.keys() == {"torch", "pip"}
    assert {name: version for name, version in inside.items() if version not in plain.get(name, {version})} == {}


def test_the_images_own_test_imports_what_gradwire_asks_for():
    assert set(runpy.run_path(str(CONTAINERS / "check.py"))["PACKAGES"]) == requirements()


def commands(text: str) -> list[str]:
    """Shell commands, one a line, without what spells the same differently in the two recipes."""
    joined = re.sub(r"\\\n\s*", "", text).replace("; ", "\n")
    return [" ".join(line.split()).rstrip(";") for line in joined.splitlines() if line.strip()]


def test_definition_and_containerfile_do_the_same():
    definition = (CONTAINERS / "gradwire.def").read_text()
    sections = dict(re.findall(r"^%(\w+)\n(.*?)(?=^%|\Z)", definition, re.MULTILINE | re.DOTALL))
    containerfile = (CONTAINERS / "Containerfile").read_text()
    run = re.search(r"^RUN --mount=type=bind,source=wheels,target=/mnt (.*?)^ENV", containerfile, re.M | re.S)
    assert commands(run[1]) == commands(sections["post"])
    variables = sections["environment"].replace("{{ NAME }}", "${NAME}").strip()
    assert variables.replace("export", "ENV") in containerfile
    assert f"RUN {sections['test'].strip()}\n" in containerfile
    source, target = sections["files"].split()
    assert f"COPY {source} {target}\n" in containerfile


def test_nothing_is_the_latest_or_comes_from_a_registry():
    for file in [
        *(CONTAINERS / name for name in (*RECIPE, "Containerfile", "images.lock.json")),
        WORKFLOW / "Snakefile",
    ]:
        assert not re.search(r"latest|docker://|library://|oras://|https?://", file.read_text()), file
    assert "\nFROM scratch\n" in (CONTAINERS / "Containerfile").read_text()
    assert "\nBootstrap: scratch\n" in (CONTAINERS / "gradwire.def").read_text()


def test_every_rule_runs_in_the_image():
    directives = re.findall(r"^ *container: (.*)$", (WORKFLOW / "Snakefile").read_text(), re.MULTILINE)
    assert directives == ["IMAGE"]
    assert not [file for file in WORKFLOW.rglob("*.smk") if re.search(r"^ *container:", file.read_text(), re.M)]


@pytest.mark.parametrize("device", ["cpu", *swept("cuda")])
def test_rules_ask_for_the_image_of_the_locks_and_say_how_to_get_it(tmp_path, device):
    (tmp_path / "apptainer").write_text("#!/bin/sh\necho apptainer version 1.4.5\n")
    (tmp_path / "apptainer").chmod(0o755)
    shutil.copytree(ROOT / "src", tmp_path / "src")
    shutil.copytree(CONTAINERS, tmp_path / "containers", ignore=shutil.ignore_patterns("cache", "images"))
    for name in ("workflow", "profiles", "Snakefile"):
        (tmp_path / name).symlink_to(ROOT / name)
    smoke = (ROOT / "configs" / "smoke.yaml").read_text()
    (tmp_path / "experiment.yaml").write_text(smoke.replace("device: cpu", f"device: {device}"))
    append(tmp_path / "containers" / "lock" / f"{device}.txt", f"more==1 --hash=sha256:{'0' * 64}\n")
    options = "-n --workflow-profile profiles/container --configfile experiment.yaml"
    done = subprocess.run(
        [sys.executable, "-m", "snakemake", *options.split()],
        cwd=tmp_path,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHONPATH": str(tmp_path / "src"), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    said = " ".join((done.stdout + done.stderr).split())
    assert f"{image_name(device, tmp_path / 'containers')}.sif is missing: run `make image VARIANT={device}`" in said


def test_a_missing_apptainer_is_reported_with_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BadInput, match="containers/get-apptainer"):
        check_apptainer()


def test_an_image_of_other_locks_does_not_do(monkeypatch, folder, tmp_path):
    (tmp_path / "apptainer").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    image = image_file("cpu", folder)
    image.parent.mkdir()
    image.touch()
    check_image("cpu", folder)
    append(folder / "lock" / "cpu.txt", f"more==1 --hash=sha256:{'0' * 64}\n")
    with pytest.raises(BadInput, match=rf"make image VARIANT=cpu.*{image.name}"):
        check_image("cpu", folder)


def test_only_an_experiment_on_gpus_takes_the_image_for_gpus():
    assert [variant_for(device) for device in ("cpu", "auto", "cuda")] == ["cpu", "cpu", "cuda"]


def test_what_is_named_crosses_into_an_image_and_nothing_else():
    variables = {
        "CUDA_VISIBLE_DEVICES": "1",
        "SLURM_JOB_ID": "7",
        "https_proxy": "proxy",
        "PYTHONPATH": "elsewhere",
        "LD_PRELOAD": "other.so",
        "GRADWIRE_IMAGE": "another",
        "APPTAINER_BIND": "/scratch",
    }
    found = crossing(variables, Path("/project/src"))
    assert found == {
        "APPTAINERENV_CUDA_VISIBLE_DEVICES": "1",
        "APPTAINERENV_SLURM_JOB_ID": "7",
        "APPTAINERENV_https_proxy": "proxy",
        "APPTAINERENV_PYTHONPATH": "/project/src",
        "APPTAINER_BIND": "/scratch,/project/src",
    }
    assert crossing(variables, Path("/project/src"), gpus=True) == {**found, "APPTAINER_NV": "1"}
    assert crossing(variables | found, Path("/project/src")) == found  # a job parses the Snakefile again


def test_a_mirror_that_moved_on_is_refused_package_by_package():
    import debian

    locked = [Package("libc6", "2.36-9", "0" * 64, "cpu"), Package("zlib1g", "1.2", "0" * 64, "cpu")]
    debian.check_versions(locked, {"libc6": ["2.36-10", "2.36-9"], "zlib1g": ["1.2"]})
    with pytest.raises(BadInput) as refused:
        debian.check_versions(locked, {"libc6": ["2.36-10"], "zlib1g": ["1.2"]})
    assert "libc6: 2.36-9 is locked, the mirror has 2.36-10" in str(refused.value)
    assert "zlib1g" not in str(refused.value)
    with pytest.raises(BadInput, match=r"zlib1g: 1\.2 is locked, the mirror has none"):
        debian.check_versions(locked, {"libc6": ["2.36-9"], "zlib1g": []})
