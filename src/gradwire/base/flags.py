"""Types of flags: numbers with bounds, and paths. Free of heavy imports.

A type converts the text of a flag. `check_paths` and `check_numbers` check all flags before a command runs, so commands
check no bounds. Fields of the configuration use the same bounds.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradwire.base.errors import BadInput
from gradwire.base.files import check_file, check_regular


@dataclass(frozen=True)
class Number:
    """Type of a flag that takes a finite number within bounds.

    Attributes:
        kind: ``int`` or ``float``.
        least: The lower bound.
        most: The upper bound; infinity for none. The number must be finite in any case.
        above: Whether the lower bound is exclusive.
        below: Whether the upper bound is exclusive.
        words: Words that are taken in place of a number.
    """

    kind: type[int] | type[float]
    least: float
    most: float = math.inf
    above: bool = False
    below: bool = False
    words: tuple[str, ...] = ()

    def __call__(self, word: str) -> float | str:
        """Convert text to a number, unless it is one of the words; `check` checks its bounds."""
        return word if word in self.words else self.kind(word)

    @property
    def __name__(self) -> str:  # argparse says "invalid int value"
        return self.kind.__name__

    __is_annotated_types_grouped_metadata__ = True  # so that ``Annotated[int, COUNT]`` has these bounds in pydantic

    def __iter__(self) -> Iterator[Any]:
        """Yield the bounds as pydantic reads them."""
        from pydantic import Field

        yield from Field(**self.limits).metadata

    @property
    def limits(self) -> dict[str, Any]:
        """The bounds as keyword arguments of pydantic's ``Field``."""
        most = {} if self.most == math.inf else {"lt" if self.below else "le": self.most}
        return {"gt" if self.above else "ge": self.least, **most}

    def check(self, name: str, value: float) -> None:
        """Check that ``value`` is within bounds.

        Raises:
            BadInput: If not; the message has ``name`` and the bound.
        """
        form = "d" if self.kind is int else "g"
        if not (isinstance(value, int) or math.isfinite(value)):
            broken = "a finite number"
        elif value < self.least or (self.above and value == self.least):
            broken = f"{'above' if self.above else 'at least'} {self.least:{form}}"
        elif value > self.most or (self.below and value == self.most):
            broken = f"{'below' if self.below else 'at most'} {self.most:{form}}"
        else:
            return
        raise BadInput(f"{name} is {value}; it must be {broken}.")


@dataclass(frozen=True)
class Positional:
    """In a field's annotation: the value is given by its place among the arguments, as ``metavar`` in the help."""

    metavar: str


@dataclass(frozen=True)
class Short:
    """In a field's annotation: another spelling of its flag, such as ``-n``."""

    flag: str


COUNT = Number(int, 1, 2**31 - 1)  # 32 bits hold every count
NATURAL = Number(int, 0, 2**31 - 1)
SEED = Number(int, 0, 2**63 - 1)  # fits an int64 column, and torch does not wrap it
RANKS = Number(int, 1, 2**16)  # addresses in a testbed's network, and ports of a machine
RANK = Number(int, 0, 2**16 - 1)
PORT = Number(int, 0, 2**16 - 1)
LORA_RANK = Number(int, 1, 2**14)  # columns of the widest matrices in use
ELEMENTS = Number(int, 1, 2**30)  # of a tensor: 4 GiB
POSITIVE = Number(float, 0, above=True)
NOT_NEGATIVE = Number(float, 0)
SHARE = Number(float, 0, 1, above=True)
FRACTION = Number(float, 0, 1, above=True, below=True)
SECONDS = Number(float, 0.001, 1e6)  # gloo and the store keep timeouts as milliseconds in 31 bits


def path(word: str) -> Path:
    """Type of a flag that takes a path."""
    if not word:
        raise argparse.ArgumentTypeError("the path is empty")
    return Path(word)


def output_file(word: str) -> Path:
    """Type of a flag that takes a file to write."""
    return path(word)


def check_words(words: Sequence[str]) -> None:
    """Check that arguments are valid UTF-8, as results and messages contain them.

    Raises:
        BadInput: If one is not.
    """
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise BadInput(f"the argument {os.fsencode(word)!r} is not valid UTF-8: rename the path.") from None


def check_paths(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Check that no path is too long, a pipe or a device, and that output files can be written.

    Raises:
        BadInput: If not; the message has the flag.
    """
    for flag, kind, value in _given(parser, args):
        if kind is path:
            check_regular(value, flag)
        elif kind is output_file:
            check_file(value, flag)


def check_numbers(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Check every number against the bounds of its flag.

    Raises:
        BadInput: If one is out of bounds; the message has its flag.
    """
    for flag, kind, number in _given(parser, args):
        if isinstance(kind, Number) and number not in kind.words:
            kind.check(flag, number)


def _given(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Iterator[tuple[str, Any, Any]]:
    """Yield flag, type and value of every flag that has a value."""
    for action in parser._actions:
        value = getattr(args, action.dest, None)
        for item in value if isinstance(value, list) else [value]:
            if item is not None:
                yield action.option_strings[0] if action.option_strings else action.dest, action.type, item
