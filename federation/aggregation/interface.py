"""The input and the answers of rules and stages: the whole interface between K and an algorithm."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from federation.arrays import Numbers, vector
from federation.errors import ArgumentError, Error

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]

UNREAD: Matrix = np.empty((0, 0))  # in place of a K that is not known, or not read

LOCAL_RATE = 0.1  # the default of train.learning_rate, where no run gives the clients' rate


class HyperparameterError(Error, ValueError):
    """An algorithm, or a hyper-parameter of one, that does not exist or cannot have this value."""


class TooFewUpdatesError(Error, ValueError):
    """Fewer updates arrived than a rule needs; the message has the number that it needs."""


def check_updates(m: int, least: int, rule: str) -> None:
    """Raises TooFewUpdatesError where m is less than `least`; `rule` names the rule or stage, with its setting."""
    if m < least:
        raise TooFewUpdatesError(f"{rule} needs at least {least} updates; there are {m}")


class Reads(IntEnum):
    """What a rule or a stage reads of the updates, besides the numbers that come with them; each includes the last."""

    NOTHING = 0
    NORMS = 1  # their lengths
    GRAM = 2  # K, their products with each other: m^2 d multiplications

    @classmethod
    def of(cls, kind: type, method: str) -> "Reads":
        """What a class says that it reads: K if it has this method itself and says nothing.

        Raises:
            ValueError: its `reads` is none of these.
        """
        own = vars(kind)
        said: Any = cls.GRAM if method in own and "reads" not in own else getattr(kind, "reads", cls.GRAM)
        if not isinstance(said, cls):
            names = ", ".join(f"Reads.{item.name}" for item in cls)
            raise ArgumentError(f"{kind.__name__}.reads must be one of {names}; got {said!r}")
        return said


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The input of a rule: the Gram matrix of the m rows of U, and numbers for each row. Nothing can be written into.

    Attributes:
        gram: K = U U^T, shape (m, m); (0, 0) where it is not known, or not read.
        squares: ||u_i||^2, shape (m,): the diagonal of K, where K is known; (0,) where they are not known, or not read.
        prior: lambda0, shape (m,): the weights of plain averaging, not negative, sum 1.
        samples: training samples of each row's client, shape (m,).
        losses: loss of the base model at each row's client, shape (m,); None unless every client reported one.
        accuracies: accuracy of the base model on each row's client's training split, shape (m,); None unless every
            client reported one.
        clients: the name of each row's client, for rules with a memory of each client; or empty.
        ages: rounds since each row was sent, shape (m,); None when all are of this round. Rows of earlier rounds come
            last, and their prior is 0; only K is read of them.
        round: t, from 0.
        rounds: T, the rounds of the run.
        local_rate: eta_l, the clients' learning rate.
        state: the algorithm's state after the last step; empty before the first.
        cap: the largest weight, in a private round; None where only the rule bounds it.

    Raises:
        ValueError: shapes that do not fit, values that are not finite, a prior that is no distribution.
    """

    gram: Matrix
    prior: Vector
    samples: Vector
    squares: Vector = field(default_factory=lambda: np.empty(0))
    losses: Vector | None = None
    accuracies: Vector | None = None
    clients: tuple[str, ...] = ()
    ages: NDArray[np.int64] | None = None
    round: int = 0
    rounds: int = 1
    local_rate: float = LOCAL_RATE
    state: Mapping[str, Any] = field(default_factory=dict)
    cap: float | None = None

    def __post_init__(self) -> None:
        m = len(self.prior)
        if m == 0:
            raise ArgumentError("there is nothing to combine: no rows")
        if self.gram.shape not in {(m, m), (0, 0)}:
            raise ArgumentError(f"K has shape {self.gram.shape}; {m} rows need {(m, m)}")
        if self.gram.size:
            object.__setattr__(self, "squares", np.diagonal(self.gram))
        if self.squares.shape not in {(m,), (0,)}:
            raise ArgumentError(f"squares has shape {self.squares.shape}; {m} rows need {(m,)}")
        for name in ("prior", "samples", "losses", "accuracies", "ages"):
            values = getattr(self, name)
            if values is not None and values.shape != (m,):
                raise ArgumentError(f"{name} has shape {values.shape}; {m} rows need {(m,)}")
            if values is not None and not np.isfinite(values).all():
                raise ArgumentError(f"{name} must be finite")
        if not (np.isfinite(self.gram).all() and np.isfinite(self.squares).all()):
            raise ArgumentError("K must be finite: leave out updates that are not, or are too large to be squared")
        if (self.prior < 0).any() or abs(self.prior.sum() - 1) > 1e-9:
            raise ArgumentError(f"the prior must be a distribution; it sums to {self.prior.sum():g}")
        if self.clients and (len(self.clients) != m or len(set(self.clients)) != m):
            raise ArgumentError(
                f"clients must be {m} different names, one for each row; got {list(self.clients)}"[:300]
            )
        if self.ages is not None and ((self.ages < 0).any() or (self.ages[: self.current] > 0).any()):
            raise ArgumentError(f"ages must not be negative, and rows of earlier rounds come last; got {self.ages}")
        if self.prior[self.current :].any():
            raise ArgumentError("the prior of rows of earlier rounds must be 0")
        for name in ("gram", "squares", "prior", "samples", "losses", "accuracies", "ages"):
            if (values := getattr(self, name)) is not None:
                object.__setattr__(self, name, _read_only(values))
        object.__setattr__(self, "state", MappingProxyType(dict(self.state)))

    @property
    def current(self) -> int:
        """The number of rows of this round, which come first."""
        return len(self.prior) if self.ages is None else int((self.ages == 0).sum())

    @property
    def norms(self) -> Vector:
        """||u_i||, shape (m,).

        Raises:
            ValueError: they are not known, or not read.
        """
        if not self.squares.size:
            raise ArgumentError("the norms of the updates are for a rule that says `reads = Reads.NORMS` or Reads.GRAM")
        return np.sqrt(self.squares)

    def reading(self, reads: Reads) -> "Rows":
        """The rows with no more of the updates than a rule or a stage says that it reads."""
        known = Reads.GRAM if self.gram.size else Reads.NORMS if self.squares.size else Reads.NOTHING
        if reads >= known:
            return self
        return replace(self, gram=UNREAD, squares=np.empty(0) if reads is Reads.NOTHING else self.squares)

    def reported(self, kind: Literal["losses", "accuracies"], rule: str) -> Vector:
        """The losses or accuracies, shape (m,), for a rule that needs them.

        Raises:
            ValueError: they are not known.
        """
        values: Vector | None = getattr(self, kind)
        if values is None:
            raise ArgumentError(f"{rule} needs {kind}, one per row")
        return values

    def names(self, rule: str) -> tuple[str, ...]:
        """The clients, m names, for a rule that needs them.

        Raises:
            ValueError: they are not known.
        """
        if not self.clients:
            raise ArgumentError(f"{rule} needs the names of the clients, one per row")
        return self.clients


def _read_only(values: NDArray[Any]) -> NDArray[Any]:
    """A view of an array that cannot be written into."""
    view = values.view()
    view.flags.writeable = False
    return view


@dataclass(frozen=True)
class Coordinates:
    """A direction that is no combination of the rows: each of its elements is made from that column alone.

    Element k is the mean of column k of `matrix @ U` without its `trim` lowest and its `trim` highest values.

    Attributes:
        matrix: shape (m', m).
        trim: the number of values left out at each end, less than m' / 2; (m' - 1) // 2 leaves the median.
    """

    matrix: Matrix
    trim: int

    def __post_init__(self) -> None:
        if not 0 <= 2 * self.trim < len(self.matrix):
            raise ArgumentError(f"of {len(self.matrix)} values, {self.trim} cannot be left out at each end")


@dataclass(frozen=True, kw_only=True)
class Objectives:
    """The objectives of a round and their weights.

    Attributes:
        names: the M objectives that a participant serves, in the task's order.
        weights: lambda, shape (M,): not negative, sum 1.
        gram: of their gradients or averaged updates, shape (M, M); None where it is not known.
        mode: the method that found the weights.
        left_out: the run's other objectives, with the reason for each.
        notes: for the operator, on this round.
        divergence: of the losses from the preference (KL); None where there is no preference.
        exact: the Gram matrix of their gradients on all of the clients' training samples, shape (M, M); None where
            these were not asked for, NaN where those of an objective are missing.
    """

    names: tuple[str, ...]
    weights: Vector
    gram: Matrix | None
    mode: str
    left_out: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    divergence: float | None = None
    exact: Matrix | None = None


@dataclass(frozen=True)
class Combination:
    """A rule's answer: the direction c U, or the coordinate-wise rule in `coordinates`.

    Attributes:
        coefficients: c, one factor for each row, those of earlier rounds (`Step.history`) included. Shape (0,) where
            there are `coordinates`.
        weights: lambda, shape (m,): the share of each row of this round, sum 1; c for rows that are not normalised.
        state: for the next round; JSON.
        diagnostics: measurements by name.
        coordinates: for a coordinate-wise rule.
        objectives: for a rule that weighs objectives.
    """

    coefficients: Vector
    weights: Vector
    state: dict[str, Any]
    diagnostics: dict[str, float]
    coordinates: Coordinates | None = None
    objectives: Objectives | None = None


@dataclass(frozen=True)
class Mixture:
    """The result of one stage on m rows: m' rows W U.

    Attributes:
        matrix: W, shape (m', m).
        shares: shape (m', m), each row of sum 1: whose updates each of the m' rows stands for. None: W itself, whose
            rows then have sum 1.
        prior: lambda0 of the m' rows, shape (m',), sum 1; None: unchanged.
        samples: training samples behind the m' rows, shape (m',); None: unchanged.
    """

    matrix: Matrix
    shares: Matrix | None = None
    prior: Vector | None = None
    samples: Vector | None = None

    @classmethod
    def scaled(cls, factors: Numbers) -> "Mixture":
        """Each row multiplied by its factor, shape (m,); it still stands for its own client."""
        checked = vector("factors", factors)
        return cls(np.diag(checked), np.eye(len(checked)))
