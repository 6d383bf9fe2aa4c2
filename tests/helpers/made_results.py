"""A results folder as a finished experiment leaves it, made up: rows of a known law, curves, profiles, hardware."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import links_rows
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gradwire.base.files import write_json, write_text
from gradwire.bench.config.file import check, read
from gradwire.bench.report.rows.record import Result, csv_text, jsonl
from gradwire.bench.report.tables.quality import PerplexityReference
from gradwire.bench.report.tables.results import Results

ROOT = Path(__file__).parents[2]

WORSE = {
    "none": 0.0,
    "bf16-native": -0.3,
    "exchange": 0.0,
    "int8": 0.4,
    "int4": 0.9,
    "powersgd": 14.0,
}  # percent of perplexity
ENVIRONMENT = {
    "device": "x86_64",
    "processor": "made up",
    "cores": 2,
    "threads": 1,
    "gradwire": "0.1.0",
    "python": "3.11",
}
VALIDATION = {"passed": True, "checks": [{"name": "dim16: row i belongs to id i", "passed": True, "detail": "16 rows"}]}


def row(strategy: str, label: str, world: int, link: str, seed: int, method: str | None = None) -> Result:
    """One run's row; `method` is a label of `links_rows` whose numbers an unknown one has."""
    method = method or label
    draw = np.random.default_rng([seed, world, *f"{strategy}{label}{link}".encode()])
    made = links_rows.row(strategy, method, link, seed=seed, noise=0.02)
    quality = np.random.default_rng([seed, world, *f"{strategy}{label}".encode()])  # the link changes no loss
    ppl = 60.0 * (1 + WORSE[method] / 100) * (1 + 0.01 * seed) * float(np.exp(quality.normal(0, 0.002)))
    name = f"{strategy}/{label}/ws{world}/{link}/seed{seed}"
    step = (made.step_time_ms_mean or 0.0) * float(np.exp(draw.normal(0, 0.01)))
    alone = dict.fromkeys(("compression_ratio", "compression_ratio_steady", "compression_ratio_bf16"))
    return made.model_copy(
        update={
            "run_name": name,
            "compressor": label,
            "world_size": world,
            "environment": {"rank": 0, **ENVIRONMENT, "packages": {"torch": "2.13.0"}},
            "step_time_ms_mean": step,
            "tokens_per_s": 1e6 * world / step,
            "val_ppl": ppl,
            "val_loss": float(np.log(ppl)),
            "unigram_ppl": 600.0,
            "quality_from": "train",
            "bytes_closed_form_total": made.bytes_compressed_total,
            "compression_ratio_bf16": (made.compression_ratio or 0.0) / 2,
            "fallbacks": 1234 * (method == "powersgd"),
            "fallback_fraction": 0.009 if method == "powersgd" else 0.0,
            "nonfinite_steps": 0,
            "loss_digest": f"{strategy}{label}{world}{seed}",
            "meter_agrees": True,
        }
        | (
            {**alone, "bytes_raw_total": 0, "bytes_compressed_total": 0, "bytes_closed_form_total": 0}
            if world == 1
            else {}
        )
    )


def rows(
    labels: Iterable[str] = tuple(WORSE),
    strategies: Sequence[str] = ("ddp", "fsdp2"),
    places: Sequence[tuple[int, str]] = ((2, "none"), (2, "1gbit"), (2, "100mbit")),
    seeds: Sequence[int] = (0, 1, 2),
) -> list[Result]:
    """The rows of a whole grid; `places` are world sizes with links. Labels that are unknown take after known ones."""
    known = list(WORSE)
    return [
        row(strategy, label, world, link, seed, label if label in WORSE else known[i % len(known)])
        for strategy in strategies
        for world, link in places
        for i, label in enumerate(labels)
        for seed in seeds
    ]


def as_read(rows: Sequence[Result], reference: PerplexityReference | None = None, **more: Any) -> Results:
    """An experiment of these rows; perplexities are its own, unless there is a reference."""
    folder = more.pop("results_dir", Path("here"))
    return Results(folder, rows, reference or PerplexityReference.of("here", rows), **more)


def write(folder: Path, results: Sequence[Result], steps: int = 40) -> Path:
    """The folder with all files that the page reads."""
    write_text(folder / "results.jsonl", jsonl(results))
    write_text(folder / "results.csv", csv_text(results))
    write_json(folder / "config.json", {"name": folder.name})
    for result in results:
        if result.status == "ok":
            run = folder / "runs" / result.run_name
            run.mkdir(parents=True, exist_ok=True)
            pq.write_table(curves(result, steps), run / "steps.parquet")
            write_json(run / "profile.json", profile(result))
            for rank in range(result.world_size):
                write_json(run / "environment" / f"rank{rank}.json", {**ENVIRONMENT, "rank": rank})
    ok = next((result for result in results if result.status == "ok"), None)
    if ok is not None:
        write_json(folder / "gradients" / ok.run_name / "validation.json", VALIDATION)
    return folder


def committed(folder: Path, name: str) -> Path:
    """A folder with the committed records of an experiment, as the documentation's example reports have it."""
    mapping = read(ROOT / ("config.yaml" if name == "default" else f"configs/{name}.yaml"))
    experiment = check(mapping)
    folder.mkdir()
    shutil.copy(ROOT / "benchmarks" / f"{name}.jsonl", folder / "results.jsonl")
    write_json(folder / "config.json", mapping)
    asked = [{**run._asdict(), "excluded": None, "shared": not experiment.timed} for run in experiment.asked()]
    write_json(folder / "expected.json", asked)
    return folder


def curves(result: Result, steps: int) -> pa.Table:
    """Its ``steps.parquet``, as far as the page reads it; gradients are sampled at every eighth step."""
    draw = np.random.default_rng(result.seed)
    step = np.repeat(np.arange(steps), result.world_size)
    loss = (
        4
        + 3 * np.exp(-step / steps * 4)
        + 0.02 * result.seed
        + np.repeat(draw.normal(0, 0.05, steps), result.world_size)
    )
    sampled = np.where(step % 8 == 7, 1.0, np.nan)
    feedback = np.nan if result.compressor in ("none", "bf16-native") else 1.0
    return pa.table(
        {
            "step": step,
            "rank": np.tile(np.arange(result.world_size, dtype=np.int32), steps),
            "step_ms": np.full(len(step), result.step_time_ms_mean),
            "loss": loss,
            "val_loss": sampled * loss,
            "grad_rel_error": sampled * feedback * 0.01,
            "residual_norm": sampled * feedback * (0.5 + step / steps),
        }
    )


def profile(result: Result) -> dict[str, float | int]:
    """Its ``profile.json``, as far as the page reads it."""
    compute, exposed = result.compute_time_ms or 0.0, result.exposed_comm_ms or 0.0
    encode, decode = result.compress_time_ms or 0.0, result.decompress_time_ms or 0.0
    return {
        "steps": 3,
        "compute_ms_per_step": compute,
        "overlap_ms_per_step": 0.2 * compute,
        "exposed_comm_ms": exposed,
        "encode_ms_per_step": encode,
        "decode_ms_per_step": decode,
        "parameter_codec_ms_per_step": 0.0,
        "idle_ms_per_step": 5.0,
    }
