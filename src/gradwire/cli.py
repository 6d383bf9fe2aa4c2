"""The command line: runs a command and reports its failure."""

from __future__ import annotations

import gc
import logging
import os
import sys
import sysconfig
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, TextIO

from gradwire import __version__
from gradwire.base import parent_watch
from gradwire.base.errors import BAD_INPUT, DONE, FAULT
from gradwire.base.extras import missing
from gradwire.base.failures import (
    exit_code,
    nobody_reads,
    reader_left,
    reason,
    report_rank_failure,
    unexpected,
    where,
)
from gradwire.base.flags import check_words
from gradwire.base.plugins import PACKAGE
from gradwire.bench.command import Command, split_command
from gradwire.bench.commands import COMMANDS
from gradwire.bench.launch import links

LIBRARIES = tuple({Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")})
FROM_TORCH = "(Triggered internally at "  # in a warning of torch's C++ code, which names the Python file that called it


def main(words: Sequence[str]) -> int:
    """Run a command and return its exit code; print why it failed, once for all ranks."""
    program, module_name = "gradwire", ""
    try:
        if not words or words[0] in ("-h", "--help", "help", "--version"):
            print(__version__ if "--version" in words[:1] else usage())
            return DONE if words else BAD_INPUT
        check_words(words)
        name, _ = split_command(words)
        program, module_name = f"gradwire {name}", COMMANDS[name].module
        return Command(words).run()
    except (Exception, KeyboardInterrupt) as raised:
        error = missing(raised, module_name) or raised
        if report_rank_failure(error):
            return exit_code(error)
        if reader_left(error):
            return FAULT
        if "--debug" in words:  # also if parsing failed, and for a command that `launch` runs
            sys.stderr.write(where(error))
        print(f"{program}: {reason(error)}", file=sys.stderr)
        if unexpected(error) and "--debug" not in words:
            print("Unexpected error: rerun with --debug for the traceback.", file=sys.stderr)
        return exit_code(error)


def usage() -> str:
    """The text of ``gradwire --help``."""
    width = max(map(len, COMMANDS))
    lines = "\n".join(f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items())
    return (
        f"gradwire {__version__}: a benchmark and library for gradient compression in data-parallel training\n\n"
        f"usage: gradwire COMMAND [options]     `gradwire COMMAND --help` lists a command's options\n\n"
        f"commands:\n{lines}\n\n"
        "exit codes: 0 success, 1 check failed, 2 bad input, 3 run failed, 75 stopped and resumable"
    )


def silence_libraries() -> None:
    """Print no warnings of libraries; those of gradwire and of the user's modules stay.

    Every rank runs the same code, so rank 0 prints the warnings of libraries for all.
    """
    logging.disable(logging.WARNING)
    show = warnings.showwarning

    def showwarning(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if not _of_library(str(message), Path(filename)):
            show(message, category, filename, lineno, file, line)

    warnings.showwarning = showwarning


def _of_library(message: str, file: Path) -> bool:
    """Whether a warning is of an installed library other than gradwire."""
    if file.is_relative_to(PACKAGE):
        return FROM_TORCH in message
    return any(file.is_relative_to(folder) for folder in LIBRARIES)


def entry() -> NoReturn:
    """The console script."""
    links.join()
    parent_watch.watch()
    if os.environ.get("RANK", "0") != "0":
        silence_libraries()
    code = main(sys.argv[1:])
    if nobody_reads():  # what is still to be written has no place to go
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.stdout.flush()
    sys.stderr.flush()
    if "RANK" in os.environ:
        # As forked ranks do. A thread that returns from torch's C++ code while the interpreter finalizes aborts the
        # process, and destroying a process group after a failure would wait for peers.
        os._exit(code)
    gc.freeze()  # skip the final garbage collection, which takes a second with torch
    sys.exit(code)
