"""Small codes packed into bytes, the first code in the lowest bits.

Codes of ``bits`` bits are a little-endian stream of bits, of any width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def packed_bytes(count: int, bits: int) -> int:
    """Bytes that ``count`` codes of ``bits`` bits take."""
    return -(-count * bits // 8)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack unsigned codes: integers [n] below 2^bits, of any integer type, to uint8 [packed_bytes(n, bits)]."""
    if bits == 8:
        return codes.to(torch.uint8)
    if 8 % bits == 0:
        lanes = 8 // bits
        rows = pad(codes.to(torch.uint8), (0, -codes.numel() % lanes)).view(-1, lanes)
        packed = rows[:, 0].clone()
        for lane in range(1, lanes):
            packed |= rows[:, lane] << (lane * bits)
        return packed
    shifts = torch.arange(bits, dtype=torch.int64, device=codes.device)
    stream = (codes.to(torch.int64).unsqueeze(1) >> shifts) & 1
    return pack(stream.view(-1), 1)


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """The first ``count`` codes: uint8 [count] up to 8 bits, int64 [count] beyond."""
    if bits == 8:
        return packed[:count]
    if 8 % bits == 0:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
        return ((packed.unsqueeze(1) >> shifts) & (2**bits - 1)).view(-1)[:count]
    stream = unpack(packed, 1, count * bits).view(count, bits).to(torch.int64)
    codes = (stream << torch.arange(bits, dtype=torch.int64, device=packed.device)).sum(dim=1)
    return codes.to(torch.uint8) if bits < 8 else codes
