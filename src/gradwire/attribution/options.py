"""Options of gradient rows that commands, the configuration and a store's provenance share. Free of heavy imports."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, model_validator

from gradwire.base.flags import COUNT, NOT_NEGATIVE
from gradwire.base.rank_env import Device
from gradwire.base.strict import Strict
from gradwire.lm.data import CHAT_FORMAT, LENGTH, SKIP_INVALID, ChatFormat, Split

if TYPE_CHECKING:
    from gradwire.lm.data.shards import Shards

SampleLoss = Literal["mean", "sum"]
GradType = Literal["sgd", "adam", "sign"]  # of an experiment
RowGradient = Literal["sgd", "adam", "sign", "ekfac"]
AdamVariant = Literal["torch", "less"]
Projection = Literal["rademacher", "sjlt", "factored", "none"]
RowType = Literal["float32", "float16", "int8", "int4", "onebit"]
RowUnit = Literal["sample", "token", "module"]
GradMethod = Literal["auto", "loop", "vmap", "hooks"]
RowStrategy = Literal["ddp", "fsdp2"]
Metric = Literal["cosine", "dot"]
Over = Literal["mean", "max"]
Count = Annotated[int, COUNT]
DAMPING = 0.1  # of a curvature, in units of its mean
PROJECTION: Projection = "sjlt"
PROJECTION_OF_MODULES: Projection = "rademacher"  # not all projections have rows of modules: `projections.OF_PARTS`


def number_of(text: str, total: int) -> int:
    """Return a number that is given as such, or as a share of ``total`` such as ``5%``, of which at least 1.

    Raises:
        ValueError: If it is neither.
    """
    match = re.fullmatch(r"([0-9]+)|([0-9]*\.?[0-9]+)%", text)
    value = float(match[1] or match[2]) if match else 0.0
    if match is None or not value or (match[2] and value > 100):
        raise ValueError(f"--top_k: {text!r} is neither a number, such as 100, nor a share, such as 5%")
    return max(1, round(total * value / 100)) if match[2] else int(value)


class LossOptions(Strict):
    """The loss whose gradient is taken."""

    loss: SampleLoss = Field("mean", description="reduction of a sample's loss over its targets")


class ModuleOptions(Strict):
    """The parameters that the gradient is of."""

    modules: tuple[str, ...] = Field(
        (),
        description="only the parameters of these modules: names, or patterns such as '*.mlp.*' (default: all modules)",
    )


# Why: docs/decisions.md, "A row's options are one model".
class RowOptions(LossOptions):
    """Options of rows that `grads collect`, the experiment's ``gradients:`` and the provenance of a store share."""

    grad_type: RowGradient = Field(
        "sgd",
        description="sgd: the gradient; adam: the update Adam would make with the saved moments; sign: the gradient's "
        "signs; ekfac: the gradient under the inverse curvature of `grads factors`, of which a projection loses much "
        "(`grads score` takes whole gradients)",
    )
    adam_variant: AdamVariant = Field(
        "torch",
        description="torch: as torch.optim.Adam; less: as LESS, betas 0.9 and 0.999, no bias correction, eps 1e-8 in "
        "the root",
    )
    projection: Projection | None = Field(
        None,
        description="sjlt: fast; rademacher: dense and slow; factored: fastest, higher variance; none: "
        f"the full gradient, --dim must equal its size (default: {PROJECTION}; with --rows module, "
        f"{PROJECTION_OF_MODULES})",
    )
    store: RowType = Field(
        "float32",
        description="row type of the files; all but float32 have a scale per row (onebit: the signs, 31 times smaller)",
    )
    method: GradMethod = Field(
        "auto",
        description="loop: one backward pass per sample; vmap: torch.func; hooks: per layer; auto: hooks, else vmap",
    )
    save_interval: Count = Field(64, description="samples (or tokens) per file")


class PrecisionOptions(Strict):
    """The type that the model computes in."""

    bf16: bool = Field(
        False, description="run the model in bfloat16, and sum its gradients in float32 (default: float32 throughout)"
    )


class PartOptions(Strict):
    """Files that stay once their rows are merged."""

    discard_parts: bool = Field(
        False,
        description="delete files whose rows are merged: grads-<N>, ids-<N> and meta-<N> of each rank, then its "
        "all_orig.pt (default: all stay, which takes three times the disk of the rows)",
    )


class PlaceOptions(Strict):
    """Where the model of a store is now, and the device that it is loaded to."""

    model_dir: Path | None = Field(None, description="current folder of the model (default: as collected)")
    optimizer_dir: Path | None = Field(None, description="current folder of Adam's moments (default: as collected)")
    lora_dir: Path | None = Field(None, description="current folder of the LoRA adapter (default: as collected)")
    device: Device = Field("auto", description="auto: a GPU if there is one")


class CurvatureOptions(Strict):
    """Flags of curvature."""

    curvature: Literal["none", "fisher"] = Field(
        "none",
        description="fisher: products and cosines under the inverse second moment of the training rows (as TRAK)",
    )
    damping: Annotated[float, NOT_NEGATIVE] | None = Field(
        None, description=f"added to that moment, in units of its mean diagonal (default: {DAMPING})"
    )

    @model_validator(mode="after")
    def _check_damping(self) -> Self:
        if self.curvature == "none" and self.damping is not None:
            raise ValueError(f"--damping {self.damping:g} is given without a curvature: add --curvature fisher")
        return self

    @property
    def chosen_damping(self) -> float | None:
        """The damping; None without curvature."""
        if self.curvature == "none":
            return None
        return DAMPING if self.damping is None else self.damping


class SampleOptions(Strict):
    """Samples that a saved model reads."""

    model_dir: Path = Field(description="a saved model, such as a run's final_model/")
    data_path: Path = Field(description="a shards folder, or a corpus file")
    split: Split | None = Field(None, description="split of a shards folder (default: train); not for a corpus file")
    max_samples: Count | None = Field(None, description="use only the first N samples (default: all)")
    max_length: Annotated[int, LENGTH] | None = Field(
        None, description="tokens per sample of a corpus file (default: the model's)"
    )
    chat_format: ChatFormat | None = Field(None, description=CHAT_FORMAT)
    skip_invalid: bool = Field(False, description=SKIP_INVALID)
    cache_dir: Path | None = Field(None, description="folder for a corpus file's shards (default: the user cache)")

    def samples(self, rank: int = 0) -> Shards:
        """Open the samples; rank 0 tokenizes a corpus file, the others wait for it.

        Raises:
            BadInput: If the model or the data are unusable, or do not match.
            RunFault: If rank 0 makes no progress.
        """
        from gradwire.lm.models.saved import samples_of

        return samples_of(self, rank)

    def checked_samples(self) -> Shards:
        """Open the samples, and compare the shards with their digests; errors as for `samples`."""
        from gradwire.lm.data.shards import check

        shards = self.samples()
        check(shards.folder.parent)
        return shards

    def count(self, available: int) -> int:
        """Return how many of the samples are used."""
        return available if self.max_samples is None else min(self.max_samples, available)
