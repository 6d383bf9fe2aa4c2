"""Wall times of a step and its phases."""

from __future__ import annotations

import time

import torch

from gradwire.bench.training.outcome import Row


class Clock:
    """Times of one step in milliseconds. Phases are timed on CPU only: on CUDA they would need a synchronization.

    A step ends by reading a number from the device, so its wall time is correct on every device.
    """

    def __init__(self, device: torch.device) -> None:
        self._phases = device.type == "cpu"
        self._origin = time.perf_counter()
        self.times: Row = {}
        self.started_s = 0.0

    def start(self) -> None:
        """Start a step."""
        self._started = self._last = time.perf_counter()
        self.started_s = self._started - self._origin
        self.times = dict.fromkeys(("data_ms", "forward_ms", "backward_ms", "optimizer_ms"))

    def lap(self, phase: str) -> None:
        """Add the time since the last lap to ``phase``."""
        now = time.perf_counter()
        if self._phases:
            self.times[phase] = (self.times[phase] or 0.0) + 1000 * (now - self._last)
        self._last = now

    def stop(self) -> None:
        """End the step and record ``step_ms``."""
        self.times["step_ms"] = 1000 * (time.perf_counter() - self._started)
