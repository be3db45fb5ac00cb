"""How local work ends without a result."""


class TrainingDiverged(Exception):
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
