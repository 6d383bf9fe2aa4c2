"""Projected gradients of single samples while an image classifier trains: python examples/gradient_rows.py."""

import torch
from torch import nn

import gradwire

torch.manual_seed(0)
model = nn.Sequential(
    *(nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU()),
    *(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 2)),
)
labels = torch.arange(16) % 2
images = torch.randn(16, 1, 8, 8) + labels.view(-1, 1, 1, 1)  # the second class is brighter
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
samples = gradwire.per_sample(model)

for _ in range(10):
    with samples.rows(64) as rows:
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()

alike = nn.functional.normalize(rows.values, dim=1)  # [16, 64]
nearest = (alike @ alike.T).fill_diagonal_(-1).argmax(1)
print(f"loss {loss.item():.3f}: {int((labels[nearest] == labels).sum())} of 16 nearest samples have the same class")
