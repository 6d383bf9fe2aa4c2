"""Rows of an experiment with links, made from a known law: what each collective costs, what each label sends."""

from __future__ import annotations

import math

import numpy as np

from gradwire.bench.config import Run
from gradwire.bench.report.rows.record import Result

RATES = {"none": math.inf, "1gbit": 1e9, "300mbit": 3e8, "100mbit": 1e8}
PARAMETERS = 500_003
COMPUTE = 0.061  # seconds
HOST = {"all_reduce": 2e-9, "reduce_scatter": 5e-9, "all_gather": 4e-9, "all_to_all": 3e-9}  # seconds per byte
FACTOR = {"all_reduce": 1.03, "reduce_scatter": 2.07, "all_gather": 1.05, "all_to_all": 1.11}
ALPHA = {"all_reduce": 2e-3, "reduce_scatter": 4e-3, "all_gather": 3e-3, "all_to_all": 5e-3}  # seconds per step
LABELS = {  # how many times smaller a gradient is, who carries it under ddp and fsdp2, seconds of encode and decode
    "none": (1.0, None, None, 0.0, 0.0),
    "bf16-native": (2.0, "native", "native", 1e-3, 5e-4),
    "exchange": (1.0, "exchange", "exchange", 5e-4, 4e-4),
    "int8": (3.94, "gather", "exchange", 4e-3, 2e-3),
    "int4": (7.11, "gather", "exchange", 5e-3, 2.5e-3),
    "powersgd": (21.3, "native", "native", 9e-3, 1e-3),
}
STEPS, MEASURED = 15, 9


def row(strategy, label, link, *, seed=0, noise=0.0, **fields):
    """One run's row at W = 2; `noise` is the relative spread of its times."""
    draw = np.random.default_rng([seed, *f"{strategy}{label}{link}".encode()])
    smaller, *algorithms, encode, decode = LABELS[label]
    sharded = strategy == "fsdp2"
    algorithm = algorithms[sharded]
    native = "reduce_scatter" if sharded else "all_reduce"
    op = {"gather": "all_gather", "exchange": "all_to_all"}.get(algorithm, native)
    raw = STEPS * 2 * 4 * PARAMETERS // (2 if sharded else 1)  # over both ranks: (W - 1) / W * 4 n each, and twice that
    sent = round(raw / smaller)
    parameters = STEPS * 7 * PARAMETERS if sharded else None

    def seconds(name, total):
        each = total / STEPS / 2
        exact = ALPHA[name] + each * math.hypot(HOST[name], 8 * FACTOR[name] / RATES[link])
        return exact * math.exp(draw.normal(0, noise))

    by_op = {op: seconds(op, sent)}
    wire = FACTOR[op] * sent
    if parameters:
        by_op["all_gather"] = seconds("all_gather", parameters)
        wire += FACTOR["all_gather"] * parameters
    comm = sum(by_op.values())
    codec = encode + decode
    values = {
        "backend": "gloo",
        "device": "cpu",
        "model": "tiny",
        "parameters": PARAMETERS,
        "dataset": "pydocs",
        "max_length": 128,
        "batch_size": 8,
        "compress_method": label,
        "compress_config": {"method": label} | ({"algorithm": "exchange"} if label == "exchange" else {}),
        "optimizer": "adamw",
        "steps": STEPS,
        "measured_steps": MEASURED,
        "algorithm": algorithm,
        "step_time_ms_p50": (median := 1e3 * (COMPUTE * math.exp(draw.normal(0, noise)) + codec + comm)),
        "step_time_ms_mean": 1.03 * median,
        "compute_time_ms": 1e3 * COMPUTE,
        "compress_time_ms": 1e3 * encode or None,
        "decompress_time_ms": 1e3 * decode or None,
        "comm_time_ms_total": 1e3 * MEASURED * comm,
        "comm_ratio": 1e3 * comm / median,
        "transfer_time_ms": 900 * comm,  # the rest is waiting
        "comm_time_ms_by_op": {name: 1e3 * MEASURED * each for name, each in by_op.items()},
        "exposed_comm_ms": 1e3 * comm,
        "bytes_raw_total": raw,
        "bytes_compressed_total": sent,
        "bytes_agreement_total": 0,
        "bytes_parameters_raw_total": parameters,
        "bytes_parameters_total": parameters,
        "bytes_interface_total": round(wire) if link != "none" else None,
        "bytes_source": "metered" if algorithm else "closed_form",
        "compression_ratio": raw / sent,
        "compression_ratio_steady": raw / sent,
        "mem_peak_alloc_gb": 0.5,
    }
    run = Run(strategy, label, 2, link, seed)
    return Result(run_name=run.path, status="ok", **run._asdict(), **values | fields)


def islands_row(label, link, op="all_gather"):
    """A run's row of hsdp at 2 x 2; the parameters are gathered twice, and `op` carries what is encoded."""
    smaller, _, _, encode, decode = LABELS[label]
    rate = RATES[link.removeprefix("between-")]
    between, inside = (rate / 2, math.inf) if link.startswith("between") else (rate, rate)
    size = 4 * PARAMETERS
    raw, scattered, gathered = size / 2, size / 2, size  # of each rank: one shard of two, to and from a peer
    op = "all_reduce" if label == "none" else op
    times = {op: ALPHA[op], "reduce_scatter": ALPHA["reduce_scatter"], "all_gather": ALPHA["all_gather"]}
    sending = ((op, raw / smaller, between), ("reduce_scatter", scattered, inside), ("all_gather", gathered, inside))
    for name, sent, limit in sending:
        times[name] += sent * math.hypot(HOST[name], 8 * FACTOR[name] / limit)
    total, comm = 4 * STEPS, sum(times.values())
    return row("fsdp2", label, "none").model_copy(
        update={
            "strategy": "hsdp",
            "run_name": Run("hsdp", label, 4, link, 0, 2).path,
            "world_size": 4,
            "islands": 2,
            "link": link,
            "algorithm": None if label == "none" else "gather" if op == "all_gather" else "exchange",
            "compress_config": {"method": label, **({"algorithm": "exchange"} if op == "all_to_all" else {})},
            "bytes_source": "closed_form" if label == "none" else "metered",
            "bytes_by_op": None if label == "none" else {op: round(total * raw / smaller)},
            "bytes_between_raw_total": round(total * raw),
            "bytes_inside_total": round(total * (scattered + gathered)),
            "bytes_parameters_total": round(total * gathered),
            "compression_ratio_between": smaller,
            "comm_time_ms_by_op": {name: 1e3 * MEASURED * each for name, each in times.items()},
            "comm_time_ms_total": 1e3 * MEASURED * comm,
            "comm_ratio": comm / (COMPUTE + encode + decode + comm),
            "exposed_comm_ms": 1e3 * comm,
            "step_time_ms_p50": 1e3 * (COMPUTE + encode + decode + comm),
        }
    )


def experiment(strategies=("ddp", "fsdp2"), links=("none", "1gbit", "100mbit"), noise=0.0, **fields):
    """The rows of every label."""
    return [
        row(strategy, label, link, noise=noise, **fields)
        for strategy in strategies
        for label in LABELS
        for link in links
    ]
