"""`bench compressors`: what is counted, printed and refused; no test depends on a time.

Of `codecs/cases.py`, `codecs/bench.py`.
"""

from __future__ import annotations

import json
from statistics import median

import pytest
import torch
from samples import normal

from gradwire import cli
from gradwire.bench.codecs import bench
from gradwire.bench.codecs import cases as bench_cases
from gradwire.bench.codecs.cases import CHAINS, VARIANTS, Case, cases
from gradwire.comm.compressors import available, build
from gradwire.comm.compressors.methods.terngrad import TernGrad

CPU, SHORT = torch.device("cpu"), 1e-4


def run(*words: str) -> int:
    return cli.main(["bench", "compressors", "--device", "cpu", "--min_run_time", str(SHORT), *words])


def test_every_method_has_a_line_and_every_line_its_method():
    found = cases()
    assert {case.name for case in found} == {*available(), *CHAINS}
    assert {*VARIANTS} <= set(available())
    for case in found:
        assert case.codec == build(case.name, **case.options)
    assert [case.name for case in cases(["nc", "topk+fp8"])] == ["natural", "topk+fp8"]


def test_a_run_prints_a_table_and_writes_what_it_measured(tmp_path, capsys):
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    file = tmp_path / "new" / "bench.json"
    assert run("--numel", "5003", "--methods", "int8", "zero", "--json", str(file)) == 0
    assert torch.equal(before, torch.get_rng_state()) and threads == torch.get_num_threads()
    result = json.loads(file.read_text())
    assert result["shape"] == [70, 71]
    recorded = result["environment"]["packages"]["torch"]
    assert recorded.partition("+")[0] == torch.__version__.partition("+")[0]  # PyPI's wheels do not name their build
    assert result["copy_bytes_per_s"] == pytest.approx(2 * 4 * 70 * 71 / (result["copy_ms"] / 1e3))
    names = [(record["method"], record["options"]) for record in result["records"]]
    assert names == [("int8", {}), *(("int8", variant) for variant in VARIANTS["int8"]), ("zero", {})]
    for record, (name, options) in zip(result["records"], names, strict=True):
        assert record["error"] is None and record["form"] == ("reference" if name == "zero" else "kernel")
        assert record["wire_bytes"] == build(name, **options).wire_bytes((70, 71))
        assert record["encode_ms"] and record["decode_ms"]
        floor = record["wire_bytes"] + 4 * 70 * 71
        assert record["decode_x_floor"] == pytest.approx(
            median(record["decode_ms"]) / 1e3 / (floor / result["copy_bytes_per_s"])
        )
    printed = capsys.readouterr().out
    table = [line for line in printed.splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(names) and "encode x floor" in table[0]
    assert "[70, 71]" in printed and "elements of a gradient of the model tiny" in printed


def test_the_error_is_that_of_each_parameter_encoded_alone():
    int8, gradient = build("int8"), [normal((4, 5)), normal((256, 3))]
    result = bench.measure([Case("int8", int8)], CPU, 20, SHORT, matrices=gradient)
    (record,) = result["records"]
    lost = sum(float((int8.decode(int8.encode(g), g.shape) - g).double().square().sum()) for g in gradient)
    total = sum(float(g.double().square().sum()) for g in gradient)
    assert record["relative_error"] == pytest.approx((lost / total) ** 0.5, rel=1e-12)
    sent = sum(int8.wire_bytes(tuple(g.shape)) for g in gradient)
    assert record["gradient_bits_per_element"] == pytest.approx(8 * sent / result["gradient_numel"])


def test_a_users_gradient_of_any_shape(tmp_path, capsys):
    torch.save(torch.arange(-60.0, 60.0).view(2, 3, 20).double(), tmp_path / "g.pt")
    given = ("--numel", "16", "--gradient", str(tmp_path / "g.pt"), "--json", str(tmp_path / "b.json"), "--methods")
    assert run(*given, "fp16", "zero") == 0
    result = json.loads((tmp_path / "b.json").read_text())
    assert result["gradient_numel"] == 120 and result["gradient"].endswith("g.pt")
    assert [record["relative_error"] for record in result["records"]] == [0, 1]
    torch.save(torch.tensor([1e6, 1.0]), tmp_path / "g.pt")
    capsys.readouterr()
    assert run(*given, "fp16") == 0
    assert "too large" in capsys.readouterr().out


SAVED = {
    "nothing": (None, "is no tensor that torch.load reads"),
    "text": ("g", "is no tensor that torch.load reads"),
    "nan": (torch.tensor([1.0, float("nan")]), "holds values that are not finite"),
    "zeros": (torch.zeros(3), "all zeros"),
    "empty": (torch.zeros(0), "is empty"),
    "sparse": (torch.tensor([0.0, 2.0]).to_sparse(), "save a dense tensor of floats"),
    "integers": (torch.tensor([1, 2]), "save a dense tensor of floats"),
}


@pytest.mark.parametrize("kind", SAVED)
def test_what_is_no_gradient_is_refused(tmp_path, capsys, kind):
    value, message = SAVED[kind]
    if value is not None:
        torch.save(value, tmp_path / "g.pt")
    assert run("--gradient", str(tmp_path / "g.pt"), "--methods", "zero") == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--numel", "0"], "--numel is 0; it must be at least 1."),
        (["--min_run_time", "0"], "--min_run_time is 0.0; it must be above 0"),
        (["--methods", "int9"], "unknown compressor 'int9'. Did you mean 'int8'"),
        (["--methods", "int8+int8"], "a chain is sparsifier+quantizer"),
    ],
)
def test_bad_arguments_end_with_2_before_anything_is_measured(capsys, words, message):
    assert run(*words) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("gradwire bench compressors: ") and message in printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_cuda_is_refused(capsys):
    assert cli.main(["bench", "compressors", "--device", "cuda"]) == 2
    assert "sees no CUDA device here" in capsys.readouterr().err


class Broken(TernGrad):
    """A method that fails."""

    def to_wire(self, x, generator):
        raise RuntimeError("no such luck")


def test_a_method_that_fails_is_reported_and_the_others_are_measured(monkeypatch, capsys, tmp_path):
    found = [Case("broken", Broken()), *cases(["zero"])]
    monkeypatch.setattr(bench_cases, "cases", lambda names: found)
    assert run("--numel", "100", "--json", str(tmp_path / "b.json")) == 3
    printed = capsys.readouterr()
    assert "broken: RuntimeError: no such luck" in printed.out and "failed: broken" in printed.err
    assert "| zero " in printed.out and "| broken " not in printed.out


def test_memory_is_watched():
    def fill():
        return torch.ones(16_000_000)

    peak = bench.peak_bytes(fill, CPU)
    if peak is None:
        pytest.skip("this system does not tell")
    assert 63e6 < peak < 70e6


def test_the_sample_gradient_is_the_same_every_time():
    before = torch.get_rng_state()
    first, second, other = (bench.sample_gradient(seed) for seed in (3, 3, 4))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(*pair) and pair[0].any() and pair[0].ndim == 2 for pair in zip(first, second, strict=True))
    assert not torch.equal(first[0], other[0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_run_on_cuda():
    result = bench.measure(cases(["int8", "topk"]), torch.device("cuda"), 2**16)
    assert not [record for record in result["records"] if record["error"] or record["encode_peak_bytes"] is None]
