"""torchtitan (0.3) with compressed gradients: any mesh it makes, and checkpoints that hold what compression lost.

torchrun --nproc_per_node 8 examples/with_torchtitan.py --module llama3 --config llama3_debugmodel
"""

import torch
from torchtitan.config import ConfigManager
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer

import gradwire


class CompressedTrainer(Trainer):
    """torchtitan's trainer, and five lines."""

    def __init__(self, config: Trainer.Config) -> None:
        super().__init__(config)
        for number, part in enumerate(self.model_parts):  # a pipeline has several
            compression = gradwire.compress_gradients(part, "int8", optimizer=self.optimizers, error_feedback=True)
            if config.checkpoint.enable:
                self.checkpointer.states[f"gradwire.{number}"] = compression


if __name__ == "__main__":
    init_logger()
    trainer = CompressedTrainer(ConfigManager().parse_args())
    trainer.train()
    trainer.close()
    torch.distributed.destroy_process_group()
