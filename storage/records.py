"""Records that a row keeps as JSON: a run's memory between rounds, and a round's facts about its objectives."""

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
    """The state that a run keeps after a step; empty before the first."""

    rule: Mapping[str, Any] = field(default_factory=dict)  # the state of the algorithm
    vectors: Mapping[str, str] = field(default_factory=dict)  # digests, by name: the optimiser's, and AVERAGE
    averaged: int | None = None  # the number of models in the mean; None if no mean is kept
    blobs: tuple[str, ...] = ()  # every digest that the others name

    @classmethod
    def decode(cls, data: Mapping[str, Any]) -> "RunMemory":
        """Reads the column of a run."""
        return cls(
            rule=data.get("rule", {}),
            vectors=data.get("vectors", {}),
            averaged=data.get("averaged"),
            blobs=tuple(data.get("blobs", ())),
        )

    def encode(self) -> dict[str, Any]:
        """The value for the column of a run."""
        data = {**asdict(self), "blobs": list(self.blobs)}
        return {name: value for name, value in data.items() if value is not None}

    def deployed(self, model: str) -> str:
        """The digest of the model that is evaluated and deployed: the mean of all models, or the current `model`."""
        return self.vectors.get(AVERAGE, model)


@dataclass(frozen=True, kw_only=True)
class VoidRecord:
    """An attempt at a round that was voided."""

    attempt: int
    reason: str
    named: Mapping[str, str] = field(default_factory=dict)  # members that must have cheated, and why
    blind: bool = False  # True if a check failed that names no member
    paused: bool = False  # True if the run was paused, and then resumed with the next attempt


@dataclass(frozen=True, kw_only=True)
class ConversationFacts:
    """What the phases of a conversation build on, as it was at the first of them: the pool may change meanwhile.

    Attributes:
        clients: that may be asked, by name: the training samples and the objectives that each offered.
        keys: the id of each member's signing key, hexadecimal, by name; empty in a run without private rounds.
    """

    clients: Mapping[str, tuple[int, tuple[str, ...]]]
    keys: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def decode(cls, data: Mapping[str, Any]) -> "ConversationFacts | None":
        """Reads the column of a phase; None if it is not the first of its conversation."""
        if not data:
            return None
        clients = {name: (samples, tuple(objectives)) for name, (samples, objectives) in data["clients"].items()}
        return cls(clients=clients, keys=data["keys"])

    def encode(self) -> dict[str, Any]:
        """The value for the column of a phase."""
        return asdict(self)


def memory_digest(data: Mapping[str, Any]) -> str:
    """The digest of the column of a run, as signed steps name it."""
    return digest(canonical(data).encode())


@dataclass(frozen=True, kw_only=True)
class ObjectivesRecord:
    """The facts of a round about the objectives of its run."""

    names: tuple[str, ...]  # of the task's objectives, in its order
    clients: Mapping[str, int]  # the number of clients that count for each
    losses: Mapping[str, float]  # of the base model, means over the clients that serve each
    weights: Mapping[str, float] = field(default_factory=dict)  # lambda of each objective that was weighed
    mode: str = ""  # the method that found the weights; empty if the rule does not weigh objectives
    left_out: Mapping[str, str] = field(default_factory=dict)  # the reason, by objective that was left out
    notes: tuple[str, ...] = ()  # for the operator
    cosines: list[list[float]] | None = None  # of the weighed objectives

    @classmethod
    def decode(cls, data: Mapping[str, Any]) -> "ObjectivesRecord | None":
        """Reads the column of a round; None for a run with one objective."""
        if not data:
            return None
        return cls(**{**data, "names": tuple(data["names"]), "notes": tuple(data["notes"])})

    def encode(self) -> dict[str, Any]:
        """The value for the column of a round."""
        return {**asdict(self), "names": list(self.names), "notes": list(self.notes)}
