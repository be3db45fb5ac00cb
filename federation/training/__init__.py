"""Local work at a member: training from a base model, and evaluation. The same assignment gives the same bytes.

On one machine and thread count, the result depends on (base, work, seed, round, client, data) alone: every random
choice comes from a seed derived from these, the optimiser starts afresh, and only deterministic kernels run. So a
worker that died in the middle, or that is asked twice, hands in the same update. Where an operation has no
deterministic kernel, the last digits may differ, and replies say so (see `determinism.Kernels`).
"""

from federation.errors import Error


class TrainingDiverged(Error):
    """A loss or a parameter is no longer finite.

    `step` counts from 1; it is 0 when the base model itself has no finite loss on this data.
    """

    def __init__(self, step: int) -> None:
        super().__init__(
            f"training diverged at step {step}: try a smaller learning rate"
            if step
            else "the model to start from has no finite loss on this data"
        )
        self.step = step


class TrainingStopped(Exception):
    """The caller no longer wants the result."""
