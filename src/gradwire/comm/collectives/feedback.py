"""Error feedback: what a compressor leaves out of one step is added to the gradient of the next.

Seide et al., "1-Bit Stochastic Gradient Descent" (Interspeech 2014); the name and the theory are Karimireddy et al.'s,
"Error Feedback Fixes SignSGD and other Gradient Compression Schemes" (ICML 2019).

With residual e, gradient g and compressor C, a step is ``p = e + g; send C(p); e = p - C(p)``. So what was sent
telescopes: sum(sent) = sum(g) + e_0 - e_T, and where the residual is stored in fewer bits, less what storing lost.

With ``average`` a the residual is a moving average of errors, e = a e + (1 - a) (p - C(p)): Xie et al., "LoCo:
Low-Bit Communication Adaptor for Large-scale Model Training" (arXiv:2407.04480, 2024), with a = 0.8, 8-bit residuals
and a reset every 1,024 steps. It does not telescope: a part of every error is never sent.
"""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from gradwire.comm.compressors.base import Shape
from gradwire.comm.compressors.registry import build
from gradwire.comm.reduction import ResidualDtype

RESIDUAL_DTYPES = get_args(ResidualDtype)


class Feedback:
    """The residual of one parameter in one phase of a reduction.

    A step is `open`, then `Compressor.encode_many` with the residuals of all parameters in one buffer, then `close`.

    Args:
        dtype: How the residual is stored: one of `RESIDUAL_DTYPES`. bf16 and int8 (blocks of 256) round it to nearest.
        shape: The parameter's.
        decay: What the residual is multiplied by before it is added; 1 forgets nothing.
        average: Weight of the old residual in the new one; 0 keeps the last error only.
        device: The device of its gradients.
    """

    def __init__(
        self,
        dtype: str,
        shape: Shape,
        *,
        decay: float = 1.0,
        average: float = 0.0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.dtype = dtype
        self.decay = decay
        self.average = average
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self._store = None if dtype == "float32" else build(dtype)
        if self._store is None:
            self._stored = torch.zeros(self.shape, dtype=torch.float32, device=device)
        else:
            self._stored = torch.zeros(self._store.wire_bytes(self.shape), dtype=torch.uint8, device=device)

    @property
    def residual(self) -> Tensor:
        """Error so far: float32 of ``shape``, a copy."""
        if self._store is None:
            return self._stored.clone()
        return self._store.decoded(self._stored, self.shape).view(self.shape)

    @property
    def in_place(self) -> bool:
        """Whether the residual is kept as the float32 error itself, so that `open` may hand it out."""
        return self._store is None and not self.average

    @property
    def device(self) -> torch.device:
        """The device of the residual."""
        return self._stored.device

    @property
    def nbytes(self) -> int:
        """Bytes kept between steps."""
        return self._stored.nbytes

    def open(self, place: Tensor) -> None:
        """Write what is added to the next gradient to ``place``, float32 of ``shape``; `in_place` it is kept there."""
        if not self.in_place:
            place.copy_(self.residual)
        elif self._stored.data_ptr() != place.data_ptr():
            self._stored = place.copy_(self._stored)
        if self.decay != 1:
            place.mul_(self.decay)

    def close(self, error: Tensor, bad: Tensor) -> None:
        """Keep the error of an encoding, which is where `open` put the residual and may change; nothing if ``bad``."""
        if self.in_place:
            return
        if self.average:
            error.mul_(1 - self.average).add_(self.residual.mul_(self.average))
        self._stored = self._stored.copy_(error) if self._store is None else self._store.coded(error, None)[0]
        self.drop(where=bad)  # an average still has the old residual

    def drop(self, where: Tensor | None = None) -> None:
        """Forget the residual, which may hold what is not finite.

        Args:
            where: Only if this is not 0: bool or uint8 [1] on the same device; nothing synchronises.
        """
        if where is None:
            self._stored.zero_()
        else:
            self._stored.masked_fill_(where.to(torch.bool), 0)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensor kept between steps, not a copy; to be taken between steps."""
        return {f"residual.{self.dtype}": self._stored}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copy what `state_dict` gave, from any device.

        Raises:
            ValueError: If it is the state of another type or of another shape.
        """
        own = self.state_dict()
        given, needed = ({key: tuple(kept.shape) for key, kept in tensors.items()} for tensors in (state, own))
        if given != needed:
            raise ValueError(f"this error feedback keeps {needed}, and was given {given}")
        for key, kept in own.items():
            kept.copy_(state[key])
