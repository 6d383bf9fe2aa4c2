"""python inplace.py: norms of a model that changes a layer's output in place are those of one sample at a time."""

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from gradwire.attribution.persample.norms import norms
from gradwire.lm.data.batches import Batch


class Net(nn.Module):
    """A layer between an embedding and a head."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.embedding, self.layer, self.head = nn.Embedding(64, 16), nn.Linear(16, 16), nn.Linear(16, 64)
        self.relu = nn.ReLU(inplace=way == "relu")

    def forward(self, ids: Tensor, **_: object) -> SimpleNamespace:
        """Logits, as transformers return them."""
        embedded = self.embedding(ids)
        x = self.layer(embedded)
        if self.way == "residual":
            x += embedded
        return SimpleNamespace(logits=self.head(self.relu(x)))


torch.manual_seed(1)
tokens = torch.randint(0, 64, (3, 9))
batch = Batch(tokens, tokens.clone(), list("abc"))
for way in ("plain", "relu", "residual"):
    torch.manual_seed(0)
    model = Net(way)
    torch.testing.assert_close(norms(model, batch).square, norms(model, batch, method="loop").square, rtol=1e-4, atol=0)
print("right")
