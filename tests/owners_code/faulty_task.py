"""Digits at a site where something goes wrong while it computes: what, is read from the file `fault` in its data."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from federation.tasks import DataSource, Pool
from federation.tasks.digits import Digits

SLOW_SECONDS = 1.0  # of each step


class Faulty(Digits):
    """Digits; `fault` holds "nan", "memory", "slow", or nothing for a healthy site."""

    fault: Path | None = None

    def pool(self, source: DataSource) -> Pool:
        if source.directory is not None:
            self.fault = source.directory / "fault"
        return super().pool(replace(source, directory=None))

    def losses(self, output: Any, y: torch.Tensor) -> dict[str, torch.Tensor]:
        found = super().losses(output, y)
        fault = self.fault.read_text() if self.fault is not None and self.fault.exists() else ""
        if fault == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        if not output.requires_grad:  # an evaluation
            return found
        if fault == "nan":
            return {name: loss * float("nan") for name, loss in found.items()}
        if fault == "slow":
            time.sleep(SLOW_SECONDS)  # the fault itself: every step is slow
        return found
