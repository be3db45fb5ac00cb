"""The base of all sketches: the layout of a message, its making at a client, and the estimate at the server.

A client's stochastic Jacobian A is (M_i, d): one gradient for each objective that the client serves, all at the model
of the round. With weights p_ik the server wants the Gram matrix of the objectives' mean gradients,

    G_kl = <sum_i p_ik a_ik, sum_j p_jl a_jl>,   (M, M).

Messages are float32, everything that the server does is float64. The same arguments give the same bytes wherever the
linear algebra library works with one thread; the caller sees to that.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from operator import index
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from federation.arrays import numbers
from federation.errors import Error
from federation.owners_code import is_owners_class
from federation.plugins import PluginError, plugin_code

Message = Mapping[str, NDArray[np.float32]]
Jacobian = NDArray[np.floating[Any]]
Matrix = NDArray[np.float64]
Vector = NDArray[np.float64]


class SketchError(Error, ValueError):
    """A sketch that does not exist or cannot be made, or a message that does not fit it."""


@dataclass(frozen=True, eq=False)
class ClientSketch:
    """The sketch of one client, with its weights.

    Attributes:
        objectives: those that the client serves, in the order of the rows of its Jacobian.
        weights: p_ik of each of them, shape (M_i,), not negative.
        rows: the client's message.
    """

    objectives: tuple[str, ...]
    weights: Vector
    rows: Message


@dataclass(frozen=True, kw_only=True)
class Sketch(ABC):
    """A short message about a Jacobian, for the Gram matrix of a sum of Jacobians.

    Attributes:
        name: its name in run specifications.
        d: columns of a Jacobian.
        objectives: all those of the task, M names.
        budget: floats of the first upload of a client that serves all of them, as a share of d. Every message has at
            least one value of each kind, however small the budget.

    Raises:
        SketchError: no columns, no objective or one named twice, a budget that is not a positive number.
    """

    name: ClassVar[str] = ""

    d: int
    objectives: tuple[str, ...]
    budget: float = 1.0

    def __post_init__(self) -> None:
        if self.d < 1:
            raise SketchError(f"a Jacobian has at least one column; got d = {self.d}")
        if not self.objectives or len(set(self.objectives)) < len(self.objectives):
            raise SketchError(f"objectives need names, each once; got {list(self.objectives)}")
        if not (isfinite(self.budget) and self.budget > 0):
            raise SketchError(f"budget must be finite and positive, a share of d; got {self.budget!r}")

    def rows(self, objectives: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
        """Name and length of every row of the message of a client that serves these.

        Raises:
            SketchError: an objective that the task does not have, one twice, or none.
        """
        unknown = [name for name in objectives if name not in self.objectives]
        if unknown:
            raise SketchError(f"no objective {unknown[0]!r}: there are {', '.join(self.objectives)}")
        if not objectives or len(set(objectives)) < len(objectives):
            raise SketchError(f"a client serves one or more objectives, each once; got {list(objectives)}")
        return self._layout(len(objectives))

    @abstractmethod
    def layout(self, served: int) -> tuple[tuple[str, int], ...]:
        """Name and length of every row of the message of a client that serves this many objectives."""

    def compress(self, A: Jacobian, *, shared_seed: int, own_seed: int) -> dict[str, NDArray[np.float32]]:
        """The message about a client's Jacobian A, (M_i, d): the rows that `layout` names.

        All clients of a round have the same `shared_seed`; `own_seed` is of the round and the client.

        Raises:
            SketchError: another shape, or values that are not finite, in A or in the message as float32; or the code of
                a sketch that is not built in raised an exception, or makes another message than its layout names.
        """
        self._check(A)
        if not is_owners_class(type(self)):
            return {name: narrow(name, values) for name, values in self.message(A, shared_seed, own_seed).items()}
        layout = self._layout(len(A))
        with _own_code(self, "message"):
            rows = {name: numbers(values) for name, values in dict(self.message(A, shared_seed, own_seed)).items()}
            message = {name: narrow(name, values) for name, values in rows.items()}
        fits(message, layout, self.name)
        return {name: message[name] for name, _ in layout}

    @abstractmethod
    def message(self, A: Jacobian, shared_seed: int, own_seed: int) -> dict[str, NDArray[Any]]:
        """The rows before they become float32; A has been checked."""

    @abstractmethod
    def gram(self, sketches: Iterable[ClientSketch], objectives: tuple[str, ...], *, shared_seed: int) -> Matrix:
        """The estimate of G, (M, M), symmetric, of these objectives in this order.

        Sketches are read one after the other, and not kept; their order decides the rounding. The rows of other
        objectives are ignored; an objective without a sketch has zeros.

        Raises:
            SketchError: a message that does not fit.
        """

    def _layout(self, served: int) -> tuple[tuple[str, int], ...]:
        """As `layout`. Raises SketchError for one of a sketch that is not built in, and cannot be used."""
        if not is_owners_class(type(self)):
            return self.layout(served)
        with _own_code(self, "layout"):
            rows = tuple((str(name), index(length)) for name, length in self.layout(served))
        if not rows or len(dict(rows)) < len(rows) or min(length for _, length in rows) < 1:
            raise SketchError(f"{self.name}: a layout has rows of one or more values, each with its name; got {rows}")
        return rows

    def _check(self, A: Jacobian) -> None:
        if A.ndim != 2 or not 1 <= len(A) <= len(self.objectives) or A.shape[1] != self.d:
            raise SketchError(
                f"the Jacobian has shape {A.shape}; 1 to {len(self.objectives)} rows of {self.d} columns are needed"
            )
        if not np.isfinite(A).all():
            raise SketchError("the Jacobian has values that are not finite")

    def _checked(self, sketches: Iterable[ClientSketch]) -> Iterator[ClientSketch]:
        for sketch in sketches:
            fits(sketch.rows, self.rows(sketch.objectives), self.name)
            weights = sketch.weights
            if weights.shape != (len(sketch.objectives),) or not (np.isfinite(weights) & (weights >= 0)).all():
                raise SketchError(
                    f"a sketch has one weight for each of {list(sketch.objectives)}; got {weights.tolist()}"
                )
            yield sketch


@dataclass(frozen=True, kw_only=True)
class Embedding(Sketch):
    """A sketch whose message stands for one vector of each objective; inner products of sums of these estimate G.

    The estimate is a Gram matrix, and so positive semi-definite.
    """

    @abstractmethod
    def vectors(self, message: Message, served: int, *, shared_seed: int) -> NDArray[Any]:
        """The vectors of a message, (M_i, k) with the same k for every client."""

    def gram(self, sketches: Iterable[ClientSketch], objectives: tuple[str, ...], *, shared_seed: int) -> Matrix:
        Z = self.total(sketches, objectives, shared_seed=shared_seed)
        return symmetric(Z @ Z.T)

    def total(self, sketches: Iterable[ClientSketch], objectives: tuple[str, ...], *, shared_seed: int) -> Matrix:
        """sum_i p_ik z_ik for each of these objectives, (M, k); (M, 0) without sketches."""
        Z = np.zeros((len(objectives), 0))
        for sketch in self._checked(sketches):
            count = len(sketch.objectives)
            vectors = numbers(self.vectors(sketch.rows, count, shared_seed=shared_seed))
            if vectors.ndim != 2 or len(vectors) != count:
                raise ValueError(f"{self.name}: vectors has shape {vectors.shape}; ({count}, k) is needed")
            if not Z.size:
                Z = np.zeros((len(objectives), vectors.shape[1]))
            for name, weight, vector in zip(sketch.objectives, sketch.weights, vectors, strict=True):
                if name in objectives:
                    Z[objectives.index(name)] += weight * vector
        return Z


@dataclass(frozen=True, kw_only=True)
class LinearSketch(Embedding):
    """A sketch that is one random linear map for all clients of a round, S with E[S^T S] = 1.

    So its estimate is unbiased, and only the sum of the messages matters.
    """

    def cross_gram(
        self,
        first: Iterable[ClientSketch],
        second: Iterable[ClientSketch],
        objectives: tuple[str, ...],
        *,
        shared_seed: int,
    ) -> Matrix:
        """(H_1^T H_2 + H_2^T H_1) / 2 of two independent sets of clients, (M, M), symmetric, perhaps indefinite.

        Its expectation is the Gram matrix of the expected gradients, without the noise of the minibatches that the
        square of one set's mean contains (FedCMOO, section 5). Clipped to the positive semi-definite matrices, it is
        biased again. The other arguments are those of `gram`.

        Raises:
            SketchError: a message that does not fit.
        """
        H1 = self.total(first, objectives, shared_seed=shared_seed)
        H2 = self.total(second, objectives, shared_seed=shared_seed)
        if not H1.size or not H2.size:
            return np.zeros((len(objectives), len(objectives)))
        return symmetric(H1 @ H2.T)


@contextmanager
def _own_code(sketch: Sketch, method: str) -> Iterator[None]:
    """Turns an exception in the code of a sketch that is not built in into a SketchError that says where it was."""
    try:
        with plugin_code(f"sketch {sketch.name!r}", method, SketchError):
            yield
    except PluginError as error:
        raise SketchError(str(error)) from error


def fits(message: Message, layout: tuple[tuple[str, int], ...], whose: str) -> None:
    """Raises SketchError if the message's rows do not match the layout; the error's text begins with `whose`."""
    for name, length in layout:
        values = message.get(name)
        if values is None or values.shape != (length,):
            actual = "no such row" if values is None else f"shape {values.shape}"
            raise SketchError(f"{whose}: row {name!r} has {length} values; the message has {actual}")


def narrow(name: str, values: NDArray[Any]) -> NDArray[np.float32]:
    """A row of a message as float32. Raises SketchError for a value that float32 cannot hold."""
    with np.errstate(over="ignore"):
        row = np.ascontiguousarray(values, dtype=np.float32).reshape(-1)
    if not np.isfinite(row).all():
        raise SketchError(f"row {name!r} of the sketch leaves the range of float32: up to {np.abs(values).max():.3g}")
    return row


def symmetric(G: Matrix) -> Matrix:
    """(G + G^T) / 2."""
    return 0.5 * (G + G.T)


def clip_to_psd(G: Matrix) -> Matrix:
    """The positive semi-definite matrix nearest to the symmetric part of G, (M, M): negative eigenvalues become 0."""
    G = symmetric(G)
    values, vectors = np.linalg.eigh(G)
    if values[0] >= 0:
        return G
    return symmetric((vectors * np.maximum(values, 0.0)) @ vectors.T)
