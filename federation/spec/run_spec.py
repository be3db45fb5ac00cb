"""RunSpec: the typed, validated description of a run, written as TOML.

    name = "digits"
    task = "digits"
    rounds = 30

    [algorithm]
    name = "fedmgda+"
    epsilon = 0.1

Every key is optional but `name`, `task` and `rounds`. An unknown or wrong key is refused with its path.
"""

import tomllib
from typing import Any, Literal

from pydantic import Field, ValidationError

from federation.errors import Error
from federation.spec.client_sections import SelectionSpec, SimulationSpec
from federation.spec.problems import Section, explain
from federation.spec.run_sections import (
    IDENTIFIER,
    TASK,
    AlgorithmSpec,
    EvaluateSpec,
    JacobianSpec,
    LimitsSpec,
    ObjectivesSpec,
    ParametersSpec,
    PrivacySpec,
    ServerSpec,
    Split,
    StopSpec,
)
from federation.spec.train_section import TrainSpec
from federation.text_files import decoded, unmarked

_KEYS = "see `fedpareto admin submit --explain` for the keys that exist"
MAX_LINE = 1000
MAX_PROBLEMS = 20


class SpecError(Error, ValueError):
    """The run specification cannot be used; the message names each wrong key."""


class RunSpec(Section):
    """A run specification; `RunSpec.parse` reads it from TOML."""

    name: str = Field(
        pattern=IDENTIFIER,
        description="The name of the run: at most 63 lower-case letters, digits, `.` and `-`. The name can be used "
        "again after the run has ended.",
    )
    task: str = Field(
        pattern=f"^{TASK}$",
        description="The [task](research/tasks.md). A worker takes part if its owner has allowed a task of this name.",
    )
    rounds: int = Field(ge=1, le=1_000_000, description="The number of rounds, 1 to 1 000 000.")
    seed: int = Field(
        0,
        ge=0,
        lt=2**63,
        description="The seed of the selection of clients and, together with round and client, of the order of "
        "minibatches.",
    )
    results: Literal["members", "admins"] = Field(
        "members",
        description='Who gets the run\'s models with a command: `"members"` are administrators, and each member with '
        'an accepted reply ([`fedpareto worker model`](member/your-site.md#the-model)); `"admins"` are administrators '
        "alone. This keeps no model secret: members that train or evaluate have it.",
    )
    algorithm: AlgorithmSpec = AlgorithmSpec()
    server: ServerSpec = ServerSpec()
    train: TrainSpec = TrainSpec()
    parameters: ParametersSpec = ParametersSpec()
    objectives: ObjectivesSpec = ObjectivesSpec()
    jacobian: JacobianSpec = JacobianSpec()
    evaluate: EvaluateSpec = EvaluateSpec()
    stop: StopSpec = StopSpec()
    privacy: PrivacySpec = PrivacySpec()
    selection: SelectionSpec = SelectionSpec()
    limits: LimitsSpec = LimitsSpec()
    simulation: SimulationSpec = SimulationSpec()

    @property
    def evaluated(self) -> tuple[Split, ...]:
        """The splits that clients measure after a round, without the training split if its samples are protected."""
        private = self.privacy.sample_noise > 0
        return tuple(split for split in self.evaluate.splits if not (private and split == "train"))

    def evaluates_after(self, number: int, *, conceals: bool) -> bool:
        """True if clients evaluate the model of the round with this number, from 0, if it has a step.

        If noise conceals their replies they are asked for no evaluation: their scores would have no noise. A simulation
        conceals nothing.
        """
        over, every = number + 1, self.evaluate.every
        due = over == self.rounds or (every > 0 and over % every == 0)
        return bool(self.evaluated) and due and not conceals

    @classmethod
    def parse(cls, text: str | bytes) -> "RunSpec":
        """Reads a TOML document.

        Raises:
            SpecError: not TOML (with the line), or keys that are unknown, missing or wrong (each with its path).
        """
        try:
            text = decoded(text) if isinstance(text, bytes) else unmarked(text)
            _check_line_lengths(text)
            document = tomllib.loads(text)
            _check_integers(document)
        except (ValueError, RecursionError) as error:  # TOMLDecodeError, UnicodeDecodeError, an endless number
            raise SpecError(f"not a TOML document: {str(error)[:400]}") from error
        try:
            return cls.model_validate(document)
        except ValidationError as error:
            problems = error.errors()
            more = [f"and {len(problems) - MAX_PROBLEMS} more"] if len(problems) > MAX_PROBLEMS else []
            raise SpecError(
                "\n".join([explain(problem, _KEYS, cls) for problem in problems[:MAX_PROBLEMS]] + more)
            ) from error


def _check_line_lengths(text: str) -> None:
    # The time that tomllib needs grows with the square of the length of a dotted key.
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > MAX_LINE:
            raise ValueError(f"line {number} has {len(line)} characters; at most {MAX_LINE}")


def _check_integers(value: Any) -> None:
    # TOML's integers have 64 bits; Python's have no limit, and cannot be shown beyond some thousand digits.
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("an integer of more than 64 bits")
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_integers(item)
