"""Encodings of parameters for an all-gather, by the name in ``param_compress``."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from gradwire.comm.compressors.reduction import Exempt

ParamCompress = Literal["none", "bf16", "int8", "fp8", "int4", "int4-diff"]

MATRICES = Exempt(max_ndim=1)  # norms and biases travel as float32: they are small, and codes are too coarse for them


class ParameterEncoding(NamedTuple):
    """An encoding of parameters.

    Attributes:
        method: The compressor.
        options: Its options.
        exempt: Parameters that travel as float32.
        differences: Whether differences from a replica travel, instead of the parameters themselves.
    """

    method: str
    options: Mapping[str, Any] = MappingProxyType({})
    exempt: Exempt = MATRICES
    differences: bool = False


FOUR_BITS = MappingProxyType({"num_bits": 4, "block": 256})

ENCODINGS = {
    "bf16": ParameterEncoding("bf16", exempt=Exempt()),
    "int8": ParameterEncoding("int8"),
    "fp8": ParameterEncoding("fp8"),
    "int4": ParameterEncoding("int8", FOUR_BITS),
    # Whatever a code misses is part of the next difference, so vectors need no exemption.
    "int4-diff": ParameterEncoding("int8", FOUR_BITS, Exempt(), differences=True),
}
