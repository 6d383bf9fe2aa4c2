"""Tensor ⇄ bytes: pure local maths. ``methods/`` has one file per method; the rest is machinery.

Importing this room does not import torch; building a compressor does.
"""

from gradwire.comm.compressors.registry import as_compressor, available, build, method_class, option_schema, options

__all__ = ["as_compressor", "available", "build", "method_class", "option_schema", "options"]
