"""Plug-ins: classes by name, from the files of a package and from the entry points of other packages.

Names are known without importing a plug-in; its module is imported when it is asked for.
"""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradwire.base.errors import BadInput, unknown

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

PACKAGE = Path(__file__).parents[1]


@cache
def installed() -> Any:
    """The entry points of all installed packages; read once for all groups, since it reads every package's metadata."""
    from importlib import metadata  # a fifth of what `gradwire --help` takes

    return metadata.entry_points()


def entry_points(group: str) -> tuple[EntryPoint, ...]:
    """The entry points of a group."""
    return tuple(installed().select(group=group))


@dataclass(frozen=True)
class Plugins:
    """The plug-ins of one kind.

    Args:
        kind: The kind of plug-in, for messages.
        package: The package with the built-in plug-ins, one per file; the file has the name of its plug-in.
        group: The group of entry points of other packages.
        suffix: The ending of the files.
    """

    kind: str
    package: str
    group: str
    suffix: str = ".py"

    @property
    def folder(self) -> Path:
        """The folder of the built-in plug-ins."""
        return PACKAGE.joinpath(*self.package.split(".")[1:])

    def built_in(self) -> list[str]:
        """Names of the plug-ins that come with gradwire, sorted."""
        if self.suffix == ".py":
            return sorted(module.name for module in pkgutil.iter_modules([str(self.folder)]))
        return sorted(file.stem for file in self.folder.glob(f"*{self.suffix}"))

    def third_party(self) -> dict[str, EntryPoint]:
        """Plug-ins of other packages, by name.

        Raises:
            BadInput: If one of them has the name of a built-in plug-in.
        """
        entries = {entry.name: entry for entry in entry_points(self.group)}
        for name in set(self.built_in()) & set(entries):
            raise BadInput(
                f"entry point {entries[name].value!r} takes the built-in {self.kind}'s name {name!r}; rename it."
            )
        return entries

    def available(self) -> list[str]:
        """Every plug-in's name, sorted."""
        return sorted([*self.built_in(), *self.third_party()])

    def check(self, name: str) -> None:
        """Check that a plug-in exists.

        Raises:
            BadInput: If not; the message has close matches.
        """
        if name not in self.available():
            raise unknown(self.kind, name, self.available())

    def offered(self, name: str) -> Any:
        """The object of another package's entry point.

        Raises:
            BadInput: If it cannot be loaded.
        """
        entry = self.third_party()[name]
        try:
            return entry.load()
        except Exception as error:  # any code may run
            raise BadInput(f"the {self.kind} {name} ({entry.value}) cannot be loaded: {error!r}") from error

    def find(self, name: str, base: type) -> Any:
        """The class of a plug-in: a subclass of ``base`` whose attribute ``name`` is its name.

        Raises:
            BadInput: If there is no such plug-in, or its file or entry point does not lead to such a class.
        """
        self.check(name)
        if name in self.built_in():
            origin = f"{self.package}.{name}"
            values = vars(import_module(origin)).values()
            kind = next((value for value in values if getattr(value, "name", None) == name), None)
        else:
            origin, kind = self.third_party()[name].value, self.offered(name)
        if not (isinstance(kind, type) and issubclass(kind, base) and getattr(kind, "name", None) == name):
            raise BadInput(f"{origin} holds no {base.__name__} class whose name is {name!r}.")
        return kind
