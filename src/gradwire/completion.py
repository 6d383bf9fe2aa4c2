"""The verb ``completion``: a script that completes verbs, flags and their values in a shell.

It stands above the command line, whose verbs it lists; `shtab` writes the script from their parsers. The script itself
starts no Python, so a key press costs nothing.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator

from gradwire.cli import VERBS
from gradwire.errors import BadInput
from gradwire.flags import CHECKS, output_folder

SHELLS = ("bash", "fish", "zsh")  # shtab's script for tcsh knows no flags of verbs
EXAMPLES = """where to put it:
  bash   gradwire completion bash > ~/.local/share/bash-completion/completions/gradwire
  zsh    gradwire completion zsh > ~/.zfunc/_gradwire     with fpath+=~/.zfunc before compinit in ~/.zshrc
  fish   gradwire completion fish > ~/.config/fish/completions/gradwire.fish"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Define the verb's arguments."""
    parser.epilog = EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("shell", choices=SHELLS, help="the shell that is to read the script")


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
    """All verbs as one parser, those of two words below their first word."""
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
    """What verbs with this first word there are."""
    return ", ".join(name.removeprefix(f"{group} ") for name in VERBS if name.startswith(f"{group} "))


def actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Every argument of a parser and of those below it."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from actions(child)
