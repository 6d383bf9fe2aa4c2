"""Compile every CPU kernel into numba's cache: ``python tests/helpers/compile_kernels.py``."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor

from samples import BUILDS, generator, normal

from gradwire.comm.compressors import build


def compile_method(name: str) -> None:
    """Encode and decode by every build of a method."""
    for built, options in BUILDS:
        if built == name:
            compressor = build(name, **options)
            compressor.decode(compressor.encode(normal((33, 40)), generator=generator()), (33, 40))


if __name__ == "__main__":
    with ProcessPoolExecutor(2) as pool:
        list(pool.map(compile_method, dict.fromkeys(name for name, _ in BUILDS)))
