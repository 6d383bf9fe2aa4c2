"""How a corpus is cut into samples: the defaults and bounds that the configuration and the commands share."""

from __future__ import annotations

from typing import Literal

from gradwire.base.errors import BadInput
from gradwire.base.flags import ELEMENTS, Number

VOCAB_SIZE = 2048
SMALLEST_VOCABULARY = 256 + 2  # byte-level BPE: every byte, and the two special tokens
MAX_LENGTH = 128
SHORTEST_MAX_LENGTH = 3  # so that a document can be cut into samples which all have a target
SHARD_SIZE = 1024
VAL_FRACTION = 0.05

VOCABULARY = Number(int, SMALLEST_VOCABULARY, 2**20)  # four times the largest in use
LENGTH = Number(int, SHORTEST_MAX_LENGTH, 2**20)  # tokens of a sample
Split = Literal["train", "val"]
ChatFormat = Literal["template", "plain"]
SKIP_INVALID = "leave invalid documents of a corpus file out, and say how many (default: an error that describes them)"
CHAT_FORMAT = "how chats are read: by the tokenizer's chat template, or in a plain format (default: template, if any)"


def check_shard(max_length: int, shard_size: int) -> None:
    """Check that a shard of ``shard_size`` samples of ``max_length`` tokens fits into memory.

    Raises:
        BadInput: If it does not.
    """
    if max_length * shard_size > ELEMENTS.most:
        raise BadInput(
            f"max_length {max_length} times shard_size {shard_size} is {max_length * shard_size} tokens per shard; it "
            f"must be at most {ELEMENTS.most}: reduce either."
        )
