"""Tensor ⇄ bytes: pure local maths. ``methods/`` has one file per method; the machinery is beside it.

Importing this room does not import torch; building a compressor does.
"""

from gradwire.compressors.registry import available, build, method_class, option_schema, options

__all__ = ["available", "build", "method_class", "option_schema", "options"]
