"""The lossless last stage: exact for any bytes, never longer, near the entropy, and strict about what it reads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from samples import generator, normal

from gradwire.base.errors import BadInput
from gradwire.bench.codecs.measure import sample_gradient
from gradwire.comm.compressors import build, lossless, rans
from gradwire.comm.compressors.base import Section


def drawn(kind: str, n: int) -> np.ndarray:
    """Bytes of a kind: uint8 [n]."""
    source = np.random.default_rng(n)
    return {
        "constant": np.full(n, 201),
        "two": 3 + (source.random(n) < 0.004),
        "geometric": np.minimum(source.geometric(0.13, n), 255),
        "normal": np.round(source.normal(0, 31, n)).astype(np.int64) & 255,
        "every byte": np.arange(n) % 256,
        "uniform": source.integers(0, 256, n),
        "runs": np.arange(n) // 997 % 7,
    }[kind].astype(np.uint8)


def entropy(data: np.ndarray) -> float:
    """Bytes that no code with one table for ``data`` goes below."""
    counts = np.bincount(data)
    counts = counts[counts > 0]
    return float(-(counts * np.log2(counts / data.size)).sum() / 8)


def read_slowly(code: np.ndarray, count: int) -> list[int]:
    """A code read as the documentation of `rans` has it, with Python's integers and no table of states."""
    stream = iter(code[32:].tolist())
    frequencies = {}
    for byte in range(256):
        if code[byte // 8] >> byte % 8 & 1:
            digits = next(stream)
            frequencies[byte] = 1 + (digits if digits < 128 else digits - 128 + 128 * next(stream))
    assert sum(frequencies.values()) == 4096
    states = [sum(next(stream) << 8 * k for k in range(4)) for _ in range(4)]
    read = []
    for i in range(count):
        x = states[i % 4]
        start = 0
        for byte, frequency in frequencies.items():  # noqa: B007 - the byte that the state lies in
            if x % 4096 < start + frequency:
                break
            start += frequency
        read.append(byte)
        x = frequency * (x // 4096) + x % 4096 - start
        states[i % 4] = x if x >= 2**15 else x * 2**16 + next(stream) + 256 * next(stream)
    assert states == [2**15] * 4 and not list(stream)
    return read


@pytest.mark.parametrize("kind", ["constant", "two", "geometric", "normal", "every byte", "uniform", "runs"])
def test_a_range_code_is_exact_short_and_as_documented(kind):
    for n in (0, 1, 48, 49, 50, 51, 52, 257, 5003, 70_001):
        data = drawn(kind, n)
        code = rans.encode(data)
        assert code.size <= n
        assert np.array_equal(rans.decode(code, n), data), n
        if n in (257, 5003) and code.size < n:
            assert read_slowly(code, n) == data.tolist()
    table = 48 + 2 * sum(np.bincount(data) > 0)
    assert code.size <= min(n, 1.005 * entropy(data) + table)


def test_a_range_code_of_other_bytes_is_refused():
    """A lost word, one too many, and a changed one: the states do not end where the encoder began."""
    code = rans.encode(drawn("normal", 5003))
    changed = code.copy()
    changed[-900] ^= 1
    for bad in (code[:-2], code[:-1], np.append(code, code[:2]), changed, code[:20]):
        with pytest.raises(ValueError, match="by the range coder"):
            rans.decode(bad, 5003)


def test_a_range_code_of_any_frequencies_is_exact():
    """Of one byte in 100,000, of a byte that takes nearly all, and of as many bytes as there can be."""
    for seed in range(40):
        source = np.random.default_rng(seed)
        weights = source.random(int(source.integers(1, 257))) ** source.integers(1, 60)
        data = source.choice(weights.size, size=int(source.integers(100, 9000)), p=weights / weights.sum())
        data = data.astype(np.uint8)
        assert np.array_equal(rans.decode(rans.encode(data), data.size), data), seed


def test_a_message_of_many_sections_is_exact_with_any_bits():
    """NaN with every payload, infinities and denormal numbers among them; an empty section; one of several tables."""
    source = np.random.default_rng(5)
    float32 = source.integers(0, 2**32, 771, dtype=np.uint32).view(np.uint8)
    exponents = np.array([0x7F80, 0xFF80, 0x7F81, 0xFFFF, 0x0001, 0x8000], "<u2")
    bf16 = source.choice(exponents, 40_003).view(np.uint8)
    codes = drawn("normal", 150_001)
    sections = [
        Section(0, 4),
        Section(float32.size, 4),
        Section(7, 1, True),
        Section(bf16.size, 2),
        Section(codes.size),
    ]
    message = np.concatenate([float32, codes[:7], bf16, codes])
    code = lossless.encode(message, sections)
    assert np.array_equal(lossless.decode(code, message.size), message)
    assert np.array_equal(lossless.decode(code, None), message)
    assert lossless.index_bytes(code) == 7
    assert code.size < float32.size + 0.2 * bf16.size + 0.93 * codes.size
    with pytest.raises(ValueError, match="expected one of"):
        lossless.decode(code, message.size + 1)


def test_a_head_that_does_not_fit_is_refused_even_with_a_good_check():
    def checked(*words: int) -> np.ndarray:
        body = np.array(words, "<i8").view(np.uint8)
        return np.concatenate([lossless.check(body), body])

    for words in [
        (),
        (1,),
        (2**40,),
        (1, 3, 9),
        (1, 1, -4, -4),
        (1, 2, 3, 1, 2),
        (1, 0, 0),
        (0, 5),
        (1, 1, 99, 99),
        (1, 1, 2**62, 0),
        (1, 1, 2**16 + 1, 0),
    ]:
        with pytest.raises(ValueError, match="lossless code"):
            lossless.decode(checked(*words), None)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("bf16", {}),
        ("int8", {"num_bits": 4}),
        ("topk+int8", {"indices": "varint", "density": 0.3}),
        ("threshold", {"threshold": 0.5}),
    ],
)
def test_every_corrupt_or_truncated_code_is_refused(name, options):
    compressor, n = build(f"{name}+entropy", **options), 4999
    wire = compressor.encode(normal(n))
    assert wire.numel() < compressor.inner.encode(normal(n)).numel()
    for at in range(0, wire.numel(), 3):
        for bits in (1, 0x80):
            bad = wire.clone()
            bad[at] ^= bits
            with pytest.raises(ValueError):
                compressor.decode(bad, n)
        with pytest.raises(ValueError):
            compressor.decode(wire[:at], n)
    with pytest.raises(ValueError):
        compressor.decode(torch.cat([wire, wire[:1]]), n)


@pytest.mark.parametrize("name", ["none", "bf16", "int8", "onebit", "topk", "threshold", "qsgd"])
def test_what_has_no_shorter_code_travels_as_it_is(name):
    """Constant tensors, random bits, few elements: never above 1.01 times the bytes, always the same bits."""
    compressor = build("entropy") if name == "none" else build(f"{name}+entropy")
    raw = compressor.inner
    for n in (0, 1, 31, 129, 257, 5003):
        bits = torch.randint(-(2**31), 2**31, (n,), generator=generator(n), dtype=torch.int64).to(torch.int32)
        for x in (torch.full((n,), -0.37), bits.view(torch.float32).nan_to_num(1.0, 1.0, -1.0).clamp(-1e18, 1e18)):
            plain, wire = raw.encode(x, generator=generator()), compressor.encode(x, generator=generator())
            assert wire.numel() <= 1.01 * plain.numel()
            assert torch.equal(compressor.decode(wire, n), raw.decode(plain, n))
            assert compressor.sent_elements(n, wire) == raw.sent_elements(n, plain)
            if wire.numel() == plain.numel():
                assert compressor.index_bytes(wire, n) == raw.index_bytes(plain, n)


def test_a_constant_tensor_takes_next_to_nothing():
    assert build("bf16+entropy").encode(torch.full((100_003,), 0.3)).numel() < 600


@pytest.fixture(scope="module")
def gradient() -> torch.Tensor:
    """A real one of 327,680 elements."""
    return sample_gradient(steps=3)["hidden.0"]


@pytest.mark.parametrize(
    ("name", "options", "ratio"),
    [("bf16", {}, 1.4), ("int8", {"num_bits": 4, "block": 64}, 1.1), ("int8", {"block": 256}, 1.05)],
)
def test_real_gradients_gain_what_their_entropy_allows(gradient, name, options, ratio):
    compressor = build(f"{name}+entropy", **options)
    plain = compressor.inner.encode(gradient).numel()
    assert plain / compressor.encode(gradient).numel() >= ratio


def test_indices_of_a_top_k_take_less_than_8_bits(gradient):
    """1.6 % at random are 7.4 bits each; real ones lie together, which their gaps show and rice codes do not."""
    shape = tuple(gradient.shape)
    bits = {}
    for indices in ("rice", "varint"):
        compressor = build("topk+entropy", density=0.016, indices=indices)
        wire = compressor.encode(gradient)
        bits[indices] = 8 * compressor.index_bytes(wire, shape) / compressor.sent_elements(shape, wire)
    assert bits["varint"] <= bits["rice"] <= 8
    assert bits["varint"] <= 7.5


@pytest.mark.parametrize("name", ["entropy+int8", "topk+entropy+int8", "topk+int8+bf16+entropy", "int8+bf16+entropy"])
def test_only_the_last_stage_may_follow_a_chain(name):
    with pytest.raises(BadInput, match="a chain"):
        build(name)
