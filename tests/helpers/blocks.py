"""Whole blocks of rows, as the files of a store have them, for tests."""

from __future__ import annotations

from pathlib import Path

import torch

from gradwire.attribution.store import store
from gradwire.attribution.store.row_file import RowFile
from gradwire.attribution.store.store import Block, Names


def read(names: Names) -> Block:
    """Read a block."""
    stored, codec = store.read_stored(names.rows)
    block = Block(torch.from_numpy(stored), store.read_ids(names.ids), store.read_meta(names.meta), codec)
    store.check_counts(names, [len(block.stored), len(block.ids), len(block.meta)])
    return block


def read_rows(path: Path) -> torch.Tensor:
    """Read rows as float32 [n, D]."""
    rows = RowFile(path)
    return torch.from_numpy(rows.read(0, rows.shape[0]))
