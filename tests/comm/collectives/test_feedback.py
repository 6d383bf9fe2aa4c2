"""Error feedback (codec.py) loses nothing: what is not sent now is sent later, and what storing loses is known."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from samples import METHODS, generator, normal

from gradwire.comm.collectives.codec import Feedback, Residual
from gradwire.comm.compressors import build
from gradwire.comm.compressors.base import Compressor, Quantizer
from gradwire.comm.compressors.sparse import Sparsifier
from gradwire.comm.reduction import ResidualDtype

ROUNDING = 2.0**-24  # of one float32 operation, relative to its result
RESIDUALS = get_args(ResidualDtype)


def feeds_back(compressor: Compressor) -> bool:
    """Scaled random-k multiplies the error at every step, as the literature warns."""
    return isinstance(compressor, (Quantizer, Sparsifier)) and not (
        compressor.name == "randomk" and compressor.unbiased
    )


CODECS = [(name, options, "float32") for name, options in METHODS if feeds_back(build(name, **options))]
CODECS += [
    (name, options, residual)
    for name, options in [("topk", {"density": 0.1}), ("onebit", {}), ("topk+int8", {}), ("topk+onebit", {})]
    for residual in RESIDUALS
]


class Fed:
    """Error feedback of one gradient after the other, with another shard before it."""

    def __init__(self, dtype, shape, device="cpu"):
        self.shape = (shape,) if isinstance(shape, int) else shape
        self.place = slice(3, 3 + math.prod(self.shape))
        self.feedback = Feedback(dtype, [slice(0, 2), self.place], device=device)
        self.kept = Residual(self.feedback, 1)

    @property
    def residual(self) -> torch.Tensor:
        return self.kept.residual.view(self.shape)

    def compensate(self, gradient: torch.Tensor) -> torch.Tensor:
        self.opened = self.feedback.open()
        self.corrected = self.opened[self.place].view(self.shape) + gradient
        return self.corrected

    def update(self, sent: torch.Tensor) -> None:
        self.opened[self.place] = (self.corrected - sent).view(-1)
        self.feedback.close(self.opened, torch.zeros(2, dtype=torch.uint8, device=self.opened.device))
        assert not self.feedback.residual(0).any()


def feedback(shape, dtype="float32") -> Fed:
    return Fed(dtype, shape)


def start(kept: Fed, seed: int = 77) -> torch.Tensor:
    """Give ``kept`` a first residual that is not 0: what nothing was sent of."""
    kept.compensate(normal(kept.shape, seed))
    kept.update(torch.zeros(kept.shape))
    return kept.residual.double()


@pytest.mark.parametrize(("name", "options", "residual"), CODECS, ids=str)
def test_it_telescopes(name, options, residual):
    """sum(sent) + e_T + sum(lost) = sum(g) + e_0, element by element, up to the float32 operations' own rounding."""
    compressor, shape, g = build(name, **options), 37 if residual == "bf16" else (7, 43), generator(4)
    kept = feedback(shape, residual)
    balance, allowed = start(kept), torch.full(kept.shape, 1e-40, dtype=torch.float64)
    for step in range(50):
        gradient = normal(shape, seed=step) * (1 + step % 3)
        corrected = kept.compensate(gradient)
        sent = compressor.decode(compressor.encode(corrected, generator=g), shape)
        allowed += ROUNDING * (corrected.double().abs() + (corrected.double() - sent.double()).abs())
        balance += gradient.double() - sent.double()
        kept.update(sent)
        lost = (corrected - sent) - kept.residual
        allowed += ROUNDING * lost.double().abs()
        balance -= lost.double()
    assert (kept.residual.double() - balance).abs().le(allowed).all()
    assert residual != "float32" or not lost.any()


@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.parametrize("shape", [0, 1, 255, 257, (3, 5), (2, 3, 4)], ids=str)
def test_a_step_is_its_definition(shape, residual):
    kept = feedback(shape, residual)
    before = start(kept)
    gradient, sent = normal(shape, 1), normal(shape, 2)
    corrected = kept.compensate(gradient)
    kept.update(sent)
    assert corrected.dtype == torch.float32
    assert torch.allclose(corrected.double(), before + gradient.double(), rtol=1e-7, atol=1e-7)
    error = corrected - sent
    if residual == "float32":
        assert torch.equal(kept.residual, error)
    elif residual == "bf16":
        assert torch.equal(kept.residual, error.to(torch.bfloat16).float())
    elif error.numel():
        scale = error.abs().max() / 127
        assert ((error - kept.residual).abs() <= scale * 0.5001).all()


@pytest.mark.parametrize(("residual", "bytes_"), [("float32", 4000), ("bf16", 2000), ("int8", 1016)])
def test_its_memory_is_stated(residual, bytes_):
    assert feedback(1000, residual).kept.nbytes == bytes_


@pytest.mark.parametrize(
    ("name", "options"),
    [("topk", {"density": 0.1}), ("topk", {"density": 0.5}), ("signsgd", {}), ("onebit", {})],
    ids=str,
)
def test_the_error_stays_bounded_for_a_contraction(name, options):
    """||e||^2 <= 4 (1 - delta) / delta^2 max ||g||^2 (Karimireddy et al., 2019), with the delta that was reached."""
    compressor, size = build(name, **options), 100
    kept, delta, largest, worst = feedback(size), 1.0, 0.0, 0.0
    sign = torch.where(torch.arange(size) % 2 == 0, 1.0, -1.0)
    for step in range(200):
        gradient = sign if step < 100 else normal(size, seed=step)  # equal magnitudes are the worst for top-k
        corrected = kept.compensate(gradient)
        sent = compressor.decode(compressor.encode(corrected), size)
        kept.update(sent)
        left = (corrected - sent).double().square().sum() / corrected.double().square().sum()
        delta = min(delta, 1 - left.item())
        largest = max(largest, gradient.double().square().sum().item())
        worst = max(worst, kept.residual.double().square().sum().item())
        assert worst <= 4 * (1 - delta) / delta**2 * largest + 1e-9
    assert name != "topk" or delta >= options["density"] - 1e-6
    assert worst > 0.1 * largest, "the bound was never approached"


def test_what_is_not_finite_is_dropped_and_the_next_step_is_a_first_one():
    for residual in RESIDUALS:
        kept = feedback(300, residual)
        start(kept)
        kept.update(kept.compensate(torch.full((300,), math.nan)) * 0.5)
        assert kept.residual.isnan().all()
        kept.kept.drop()
        assert not kept.residual.any()
        kept.compensate(torch.full((300,), math.inf))
        kept.feedback.drop()  # before the error is kept, too
        assert torch.equal(kept.compensate(normal(300)), normal(300))


@pytest.mark.parametrize("residual", RESIDUALS)
def test_a_loaded_state_continues_the_run(residual):
    def step(kept: Fed, seed: int) -> torch.Tensor:
        corrected = kept.compensate(normal((7, 43), seed))
        sent = corrected * (corrected.abs() > 1)
        kept.update(sent)
        return sent

    kept, fresh = (feedback((7, 43), residual) for _ in range(2))
    for seed in range(5):
        step(kept, seed)
    fresh.kept.load_state_dict({key: value.clone() for key, value in kept.kept.state_dict().items()})
    for seed in range(5, 8):
        assert torch.equal(step(kept, seed), step(fresh, seed))


def test_a_state_of_other_options_or_shapes_is_refused():
    state = feedback(300, "bf16").kept.state_dict()
    for other in (feedback(300), feedback(299, "bf16")):
        with pytest.raises(ValueError, match=r"keeps .*residual.* was given .*bf16"):
            other.kept.load_state_dict(state)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("residual", RESIDUALS)
def test_it_lives_where_the_gradients_are(residual):
    kept = Fed(residual, 300, device="cuda")
    corrected = kept.compensate(normal(300).cuda())
    kept.update(corrected * 0.5)
    assert corrected.is_cuda and kept.residual.is_cuda
