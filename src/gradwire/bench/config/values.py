"""Names and number types that the configuration and its flags share, and the training settings of all runs."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from gradwire.base.errors import BadInput
from gradwire.base.flags import COUNT, NATURAL, RANKS, SEED
from gradwire.base.strict import Matching, Strict
from gradwire.base.units import UNSHAPED, amount
from gradwire.comm.topology import BETWEEN, STRATEGIES, link_rate
from gradwire.lm.models import presets

SCHEMA_VERSION = 1  # of record.json and results.jsonl
BASELINE = "none"  # the label of the framework's own reduction in fp32

Precision = Literal["fp32", "bf16"]
NAME = Matching(
    r"[A-Za-z0-9][A-Za-z0-9._+-]*",
    "made of letters, digits and . _ + -, start with a letter or digit and have at most 100 characters",
)
Name = Annotated[str, Field(max_length=100), NAME]  # becomes a folder
RATE = r"\d+(\.\d+)?[kmgt]?bit"  # as tc spells it
LINK = Matching(rf"({UNSHAPED}|({BETWEEN})?{RATE})", "a rate such as 100mbit, or none, or between-100mbit for islands")
Count = Annotated[int, COUNT]
Natural = Annotated[int, NATURAL]
Seed = Annotated[int, SEED]
Ranks = Annotated[int, RANKS]


def _strategy(name: str) -> str:
    """Check a strategy's name."""
    STRATEGIES.check(name)
    return name


def _rate(link: str) -> str:
    """Check that `tc` accepts a link's rate."""
    link_rate(link)
    return link


def _known_model(model: str | dict[str, Any]) -> str | dict[str, Any]:
    """Check a model's name, or the names of its options."""
    options = presets.options(presets.text(model))
    if isinstance(model, dict) and options is not None:  # imports transformers, so only if necessary
        from gradwire.lm.models.architecture import check_options

        check_options(options)
    return model


Strategy = Annotated[str, AfterValidator(_strategy)]
Link = Annotated[str, LINK, AfterValidator(_rate)]
ModelOption = Annotated[str | dict[str, Any], AfterValidator(_known_model)]


class Training(Strict):
    """Training settings of all runs. Each field is also a flag of ``gradwire train``."""

    batch_size: Count = Field(8, description="samples per rank and micro-batch")
    global_batch_size: Count | None = Field(
        None, description="samples of all ranks per optimizer step; sets batch_size if given"
    )
    grad_accum_steps: Count = Field(1, description="micro-batches per optimizer step")
    steps: Count = Field(60, description="optimizer steps")
    warmup_steps: Natural = Field(
        3, description="first steps, excluded from step times; more until each kind of step was taken"
    )
    lr: float = Field(3e-3, gt=0, description="peak learning rate of AdamW")
    lr_warmup_steps: Natural = Field(6, description="steps of linear warm-up before the cosine decay")
    beta2: float = Field(0.95, gt=0, lt=1, description="decay rate of AdamW's second moments")
    weight_decay: float = Field(0.1, ge=0, description="AdamW's weight decay, on matrices only")
    clip_grad_norm: float = Field(1.0, gt=0, description="largest global gradient norm; larger ones are clipped")
    eval_every: Natural = Field(20, description="steps between evaluations; 0: only at the end")
    checkpoint_every: Natural = Field(0, description="steps between checkpoints; 0: only when stopped by a signal")
    keep_checkpoints: Count = Field(2, description="number of newest checkpoints to keep")
    keep_model_every: Natural = Field(
        0, description="steps between models kept in models/, for gradients along the training; 0: final_model/ alone"
    )
    evaluate: bool = Field(True, description="evaluate after the last step; turn off if only times matter")
    profile: bool = Field(True, description="profile some steps on every rank")
    profile_steps: Count = Field(3, description="steps to profile; more where each kind of step takes more")
    precision: Precision = Field("fp32", description="of the forward pass; bf16: autocast, with float32 weights")
    gradient_checkpointing: bool = Field(False, description="recompute activations in the backward pass")
    bucket_mb: float = Field(25.0, ge=0, description="MiB of a bucket of ddp and bucket; smaller if that makes four")
    compile: bool = Field(False, description="compile the model's blocks and the loss with torch.compile")
    dp_max_grad_norm: float | None = Field(
        None, gt=0, description="train privately (DP-SGD): largest norm of a sample's gradient; larger ones are clipped"
    )
    dp_noise_multiplier: float = Field(
        0.0, ge=0, description="standard deviation of the noise on the clipped sum, in units of dp_max_grad_norm"
    )
    dp_delta: float = Field(1e-5, gt=0, lt=1, description="delta of the privacy budget")
    dp_sampling: Literal["poisson", "shuffled"] = Field(
        "poisson", description="sampling of a private step; shuffled claims no amplification"
    )
    backend: Literal["auto", "nccl", "gloo"] = Field("auto", description="collectives; auto: nccl with a GPU per rank")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda with a GPU, else cpu")

    @model_validator(mode="after")
    def _some_steps_are_timed(self) -> Self:
        if self.warmup_steps + self.profiled_steps >= self.steps:
            raise ValueError(
                f"no step of {self.steps} is left to time after {self.warmup_steps} warm-up and "
                f"{self.profiled_steps} profiled ones; raise `steps`"
            )
        return self

    @model_validator(mode="after")
    def _private_training_is_not_compiled(self) -> Self:
        if self.compile and self.private:
            raise ValueError(
                "compile is set with dp_max_grad_norm: private training reads each layer's inputs and gradients, which "
                "compiled blocks do not show; leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _noise_goes_with_clipping(self) -> Self:
        if self.dp_noise_multiplier and self.dp_max_grad_norm is None:
            raise ValueError(
                f"dp_noise_multiplier is {self.dp_noise_multiplier:g} without dp_max_grad_norm: noise hides a sample "
                "only if its gradient is clipped; give dp_max_grad_norm too"
            )
        return self

    @model_validator(mode="after")
    def _clipping_is_exact(self) -> Self:
        if self.private and self.precision != "fp32":
            raise ValueError(
                f"precision is {self.precision} with dp_max_grad_norm: samples are clipped by the norms of their "
                "float32 gradients; leave precision out"
            )
        return self

    def shared_out(self, world_size: int) -> Training:
        """Return the settings with `batch_size` set from the global batch, if that is given.

        Raises:
            BadInput: If the global batch is not a multiple of ranks times micro-batches.
        """
        total, parts = self.global_batch_size, world_size * self.grad_accum_steps
        if total is None:
            return self
        if total % parts:
            raise BadInput(
                f"global_batch_size {total} cannot be divided evenly among {amount(world_size, 'rank')} x "
                f"{amount(self.grad_accum_steps, 'micro-batch')}: give a multiple of {parts}."
            )
        return self.model_copy(update={"batch_size": total // parts})

    @property
    def private(self) -> bool:
        """Whether each sample's gradient is clipped."""
        return self.dp_max_grad_norm is not None

    @property
    def profiled_steps(self) -> int:
        """Steps with the profiler: its warm-up step and the recorded ones."""
        return 1 + self.profile_steps if self.profile else 0
