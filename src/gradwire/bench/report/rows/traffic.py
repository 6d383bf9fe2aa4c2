"""Bytes that one run sent by each collective, from its row."""

from __future__ import annotations

from gradwire.bench.report.rows.record import Result

CARRIERS = {"exchange": "all_to_all", "gather": "all_gather"}  # else the framework's own collective, or torch's


def hooked(row: Result) -> bool:
    """Whether a reducer averaged the gradients, not the framework."""
    return row.bytes_source == "metered"


def sharded(row: Result) -> bool:
    """Whether the strategy shards the model: only then are there bytes of parameters, which replicas do not gather."""
    return row.bytes_parameters_raw_total is not None


def as_computed(row: Result) -> bool | None:
    """Whether the measured gradient bytes equal the closed form; None if not measured.

    A reducer's messages are counted in all steps, the framework's in the traces of the profiled steps.
    """
    measured = row.bytes_compressed_total if hooked(row) else row.bytes_traced_total
    if row.world_size == 1 or measured is None or row.bytes_closed_form_total is None:
        return None
    return measured == row.bytes_closed_form_total


def gradient_op(row: Result) -> str:
    """The collective that carries the gradients, or most of them."""
    if row.bytes_by_op:
        return max(row.bytes_by_op, key=lambda op: (row.bytes_by_op or {})[op])
    native = "reduce_scatter" if sharded(row) else "all_reduce"
    return CARRIERS.get(row.algorithm or "", native) if hooked(row) else native


def parameter_op(row: Result) -> str:
    """The collective that gathers FSDP's parameters."""
    compressed = (row.compress_config or {}).get("param_compress", "none") != "none"
    return "all_to_all" if compressed else "all_gather"


def carriers(row: Result) -> list[str]:
    """The collectives of the gradients, then that of the parameters."""
    return [*(row.bytes_by_op or [gradient_op(row)]), *([parameter_op(row)] if row.bytes_parameters_total else [])]


def counted(row: Result) -> int:
    """Counted bytes of all ranks: gradients, the flag of each step, parameters."""
    return sum((row.bytes_compressed_total or 0, row.bytes_agreement_total or 0, row.bytes_parameters_total or 0))


def sent_by_op(row: Result) -> dict[str, int]:
    """The counted bytes by collective."""
    gradients = row.bytes_by_op or {gradient_op(row): row.bytes_compressed_total or 0}
    parts = [
        *gradients.items(),
        ("all_reduce", row.bytes_agreement_total),
        (parameter_op(row), row.bytes_parameters_total),
    ]
    found: dict[str, int] = {}
    for op, sent in parts:
        if sent:
            found[op] = found.get(op, 0) + sent
    return found
