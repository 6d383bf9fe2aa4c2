"""Build an image from what is locked: ``make image [VARIANT=cuda] [MIRROR=URL]``.

Debian's packages and wheels are fetched by their locked digests, the former become a root folder (``rootfs``), and
Apptainer puts the latter into it (``gradwire.def``). Needs no image registry, no Docker engine, and no network inside.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import debian

from gradwire.base.errors import BadInput, GradwireError
from gradwire.base.files import atomic_write, read_json, sha256_file, write_json
from gradwire.bench.image import CONTAINERS, VARIANTS, check_apptainer, image_file, image_name, inputs, packages

CACHE = CONTAINERS / "cache"  # packages as fetched
IMAGES = CONTAINERS / "images.lock.json"
NOT_BUILT = "not yet"
PYTHON, GLIBC = "3.11", (17, 36)  # the image's Python, and the glibc of wheels that run there: 2.17 to 2.36
TOOLS = {"mmdebstrap": "mmdebstrap", "dpkg-deb": "dpkg", "unshare": "util-linux"}
# Fast to write and to read; the size does not matter much on a local disk.
COMPRESSION = "-comp zstd -Xcompression-level 1"


def main() -> None:
    """Build, unless the image of these very inputs is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", choices=VARIANTS, default="cpu", help="which image")
    parser.add_argument("--mirror", metavar="URL", help="a mirror of Debian, or a dated snapshot; None: this machine's")
    parser.add_argument("--context", type=Path, metavar="FOLDER", help="instead, fill a new folder for Containerfile")
    args = parser.parse_args()
    file = image_file(args.variant)
    if file.is_file() and args.context is None:
        print(f"{file} is there already.")
        return
    if args.context is None:
        check_apptainer()
    check_tools()
    with ThreadPoolExecutor() as pool:  # pip waits for the network while the root folder is made, and the reverse
        wheels = pool.submit(fetch_wheels, args.variant)
        debs = debian.fetch(packages(args.variant), CACHE / "debs", args.mirror)
        with TemporaryDirectory(dir=CACHE) as work:
            root = rootfs(debs, Path(work))
            if args.context is not None:
                fill_context(args.context, args.variant, root, wheels.result())
                return
            with atomic_write(file) as part:  # an image appears whole or not at all
                log = build(args.variant, root, wheels.result(), part)
    record_build(args.variant, versions=json.loads(log.splitlines()[-1]))
    print(f"{file}: {file.stat().st_size / 1e6:.0f} MB")


def check_tools() -> None:
    """Check for the programs that a build needs.

    Raises:
        BadInput: If one is missing, with its package.
    """
    missing = [package for tool, package in TOOLS.items() if shutil.which(tool) is None]
    if missing:
        raise BadInput(f"missing here: {', '.join(missing)} (packages of Debian and its like).")


def fetch_wheels(variant: str) -> Path:
    """A folder with the locked wheels of an image, and their lock; what is there already is not fetched again.

    Raises:
        BadInput: If pip cannot get one of them.
    """
    lock, folder = CONTAINERS / "lock" / f"{variant}.txt", CACHE / variant
    folder.mkdir(parents=True, exist_ok=True)
    locked = set(re.findall(r"sha256:([0-9a-f]{64})", lock.read_text()))
    for digest, file in debian.digests(folder).items():
        if digest not in locked:
            file.unlink()
    if locked - set(debian.digests(folder)):
        platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in range(GLIBC[1], GLIBC[0] - 1, -1)]
        platforms += ["--platform=manylinux2014_x86_64", "--platform=linux_x86_64"]
        options = ("--quiet", "--no-deps", "--require-hashes", "--only-binary=:all:", f"--python-version={PYTHON}")
        pip = (sys.executable, "-m", "pip", "download", *options, *platforms, "--dest", folder, "--requirement", lock)
        if subprocess.run(pip, check=False).returncode:
            raise BadInput(
                f"pip could not get all wheels of {lock}; its message is above. torch's CPU build is not on PyPI: "
                "where that is the one, tell pip of PyTorch's own index for CPUs, or of a folder (PIP_FIND_LINKS)."
            )
    shutil.copy(lock, folder / "lock.txt")
    return folder


def rootfs(debs: list[Path], work: Path) -> Path:
    """The tar of a root folder with these packages."""
    debian.repository(debs, work / "debs")
    run([CONTAINERS / "rootfs", work / "debs", work / "rootfs.tar"])
    return work / "rootfs.tar"


def build(variant: str, root: Path, wheels: Path, file: Path) -> str:
    """Let Apptainer build and test the image; returns what it printed, the test's versions last.

    It runs as root of a user namespace: so it needs no privileges, and where it has some it does not miss others.
    """
    arguments = {"NAME": image_name(variant), "ROOTFS": root}
    command = ["unshare", "--map-root-user", "apptainer", "build", "--force", f"--mksquashfs-args={COMPRESSION}"]
    command += ["--bind", f"{wheels}:/mnt", *(f"--build-arg={key}={value}" for key, value in arguments.items())]
    command += [str(file), "gradwire.def"]
    return run(command, cwd=CONTAINERS, env={**os.environ, "APPTAINER_TMPDIR": str(root.parent)})


def fill_context(folder: Path, variant: str, root: Path, wheels: Path) -> None:
    """The inputs of Containerfile: rootfs.tar, the wheels with their lock, the image's test."""
    folder.mkdir(parents=True)
    shutil.move(root, folder / "rootfs.tar")
    shutil.copytree(wheels, folder / "wheels")
    for name in ("check.py", "Containerfile"):
        shutil.copy(CONTAINERS / name, folder)
    print(f"{folder} is ready: podman build --tag {(name := image_name(variant))} --build-arg NAME={name} {folder}")


def run(command: list[Any], **options: Any) -> str:
    """Run a program whose messages are shown; returns what it printed.

    Raises:
        BadInput: If it fails.
    """
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, text=True, check=False, **options)
    if done.returncode:
        print(done.stdout)
        raise BadInput(f"`{Path(command[0]).name}` ended with {done.returncode}; its messages are above.")
    return done.stdout


def record_inputs(variant: str) -> None:
    """Let images.lock.json name the image of the inputs that are here; one of other inputs was not built."""
    images = read_json(IMAGES) if IMAGES.is_file() else {}
    entry = {"name": image_name(variant), "inputs": inputs(variant), "built": NOT_BUILT}
    if images.get(variant, {}).get("name") != entry["name"]:
        write_json(IMAGES, {**images, variant: entry})


def record_build(variant: str, versions: dict[str, Any]) -> None:
    """Let images.lock.json tell of the first build of an image; later ones are of the same inputs."""
    record_inputs(variant)
    images = read_json(IMAGES)
    if images[variant]["built"] == NOT_BUILT:
        file = image_file(variant)
        apptainer = run(["apptainer", "--version"]).split()[-1]
        images[variant]["built"] = {
            "on": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "apptainer": apptainer,
            "bytes": file.stat().st_size,
            "sha256": sha256_file(file),
            **{key: value for key, value in versions.items() if key != "packages"},
        }
        write_json(IMAGES, images)


if __name__ == "__main__":
    try:
        main()
    except GradwireError as error:
        print(f"make image: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
