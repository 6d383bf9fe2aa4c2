"""The bytes that travel are those of ``golden.json``: runs of different versions can be compared, and mixed.

``python tests/comm/compressors/test_golden.py`` writes the file; a change of it is a change of the wire format.
dcttopk, gradiveq and powersgd are left out, because their bytes follow the machine's linear algebra.

Of `kernels/cpu/__init__.py`, `kernels/cpu/none.py`, `kernels/cpu/quantizers.py`, `kernels/cpu/signs.py`,
`kernels/cpu/sparse.py`.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import pytest
import torch
from samples import BUILDS, SHAPES, SWEPT, generator

from gradwire.comm.compressors import available, build, method_class
from gradwire.comm.compressors.base import Shape

FILE = Path(__file__).with_name("golden.json")
OWN = {name for name in available() if method_class(name).__module__.startswith("gradwire.")}
NAMES = OWN - {"dcttopk", "gradiveq", "powersgd"}
KEPT = [(name, options) for name, options in BUILDS if NAMES.issuperset(name.split("+"))]


def exact(shape: Shape, seed: int) -> torch.Tensor:
    """Numbers of either sign and of different magnitudes, some of them 0, by exact arithmetic: alike everywhere."""
    drawn = generator(seed)
    form = shape if isinstance(shape, tuple) else (shape,)
    fractions, powers = (torch.randint(high, form, generator=drawn) for high in (2**24, 12))
    values = (fractions - 2**23).float() * 2.0 ** (powers.float() - 30)
    return torch.where(fractions % 17 == 0, 0.0, values)


def digests(name: str, options: dict) -> list[str]:
    """Of the encodings of all shapes by one generator, and of what they decode to."""
    compressor, drawn = build(name, **options), generator(7)
    wires, decoded = hashlib.sha256(), hashlib.sha256()
    for seed, shape in enumerate([*SHAPES, (64, 65), 2**16 + 5]):
        wire = compressor.encode(exact(shape, seed), generator=drawn)
        wires.update(wire.numpy().tobytes())
        decoded.update(compressor.decode(wire, shape).numpy().tobytes())
    return [wires.hexdigest()[:32], decoded.hexdigest()[:32]]


def key(name: str, options: dict) -> str:
    return " ".join([name, *(f"{option}={value}" for option, value in options.items())])


@pytest.mark.parametrize(
    ("name", "options"), [pytest.param(*made, marks=[pytest.mark.sweep] * (made in SWEPT)) for made in KEPT], ids=str
)
def test_wires_and_what_they_decode_to_are_the_golden_ones(name, options):
    golden = json.loads(FILE.read_text())
    assert digests(name, options) == golden[key(name, options)]


if __name__ == "__main__":
    FILE.write_text(json.dumps({key(*kept): digests(*kept) for kept in KEPT}, indent=0) + "\n")
    print(f"{FILE}: {len(KEPT)} builds", file=sys.stderr)
