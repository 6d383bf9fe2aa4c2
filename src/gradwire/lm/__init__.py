"""Corpora, tokens and language models."""

from gradwire.base.extras import require

require(__name__, "tokenizers", "transformers", "ijson", "safetensors")
