"""Of all ranks' warnings of libraries, rank 0's alone are printed; gradwire's are printed by each."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest

WARNING = """
import logging, sys, warnings
from pathlib import Path
import numpy, gradwire
from gradwire import cli
def main(words):
    place, own = numpy.__file__, gradwire.__file__
    warnings.warn_explicit("of a library", UserWarning, place, 1)
    warnings.warn_explicit("of C++ (Triggered internally at x.cpp:1.)", UserWarning, own, 2)
    warnings.warn_explicit("of gradwire", UserWarning, own, 3)
    warnings.warn_explicit("of the user", UserWarning, __file__, 4)
    logging.getLogger("transformers").warning("of a logger")
    logging.getLogger("transformers").error("an error")
    return 0
cli.main = main
cli.entry()
"""


@pytest.mark.parametrize("rank", [None, "0", "1"])
def test_warnings_of_libraries_are_printed_by_one_rank(tmp_path, rank):
    (tmp_path / "rank.py").write_text(WARNING)
    variables = {**os.environ, **({} if rank is None else {"RANK": rank})}
    ended = subprocess.run(
        [sys.executable, str(tmp_path / "rank.py")], env=variables, capture_output=True, text=True, check=True
    )
    texts = ("of a library", "of C++", "of gradwire", "of the user", "of a logger", "an error")
    printed = Counter({text: ended.stderr.count(text) for text in texts})
    once = Counter(dict.fromkeys(texts, 1))
    silent = ("of a library", "of C++", "of a logger") if rank == "1" else ()
    assert printed == once - Counter(silent)
