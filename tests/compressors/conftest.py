"""Without a GPU, Triton's interpreter runs the CUDA forms; it has to be chosen before triton is imported."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
