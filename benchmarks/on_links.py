"""A benchmark's ranks on one shaped link after another: the script runs again for each link, and again as each rank."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gradwire.base.errors import BadInput
from gradwire.base.units import UNSHAPED
from gradwire.bench.launch import links
from gradwire.bench.launch.ranks import environment, start


def add_arguments(parser: argparse.ArgumentParser, default: list[str]) -> None:
    """Add ``--links`` and ``--world_size``."""
    parser.add_argument("--links", nargs="+", default=default)
    parser.add_argument("--world_size", type=int, default=2)
    parser.add_argument("--folder", help=argparse.SUPPRESS)  # of the rows; given to the process of one link


def rows_of_links(args: argparse.Namespace, rank: Callable[[argparse.Namespace], None]) -> list[Any]:
    """Run ``rank(args)`` in the ranks of every link; the rows that it gave to `add`, none in a rank."""
    if "RANK" in os.environ:
        links.join()
        rank(args)
    elif args.folder:
        try:
            one_link(args)
        except BadInput as error:
            print(f"{sys.argv[0]}: --links: {error}", file=sys.stderr)
            sys.exit(2)
    else:
        with tempfile.TemporaryDirectory() as folder:
            for link in args.links:
                command = [sys.executable, *sys.argv, "--folder", folder, "--links", link]
                if code := subprocess.run(command, check=False).returncode:
                    sys.exit(code)
            return [json.loads(line) for line in Path(folder, "rows.jsonl").read_text().splitlines()]
    return []


def one_link(args: argparse.Namespace) -> None:
    """Start the ranks on a link."""
    command = [sys.executable, *sys.argv]
    if args.links[0] == UNSHAPED:
        start(command, args.world_size, "spawn")
        return
    links.enter(args.links[0])
    with links.testbed(args.links[0], args.world_size) as testbed, environment(testbed.environment):
        start(command, args.world_size, "spawn", *testbed.meeting_point("spawn"))


def add(args: argparse.Namespace, row: list[Any]) -> None:
    """Keep a row, in rank 0."""
    with Path(args.folder, "rows.jsonl").open("a") as file:
        print(json.dumps(row), file=file)
