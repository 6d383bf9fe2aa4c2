"""Unigram model: the baseline that knows only the frequency of each token."""

from __future__ import annotations

import math

import numpy as np
import torch


def target_counts(shard: dict[str, torch.Tensor], vocab_size: int, pad_id: int) -> np.ndarray:
    """Count each token as a target of a shard: int64 ``[vocab_size]``.

    Targets are those of ``is_target``, or without it every token of a sample but its first.
    """
    if "is_target" in shard:
        chosen = shard["input_ids"][:, 1:][shard["is_target"][:, 1:]]
        return np.bincount(chosen.numpy(), minlength=vocab_size)
    tokens, lengths = shard["input_ids"].numpy()[:, 1:], shard["lengths"].numpy()
    counts = np.bincount(tokens.ravel(), minlength=vocab_size)
    counts[pad_id] -= tokens.size - (lengths - 1).sum()  # the padding after each sample
    return counts


def loss(train: np.ndarray, val: np.ndarray) -> float:
    """Return the mean negative log-likelihood (nats per token) of the validation targets.

    The model is the training frequencies with add-one smoothing over the vocabulary:
    p(token) = (count + 1) / (total + vocabulary).

    Args:
        train: Counts of the training targets, ``[vocab_size]``.
        val: Counts of the validation targets, ``[vocab_size]``.
    """
    log_p = np.log(train + 1.0) - math.log(train.sum() + len(train))
    return float(-(val @ log_p) / val.sum())
