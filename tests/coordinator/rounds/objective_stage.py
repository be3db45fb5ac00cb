"""A stage for runs over several objectives: clients that serve some of them, and what the record says of a round."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from federation.trust.envelope import unseal
from federation.v1.common_pb2 import AssignmentManifest, SignedEnvelope, StepManifest
from federation.vectors import Layout, Tensor, read_vector, to_bytes, update_rows
from tests.running import wait_for
from tests.stage import Player, Stage, spec

NAMES = ("left", "mid", "right")
LAYOUT = Layout(
    (Tensor("encoder.weight", (8, 5)), *(Tensor(f"heads.{name}.weight", (5,)) for name in NAMES)),
)
MODEL = to_bytes(LAYOUT, np.linspace(-1, 1, LAYOUT.size, dtype=np.float32))
SERVES = {"ann": ("left", "right"), "ben": ("left",), "cleo": ("mid", "right")}
SAMPLES = {"ann": 10, "ben": 30, "cleo": 60}
EXACT = 'algorithm.sketch = "exact"\nalgorithm.weights = "exact"\nalgorithm.bound = "none"'
Rows = dict[str, dict[str, NDArray[np.float64]]]


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
    task = stage.task()
    players = stage.cast(task, *names, samples=[SAMPLES[name] for name in names], serves=serves)
    for player in players:
        player.losses = {name: 1.0 + at for at, name in enumerate(serves.get(player.name, NAMES))}
    lines = [f"objectives.names = {list(NAMES)}", "jacobian.deadline_seconds = 800", "evaluate.every = 0", more]
    if "selection.minimum" not in more:
        lines.append("selection.minimum = 3")
    text = spec(f"{algorithm}-{stage.count}", task, rounds, algorithm=algorithm, seed=seed, more="\n".join(lines))
    return stage.submit(text, model=MODEL), {player.name: player for player in players}


def sent(stage: Stage, run: str, phase: int, number: int = 0) -> Rows:
    """What each client's accepted reply holds, row by row, from the blob store."""
    return {
        client: {
            name: row.read().astype(np.float64) for name, row in update_rows(stage.blobs.local(one.payload)).items()
        }
        for client, one in stage.replies(run, number, phase).items()
    }


def order_of(stage: Stage, run: str, client: str, phase: int, number: int = 0) -> AssignmentManifest:
    envelope = stage.assignments(run, number, phase)[client].envelope
    return AssignmentManifest.FromString(SignedEnvelope.FromString(envelope).manifest)


def step_of(stage: Stage, run: str, number: int = 0) -> StepManifest:
    envelope = SignedEnvelope.FromString(stage.rounds(run)[number].step or b"")
    return unseal(envelope, StepManifest, stage.served.home.signing_key.public_key())


def weights_of(stage: Stage, run: str, number: int = 0) -> dict[str, float]:
    return {item.objective: item.weight for item in step_of(stage, run, number).weights}


def moved(stage: Stage, run: str, number: int = 0) -> NDArray[np.float64]:
    """w_t - w_{t+1}."""
    round_ = stage.rounds(run)[number]
    base, made = (read_vector(stage.blobs.local(str(name)))[1] for name in (round_.base_model, round_.result_model))
    return base.astype(np.float64) - made


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
        players[name].reply(players[name].order())


def gone(stage: Stage, player: Player) -> None:
    player.leave()
    supervisor = stage.served.coordinator._supervisor
    wait_for(lambda: player.name not in supervisor._presence.attending(), f"{player.name} to be gone")


# --- what clients send that they should not


def jacobian_phase(stage: Stage, more: str = EXACT, rounds: int = 1) -> tuple[str, dict[str, Player]]:
    return begin(stage, "fedcmoo", more, rounds=rounds)
