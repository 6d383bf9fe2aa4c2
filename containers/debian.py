"""Debian's packages by apt, with sources and state of its own: nothing of this machine's apt is changed."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from gradwire.base.errors import BadInput
from gradwire.base.files import sha256_file
from gradwire.bench.image import Package

SUITE = "bookworm"
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
URL = re.compile(r"^(?:URIs:\s*|deb\s+(?:\[[^]]*\]\s*)?)(\S+/debian)/?(?:\s|$)", re.MULTILINE)


class Mirror:
    """A mirror of Debian, or a dated snapshot of one.

    Args:
        url: Its address, which has ``/debian`` where its security updates have ``/debian-security``; None takes the
            one that this machine's apt is set up with.
        state: A folder for apt's lists.
        signed: Check the archive's signature. Where every package is compared with a locked digest, that is enough.

    Raises:
        BadInput: If there is no apt, no mirror, or no key to check signatures with.
    """

    def __init__(self, url: str | None, state: Path, *, signed: bool = False) -> None:
        if shutil.which("apt-get") is None:
            raise BadInput("apt-get is missing: Debian's packages are fetched with it (the package is called apt).")
        if signed and not KEYRING.is_file():
            raise BadInput(f"{KEYRING} is missing: install debian-archive-keyring.")
        url = (url or configured()).rstrip("/")
        security = re.sub(r"/debian(?=/|$)", "/debian-security", url)
        trust = f"signed-by={KEYRING}" if signed else "trusted=yes"
        suites = ((url, SUITE), (url, f"{SUITE}-updates"), (security, f"{SUITE}-security"))
        lines = [f"deb [{trust} check-valid-until=no] {where} {suite} main\n" for where, suite in suites]
        shutil.rmtree(state, ignore_errors=True)
        (state / "lists" / "partial").mkdir(parents=True)
        (state / "sources.list").write_text("".join(lines))
        (state / "status").touch()
        options = {
            "Dir::Etc::sourcelist": state / "sources.list",
            "Dir::Etc::sourceparts": "/dev/null",
            "Dir::Etc::preferencesparts": "/dev/null",
            "Dir::State": state,
            "Dir::State::status": state / "status",  # no package is installed yet
            "Dir::Cache": state,
            "APT::Sandbox::User": "root",
            "APT::Install-Recommends": "false",
            "APT::Architecture": "amd64",
            "APT::Architectures": "amd64",
            "Acquire::Languages": "none",
        }
        self._options = [word for key, value in options.items() for word in ("-o", f"{key}={value}")]
        self._run("apt-get", "update")

    def versions(self, names: Iterable[str]) -> dict[str, list[str]]:
        """The versions of packages that are to be had, newest first; a name that is unknown has none."""
        found: dict[str, list[str]] = {name: [] for name in names}
        for line in self._run("apt-cache", "madison", *found).splitlines():
            name, version, _ = (field.strip() for field in line.split("|"))
            found[name].append(version)
        return found

    def download(self, packages: Iterable[str], folder: Path) -> None:
        """Put packages (``name=version``) into a folder."""
        self._run("apt-get", "download", *packages, folder=folder)

    def resolve(self, names: Sequence[str], folder: Path) -> None:
        """Put the essential packages, some more, and all that they depend on, into a folder."""
        (folder / "partial").mkdir(parents=True)
        into = ("-o", f"Dir::Cache::archives={folder}")
        self._run("apt-get", *into, "install", "--download-only", "--yes", "?essential", *names)

    def _run(self, program: str, *words: str, folder: Path | None = None) -> str:
        command = [program, "--quiet=2", *self._options, *words]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise BadInput(f"`{program} {words[0]}` failed:\n{done.stderr.strip()}")
        return done.stdout


def configured() -> str:
    """The first mirror of Debian among this machine's apt sources.

    Raises:
        BadInput: If there is none.
    """
    etc = Path("/etc/apt")
    for file in (etc / "sources.list", *sorted((etc / "sources.list.d").glob("*"))):
        if file.is_file() and (found := URL.search(file.read_text())):
            return found[1]
    raise BadInput("there is no mirror of Debian in /etc/apt: name one (make image MIRROR=URL).")


def fetch(packages: Sequence[Package], folder: Path, url: str | None) -> list[Path]:
    """Have the locked packages in a folder; what is there already is not fetched again.

    Raises:
        BadInput: If the mirror has another version of a package, or other bytes under the locked version; each such
            package is named.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = digests(folder)
    missing = [package for package in packages if package.sha256 not in found]
    if missing:
        mirror = Mirror(url, folder.parent / "apt")
        check_versions(missing, mirror.versions(package.name for package in missing))
        mirror.download([f"{package.name}={package.version}" for package in missing], folder)
        found = digests(folder)
    other = [f"{package.name} {package.version}" for package in packages if package.sha256 not in found]
    if other:
        raise BadInput(f"the mirror's file is not the locked one (its SHA-256 differs): {', '.join(other)}.")
    return [found[package.sha256] for package in packages]


def check_versions(packages: Iterable[Package], offered: dict[str, list[str]]) -> None:
    """Compare what is locked with what a mirror has.

    Raises:
        BadInput: If it has not all of it, with the packages that differ.
    """
    moved = [
        f"  {package.name}: {package.version} is locked, the mirror has {', '.join(offered[package.name]) or 'none'}"
        for package in packages
        if package.version not in offered[package.name]
    ]
    if moved:
        listed = "\n".join(moved)
        raise BadInput(
            f"the mirror has moved on from containers/lock/debian.txt:\n{listed}\nBuild from a dated snapshot "
            "(make image MIRROR=URL), or lock what the mirror has now (make image-lock)."
        )


def digests(folder: Path) -> dict[str, Path]:
    """The files of a folder by their SHA-256."""
    return {sha256_file(file): file for file in sorted(folder.iterdir()) if file.is_file()}


def repository(files: Iterable[Path], folder: Path) -> None:
    """Make a folder a repository of these packages and no others."""
    folder.mkdir(parents=True)
    stanzas = []
    for file in files:
        copy = Path(shutil.copy(file, folder / file.name.replace("%3a", "-")))
        control = subprocess.run(["dpkg-deb", "--field", file], capture_output=True, text=True, check=True).stdout
        size = copy.stat().st_size
        stanzas.append(f"{control.rstrip()}\nFilename: ./{copy.name}\nSize: {size}\nSHA256: {sha256_file(copy)}\n")
    (folder / "Packages").write_text("\n".join(stanzas))
