"""Means over steps that communicate unlike each other, such as local updates, of which one in H sends anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def weights(measured: Sequence[str], counted: Sequence[str]) -> list[float]:
    """Weights of measured steps, so that each kind has the share that it has of all steps that count; the sum is 1.

    Args:
        measured: The kind of each measured step, at least one.
        counted: The kinds of the steps that count, the measured ones among them; a kind that was not measured is left
            out.
    """
    number, share = Counter(measured), Counter(counted)
    each = [share[kind] / number[kind] for kind in measured]
    return [weight / sum(each) for weight in each]
