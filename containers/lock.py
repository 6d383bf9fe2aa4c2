"""Lock again what goes into the images: ``make image-lock``. Nothing is built; images.lock.json then says so.

Debian's packages are what the mirror has now. Wheels have the versions of requirements.lock and
requirements-dev.lock; torch the Makefile's.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory

import debian
from build import CACHE, record_inputs

from gradwire.base.errors import GradwireError
from gradwire.base.files import read_json, sha256_file, write_text
from gradwire.bench.image import CONTAINERS, VARIANTS

ROOT = CONTAINERS.parent
DEBIAN = {
    "cpu": ["python3", "libgomp1", "ca-certificates", "iproute2"],
    "cuda": ["gcc", "libc6-dev", "python3-dev"],  # beside the former: Triton compiles a launcher for each kernel
}
# The CPU build of torch has a local version and is not on PyPI; `===` keeps pip from taking it for the other.
TORCH = {"cpu": "torch=={version}+cpu", "cuda": "torch==={version}"}
OUTSIDE = ("dev", "trainer")  # extras that no rule needs by default
NOT_INSIDE = re.compile(r"torch\b|gradwire\b|snakemake")  # torch is locked by itself; Snakemake starts the image
INSTALLER = "pip"  # it comes as a wheel too, and runs from it


def main() -> None:
    """Write lock/debian.txt, lock/cpu.txt, lock/cuda.txt and images.lock.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", required=True, metavar="VERSION", help="the version of torch")
    parser.add_argument("--mirror", metavar="URL", help="a mirror of Debian, or a dated snapshot; None: this machine's")
    args = parser.parse_args()
    write_text(CONTAINERS / "lock" / "debian.txt", debian_lock(args.mirror))
    for variant in VARIANTS:
        write_text(CONTAINERS / "lock" / f"{variant}.txt", wheels_lock(variant, args.torch))
    for variant in VARIANTS:
        record_inputs(variant)


def debian_lock(mirror: str | None) -> str:
    """The lines of lock/debian.txt."""
    source = debian.Mirror(mirror, CACHE / "apt", signed=True)
    found: dict[str, set[str]] = {}
    for variant in VARIANTS:
        names = DEBIAN["cpu"] if variant == "cpu" else [*DEBIAN["cpu"], *DEBIAN["cuda"]]
        with TemporaryDirectory(dir=CACHE) as folder:
            archives = Path(folder) / "archives"
            source.resolve(names, archives)
            for file in archives.glob("*.deb"):
                fields = ("dpkg-deb", "--show", "--showformat=${Package} ${Version}", file)
                package = subprocess.run(fields, capture_output=True, text=True, check=True).stdout
                found.setdefault(f"{package} {sha256_file(file)}", set()).add(variant)
    lines = [f"{line} {','.join(sorted(variants))}" for line, variants in sorted(found.items())]
    return "# package version sha256 images. Written by `make image-lock`.\n" + "\n".join(lines) + "\n"


def wheels_lock(variant: str, torch: str) -> str:
    """The lines of a variant's wheel lock: exactly the files that go in, in pip's form."""
    with TemporaryDirectory() as folder:
        constraints = Path(folder) / "constraints.txt"
        locks = (ROOT / "requirements.lock", ROOT / "requirements-dev.lock")
        constraints.write_text("\n".join(pinned(lock.read_text()) for lock in locks))
        report = Path(folder) / "report.json"
        wanted = [TORCH[variant].format(version=torch), *requirements(), INSTALLER]
        options = ("--dry-run", "--ignore-installed", "--only-binary=:all:", "--quiet", "--report", report)
        pip = (sys.executable, "-m", "pip", "install", *options, "--constraint", constraints)
        subprocess.run([*pip, *wanted], check=True)
        found = [
            (
                item["metadata"]["name"].lower(),
                item["metadata"]["version"],
                item["download_info"]["archive_info"]["hashes"],
            )
            for item in read_json(report)["install"]
        ]
    lines = [f"{name}=={version} --hash=sha256:{hashes['sha256']}" for name, version, hashes in sorted(found)]
    return f"# The wheels of the {variant} image. Written by `make image-lock`.\n" + "\n".join(lines) + "\n"


def requirements() -> list[str]:
    """The packages that every command of gradwire needs, without torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    inside = [name for extra, names in extras.items() if extra not in OUTSIDE for name in names]
    return [name for name in (*project["dependencies"], *inside) if not NOT_INSIDE.match(name)]


def pinned(lock: str) -> str:
    """The versions of a lock, without hashes: pip takes those as a demand for all packages."""
    return "\n".join(re.findall(r"^[A-Za-z0-9][^\\\n]*", lock, re.MULTILINE))


if __name__ == "__main__":
    try:
        main()
    except GradwireError as error:
        sys.exit(f"make image-lock: {error}")
