"""Runs a command: checks its flags, calls its module, and writes down why it failed.

A command is a module with ``Options`` (a model whose fields are the flags) and ``main(options)``, and optionally
``preflight(options)`` (checks before any rank starts, in a process that only does that), ``output_dir(options)`` (the
output folder, for ``<command>.failed.json``) and ``PRELOAD`` (slow imports of each rank, which `launch` imports once).
Heavy imports are inside functions to keep ``gradwire --help`` and Snakemake fast.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from gradwire.base.errors import DONE, BadInput, did_you_mean, unknown
from gradwire.base.extras import missing
from gradwire.base.failures import CHECK, clear_failure, is_rank, reader_left, refuse_again, write_failure
from gradwire.base.files import check_folder
from gradwire.base.flags import COUNT, check_numbers, check_paths

LOCAL_RANK = re.compile(r"--local[-_]rank=\d+")  # as `torch.distributed.launch` passes it


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults other than None, False and an empty list."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        """Return the help of an option with its default, if shown."""
        silent = action.default is None or action.default is False or action.default == ()
        return action.help if silent else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """Reports bad arguments in one message, an unknown choice or flag with close matches."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments; dashes in the name of a flag are underscores.

        Raises:
            BadInput: If one is unknown, invalid or missing.
        """
        words = [*map(self._spelled, args)]
        left = self._unknown_flags(words)  # named before what is missing, as the one is often the other, misspelt
        if not left:
            namespace, left = self.parse_known_args(words, namespace)
        if left:
            word = next((word for word in left if word.startswith("-")), left[0]).partition("=")[0]
            flags = [flag for flag, action in self._option_string_actions.items() if action.help != argparse.SUPPRESS]
            self.error(f"unknown argument {word!r}.{did_you_mean(word, flags)}")
        return namespace

    def _unknown_flags(self, words: Sequence[str]) -> list[str]:
        """The flags before ``--`` that this command does not have."""
        flags = [word for word in itertools.takewhile("--".__ne__, words) if word.startswith("--") and " " not in word]
        return [flag for flag in flags if flag.partition("=")[0] not in self._option_string_actions]

    def _spelled(self, word: str) -> str:
        """Return ``--dry_run`` for ``--dry-run``."""
        flag, equals, value = word.partition("=")
        spellings = {known.replace("-", "_"): known for known in self._option_string_actions}
        return spellings.get(flag.replace("-", "_"), flag) + equals + value if flag.startswith("--") else word

    def error(self, message: str) -> NoReturn:
        """Refuse the arguments.

        Raises:
            BadInput: Always.
        """
        raise BadInput(f"{message.rstrip('.')}{'' if message.endswith('?') else '.'} See `{self.prog} --help`.")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Check a value against its flag's choices.

        Raises:
            BadInput: If it is none of them.
        """
        if action.choices is not None and value not in action.choices:
            raise unknown("/".join(action.option_strings) or action.dest, str(value), map(str, action.choices))


def commands() -> dict[str, Any]:
    """Return the table of commands, imported by its name: a new one changes the source digest of no other."""
    table: dict[str, Any] = importlib.import_module("gradwire.bench.commands").COMMANDS
    return table


def split_command(words: Sequence[str]) -> tuple[str, list[str]]:
    """Split words into the name of a command (one or two words) and its arguments.

    ``python -m torch.distributed.launch`` puts ``--local-rank=N``, an argument of the command, in front of the name.

    Raises:
        BadInput: If the command is unknown.
    """
    if words and LOCAL_RANK.fullmatch(words[0]):
        name, rest = split_command(words[1:])
        return name, [*rest, words[0]]
    for length in (2, 1):
        name = " ".join(words[:length])
        if name in commands() and len(words) >= length:
            return name, list(words[length:])
    raise unknown("command", " ".join(words[:1]), commands())


def parser_of(name: str) -> Parser:
    """The parser of a command's flags."""
    from gradwire.base.strict import add_flags

    parser = Parser(
        prog=f"gradwire {name}",
        description=commands()[name].help + ".",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    add_flags(parser, importlib.import_module(commands()[name].module).Options)
    parser.add_argument(
        "--attempt",
        type=COUNT,
        default=1,
        help=argparse.SUPPRESS,  # for the workflow: above 1, do not retry after bad input
    )
    parser.add_argument("--debug", action="store_true", help="on failure, show the traceback")
    return parser


class Command:
    """A command with its arguments.

    Args:
        words: Its name and its arguments.

    Attributes:
        name: Its name.
        module: Its module.
        arguments: The parsed arguments.
        inner: The command that `launch` runs on each rank; None for other commands.
        folder: While it runs, the folder of its failure file: that of its outputs, or of those of ``inner``.

    Raises:
        BadInput: If the command is unknown, or an argument is unknown, invalid or missing.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.name, rest = split_command(words)
        self.module = importlib.import_module(commands()[self.name].module)
        self._parser = parser_of(self.name)
        self.arguments = self._parser.parse_args(rest)
        self.inner = Command(self.arguments.command) if self.name == "launch" else None
        self.folder: Path | None = None

    @property
    def options(self) -> Any:
        """The command's options.

        Raises:
            BadInput: If a value is out of range.
        """
        from gradwire.base.strict import from_flags

        return from_flags(self.module.Options, self.arguments)

    def run(self) -> int:
        """Check the arguments and run the command; a failure is written next to its outputs, a success removes it.

        Returns:
            The exit code.
        """
        commands = [self] if self.inner is None else [self, self.inner]
        recorded = commands[-1]
        try:
            for command in commands:
                check_paths(command._parser, command.arguments)
            self.folder = recorded.output_folder()
            if self.folder is not None and self.arguments.attempt > 1:
                refuse_again(self.folder, recorded.name)
            for command in commands:
                check_numbers(command._parser, command.arguments)
            if CHECK in os.environ:
                self.module.preflight(self.options)
                return DONE
            code: int = self.module.main(self.options) or DONE
        except (Exception, KeyboardInterrupt) as raised:
            # `launch` reports a failure once for all ranks.
            if self.folder is not None and not is_rank() and not reader_left(raised):
                write_failure(self.folder, recorded.name, missing(raised, self.module.__name__) or raised)
            raise
        if self.folder is not None and code == DONE:
            clear_failure(self.folder, recorded.name)
        return code

    def output_folder(self) -> Path | None:
        """Return the folder of the command's outputs, created and checked; None if it has none."""
        folder: Path | None = self.module.output_dir(self.arguments) if hasattr(self.module, "output_dir") else None
        if folder is not None:
            check_folder(folder)
        return folder
