"""Train a debug model of torchtitan with any compression; torchrun runs this.

The first argument is JSON: ``model``, ``folder``, ``steps``, ``mesh`` (degrees by dimension), ``compiled`` (whether
blocks are compiled, all their activations recomputed, and gradients accumulated over two micro-batches), ``checkpoint``
(whether there are checkpoints), and ``compression``: the arguments of `compress_gradients`, ``example`` for the trainer
of `examples/with_torchtitan.py`, or null for none. The last rank writes ``losses.json``: loss and gradient norm of each
step, and the traffic of each part of the model.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import on_cpu
import torch.distributed as dist
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.trainer import Trainer
from with_torchtitan import CompressedTrainer

import gradwire


def main(given: dict) -> None:
    config = on_cpu.config(given["model"], given["folder"], given["steps"], **given["mesh"])
    config.checkpoint.enable, config.checkpoint.interval = given["checkpoint"], 2
    if given["compiled"]:
        config.compile.enable, config.activation_checkpoint = True, FullAC.Config()
        config.training.global_batch_size = 2 * int(os.environ["WORLD_SIZE"]) * config.training.local_batch_size
    trainer = (CompressedTrainer if given["compression"] == "example" else Trainer)(config)
    compressions = []
    if isinstance(options := given["compression"], dict):
        parts, options["optimizer"] = trainer.model_parts, trainer.optimizers
        compressions = [gradwire.compress_gradients(part, **options) for part in parts]
    steps = {}

    def log(step, average, maximum, norm, *_, **__):
        steps[step] = [float(average), float(norm)]

    trainer.metrics_processor.should_log = lambda step: True
    trainer.metrics_processor.log = log
    trainer.train()
    if dist.get_rank() == dist.get_world_size() - 1:  # the last stage of a pipeline knows the loss
        traffic = [{name: compression.traffic[name] for name in ("raw", "sent")} for compression in compressions]
        Path(given["folder"], "losses.json").write_text(json.dumps({"steps": steps, "traffic": traffic}))
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
