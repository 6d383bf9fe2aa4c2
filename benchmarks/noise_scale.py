"""Batch noise scale of saved models: the batch up to which more samples per step save about as many steps.

    python benchmarks/noise_scale.py SHARDS FINAL_MODEL ...

tr(Σ)/|G|² of the gradients of single training samples, both estimated without bias from 512 of them, equally far apart
(McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, sections 2.2 and A.1), for `tiny` before
training and for each model that is given. A sample's loss is the mean over its tokens.
"""

from __future__ import annotations

import argparse
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


def main() -> None:
    """Print a line for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", type=Path)
    parser.add_argument("models", type=Path, nargs="+", metavar="FINAL_MODEL")
    args = parser.parse_args()
    models = {folder: causal.load(folder) for folder in args.models}
    first = models[args.models[0]].config
    untrained = causal.build("tiny", first.vocab_size, first.n_positions, seed=0)
    for name, model in {"tiny before training": untrained, **models}.items():
        print(f"{name}: {noise_scale(model, args.shards):.0f} samples")


if __name__ == "__main__":
    main()
