"""Records that a row keeps as JSON: what a run remembers between rounds, and what a round knew of its objectives."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from federation.digests import digest

AVERAGE = "average"  # the vector that is the mean of all models so far


def canonical(value: Any) -> str:
    """JSON in its one canonical spelling, from which digests are made."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


@dataclass(frozen=True, kw_only=True)
class RunMemory:
    """What a run remembers after a step; empty before the first.

    Attributes:
        rule: what the algorithm keeps.
        vectors: the digests of vectors of the model's size by name: the optimiser's, and "average", the mean of models.
        averaged: of how many models that mean is; None where none is kept.
        blobs: every digest that the others name.
    """

    rule: Mapping[str, Any] = field(default_factory=dict)
    vectors: Mapping[str, str] = field(default_factory=dict)
    averaged: int | None = None
    blobs: tuple[str, ...] = ()

    @classmethod
    def decode(cls, data: Mapping[str, Any]) -> "RunMemory":
        """From the column of a run."""
        return cls(
            rule=data.get("rule", {}),
            vectors=data.get("vectors", {}),
            averaged=data.get("averaged"),
            blobs=tuple(data.get("blobs", ())),
        )

    def encode(self) -> dict[str, Any]:
        """For the column of a run."""
        data = {**asdict(self), "blobs": list(self.blobs)}
        return {name: value for name, value in data.items() if value is not None}

    def deployed(self, model: str) -> str:
        """The digest of the model that is evaluated and deployed: the mean of all models, or the current `model`."""
        return self.vectors.get(AVERAGE, model)


def memory_digest(data: Mapping[str, Any]) -> str:
    """The digest of the column of a run, as signed steps name it."""
    return digest(canonical(data).encode())


@dataclass(frozen=True, kw_only=True)
class ObjectivesRecord:
    """What a round of a run with several objectives knew of them.

    Attributes:
        names: of the task's objectives, in its order.
        clients: how many counted for each.
        losses: of the base model, means over the clients that serve each.
        weights: lambda of each objective that was weighed.
        mode: how the weights were found; empty where the rule does not weigh objectives.
        left_out: the reason, by objective that was left out.
        notes: what an operator should know.
        cosines: of the objectives that have weights, row after row; None where the rule did not compare them.
    """

    names: tuple[str, ...]
    clients: Mapping[str, int]
    losses: Mapping[str, float]
    weights: Mapping[str, float] = field(default_factory=dict)
    mode: str = ""
    left_out: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    cosines: list[list[float]] | None = None

    @classmethod
    def decode(cls, data: Mapping[str, Any]) -> "ObjectivesRecord | None":
        """From the column of a round; None for a run with one objective."""
        if not data:
            return None
        return cls(**{**data, "names": tuple(data["names"]), "notes": tuple(data["notes"])})

    def encode(self) -> dict[str, Any]:
        """For the column of a round."""
        return {**asdict(self), "names": list(self.names), "notes": list(self.notes)}
