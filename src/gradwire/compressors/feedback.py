"""Error feedback: what a compressor leaves out of one step is added to the gradient of the next.

Seide et al., "1-Bit Stochastic Gradient Descent" (Interspeech 2014); the name and the theory are Karimireddy et al.'s,
"Error Feedback Fixes SignSGD and other Gradient Compression Schemes" (ICML 2019). Momentum correction, momentum factor
masking and local gradient clipping are Lin et al.'s, "Deep Gradient Compression" (ICLR 2018).

With residual e, gradient g and compressor C, a step is ``p = e + g; send C(p); e = p - C(p)``. So what was sent
telescopes: sum(sent) = sum(g) + e_0 - e_T, and where the residual is stored in fewer bits, less what storing lost.
With clipping, g is the clipped gradient; with momentum, it is the velocity ``u = momentum * u + g``, and the optimizer
then has no momentum of its own.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from gradwire.compressors.base import Shape
from gradwire.compressors.registry import build


class FeedbackOptions(BaseModel):
    """How an error is kept; the defaults are plain error feedback."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    residual_dtype: Literal["float32", "bf16", "int8"] = Field(
        "float32", description="how the residual is stored; bf16 and int8 (blocks of 256) round it to nearest"
    )
    momentum: float = Field(
        0.0, ge=0, lt=1, description="momentum correction: accumulate the velocity, not the gradient"
    )
    masking: bool = Field(
        True, description="momentum factor masking: forget the velocity of the elements that were sent (are not 0)"
    )
    clip_norm: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="local clipping: W ranks clip to this L2 norm times W^-1/2"
    )


class Feedback:
    """The residual of one parameter in one phase of a reduction.

    A step is `compensate`, then `update` with what was sent. Between them the residual is still the old one. Masking is
    meant for sparsifiers; a quantizer sends every element, and masks all momentum.

    Args:
        options: See `FeedbackOptions`.
        shape: The parameter's.
        device: Where its gradients lie.
        world: Number of ranks, for clipping.
    """

    def __init__(
        self, options: FeedbackOptions, shape: Shape, *, device: torch.device | str = "cpu", world: int = 1
    ) -> None:
        self.options = options
        self.shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self._store = None if options.residual_dtype == "float32" else build(options.residual_dtype)
        if self._store is None:
            self._stored = torch.zeros(self.shape, device=device)
        else:
            self._stored = torch.zeros(self._store.wire_bytes(self.shape), dtype=torch.uint8, device=device)
        self._velocity = torch.zeros(self.shape, device=device) if options.momentum else None
        self._corrected: Tensor | None = None
        self._largest_norm = None if options.clip_norm is None else options.clip_norm / math.sqrt(world)

    @property
    def residual(self) -> Tensor:
        """The error so far: float32 of ``shape``, a copy."""
        return self._stored.clone() if self._store is None else self._unstored(self._stored)

    @property
    def nbytes(self) -> int:
        """Bytes kept between steps: the residual, and the velocity where there is momentum."""
        return self._stored.nbytes + (0 if self._velocity is None else self._velocity.nbytes)

    def compensate(self, gradient: Tensor, norm: Tensor | None = None) -> Tensor:
        """The gradient (or velocity) with the residual added: what is to be compressed.

        It is the only tensor of that size that this allocates for a float32 gradient; nothing synchronises.

        Args:
            gradient: Float of ``shape``; neither changed nor kept.
            norm: What clipping compares, a tensor [] on the same device: the L2 norm of all parameters' gradients, as
                in the paper; without it, of this one.

        Returns:
            float32 of ``shape``; not to be changed before `update`.

        Raises:
            ValueError: If the gradient has another shape.
            RuntimeError: If the last compensated gradient was not followed by `update` or `drop`.
        """
        if self._corrected is not None:
            raise RuntimeError("compensate was called twice without update: the first gradient would be lost")
        self._check("gradient", gradient)
        gradient = gradient.detach()
        corrected = self.residual
        if self._velocity is None:
            self._accumulate(corrected, gradient, norm)
        else:
            self._accumulate(self._velocity.mul_(self.options.momentum), gradient, norm)
            corrected += self._velocity
        self._corrected = corrected
        return corrected

    def update(self, sent: Tensor, lost: Tensor | None = None) -> None:
        """Keep what of the compensated gradient was not sent.

        Args:
            sent: What the receivers take for it: float32 of ``shape``, neither changed nor kept.
            lost: float32 of ``shape``; what storing the residual loses is added to it (nothing, for float32).

        Raises:
            ValueError: If ``sent`` has another shape.
            RuntimeError: Without a compensated gradient.
        """
        if self._corrected is None:
            raise RuntimeError("update has nothing to compare with what was sent: call compensate first")
        self._check("sent tensor", sent)
        corrected, self._corrected = self._corrected, None
        if self._velocity is not None and self.options.masking:
            self._velocity.masked_fill_(sent != 0, 0.0)
        if self._store is None:
            torch.sub(corrected, sent, out=self._stored)
            return
        error = corrected - sent  # corrected stays as it is: the wire that travels may share its memory
        self._stored = self._store.coded(error, None)[0]
        if lost is not None:
            lost += error.sub_(self._unstored(self._stored))

    def drop(self, where: Tensor | None = None) -> None:
        """Forget residual, velocity and the compensated gradient: all may hold what is not finite.

        Args:
            where: Only if this is not 0: bool or uint8 [1] on the same device; nothing synchronises.
        """
        self._corrected = None
        for kept in self.state_dict().values():
            if where is None:
                kept.zero_()
            else:
                kept.masked_fill_(where.to(torch.bool), 0)

    def state_dict(self) -> dict[str, Tensor]:
        """The tensors kept between steps, not copies; to be taken between steps."""
        state = {f"residual.{self.options.residual_dtype}": self._stored}
        return state if self._velocity is None else {**state, "velocity": self._velocity}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Copy what `state_dict` gave, from any device.

        Raises:
            ValueError: If it is the state of other options or of another shape.
        """
        own = self.state_dict()
        given, needed = ({key: tuple(kept.shape) for key, kept in tensors.items()} for tensors in (state, own))
        if given != needed:
            raise ValueError(f"this error feedback keeps {needed}, and was given {given}")
        self._corrected = None
        for key, kept in own.items():
            kept.copy_(state[key])

    def _accumulate(self, into: Tensor, gradient: Tensor, norm: Tensor | None) -> None:
        """Add the gradient, clipped if that is asked for."""
        if self._largest_norm is None:
            into += gradient
        else:
            if norm is None:
                norm = torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32))
            into.addcmul_(gradient, (self._largest_norm / norm).clamp_max(1.0))

    def _unstored(self, stored: Tensor) -> Tensor:
        """float32 of ``shape`` from the bytes of a compressed residual."""
        assert self._store is not None
        return self._store.decoded(stored, self.shape).view(self.shape)

    def _check(self, what: str, tensor: Tensor) -> None:
        """No other shape: it could be broadcast."""
        if tuple(tensor.shape) != self.shape:
            raise ValueError(f"the {what} has shape {tuple(tensor.shape)}, the residual {self.shape}")
