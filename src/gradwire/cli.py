"""The command line: one verb per step of the DAG. Parses arguments and calls the verb.

A verb is a module with ``Options`` (a model whose fields are the flags) and ``main(options)``, and optionally
``preflight(options)`` (checks before any rank starts), ``beside(options)`` (the output folder, for
``<verb>.failed.json``) and ``PRELOAD`` (slow imports of each rank, which `launch` imports once). Flags that are no
field are added by ``arguments(parser)``; a module without ``Options`` gets the parsed namespace. Heavy imports are
inside functions to keep ``gradwire --help`` and Snakemake fast.
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
from typing import Any, NamedTuple, NoReturn

from gradwire import __version__
from gradwire.base import parent_watch
from gradwire.base.errors import BAD_INPUT, DONE, FAULT, BadInput, did_you_mean, unknown
from gradwire.base.extras import missing
from gradwire.base.failures import (
    clear_failure,
    exit_code,
    reason,
    refuse_again,
    report_rank_failure,
    unexpected,
    where,
    write_failure,
)
from gradwire.base.flags import COUNT, check_numbers, check_paths, check_words, writable


class Verb(NamedTuple):
    """A verb's module and its line in ``--help``."""

    module: str
    help: str


VERBS = {
    "init": Verb("gradwire.bench.init", "write a configuration with every field, its default and its meaning"),
    "run": Verb("gradwire.bench.workflow.run", "run an experiment from its file to its page"),
    "download": Verb("gradwire.lm.data.download", "fetch or extract a corpus as a JSON array of id, title, text"),
    "tokenize": Verb("gradwire.lm.data.tokenize", "train or load a tokenizer and write token shards"),
    "launch": Verb("gradwire.bench.launch.launch", "check a verb's input and run it on several ranks"),
    "train": Verb("gradwire.bench.training.train", "train a language model under a compressor and a strategy"),
    "trace": Verb("gradwire.bench.trace.trace", "read a run's profiler traces into profile.json"),
    "perplexity": Verb("gradwire.bench.training.perplexity", "compute the token-weighted perplexity of a saved model"),
    "generate": Verb("gradwire.bench.training.generate", "continue a prompt with a saved model"),
    "grads collect": Verb(
        "gradwire.attribution.collect.collect", "collect projected per-sample gradients with their sample ids"
    ),
    "grads aggregate": Verb("gradwire.attribution.store.aggregate", "merge the ranks' gradients into one matrix"),
    "grads validate": Verb("gradwire.attribution.store.validate", "check that row i is the gradient of sample id i"),
    "grads influence": Verb(
        "gradwire.attribution.query.influence", "rank training samples by their influence on validation samples"
    ),
    "grads query": Verb(
        "gradwire.attribution.query.query", "find the samples whose gradients are nearest to that of a text"
    ),
    "grads index": Verb(
        "gradwire.attribution.query.index", "build a FAISS index of a gradient store, for faster queries"
    ),
    "grads serve": Verb(
        "gradwire.attribution.query.serve", "answer queries of a gradient store in a browser, on this machine"
    ),
    "grads factors": Verb("gradwire.attribution.collect.factors", "compute the curvature for gradients of type ekfac"),
    "grads lds": Verb(
        "gradwire.bench.judge.lds", "judge attribution methods by trainings on random subsets of the samples"
    ),
    "grads recall": Verb("gradwire.bench.judge.recall", "judge attribution methods by samples that were planted"),
    "grads run": Verb("gradwire.attribution.collect.run", "collect, aggregate and validate in one call"),
    "norms": Verb("gradwire.attribution.collect.norms", "compute the norm of every sample's gradient"),
    "compressors": Verb("gradwire.comm.compressors.listing", "list compressors and their options"),
    "bench compressors": Verb("gradwire.bench.codecs.verb", "time every compressor and compare with memory bandwidth"),
    "predict": Verb(
        "gradwire.bench.report.verbs.predict", "predict step times and crossovers at any world size and bandwidth"
    ),
    "doctor": Verb("gradwire.bench.doctor", "show what this machine supports, and test several ranks on it"),
    "report": Verb(
        "gradwire.bench.report.verbs.report", "write a page of figures and tables over all runs of an experiment"
    ),
    "compare": Verb(
        "gradwire.bench.report.verbs.compare", "compare two experiments, paired by seed, with statistical tests"
    ),
    "status": Verb(
        "gradwire.bench.report.verbs.status", "show which runs are done, running, failed or pending, and the time left"
    ),
    "results": Verb("gradwire.bench.report.verbs.results", "print an experiment's results, one line per run"),
    "summarize": Verb("gradwire.bench.report.verbs.summarize", "write one table over all runs of an experiment"),
}


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
        parsed, left = self.parse_known_args([*map(self._spelled, args)], namespace)
        if left:
            word = next((word for word in left if word.startswith("-")), left[0]).partition("=")[0]
            flags = [flag for flag, action in self._option_string_actions.items() if action.help != argparse.SUPPRESS]
            self.error(f"unknown argument {word!r}.{did_you_mean(word, flags)}")
        return parsed

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


def verb_of(words: Sequence[str]) -> tuple[str, list[str]]:
    """Split a command into its verb (one or two words) and the verb's arguments.

    Raises:
        BadInput: If the verb is unknown.
    """
    for length in (2, 1):
        name = " ".join(words[:length])
        if name in VERBS and len(words) >= length:
            return name, list(words[length:])
    raise unknown("verb", " ".join(words[:1]), VERBS)


def parse(words: Sequence[str]) -> tuple[str, ModuleType, argparse.Namespace]:
    """Parse a whole command into its verb, the verb's module and its arguments.

    Raises:
        BadInput: If the verb is unknown, or an argument is unknown, invalid or missing.
    """
    name, rest = verb_of(words)
    module = importlib.import_module(VERBS[name].module)
    parser = parser_of(name, module)
    args = parser.parse_args(rest)
    # for `launch`, which runs another command
    args.parser, args.parse, args.options_of = parser, parse, options_of
    return name, module, args


def parser_of(name: str, module: ModuleType) -> Parser:
    """The parser of a verb's flags."""
    parser = Parser(
        prog=f"gradwire {name}",
        description=VERBS[name].help + ".",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    if hasattr(module, "Options"):
        from gradwire.base.strict import add_flags

        add_flags(parser, module.Options)
    if hasattr(module, "arguments"):
        module.arguments(parser)
    parser.add_argument(
        "--attempt",
        type=COUNT,
        default=1,
        help=argparse.SUPPRESS,  # for the workflow: above 1, do not retry after bad input
    )
    parser.add_argument("--debug", action="store_true", help="on failure, show the traceback")
    return parser


def options_of(module: ModuleType, args: argparse.Namespace) -> Any:
    """The options of a verb from its parsed arguments, or these if it has no ``Options``.

    Raises:
        BadInput: If a value is out of range.
    """
    if not hasattr(module, "Options"):
        return args
    from gradwire.base.strict import from_flags

    return from_flags(module.Options, args)


def main(words: Sequence[str]) -> int:
    """Run a command and return its exit code; a failure is printed once and written next to the verb's outputs."""
    program, module_name = "gradwire", ""
    folder = None
    try:
        if not words or words[0] in ("-h", "--help", "help", "--version"):
            print(__version__ if "--version" in words[:1] else usage())
            return DONE if words else BAD_INPUT
        check_words(words)
        name, _ = verb_of(words)
        program, module_name = f"gradwire {name}", VERBS[name].module
        _, module, args = parse(words)
        check_paths(args)
        folder = writable(module.beside(args)) if hasattr(module, "beside") else None
        if folder is not None and args.attempt > 1:
            refuse_again(folder, name)
        check_numbers(args)
        code = module.main(options_of(module, args)) or DONE
    except (Exception, KeyboardInterrupt) as raised:
        error = missing(raised, module_name) or raised
        if report_rank_failure(error):  # `launch` reports it once for all ranks
            return exit_code(error)
        if isinstance(error, BrokenPipeError) and reader_left() and folder is None:
            return FAULT  # such as `| head`
        if "--debug" in words:  # also if parsing failed, and for a verb that `launch` runs
            sys.stderr.write(where(error))
        print(f"{program}: {reason(error)}", file=sys.stderr)
        if unexpected(error) and "--debug" not in words:
            print("Unexpected error: rerun with --debug for the traceback.", file=sys.stderr)
        if folder is not None:
            write_failure(folder, name, error)
        return exit_code(error)
    if code == DONE and folder is not None:
        clear_failure(folder, name)
    return code


def reader_left() -> bool:
    """Whether the reader of standard output is gone; if so, discard further output."""
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
        f"gradwire {__version__}: a benchmark and library for gradient compression in data-parallel training\n\n"
        f"usage: gradwire VERB [options]     `gradwire VERB --help` lists a verb's options\n\nverbs:\n{lines}\n\n"
        "exit codes: 0 success, 1 check failed, 2 bad input, 3 run failed, 75 stopped and resumable"
    )


def entry() -> NoReturn:
    """The console script."""
    parent_watch.watch()
    code = main(sys.argv[1:])
    reader_left()
    sys.stdout.flush()
    sys.stderr.flush()
    if "RANK" in os.environ:
        # As forked ranks do. A thread that returns from torch's C++ code while the interpreter finalizes aborts the
        # process, and destroying a process group after a failure would wait for peers.
        os._exit(code)
    gc.freeze()  # skip the final garbage collection, which takes a second with torch
    sys.exit(code)
