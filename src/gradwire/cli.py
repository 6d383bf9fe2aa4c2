"""The command line: one verb per step of the DAG. Arguments in, function called; no work of its own.

A verb is a module with ``arguments(parser)`` and ``main(args)``, and where they apply ``preflight(args)`` (what can be
checked before any rank starts), ``beside(args)`` (the folder of its outputs, where ``<verb>.failed.json`` goes) and
``PRELOAD`` (what each rank imports and takes long, which `launch` imports once).
Those modules keep their heavy imports inside their functions, so that ``gradwire --help`` and Snakemake stay quick.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import select
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple, NoReturn

from gradwire import __version__
from gradwire.errors import BAD_INPUT, DONE, FAULT, unknown
from gradwire.failures import (
    clear_failure,
    exit_code,
    reason,
    refuse_again,
    report_rank_failure,
    unexpected,
    where,
    write_failure,
)
from gradwire.flags import COUNT, check_numbers, check_paths, check_words, writable
from gradwire.launch import keeper


class Verb(NamedTuple):
    """Where a verb lives and the line that ``--help`` shows."""

    module: str
    help: str


VERBS = {
    "init": Verb("gradwire.init", "write a configuration with every field, its default and its meaning"),
    "download": Verb("gradwire.data.download", "fetch or extract a corpus as a JSON array of id, title, text"),
    "tokenize": Verb("gradwire.data.tokenize", "train or take a tokenizer and write token shards"),
    "launch": Verb("gradwire.launch.launch", "check a verb's input, then run it on several ranks"),
    "train": Verb("gradwire.training.train", "train a GPT-2 model under a compressor and a strategy"),
    "trace": Verb("gradwire.measurement.trace", "read a run's profiler traces into profile.json"),
    "perplexity": Verb("gradwire.training.perplexity", "token-weighted perplexity of a saved model"),
    "generate": Verb("gradwire.models.generate", "continue a prompt with a saved model"),
    "grads collect": Verb("gradwire.gradients.collect", "projected per-sample gradients with their sample ids"),
    "grads aggregate": Verb("gradwire.gradients.aggregate", "merge the ranks' gradients into one matrix"),
    "grads validate": Verb("gradwire.gradients.validate", "prove that row i belongs to id i"),
    "grads influence": Verb("gradwire.gradients.influence", "training samples by their effect on validation samples"),
    "grads run": Verb("gradwire.gradients.run", "collect, aggregate and validate in one call"),
    "norms": Verb("gradwire.gradients.norms", "the norm of every sample's gradient"),
    "compressors": Verb("gradwire.compressors.listing", "every compressor with its options"),
    "bench compressors": Verb("gradwire.compressors.bench", "time every compressor against the memory's speed"),
    "predict": Verb("gradwire.report.predict", "step times and crossovers at any world size and bandwidth"),
    "doctor": Verb("gradwire.doctor", "what this machine offers, and whether several ranks work on it"),
    "report": Verb("gradwire.report.page", "one page of figures and tables over all runs of an experiment"),
    "compare": Verb("gradwire.report.compare", "how two experiments differ, paired by seed, and with which test"),
    "completion": Verb("gradwire.completion", "complete verbs and flags in bash, fish or zsh"),
    "status": Verb("gradwire.report.status", "which runs are done, running, failed or to come, and how long is left"),
    "summarize": Verb("gradwire.report.summarize", "one table over all runs of an experiment"),
}


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the defaults that say something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        """The help of an option, with its default unless that is None or False."""
        silent = action.default is None or action.default is False
        return action.help if silent else super()._get_help_string(action)


def verb_of(words: Sequence[str]) -> tuple[str, list[str]]:
    """Split a command into its verb (one word or two) and the verb's arguments.

    Raises:
        BadInput: If there is no such verb.
    """
    for length in (2, 1):
        name = " ".join(words[:length])
        if name in VERBS and len(words) >= length:
            return name, list(words[length:])
    raise unknown("verb", " ".join(words[:1]), VERBS)


def parse(words: Sequence[str]) -> tuple[str, ModuleType, argparse.Namespace]:
    """Parse a whole command into its verb, the verb's module and its arguments.

    Raises:
        BadInput: If there is no such verb, or an argument is not text.
    """
    check_words(words)
    name, rest = verb_of(words)
    module = importlib.import_module(VERBS[name].module)
    parser = argparse.ArgumentParser(
        prog=f"gradwire {name}",
        description=VERBS[name].help + ".",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    module.arguments(parser)
    parser.add_argument(
        "--attempt",
        type=COUNT,
        default=1,
        help="above 1, do not try again what ended by bad input (Snakemake's attempt)",
    )
    parser.add_argument("--debug", action="store_true", help="after a failure, show where in the program it happened")
    args = parser.parse_args(rest)
    args.parser, args.parse = parser, parse  # for `launch`, whose argument is another command
    return name, module, args


def main(words: Sequence[str]) -> int:
    """Run a command and return its exit code; a failure is told once and written beside the verb's outputs."""
    program = "gradwire"
    folder = None
    try:
        if not words or words[0] in ("-h", "--help", "help", "--version"):
            print(__version__ if "--version" in words[:1] else usage())
            return DONE if words else BAD_INPUT
        name, module, args = parse(words)
        program = f"gradwire {name}"
        check_paths(args)
        folder = writable(module.beside(args)) if hasattr(module, "beside") else None
        if folder is not None and args.attempt > 1:
            refuse_again(folder, name)
        check_numbers(args)
        code = module.main(args) or DONE
    except (Exception, KeyboardInterrupt) as error:
        if report_rank_failure(error):  # `launch` tells it, once for all ranks
            return exit_code(error)
        if isinstance(error, BrokenPipeError) and reader_left() and folder is None:
            return FAULT  # such as `| head`, which has what it wanted
        if "--debug" in words:  # also where they could not be parsed, and for a verb that `launch` runs
            sys.stderr.write(where(error))
        print(f"{program}: {reason(error)}", file=sys.stderr)
        if unexpected(error) and "--debug" not in words:
            print("gradwire did not expect this: --debug shows where it happened.", file=sys.stderr)
        if folder is not None:
            write_failure(folder, name, error)
        return exit_code(error)
    if code == DONE and folder is not None:
        clear_failure(folder, name)
    return code


def reader_left() -> bool:
    """Whether whoever read our standard output is gone; then what is left for it goes nowhere."""
    output = select.poll()
    output.register(sys.stdout, 0)  # errors are always reported
    gone = any(event & select.POLLERR for _, event in output.poll(0))
    if gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return gone


def usage() -> str:
    """The text of ``gradwire --help``."""
    width = max(map(len, VERBS))
    lines = "\n".join(f"  {name:<{width}}  {verb.help}" for name, verb in VERBS.items())
    return (
        f"gradwire {__version__}: what gradients cost on the wire, what compressing them buys, what it takes away\n\n"
        f"usage: gradwire VERB [options]     `gradwire VERB --help` documents each option\n\nverbs:\n{lines}\n\n"
        "exit codes: 0 done, 1 a check failed, 2 bad input, 3 a fault in the run, 75 stopped and resumable"
    )


def entry() -> NoReturn:
    """The console script."""
    keeper.watch()
    code = main(sys.argv[1:])
    reader_left()
    sys.stdout.flush()
    sys.stderr.flush()
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        os._exit(code)  # a process group that a failure left standing would wait for its peers when it is destroyed
    gc.freeze()  # what is left goes with the process; a last collection among torch's modules takes a second
    sys.exit(code)
