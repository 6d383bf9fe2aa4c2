"""Random-k: k elements at places drawn from a seed without replacement, so that no indices travel.

As in Stich et al., "Sparsified SGD with Memory" (NeurIPS 2018), and, scaled, in Wangni et al., "Gradient Sparsification
for Communication-Efficient Distributed Optimization" (NeurIPS 2018) with equal probabilities.

Wire: the seed in 8 bytes, then the values at the first k places of the seed's permutation, in its order; the receiver
multiplies by n / k if ``scaled``.

Rounds: all ranks derive the places from the run's seed, the step and the parameter's name, and sum the values there.

The permutation of 0..n-1 is keyed: any part of it costs what that part holds. It is a Feistel network over the next
power of two, of at least 2^6, whose two halves may differ by a bit; what falls outside 0..n-1 goes through it again
until it is inside ("cycle walking"), less than twice on average beyond n = 32. Compare Mitchell, Stokes, Frank and
Holmes, "Bandwidth-Optimal Random Shuffling for GPUs" (ACM TOPC 2022). Round r changes one half by a hash of the other
half and word r of the seed's stream (`gradwire.comm.compressors.philox`); the hash is the mixer of 32 bits
"16-21f0aaad-15-735a2d97-15" found by Wellons' hash prospector. In a network of random round functions one element's
image is uniform, and a pair's differs from a uniform pair's by 2^-3 to the power of the rounds at most, 2^-24 here.
"""

from __future__ import annotations

import hashlib

import torch
from pydantic import Field
from torch import Tensor

from gradwire.comm.compressors.base import Shape, as_numbers, numel
from gradwire.comm.compressors.philox import WORD, draw_seed, words
from gradwire.comm.compressors.rounds import Context, ReduceRequest, RoundCost, Rounds, State
from gradwire.comm.compressors.sparse import Sparsifier, share

SEED = 8  # bytes
ROUNDS = 8
LEAST_BITS = 6  # halves of 3 bits: with fewer, 8 rounds would not mix enough
MIX = ((16, 0x21F0AAAD), (15, 0x735A2D97))  # below 2^31, so that a product fits int64
LAST_SHIFT = 15


class RandomK(Sparsifier):
    """Sends ``k = max(1, round(density * n))`` elements of n, every set of k as likely as any other.

    Scaled it is unbiased, and the expected squared error is ``(n / k - 1) ||x||^2``; unscaled (for error feedback) the
    error is ``(1 - k / n) ||x||^2``. Both are exact.
    """

    name = "randomk"
    use = "Unbiased, and a seed replaces the indices; topk loses less at the same size."
    linear = True

    density: float = Field(default=0.01, gt=0, le=1, description="part of the elements that is sent")
    scaled: bool = Field(default=True, description="multiply by n / k, which makes it unbiased; off for error feedback")

    @property
    def unbiased(self) -> bool:
        """True if scaled."""
        return self.scaled

    def kept(self, shape: Shape) -> int:
        """k."""
        return share(self.density, numel(shape))

    def head_bytes(self, shape: Shape) -> int:
        """The seed."""
        return SEED

    def gain(self, shape: Shape) -> float:
        """n / k, or 1."""
        return numel(shape) / self.kept(shape) if self.scaled and numel(shape) else 1.0

    def pick(self, x: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Draw a seed and take the elements at its places."""
        seed = draw_seed(generator, x.device, self.name)
        return seed.view(torch.uint8), x.view(-1)[permuted(seed, x.numel(), self.kept(x.numel()))]

    def places(self, wire: Tensor, shape: Shape) -> tuple[Tensor, int]:
        """The places drawn from the seed."""
        return permuted(self.seed(wire), numel(shape), self.kept(shape)), SEED

    def seed(self, wire: Tensor) -> Tensor:
        """The seed at the start of ``wire``: int64 [1].

        Raises:
            ValueError: If the wire is too short.
        """
        if wire.numel() < SEED:
            raise ValueError(f"invalid payload: {wire.numel()} bytes cannot encode the {SEED}-byte seed of {self.name}")
        return as_numbers(wire[:SEED], torch.int64)

    def rounds(self, x: Tensor, state: State, context: Context) -> Rounds:
        """One sum of the values at places that all ranks know."""
        key = f"{context.seed}/{context.step}/{context.name}".encode()
        seed = torch.frombuffer(bytearray(hashlib.sha256(key).digest()[:SEED]), dtype=torch.uint8).to(x.device)
        places, _ = self.decoded_places(seed, context.shape)
        values = x.view(-1)[places]
        total = yield ReduceRequest("sum", values)
        mean, sent = (self.placed(vector, places, context.shape) for vector in (total / context.world, values))
        return mean.view(context.shape), sent.view(context.shape)

    def round_cost(self, shape: Shape, step: int | None = None) -> RoundCost:
        """Four bytes per sent element."""
        return RoundCost(summed=4 * self.kept(shape))


def halves(n: int) -> tuple[int, int]:
    """Bits of the upper and the lower half of a number below the power of two that holds n."""
    bits = max(LEAST_BITS, (n - 1).bit_length())
    return bits // 2, bits - bits // 2


def permuted(seed: Tensor, n: int, k: int) -> Tensor:
    """The images of 0..k-1, which are k distinct numbers below n, each k-subset as likely as any other.

    Args:
        seed: int64 [1].
        n: Size of the permuted range, below 2^63.
        k: At most n.

    Returns:
        int64 [k] on the seed's device.
    """
    keys = words(seed, ROUNDS)
    images = crossed(torch.arange(k, dtype=torch.int64, device=seed.device), keys, n)
    while (outside := (images >= n).nonzero().view(-1)).numel():
        images[outside] = crossed(images[outside], keys, n)
    return images


def crossed(numbers: Tensor, keys: Tensor, n: int) -> Tensor:
    """Once through the network."""
    high, low = halves(n)
    upper, lower = numbers >> low, numbers & ((1 << low) - 1)
    for r in range(0, ROUNDS, 2):
        upper = upper ^ mixed(lower ^ keys[r]) & ((1 << high) - 1)
        lower = lower ^ mixed(upper ^ keys[r + 1]) & ((1 << low) - 1)
    return upper << low | lower


def mixed(word: Tensor) -> Tensor:
    """A hash of 32 bits."""
    for shift, factor in MIX:
        word = (word ^ word >> shift) * factor & WORD
    return word ^ word >> LAST_SHIFT
