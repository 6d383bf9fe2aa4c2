"""Write the Python blocks of all pages as modules into a folder, for type checkers: pages.py FOLDER.

A block is at the lines that it has on its page. One that is not a whole file begins with the names of `reader.py`,
which a reader has already. The blocks of a page in ``PROGRAMS`` are one module. One more makes what has options,
without them.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import gradwire

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROGRAMS = {ROOT / "docs/how-to/nearest-samples.md"}
METHODS = "gradwire.comm.compressors.methods."
MODELS = """import gradwire as gw
from gradwire.comm.communication import Communication, Outer, Streaming
from gradwire.comm.reduction import Exempt, ReducerOptions

Communication()
Outer()
Streaming(fragments=2)
Exempt()
ReducerOptions()
"""


def blocks(text: str) -> list[str]:
    """The Python blocks of a page as modules."""
    return [
        ("" if block[1].startswith('"""') else "from reader import *")
        + "\n" * text.count("\n", 0, block.start(1))
        + block[1]
        for block in BLOCK.finditer(text)
    ]


def program(text: str) -> list[str]:
    """The Python blocks of a page as one module."""
    module = ""
    for block in BLOCK.finditer(text):
        module += "\n" * (text.count("\n", 0, block.start(1)) - module.count("\n")) + block[1]
    return [module]


def modules() -> dict[str, str]:
    """Every module, by name."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")]
    written = {
        re.sub(r"\W", "_", f"{page.relative_to(ROOT).with_suffix('')}_{number}"): module
        for page in pages
        for number, module in enumerate((program if page in PROGRAMS else blocks)(page.read_text(encoding="utf-8")))
    }
    public = (name for name, home in gradwire.HOMES.items() if home.startswith(METHODS))
    written["defaults"] = MODELS + "".join(f"gw.{name}()\n" for name in public)
    return written


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.py"):
        old.unlink()
    for name, module in modules().items():
        (folder / f"{name}.py").write_text(module, encoding="utf-8")
