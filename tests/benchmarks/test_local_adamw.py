"""The program of AdamW's rounds: its exchange against sums in float64, its rounds, and the page's table."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))
local_adamw = importlib.import_module("local_adamw")


@pytest.mark.parametrize(
    "encode", [local_adamw.one_bit, lambda x: local_adamw.integers(x, 4), lambda x: local_adamw.integers(x, 2)]
)
def test_what_is_not_sent_now_is_sent_later(encode):
    """The sum of all means is that of the exact ones, less what is kept."""
    generator = torch.Generator().manual_seed(3)
    exchange = local_adamw.Exchange(encode, 1.5, ["b", "a"])
    exact = received = torch.zeros(3 * 107 + 11, dtype=torch.float64)
    for scale in (1.0, 0.3, 2.0, 0.7):
        tensors = {"a": torch.randn(5, 11, generator=generator), "b": torch.randn(5, 3, 107, generator=generator)}
        mean = exchange.mean({name: scale * tensor for name, tensor in tensors.items()})
        assert [part.shape for part in mean.values()] == [(1, 3, 107), (1, 11)]
        exact = exact + scale * torch.cat([tensors["b"].flatten(1), tensors["a"]], 1).double().mean(0)
        received = received + torch.cat([mean["b"].flatten(), mean["a"].flatten()]).double()
    of_ranks, of_mean = exchange.lost
    torch.testing.assert_close(received + of_ranks.double().mean(0) + of_mean.double(), exact, atol=1e-5, rtol=0)
    assert of_mean.abs().max() > 0.01
    assert exchange.sent == 4 * 1.5 * (3 * 107 + 11)


def test_one_bit_is_the_mean_of_each_side_in_a_block():
    x = torch.randn(300, generator=torch.Generator().manual_seed(1))
    decoded = local_adamw.one_bit(x[None])[0]
    last = x[256:].double()  # a block with fewer elements
    expected = torch.where(last < 0, last[last < 0].mean(), last[last >= 0].sum() / (256 - (last < 0).sum()))
    torch.testing.assert_close(decoded[256:].double(), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(decoded[:256].sum(), x[:256].sum(), atol=1e-4, rtol=0)


def test_rounds_are_short_first():
    ends = [step for step in range(900) if local_adamw.ends_round(step, 900)]
    lengths = [end - before for before, end in zip([-1, *ends], ends, strict=False)]
    assert lengths == [4] * 36 + [8] * 36 + [14] * 33 + [6]


def test_the_page_has_the_records():
    records = [json.loads(line) for line in (ROOT / "benchmarks" / "local-adamw.jsonl").read_text().splitlines()]
    assert [record["variant"] for record in records] == list(local_adamw.VARIANTS)
    least = records[0]["perplexity"]
    rows = [
        f"| {record['variant']} | {record['ratio']:.1f} × | {record['perplexity']:.2f} | "
        f"{100 * (record['perplexity'] / least - 1):+.1f} % |"
        for record in records
    ]
    assert "\n".join(rows) in (ROOT / "benchmarks" / "quality.md").read_text()
