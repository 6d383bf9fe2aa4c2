"""torchrun --nproc_per_node 2 trainer.py: a second training goes on, and each gradient is sent once."""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from gradwire.comm.huggingface import CompressedGradients

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2))
data = [{"input_ids": (x := torch.randint(0, 64, (16,))), "labels": x} for _ in range(32)]
args = TrainingArguments(
    tempfile.mkdtemp(), max_steps=2, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
    ddp_find_unused_parameters=False, dataloader_pin_memory=False, logging_steps=100,
)  # fmt: skip
compressed = CompressedGradients("int8")
trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[compressed])
sent = []
for _ in range(2):
    trainer.train()
    sent.append(compressed.compression.traffic["sent"])
assert sent[1] == 2 * sent[0] > 0
print("right")
