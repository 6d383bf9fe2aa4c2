"""A callback that collects gradient rows while Hugging Face's Trainer trains: ``pip install 'gradwire[trainer]'``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import distributed
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from gradwire.attribution.collect import collect
from gradwire.attribution.store import aggregate
from gradwire.base.strict import checked
from gradwire.comm.collectives.world import World


class CollectedGradients(TrainerCallback):
    """Collects the gradient rows of samples at each checkpoint that a Trainer saves.

    ``step-<N>/dim<D>`` in the output folder becomes the store of step N, as ``grads collect`` and ``grads aggregate``
    make it of the checkpoint. Each rank computes its share, with a second copy of the model in memory. The training
    stays as it is, and checkpoints may be deleted later (``save_total_limit``): what needs the model again, such as a
    query by a text, names the folder that is missing.

    Args:
        output_dir: Folder of the stores.
        data_path: The samples: a shards folder, or a corpus file.
        dim: Columns per row.
        model_dir: The model, if the checkpoints are LoRA adapters.
        options: Further options of ``grads collect``, such as ``grad_type="adam"``.

    Raises:
        BadInput: If an option is invalid; from the training, if a checkpoint is not a whole model with its tokenizer,
            which the Trainer gets as ``processing_class``, or does not match the samples.
    """

    def __init__(
        self,
        output_dir: Path | str,
        data_path: Path | str,
        dim: int,
        *,
        model_dir: Path | str | None = None,
        **options: Any,
    ) -> None:
        places = {"output_path": output_dir, "data_path": data_path, "model_dir": model_dir or output_dir}
        self.options = checked(collect.Options, {**options, **places, "dim": (dim,)}, type(self).__name__)
        self.adapters = model_dir is not None

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Collect the rows of the checkpoint that was saved; rank 0 merges those of all ranks."""
        place = "lora_dir" if self.adapters else "model_dir"
        checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        run = self.options.output_path / f"step-{state.global_step}"
        options = self.options.model_copy(update={place: checkpoint, "output_path": run})
        world = World(args.process_index, args.local_process_index, args.world_size, "", args.device)
        wait(world)  # until rank 0 has saved the checkpoint
        shards = options.samples(world.rank)
        intended = collect.intention(options, shards, world.world_size)
        collect.collect(options, intended, world)
        wait(world)
        if world.rank == 0:
            merged = aggregate.Options(base_path=run, dim=options.dim[0], discard_parts=options.discard_parts)
            aggregate.main(merged)
        wait(world)


def wait(world: World) -> None:
    """Wait for the other ranks of a training."""
    if world.world_size > 1:
        distributed.barrier()
