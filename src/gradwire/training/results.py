"""Files of a finished run: ``steps.parquet``, ``environment/``, ``final_model/`` and ``record.json``.

The record is written last, so its presence means that all other files are complete.
"""

from __future__ import annotations

import math
from collections import Counter
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import nn

from gradwire import parallel
from gradwire.collectives import ops
from gradwire.collectives.world import World
from gradwire.config import SCHEMA_VERSION, Run
from gradwire.data.shards import Shards
from gradwire.files import digest, write_json, write_with
from gradwire.models import folder as model_folder
from gradwire.training import link
from gradwire.training.environment import environment, same_machine
from gradwire.training.loop import COUNTED, Outcome, Row
from gradwire.training.privacy import ADJACENCY
from gradwire.training.sampling import COLUMNS
from gradwire.training.settings import Settings

STEPS = pa.schema(
    [
        ("step", pa.int64()),
        ("rank", pa.int32()),
        *((name, pa.float64()) for name in ("t_start_s", "step_ms", "data_ms", "forward_ms", "backward_ms")),
        *((name, pa.float64()) for name in ("comm_ms", "exposed_ms", "encode_ms", "decode_ms", "optimizer_ms")),
        ("tokens", pa.int64()),
        *((name, pa.float64()) for name in ("loss", "lr", "grad_norm")),
        *((name, pa.bool_()) for name in ("clipped", "nonfinite")),
        *((name, pa.int64()) for name in ("bytes_raw", "bytes_sent", "bytes_index")),
        *((name, pa.float64()) for name in ("residual_norm", "grad_rel_error", "grad_rel_error_linf", "grad_cos_sim")),
        *((name, pa.bool_()) for name in ("warmup", "profiled")),
        ("val_loss", pa.float64()),
        *((name, pa.float64()) for name in ("clipped_fraction", "sample_norm_mean", "epsilon", "around_ms")),
    ]
)


def write(
    settings: Settings,
    identity: str,
    splits: tuple[Shards, Shards],
    world: World,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    outcome: Outcome,
) -> Row | None:
    """Gather the ranks' measurements and write the run's files; a collective operation.

    Returns:
        The record on rank 0, which writes the shared files; None on other ranks.
    """
    folder = settings.output_dir
    here = environment(world)
    write_json(folder / "environment" / f"rank{world.rank}.json", here)
    (folder / "profiler").mkdir(parents=True, exist_ok=True)
    allocated, reserved = outcome.memory.gb()
    own = {"rows": outcome.rows, "allocated": allocated, "reserved": reserved, "residual": outcome.residual_bytes}
    own["environment"] = here
    ranks = ops.gather_objects(own)
    state, moments = parallel.full_state_dict(model), parallel.full_optimizer_state(model, optimizer)
    if world.rank != 0:
        return None
    rows = [row for rank in ranks for row in rank["rows"]]
    run = Run(settings.strategy, settings.cell.label, world.world_size, link.link(), settings.seed)
    write_steps(folder, rows)
    model_folder.save(
        state,
        outcome.config,
        splits[0].folder.parent.parent / "tokenizer",
        folder / "final_model",
        {"run": run.path, "identity": identity},
        moments,
    )
    record = {
        "schema_version": SCHEMA_VERSION,
        "run_name": run.path,
        "identity": identity,
        "compressor": settings.cell.label,
        "strategy": settings.strategy,
        "backend": world.backend,
        "link": run.link,
        "device": world.device.type,
        "status": "diverged" if outcome.diverged else "ok",
        "reason": outcome.diverged,
        "environment": here | {"same_machine": same_machine([rank["environment"] for rank in ranks])},
        "world_size": world.world_size,
        "model": settings.model,
        "architecture": outcome.config.model_type,
        "parameters": outcome.numel,
        "dataset": splits[0].meta["dataset"],
        "max_length": splits[0].meta["max_length"],
        "precision": settings.training.precision,
        "gradient_dtype": gradient_dtype(model),
        "evaluation_precision": "fp32",
        "batch_size": settings.training.batch_size,
        "compress_method": settings.cell.method,
        "compress_config": settings.cell.flat(),
        "optimizer": settings.cell.communication.optimizer,
        "steps": settings.training.steps,
        "seed": settings.seed,
        "unigram_ppl": splits[1].meta["unigram_ppl"],
        **times(rows),
        **traffic(settings, world, outcome, rows),
        **parameter_traffic(settings, outcome, rows),
        "bytes_interface_total": interface_traffic(rows),
        **codec(settings, rows),
        **compression_error(outcome),
        **quality(outcome),
        "mem_peak_alloc_gb": max(rank["allocated"] for rank in ranks),
        "mem_peak_reserved_gb": None if reserved is None else max(rank["reserved"] for rank in ranks),
        "mem_residual_gb": None if outcome.residual_bytes is None else max(rank["residual"] for rank in ranks) / 1e9,
        "algorithm": outcome.algorithm,
        "nonfinite_steps": sum(row["nonfinite"] for row in outcome.rows),
        "clipped_steps": sum(row["clipped"] for row in outcome.rows),
        **private(settings, outcome),
    }
    write_json(folder / "record.json", record)
    return record


def gradient_dtype(model: nn.Module) -> str:
    """The type of the gradients that are reduced, that of their parameters, such as ``float32``."""
    types = {str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters() if parameter.requires_grad}
    return ", ".join(sorted(types))


def summary(record: Row) -> str:
    """Summarize a record in one line."""
    if record["status"] == "diverged":
        return f"{record['run_name']}: diverged ({record['reason']})"
    ratio = "nothing sent" if record["compression_ratio"] is None else f"ratio {record['compression_ratio']:.3f}"
    quality = "not evaluated" if record["val_ppl"] is None else f"val ppl {record['val_ppl']:.2f}"
    step = "no step timed" if record["step_time_ms_mean"] is None else f"{record['step_time_ms_mean']:.1f} ms/step"
    return f"{record['run_name']}: {quality}, {ratio}, {step}"


def times(rows: list[Row]) -> Row:
    """Statistics of step times, without warm-up and profiled steps; a step's time is its slowest rank's."""
    slowest: dict[int, float] = {}
    tokens: dict[int, int] = {}
    for row in rows:
        if not row["warmup"] and not row["profiled"]:
            slowest[row["step"]] = max(slowest.get(row["step"], 0.0), row["step_ms"])
            tokens[row["step"]] = tokens.get(row["step"], 0) + row["tokens"]
    measured = np.array(list(slowest.values()))
    if not measured.size:
        fields = ("step_time_ms_mean", "step_time_ms_p50", "step_time_ms_p90", "step_time_ms_p95", "tokens_per_s")
        return dict.fromkeys(fields) | {"measured_steps": 0}
    p50, p90, p95 = np.percentile(measured, (50, 90, 95))
    return {
        "measured_steps": len(measured),
        "step_time_ms_mean": float(measured.mean()),
        "step_time_ms_p50": float(p50),
        "step_time_ms_p90": float(p90),
        "step_time_ms_p95": float(p95),
        "tokens_per_s": float(sum(tokens.values()) / (measured.sum() / 1000)),
    }


def traffic(settings: Settings, world: World, outcome: Outcome, rows: list[Row]) -> Row:
    """Bytes of gradient reduction over all ranks and optimizer steps, warm-up included.

    Raw bytes are those of a bandwidth-optimal float32 collective of the same kind; sent bytes are those passed to
    collectives. Without a reducer both are closed forms, and sent includes the framework's padding; `trace` measures
    the profiled steps.

    Args:
        settings: The run.
        world: The process group.
        outcome: Rank 0's measurements.
        rows: All ranks' rows.
    """
    if settings.cell.hooked:
        raw, sent, agreement = (sum(row[f"bytes_{what}"] for row in rows) for what in ("raw", "sent", "agreement"))
        steps = [row["bytes_closed_form"] for row in outcome.rows]
        closed, source = None if None in steps else sum(steps), "metered"
        steady = ratio([row for row in rows if row["step"] >= outcome.dense_steps])
    else:
        raw, sent = (
            len(outcome.rows) * parallel.traffic_unhooked(numel, settings.strategy, world.world_size)
            for numel in (outcome.numel, outcome.reduced_numel)
        )
        agreement, source, closed = 0, "closed_form", sent
        steady = raw / sent if sent else None
    index = sum(row["bytes_index"] for row in rows) if settings.cell.hooked else None
    overall = raw / sent if sent else None
    return {
        "bytes_raw_total": raw,
        "bytes_compressed_total": sent,
        "bytes_closed_form_total": closed,
        "bytes_agreement_total": agreement,
        "index_bytes": index,
        "index_share": index / sent if index is not None and sent else None,
        "bytes_by_op": by_op(rows) if settings.cell.hooked else None,
        "bytes_source": source,
        "compression_ratio": overall,
        "compression_ratio_steady": steady,
        "compression_ratio_bf16": None if overall is None else overall / 2,
    }


def codec(settings: Settings, rows: list[Row]) -> Row:
    """Codec statistics of the reducer; all null without a reducer and at world size 1.

    ``extra_collectives`` counts one rank's over the whole run; their time is per measured step, averaged over ranks.
    ``density`` covers what sparsifiers encoded on all ranks, in both phases. ``residual_norm`` is the root mean square
    over ranks at the last step. ``fallbacks`` counts encodings on all ranks; ``fallback_fraction`` is their share of
    the elements passed to the compressor, null if there were none.

    Args:
        settings: The run.
        rows: All ranks' rows.
    """
    fields = (
        *("extra_collectives", "extra_collective_time_ms", "padding_bytes", "density", "sparsity", "residual_norm"),
        *("exempt_fraction", "fallbacks", "fallback_fraction"),
    )
    if not settings.cell.hooked or not sum(row["bytes_raw"] for row in rows):
        return dict.fromkeys(fields)
    times = [row["extra_ms"] for row in rows if not row["warmup"] and not row["profiled"]]
    total = {name: sum(row[name] for row in rows) for name in COUNTED}
    chosen, among, encoded = (total[f"{which}_elements"] for which in ("chosen", "sparse", "encoded"))
    norms = [row["residual_norm"] for row in rows if row["step"] == rows[-1]["step"]]
    values = (
        sum(row["extra_collectives"] for row in rows if row["rank"] == 0),
        fmean(times) if times and None not in times else None,
        sum(row["bytes_padding"] for row in rows),
        chosen / among if among else None,
        1 - chosen / among if among else None,
        None if None in norms else math.sqrt(fmean(norm * norm for norm in norms)),
        total["exempt_elements"] / total["elements"],
        total["fallbacks"],
        total["fallback_elements"] / encoded if encoded else None,
    )
    return dict(zip(fields, values, strict=True))


def compression_error(outcome: Outcome) -> Row:
    """Means over the sampled steps after the dense ones; null if no step was sampled."""
    steady = [row for row in outcome.rows if row["step"] >= outcome.dense_steps]
    found = {name: [row[name] for row in steady if row[name] is not None] for name in COLUMNS}
    return {name: fmean(values) if values else None for name, values in found.items()}


def private(settings: Settings, outcome: Outcome) -> Row:
    """The privacy budget spent; all null without private training, and ε null without a guarantee.

    ``noise_multiplier`` is that of the sum over ranks; ε is computed from ``noise_multiplier_accounted``. The step in
    which a run diverged has no row but counts, because it may have changed the weights.
    """
    fields = (
        "epsilon",
        "delta",
        "noise_multiplier",
        "noise_multiplier_accounted",
        "clipped_fraction",
        "sampling",
        "adjacency",
        "accountant",
    )
    training, guarantee = settings.training, outcome.guarantee
    if guarantee is None:
        return dict.fromkeys(fields)
    samples, clipped = (sum(row[name] for row in outcome.rows) for name in ("samples", "clipped_samples"))
    values = (
        guarantee.epsilon(len(outcome.rows) + (outcome.diverged is not None)),
        guarantee.delta,
        training.dp_noise_multiplier,
        guarantee.multiplier,
        clipped / samples if samples else None,
        training.dp_sampling,
        ADJACENCY,
        guarantee.accountant,
    )
    return dict(zip(fields, values, strict=True))


def by_op(rows: list[Row]) -> dict[str, int]:
    """Bytes of gradient reduction per collective."""
    total: Counter[str] = Counter()
    for row in rows:
        total.update(row["bytes_by_op"])
    return dict(total)


def parameter_traffic(settings: Settings, outcome: Outcome, rows: list[Row]) -> Row:
    """Bytes of FSDP's parameter all-gathers over all ranks and optimizer steps, in float32 and as sent.

    The framework's own gathers are float32, in closed form. Replicas gather nothing, so both are null.
    """
    each = [row["bytes_parameters_raw"] for row in outcome.rows]  # over all ranks
    raw = None if None in each else sum(each)
    counted = settings.cell.param_compress != "none"
    return {
        "bytes_parameters_raw_total": raw,
        "bytes_parameters_total": sum(row["bytes_parameters"] for row in rows) if counted else raw,
    }


def interface_traffic(rows: list[Row]) -> int | None:
    """Bytes that the ranks' own interfaces transmitted in all optimizer steps; None if ranks share an interface."""
    each = [row["bytes_interface"] for row in rows]
    return None if not each or None in each else sum(each)


def ratio(rows: list[Row]) -> float | None:
    """Float32 bytes over bytes sent in ``rows``; None if nothing was sent."""
    sent = sum(row["bytes_sent"] for row in rows)
    return sum(row["bytes_raw"] for row in rows) / sent if sent else None


def quality(outcome: Outcome) -> Row:
    """Losses of the last step and evaluation, null for a diverged run, and a digest of all steps' losses."""
    last = outcome.rows[-1]["loss"] if outcome.rows else None
    return {
        "train_loss": None if outcome.diverged else last,
        "val_loss": outcome.quality.loss if outcome.quality else None,
        "val_ppl": outcome.quality.ppl if outcome.quality else None,
        "quality_from": "train" if outcome.quality else None,
        "loss_digest": digest([row["loss"] for row in outcome.rows]),
    }


def write_steps(folder: Any, rows: list[Row]) -> None:
    """Write ``steps.parquet``: one row per step and rank, with null for columns that were not measured."""
    complete = [{name: row.get(name) for name in STEPS.names} for row in rows]
    table = pa.Table.from_pylist(complete, schema=STEPS)
    write_with(folder / "steps.parquet", lambda part: pq.write_table(table, part))
