"""python tuple.py blenderbot|prophetnet: norms of a model whose layers return tuples."""

import json
import sys

import torch

from gradwire.attribution.persample.norms import norms
from gradwire.lm.data.batches import Batch
from gradwire.lm.models import causal

sizes = {
    "blenderbot": {"d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 48},
    "prophetnet": {
        "hidden_size": 32, "num_decoder_layers": 1, "num_decoder_attention_heads": 2, "decoder_ffn_dim": 48
    },
}[sys.argv[1]]  # fmt: skip
model = causal.build(json.dumps({"architecture": sys.argv[1], "is_decoder": True, **sizes}), 64, 32, 0)
torch.manual_seed(0)
tokens = torch.randint(3, 60, (2, 9))
batch = Batch(tokens, tokens.clone(), ["a", "b"])
torch.testing.assert_close(norms(model, batch).square, norms(model, batch, method="loop").square, rtol=1e-4, atol=0)
print("right")
