"""What tests of rounds share: runs over several objectives, made-up algorithms, and damage to blobs."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sqlalchemy import Engine, event
from sqlalchemy.exc import OperationalError

from federation.aggregation import registry
from federation.aggregation.base import Algorithm
from federation.aggregation.diagnostics import describe
from federation.aggregation.interface import Combination, Rows
from federation.vectors import Layout, Tensor, to_bytes, update_rows
from tests.running import wait_for
from tests.stage import Player, Stage, spec

NAMES = ("left", "mid", "right")
LAYOUT = Layout((Tensor("encoder.weight", (8, 5)), *(Tensor(f"heads.{name}.weight", (5,)) for name in NAMES)))
MODEL = to_bytes(LAYOUT, np.linspace(-1, 1, LAYOUT.size, dtype=np.float32))
SERVES = {"ann": ("left", "right"), "ben": ("left",), "cleo": ("mid", "right")}
SAMPLES = {"ann": 10, "ben": 30, "cleo": 60}
EXACT = 'algorithm.sketch = "exact"\nalgorithm.weights = "exact"\nalgorithm.bound = "none"'
Sent = dict[str, dict[str, NDArray[np.float64]]]


# --- the conductor of a run


def conducting(run: str) -> bool:
    return any(thread.name == f"run-{run}" for thread in threading.enumerate())


def wait_rest(run: str) -> None:
    wait_for(lambda: not conducting(run), f"the conductor of {run} to come to rest")


def compared(stage: Stage) -> tuple[str, str, Player, Player]:
    """A run of ann and ben that has begun, and the model that such a run comes to when nothing disturbs it."""
    keys: dict[str, Any] = {"rounds": 2, "seed": 23, "more": "selection.minimum = 2\nalgorithm.epsilon = 0.3"}
    undisturbed, (ann, ben) = stage.begin("ann", "ben", **keys)
    stage.play(undisturbed, ann, ben)
    run, _ = stage.begin("ann", "ben", **keys)
    return run, stage.run(undisturbed).model, ann, ben


# --- algorithms of tests


class Averaging(Algorithm):
    """The step is the plain average of what its round gives it."""

    def combine(self, rows: Rows) -> Combination:
        """The plain average."""
        return Combination(rows.prior, rows.prior, {}, describe(rows.gram, rows.prior, rows.prior))


def register(monkeypatch: pytest.MonkeyPatch, *toys: type[Algorithm]) -> None:
    """Lets runs name these algorithms, too."""
    known = {**registry.ALGORITHMS, **{toy.name: toy for toy in toys}}
    monkeypatch.setattr(registry, "ALGORITHMS", MappingProxyType(known))


# --- damage


Repair = Callable[[], object]


def _altered(path: Path, altered: Callable[[bytes], bytes]) -> Repair:
    good = path.read_bytes()
    path.write_bytes(altered(good))
    return lambda: path.write_bytes(good)


def flip(path: Path) -> Repair:
    """Alters one bit of the last byte; returns the repair."""
    return _altered(path, lambda good: good[:-1] + bytes([good[-1] ^ 1]))


def cut(path: Path) -> Repair:
    """Leaves the first half of the file; returns the repair."""
    return _altered(path, lambda good: good[: len(good) // 2])


def lose(path: Path) -> Repair:
    """Removes the file; returns the repair."""
    repair = _altered(path, bytes)
    path.unlink()
    return repair


# --- the database at the worst moment


@contextmanager
def at(thread: str, statement: str, do: Callable[[], object]) -> Iterator[list[str]]:
    """Calls `do` when a thread whose name begins so sends such a statement; yields those that were sent."""
    seen: list[str] = []

    def listen(_c: object, _cursor: object, sql: str, *_: object) -> None:
        if threading.current_thread().name.startswith(thread) and sql.startswith(statement):
            seen.append(sql)
            do()

    event.listen(Engine, "before_cursor_execute", listen)
    try:
        yield seen
    finally:
        event.remove(Engine, "before_cursor_execute", listen)


def once(action: Callable[[], object]) -> Callable[[], None]:
    left = [action]

    def act() -> None:
        if left:
            left.pop()()

    return act


def fail() -> None:
    raise OperationalError("a statement", {}, Exception("the disk is full"))


# --- runs over several objectives


def begin(
    stage: Stage,
    algorithm: str,
    more: str = "",
    *,
    rounds: int = 1,
    serves: Mapping[str, Sequence[str]] = SERVES,
    seed: int = 3,
    names: Sequence[str] = tuple(SAMPLES),
) -> tuple[str, dict[str, Player]]:
    """A run of ann, ben and cleo, or of some of them; it is evaluated after its last round."""
    task, players = stage.crew(*names, samples=[SAMPLES.get(name, 10) for name in names], serves=serves)
    for player in players:
        player.losses = {name: 1.0 + at for at, name in enumerate(serves.get(player.name, NAMES))}
    lines = [f"objectives.names = {list(NAMES)}", "jacobian.deadline_seconds = 800", "evaluate.every = 0", more]
    if "selection.minimum" not in more:
        lines.append("selection.minimum = 3")
    text = spec(f"{algorithm}-{stage.count}", task, rounds, algorithm=algorithm, seed=seed, more="\n".join(lines))
    return stage.submit(text, model=MODEL), {player.name: player for player in players}


def sent(stage: Stage, run: str, phase: int, number: int = 0) -> Sent:
    """What each client's accepted reply holds, row by row, from the blob store."""
    return {
        client: {
            name: row.read().astype(np.float64) for name, row in update_rows(stage.blobs.local(one.payload)).items()
        }
        for client, one in stage.replies(run, number, phase).items()
    }


def weights_of(stage: Stage, run: str, number: int = 0) -> dict[str, float]:
    return {item.objective: item.weight for item in stage.step(run, number).weights}


def moved(stage: Stage, run: str, number: int = 0) -> NDArray[np.float64]:
    """w_t - w_{t+1}."""
    round_ = stage.rounds(run)[number]
    return stage.parameters(round_.base_model).astype(np.float64) - stage.parameters(round_.result_model)


def shares(prior: str) -> dict[str, dict[str, float]]:
    """p_ik by objective and client, from SERVES and SAMPLES alone."""
    size = {name: 1.0 if prior == "uniform" else float(count) for name, count in SAMPLES.items()}
    mass = {key: sum(size[name] for name, own in SERVES.items() if key in own) for key in NAMES}
    return {key: {name: size[name] / mass[key] for name, own in SERVES.items() if key in own} for key in NAMES}


def is_min_norm(G: NDArray[np.float64], weights: NDArray[np.float64]) -> bool:
    """Whether these weights solve min over the simplex of lambda' G lambda: its optimality conditions."""
    products, value = G @ weights, float(weights @ G @ weights)
    slack = 1e-6 * np.abs(G).max()
    return bool((products >= value - slack).all() and np.allclose(products[weights > 1e-9], value, atol=slack))


def kinds(stage: Stage, run: str, number: int = 0) -> list[str]:
    return [phase.kind for phase in stage.phases(run, number)]


def answer(players: Mapping[str, Player], *names: str) -> None:
    """These clients do the one thing that they are asked next."""
    for name in names:
        players[name].answer()
