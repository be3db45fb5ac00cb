"""The engine knows phases, not algorithms: it carries any sequence that an algorithm asks for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest

from coordinator.rounds import selection
from coordinator.rounds.conversation import _continued
from coordinator.rounds.fleets.base import Skipped
from federation.aggregation.interface import Combination, Rows, TooFewUpdatesError
from federation.aggregation.phase_kinds import EvaluationPhase, TrainingPhase
from federation.aggregation.phases import Replies, RoundContext, RoundGenerator, Step, Voided
from federation.aggregation.qp import UnsolvedError
from federation.sketches.base import SketchError
from federation.spec.run_spec import RunSpec
from storage.states import RoundState, RunState
from tests.coordinator.rounds.scene import Averaging, register, wait_rest
from tests.stage import MODEL, Player, Stage, vector
from tests.works import work_of


class Rehearsed(Averaging):
    """Everybody trains; the longest updates are asked for once more, their makers' losses measured; those are averaged.

    A made-up algorithm with three phases, the later ones for a part of the clients that depends on the replies.
    """

    name: ClassVar[str] = "rehearsed"

    def combine(self, rows: Rows) -> Combination:
        """The plain average, and how many there were."""
        return replace(super().combine(rows), state={"rounds": int(rows.state.get("rounds", 0)) + 1})

    def round(self, context: RoundContext) -> RoundGenerator:
        first = yield TrainingPhase()
        lengths = np.diag(first.gram)
        longest = sorted(first[int(i)].client_id for i in np.argsort(lengths)[-2:])
        again = yield TrainingPhase(clients=tuple(longest))
        measured = yield EvaluationPhase(splits=("validation",), clients=tuple(reply.client_id for reply in again))
        assert {reply.client_id for reply in measured} <= set(longest)
        return Step(again, self.combine(again.rows(context)))


class FirstThoughts(Averaging):
    """Everybody trains twice, and the step is made of the first replies."""

    name: ClassVar[str] = "first-thoughts"

    def round(self, context: RoundContext) -> RoundGenerator:
        first = yield TrainingPhase()
        yield TrainingPhase()
        return Step(first, self.combine(first.rows(context)))


class DrawnAnew(Averaging):
    """Clients that are drawn for the purpose train; the step is their average."""

    name: ClassVar[str] = "drawn-anew"

    def round(self, context: RoundContext) -> RoundGenerator:
        trained = yield TrainingPhase(clients=context.draw("anew"))
        return Step(trained, self.combine(trained.rows(context)))


class NobodyFirst(Averaging):
    """A phase that asks nobody, as when all its clients were revoked meanwhile; then everybody trains."""

    name: ClassVar[str] = "nobody-first"

    def round(self, context: RoundContext) -> RoundGenerator:
        measured = yield EvaluationPhase(splits=("validation",), clients=())
        assert not measured
        trained = yield TrainingPhase()
        return Step(trained, self.combine(trained.rows(context)))


@dataclass(frozen=True, kw_only=True)
class Interrupted(Averaging):
    """While it thinks about how its first attempt ends, an operator acts."""

    name: ClassVar[str] = "interrupted"
    operator: ClassVar[Callable[[], object]]
    ends: str

    def round(self, context: RoundContext) -> RoundGenerator:
        trained = yield TrainingPhase()
        type(self).operator()
        if self.ends == "skipped":
            raise TooFewUpdatesError("another time")
        if self.ends == "voided" and context.attempt == 0:
            raise Voided("once more")
        return Step(trained, self.combine(trained.rows(context)))


class TrainingWithInput(TrainingPhase):
    """Training for which every client needs a word besides the model."""

    def inputs(self) -> Mapping[str, bytes]:
        return {"word": b"a word"}


class WithInputs(Averaging):
    """Everybody trains, with an input besides the model."""

    name: ClassVar[str] = "with-inputs"

    def round(self, context: RoundContext) -> RoundGenerator:
        trained = yield TrainingWithInput()
        return Step(trained, self.combine(trained.rows(context)))


@pytest.fixture(autouse=True)
def _toys(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, Rehearsed, FirstThoughts, DrawnAnew, NobodyFirst, Interrupted, WithInputs)


NAMES = ("ann", "ben", "cleo", "dan", "eve", "fay")


def begin(stage: Stage, algorithm: str, *, rounds: int = 1, more: str = "") -> tuple[str, list[Player]]:
    return stage.begin(*NAMES, algorithm=algorithm, rounds=rounds, more=f"selection.minimum = 6\n{more}")


def rows_of(stage: Stage, run: str, phase: int, number: int = 0) -> dict[str, np.ndarray]:
    """What each client sent in a phase."""
    return {client: vector(client, order) for client, order in stage.orders(run, number, phase).items()}


def averaged(stage: Stage, run: str, rows: list[np.ndarray], number: int = 0) -> None:
    """The step of the round is along the average of these rows."""
    round_ = stage.rounds(run)[number]
    expected = stage.parameters(round_.base_model) - np.mean(rows, axis=0)
    np.testing.assert_allclose(stage.parameters(round_.result_model), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_phases_for_some_of_the_clients_are_carried_to_the_step(stage: Stage) -> None:
    run, players = begin(stage, "rehearsed", rounds=2)
    stage.play(run, *players)
    for number in (0, 1):
        kinds = [(phase.kind, phase.number, phase.wanted) for phase in stage.phases(run, number)]
        assert kinds == [("train", 0, 6), ("train", 1, 2), ("evaluate", 2, 2), ("evaluate", 3, 6)]
        first = rows_of(stage, run, 0, number)
        longest = sorted(sorted(NAMES, key=lambda name: float(first[name].astype(np.float64) @ first[name]))[-2:])
        assert sorted(stage.assignments(run, number, 1)) == sorted(stage.assignments(run, number, 2)) == longest
        second = rows_of(stage, run, 1, number)
        averaged(stage, run, [second[name] for name in longest], number)
    assert stage.run(run).state_data == {"rule": {"rounds": 2}, "vectors": {}, "blobs": []}
    splits = [list(work_of(order).splits) for phase in (2, 3) for order in stage.orders(run, 0, phase).values()]
    assert splits == [["validation"]] * 2 + [["train", "test"]] * 6


def test_a_drawn_phase_asks_a_choice_of_its_own(stage: Stage) -> None:
    more = "selection.method = 'count'\nselection.count = 2\nselection.over_selection = 1.0"
    run, players = begin(stage, "drawn-anew", more=more)
    stage.play(run, *players)
    asked, selected = sorted(stage.assignments(run)), stage.rounds(run)[0].selected
    given, pool = RunSpec.parse(stage.run(run).spec), dict.fromkeys(NAMES, 1)
    drawn = [
        selection.select(given.selection, pool, seed=given.seed, round_number=0, purpose=purpose)
        for purpose in ("select", "anew")
    ]
    assert [selected, asked] == drawn
    assert drawn[0] != drawn[1]


def test_a_phase_that_asks_nobody_is_closed_at_once(stage: Stage) -> None:
    run, players = begin(stage, "nobody-first")
    stage.play(run, *players)
    asked = [(phase.kind, phase.wanted) for phase in stage.phases(run)]
    assert asked == [("evaluate", 0), ("train", 6), ("evaluate", 6)]


def test_the_quorum_of_a_phase_is_of_the_replies_that_it_wanted_when_it_was_opened(stage: Stage) -> None:
    run, players = begin(stage, "drawn-anew", more="selection.quorum = 1.0")
    orders = {player: player.order() for player in players}
    stage.pause(run)
    *loyal, leaver = players
    for player in loyal:
        player.reply(orders[player])
    leaver.decline(orders[leaver], "busy")
    stage.wait_outcome(run, leaver.name, "DECLINED")
    leaver.attend()  # without the task: drawn again, the phase would want five replies
    stage.resume(run)
    skipped = stage.wait_round(run, 0)
    assert (skipped.state, skipped.wanted, stage.phases(run)[0].wanted) == (RoundState.SKIPPED, 6, 6)
    assert skipped.reason.endswith("6 are needed")


@pytest.mark.parametrize("kind", [TooFewUpdatesError, UnsolvedError, SketchError])
def test_a_rule_that_cannot_use_its_replies_gives_no_step(kind: type[Exception]) -> None:
    def conversation() -> RoundGenerator:
        yield TrainingPhase()
        raise kind("not with these")

    replies = conversation()
    _continued(replies, None)
    with pytest.raises(Skipped, match=r"^aggregation: not with these$"):
        _continued(replies, Replies([]))


def test_the_inputs_of_a_round_count_as_its_traffic(stage: Stage) -> None:
    run, players = begin(stage, "with-inputs", rounds=3, more="evaluate.every = 0")
    stage.play(run, *players)
    _, second, _ = stage.rounds(run)
    assert second.metrics["bytes/down"] == len(NAMES) * (len(MODEL) + len(b"a word"))


def test_the_record_names_the_replies_that_the_step_was_made_of(stage: Stage) -> None:
    run, players = begin(stage, "first-thoughts")
    stage.play(run, *players)
    first = rows_of(stage, run, 0)
    averaged(stage, run, [first[name] for name in NAMES])
    step = stage.step(run)
    updates = [stage.replies(run, 0, phase) for phase in (0, 1)]
    assert list(step.replies) == [updates[0][name].envelope_digest for name in NAMES]
    for name in NAMES:
        assert updates[0][name].weight == pytest.approx(1 / 6)
        assert updates[0][name].norm == pytest.approx(np.linalg.norm(first[name].astype(np.float64)))
        assert (updates[1][name].weight, updates[1][name].norm) == (None, None)


@pytest.mark.parametrize(
    ("ends", "state", "attempt"),
    [
        pytest.param("stepped", RoundState.COMPLETED, 0, marks=pytest.mark.full),
        pytest.param("skipped", RoundState.SKIPPED, 0, marks=pytest.mark.full),
        ("voided", RoundState.COMPLETED, 1),
    ],
)
def test_the_end_of_a_round_is_not_recorded_while_its_run_is_paused(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, ends: str, state: RoundState, attempt: int
) -> None:
    run, players = begin(stage, "interrupted", more=f'algorithm.ends = "{ends}"')
    pauses = iter([stage.pause])
    monkeypatch.setattr(Interrupted, "operator", lambda: [pause(run) for pause in pauses], raising=False)
    stage.play(run, *players, until=lambda: stage.run(run).state is RunState.PAUSED)
    wait_rest(run)
    (held,) = stage.rounds(run)
    assert (held.state, held.attempt, held.step) == (RoundState.OPEN, 0, None)
    stage.resume(run, *players)
    (ended,) = stage.rounds(run)
    assert (ended.state, ended.attempt) == (state, attempt)
