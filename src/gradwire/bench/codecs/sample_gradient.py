"""A real gradient to measure errors on, made from torch alone: of a small byte-level language model being trained.

The text is source code of Python's standard library, which every installation carries; so the gradient is the same for
the same Python, torch and seed, and nearly the same elsewhere.
"""

from __future__ import annotations

import inspect
from importlib import import_module

import torch
from torch import Tensor
from torch.nn import functional

MODULES = ("argparse", "inspect", "tarfile", "typing")
CONTEXT, WIDTH, HIDDEN = 8, 64, 640
SHAPES = {
    "embedding": (256, WIDTH),
    "hidden.0": (HIDDEN, CONTEXT * WIDTH),
    "hidden.1": (HIDDEN, HIDDEN),
    "output": (256, HIDDEN),
}
BATCH = 256


def sample_gradient(seed: int = 0, steps: int = 40) -> dict[str, Tensor]:
    """The gradient of the step after ``steps`` steps of Adam.

    Args:
        seed: Of the initial weights and the batches. The global random state is not touched.
        steps: Steps of training before it; 40 take about two seconds of one core.

    Returns:
        float32 matrices by the parameters' names, about 0.9 million elements.
    """
    generator = torch.Generator().manual_seed(seed)
    text = corpus()
    weights = {
        name: (torch.randn(shape, generator=generator) / shape[1] ** 0.5).requires_grad_()
        for name, shape in SHAPES.items()
    }
    optimizer = torch.optim.Adam(weights.values(), lr=1e-3)
    with torch.enable_grad():
        for _ in range(steps + 1):
            optimizer.step()  # does nothing before the first gradient
            optimizer.zero_grad()
            starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=generator)
            loss(weights, text[starts + torch.arange(CONTEXT + 1)]).backward()
    return {name: weight.grad for name, weight in weights.items() if weight.grad is not None}


def corpus() -> Tensor:
    """The text's bytes: int64 [n]."""
    source = "".join(inspect.getsource(import_module(module)) for module in MODULES)
    return torch.frombuffer(bytearray(source.encode()), dtype=torch.uint8).to(torch.int64)


def loss(weights: dict[str, Tensor], windows: Tensor) -> Tensor:
    """Mean cross-entropy of each window's last byte, given those before it.

    Args:
        weights: The parameters, of `SHAPES`.
        windows: int64 [batch, CONTEXT + 1].
    """
    state = functional.embedding(windows[:, :-1], weights["embedding"]).flatten(1)
    for layer in ("hidden.0", "hidden.1"):
        state = functional.gelu(functional.linear(state, weights[layer]))
    return functional.cross_entropy(functional.linear(state, weights["output"]), windows[:, -1])
