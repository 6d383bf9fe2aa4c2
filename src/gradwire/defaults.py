"""Defaults and limits that the configuration and the verbs below it share: how a corpus is cut into samples."""

VOCAB_SIZE = 2048
SMALLEST_VOCABULARY = 256 + 2  # byte-level BPE: every byte, and the two special tokens
MAX_LENGTH = 128
SHORTEST_MAX_LENGTH = 3  # so that a document can be cut into samples which all have a target
SHARD_SIZE = 1024
VAL_FRACTION = 0.05
