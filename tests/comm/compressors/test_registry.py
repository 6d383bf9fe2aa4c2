"""Compressors by name: built-in, of other packages, in chains; and the messages for a wrong name or option.

Of `base/plugins.py`.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from samples import normal

import gradwire
from gradwire import HOMES
from gradwire.base import plugins
from gradwire.base.errors import BadInput
from gradwire.comm.compressors import available, build, method_class, methods, option_schema
from gradwire.comm.compressors.base import Compressor, numel


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("int9", {}, "unknown compressor 'int9'. Did you mean 'int8'"),
        ("int8", {"blok": 64}, "unknown int8 option 'blok'. Did you mean 'block'"),
        ("int8", {"block": "64"}, "int8 option 'block' is '64': it must be a valid integer"),
        ("int8", {"block": 0}, "int8 option 'block' is 0: it must be greater than or equal to 1"),
        ("int8", {"rounding": "up"}, "int8 option 'rounding' is 'up': it must be 'nearest' or 'stochastic'"),
        ("none", {"level": 3}, "unknown none option 'level'. Available: none."),
        (
            "topk",
            {"density": 10},
            "option 'density' is 10: it must be less than or equal to 1 (0 < density <= 1).",
        ),
        (
            "gradiveq",
            {"slice": 4, "components": 9},
            "gradiveq: components 9 must be fewer than the slice's 4 elements.",
        ),
    ],
)
def test_bad_names_and_options_are_refused(name, options, message):
    """By name and by class alike, on one line."""
    for build_it in [build, by_class] if name in available() else [build]:
        with pytest.raises(BadInput) as raised:
            build_it(name, **options)
        assert message in str(raised.value) and "\n" not in str(raised.value)


def by_class(name, **options):
    """A compressor as ``gradwire.TopK(density=0.1)`` makes it."""
    return method_class(name)(**options)


def test_names_are_known_without_torch():
    program = (
        "import sys; from gradwire.comm.compressors import available; print(available()); "
        "assert 'torch' not in sys.modules"
    )
    printed = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert "int8" in printed


def test_registry_describes_what_it_lists():
    for name in available():
        assert method_class(name).name == name
        assert method_class(name).__doc__
    assert option_schema("int8")["properties"]["block"]["default"] == 256


def test_every_method_is_a_public_class():
    """The homes of ``gradwire.Int8`` and so on, against the files of the folder."""
    files = {file.stem for file in Path(methods.__path__[0]).glob("[a-z]*.py")}
    homes = {name: home.rpartition(".")[2] for name, home in HOMES.items() if home.startswith(methods.__name__)}
    assert sorted(homes.values()) == sorted(files)
    for name, method in homes.items():
        kind = getattr(gradwire, name)
        assert kind is method_class(method) and isinstance(kind(), Compressor)


class Halved(Compressor):
    """A third party's compressor."""

    name = "halved"

    def wire_bytes(self, shape):
        return 4 * numel(shape)

    def to_wire(self, x, generator):
        return (x / 2).view(-1).view(torch.uint8)

    def from_wire(self, wire, shape):
        return wire.view(torch.float32) * 2


def offer(monkeypatch, name, value):
    """Make an entry point, as an installed package would."""
    entry = EntryPoint(name, value, "gradwire.compressors")
    monkeypatch.setattr(plugins, "entry_points", lambda group: [entry] if group == entry.group else [])


def test_an_entry_point_adds_a_compressor(monkeypatch):
    offer(monkeypatch, "halved", f"{__name__}:Halved")
    assert "halved" in available()
    x = normal(5)
    assert torch.equal(build("halved").decode(build("halved").encode(x), 5), x)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("int8", f"{__name__}:Halved", "takes the built-in compressor's name 'int8'"),
        ("other", f"{__name__}:Halved", "no Compressor class whose name is 'other'"),
        ("halved", f"{__name__}:normal", "no Compressor class whose name is 'halved'"),
    ],
)
def test_a_bad_entry_point_is_refused(monkeypatch, name, value, message):
    offer(monkeypatch, name, value)
    with pytest.raises(BadInput, match=message):
        build(name)
