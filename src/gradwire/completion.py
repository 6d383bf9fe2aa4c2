"""The verb ``completion``: prints a shell script that completes verbs, flags and their values.

`shtab` generates the script from the parsers of all verbs. The script does not start Python, so completion is instant.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator

from gradwire.cli import VERBS
from gradwire.errors import BadInput
from gradwire.flags import CHECKS, output_folder

SHELLS = ("bash", "fish", "zsh")  # shtab's script for tcsh does not complete flags of verbs
EXAMPLES = """installation:
  bash   gradwire completion bash > ~/.local/share/bash-completion/completions/gradwire
  zsh    gradwire completion zsh > ~/.zfunc/_gradwire     with fpath+=~/.zfunc before compinit in ~/.zshrc
  fish   gradwire completion fish > ~/.config/fish/completions/gradwire.fish"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Define the verb's arguments."""
    parser.epilog = EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("shell", choices=SHELLS, help="the shell to write the script for")


def main(args: argparse.Namespace) -> None:
    """Print the script."""
    print(script(args.shell))


def script(shell: str) -> str:
    """The completion script for ``bash``, ``fish`` or ``zsh``.

    Raises:
        BadInput: If shtab is not installed.
    """
    try:
        import shtab
    except ModuleNotFoundError:
        raise BadInput("completion needs shtab, which is not installed: pip install 'gradwire[completion]'.") from None

    from gradwire.compressors import available

    parser = every_verb()
    for action in actions(parser):
        if action.dest == "comm_compress":
            action.choices = available()
        elif action.type in CHECKS or action.dest.endswith(("_path", "_dir")):
            folder = action.type is output_folder or action.dest.endswith("_dir")
            action.complete = shtab.DIRECTORY if folder else shtab.FILE  # type: ignore[attr-defined]
    return shtab.complete(parser, shell)


def every_verb() -> argparse.ArgumentParser:
    """One parser for all verbs; verbs of two words are nested."""
    parser = argparse.ArgumentParser(prog="gradwire", allow_abbrev=False)
    below = {"": parser.add_subparsers()}
    for name, verb in VERBS.items():
        group, _, word = name.rpartition(" ")
        if group not in below:
            below[group] = below[""].add_parser(group, help=group_help(group)).add_subparsers()
        own = below[group].add_parser(word, help=verb.help, allow_abbrev=False)
        importlib.import_module(verb.module).arguments(own)
    return parser


def group_help(group: str) -> str:
    """The verbs that start with this word."""
    return ", ".join(name.removeprefix(f"{group} ") for name in VERBS if name.startswith(f"{group} "))


def actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Every argument of a parser and its subparsers."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from actions(child)
