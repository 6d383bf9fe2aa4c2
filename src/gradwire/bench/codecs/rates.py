"""How fast a device encodes and decodes: measured here and kept, or as recorded in a file.

A file is that of ``gradwire bench compressors --json``, or ``reduction.json`` of benchmarks/gpu. The second times whole
reductions of many tensors on a GPU, whose host takes longer than its kernels: a rate then has a time per tensor too.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from gradwire.base.errors import BadInput
from gradwire.base.files import digest, read_object, write_json
from gradwire.base.units import amount
from gradwire.bench.codecs.bench import SCHEMA_VERSION, describe, measure

NUMEL = {"cpu": 2**20, "cuda": 2**26}
SMALL = 2**8  # elements of a tensor that costs its call and nothing else
SECONDS = 0.02  # of each measurement
RECORDED = Path(__file__).with_name("h200.json")
NUMEL_62M, TENSORS_62M = 62_007_040, 148  # of what benchmarks/gpu reduces: the preset 62m
ALONE = " alone"  # ends the name of a reduction by itself, not in a step
SHORT: dict[str, tuple[str, dict[str, Any]]] = {"int4": ("int8", {"num_bits": 4})}  # its labels that are no methods

Options = Mapping[str, Any]


class Rate(NamedTuple):
    """Seconds of a codec.

    Attributes:
        encode: Per element.
        decode: Per element.
        tensor: Per tensor of a reduction, on the host.
    """

    encode: float
    decode: float
    tensor: float = 0.0


class Rates(NamedTuple):
    """The rates of a device.

    Attributes:
        device: Its name, and where the rates are from.
        kind: ``cpu`` or ``cuda``.
        known: Methods with their options, and their rates.
    """

    device: str
    kind: str
    known: list[tuple[str, Options, Rate]]

    def of(self, method: str, options: Options) -> Rate | None:
        """The rate of a method; of those that the device has without some of the options, that with the most."""
        alike = {
            len(given): rate for name, given, rate in self.known if name == method and given.items() <= options.items()
        }
        return alike[max(alike)] if alike else None


def rates_of(device: str, codecs: Iterable[tuple[str, Options]]) -> Rates:
    """Return the rates of a device.

    Args:
        device: ``cpu``; ``cuda``, measured here if there is a GPU, else those recorded of an H200; or a file.
        codecs: The methods with their options, for what is measured.

    Raises:
        BadInput: If the file cannot be read or has no rates, or a codec cannot be measured.
    """
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        return read(RECORDED)
    return measured(torch.device(device), codecs) if device in NUMEL else read(Path(device))


def measured(device: Any, codecs: Iterable[tuple[str, Options]]) -> Rates:
    """Measure codecs on this machine's device, or return what an earlier call has measured."""
    from gradwire.bench.codecs.cases import Case
    from gradwire.comm.compressors import registry

    cases = {
        digest([name, options]): Case(name, registry.build(name, **options), dict(options)) for name, options in codecs
    }
    machine = describe(device)
    key = digest([machine, sorted(cases), NUMEL, SECONDS])
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gradwire" / f"codecs-{key}.json"
    if not cache.is_file():
        print(
            f"gradwire predict: timing {amount(len(cases), 'codec')} here, once (kernels compile first): {cache}",
            file=sys.stderr,
        )
        large, small = (measure([*cases.values()], device, numel, SECONDS) for numel in (NUMEL[device.type], SMALL))
        for record, per_call in zip(large["records"], small["records"], strict=True):
            if error := record["error"] or per_call["error"]:
                raise BadInput(f"{record['method']} cannot be timed here ({error}): leave it out by --cells.")
            record["tensor_ms"] = [sum(map(median, (per_call["encode_ms"], per_call["decode_ms"])))]
        write_json(cache, large)
    return read(cache, f"{machine['device']}, measured here")


def read(path: Path, device: str | None = None) -> Rates:
    """Read a file of rates.

    Raises:
        BadInput: If it cannot be read, is of another version or has no rates.
    """
    content = read_object(path)
    with suppress(ArithmeticError, AttributeError, LookupError, TypeError, ValueError):  # of another form
        if content.get("part") == "reduction":
            known = [reduction_rate(row) for row in content["rows"] if row["name"].endswith(ALONE)]
            kind, name = "cuda", content.get("card", str(path))
        else:
            numel = math.prod(content["shape"]) if content["schema_version"] == SCHEMA_VERSION else 0
            known = [codec_rate(record, numel) for record in content["records"] if not record["error"]]
            kind, name = content["environment"]["kind"], f"{content['environment']['device']} ({path})"
        if known and kind in NUMEL:
            return Rates(device or name, kind, known)
    raise BadInput(
        f"--device {path}: it is no file of `gradwire bench compressors --json` with schema version "
        f"{SCHEMA_VERSION}, nor reduction.json of benchmarks/gpu: measure again, or give cpu or cuda."
    )


def codec_rate(record: Mapping[str, Any], numel: int) -> tuple[str, Options, Rate]:
    """The rate of a codec that was timed on a tensor of ``numel`` elements."""
    encode, decode, tensor = (1e-3 * median(record.get(f"{call}_ms", [0])) for call in ("encode", "decode", "tensor"))
    return record["method"], record["options"], Rate(encode / numel, decode / numel, tensor)


def reduction_rate(row: Mapping[str, Any]) -> tuple[str, Options, Rate]:
    """The rate of a reduction in both phases of an exchange: it encodes and decodes every element twice."""
    label = row["name"].removesuffix(ALONE)
    method, options = SHORT.get(label, (label, {}))
    element = 1e-3 * row["kernels_ms"] / NUMEL_62M / 4
    return method, options, Rate(element, element, 1e-3 * row["host_ms"] / TENSORS_62M)
