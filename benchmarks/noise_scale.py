"""Batch noise scale of saved models: the batch up to which more samples per step save about as many steps.

    python benchmarks/noise_scale.py SHARDS FINAL_MODEL ...

tr(Σ)/|G|² of the gradients of single training samples, both estimated without bias from 512 of them, equally far apart
(McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, sections 2.2 and A.1), for the model before
training and for each that is given. A sample's loss is the mean over its tokens.
"""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path

import torch
from torch import nn

from gradwire.lm.data.batches import eval_batches
from gradwire.lm.data.shards import Shards
from gradwire.lm.models import causal

SAMPLES = 512


def noise_scale(model: nn.Module, shards: Path) -> float:
    """The batch noise scale, in samples."""
    parameters = list(model.eval().parameters())
    total, squares = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64), 0.0
    split = Shards(shards, "train")
    for batch in islice(eval_batches(split, 1, 0, 1), 0, SAMPLES * (len(split) // SAMPLES), len(split) // SAMPLES):
        loss = model(input_ids=batch.input_ids, labels=batch.labels, use_cache=False).loss
        gradient = torch.cat([part.flatten() for part in torch.autograd.grad(loss, parameters)]).double()
        total += gradient
        squares += float(gradient @ gradient)
    of_one, of_all = squares / SAMPLES, float(total @ total) / SAMPLES**2  # mean |g|², |mean g|²
    signal = (SAMPLES * of_all - of_one) / (SAMPLES - 1)
    return (of_one - of_all) * SAMPLES / (SAMPLES - 1) / signal


def main(shards: Path, folders: list[Path]) -> None:
    """Print a line for each model."""
    models = {folder: causal.load(folder) for folder in folders}
    first = models[folders[0]].config
    untrained = causal.build("tiny", first.vocab_size, first.n_positions, seed=0)
    for name, model in {"before training": untrained, **models}.items():
        print(f"{name}: {noise_scale(model, shards):.0f} samples")


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(folder) for folder in sys.argv[2:]])
