"""The command ``grads factors``: the curvature that ``grads collect --grad_type ekfac`` takes gradients under."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from gradwire.attribution.options import DAMPING, Count, LossOptions, ModuleOptions, SampleOptions
from gradwire.base.flags import NOT_NEGATIVE
from gradwire.base.rank_env import Device

if TYPE_CHECKING:
    from torch import nn

    from gradwire.lm.data.batches import Batch


class Options(LossOptions, ModuleOptions, SampleOptions):
    """Flags of ``gradwire grads factors``."""

    output_dir: Path = Field(description="folder for the factors")
    damping: Annotated[float, NOT_NEGATIVE] = Field(
        DAMPING, description="added to a parameter's curvature, in units of its mean"
    )
    lora_dir: Path | None = Field(None, description="the curvature of this LoRA adapter")
    batch_size: Count = Field(8, description="samples per forward pass")
    device: Device = Field("auto", description="auto: a GPU if there is one")


def output_dir(options: Options) -> Path:
    """Return the folder of the factors."""
    return options.output_dir


def main(options: Options) -> None:
    """Compute and write the factors.

    Raises:
        BadInput: If the model or the data are invalid, or do not match.
    """
    import torch

    from gradwire.attribution.collect import ekfac, methods
    from gradwire.attribution.persample.batch import restrict, shapes
    from gradwire.attribution.projections import of_modules
    from gradwire.attribution.store.samples import longest_first
    from gradwire.comm.collectives import world
    from gradwire.lm.data.batches import collate
    from gradwire.lm.models import causal, lora, saved

    methods.check_dense(options.model_dir)
    shards = options.checked_samples()
    count = options.count(len(shards))
    device = torch.device(world.choose("auto", options.device, 1, world.detect_gpus()).device_type)
    model: nn.Module = causal.load_finite(options.model_dir)
    if options.lora_dir:
        lora.check(options.lora_dir, options.model_dir)
        model = lora.attach(model, options.model_dir, adapter=options.lora_dir)
    restrict(model, of_modules(shapes(model), options.modules))
    model = model.to(device)
    method = methods.resolved("auto", model)

    order = longest_first(shards, range(count))

    def batches() -> Iterator[Batch]:
        for start in range(0, count, options.batch_size):
            samples = [shards[position] for position in order[start : start + options.batch_size]]
            yield collate(samples, shards.meta["pad_id"], len(samples)).to(device)

    curvature = ekfac.factored(
        model, batches, lambda batch: methods.METHODS[method](model, batch, options.loss), options.loss, device
    )
    made_of = {
        "model_digest": saved.digest(options.model_dir),
        "lora": lora.digest(options.lora_dir) if options.lora_dir else None,
        "modules": sorted(set(options.modules)),
        "data_digest": shards.digest,
        "samples": count,
        "loss": options.loss,
    }
    ekfac.save(curvature, options.damping, options.output_dir, made_of)
    print(f"factors of {shards.describe(count)} in {options.output_dir / ekfac.FILE}")
