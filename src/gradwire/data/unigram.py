"""The yardstick: a unigram model, which knows how frequent each token is and nothing else."""

from __future__ import annotations

import math

import numpy as np
import torch


def target_counts(shard: dict[str, torch.Tensor], vocab_size: int, pad_id: int) -> np.ndarray:
    """How often each token is a target in a shard (every token of a sample but its first): int64 ``[vocab_size]``."""
    tokens, lengths = shard["input_ids"].numpy()[:, 1:], shard["lengths"].numpy()
    counts = np.bincount(tokens.ravel(), minlength=vocab_size)
    counts[pad_id] -= tokens.size - (lengths - 1).sum()  # all that stands behind a sample's end
    return counts


def loss(train: np.ndarray, val: np.ndarray) -> float:
    """Mean negative log-likelihood (nats per token) of the validation targets under the training frequencies.

    Add-one smoothing over the vocabulary: p(token) = (count + 1) / (total + vocabulary).

    Args:
        train: Counts of the training targets, ``[vocab_size]``.
        val: Counts of the validation targets, ``[vocab_size]``.
    """
    log_p = np.log(train + 1.0) - math.log(train.sum() + len(train))
    return float(-(val @ log_p) / val.sum())
