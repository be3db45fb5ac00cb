"""Private rounds that owners still allow: workers tell, operators see it, and a run that needs more is refused."""

import re
from fractions import Fraction

import grpc
import pytest

from federation.aggregation.interface import TooFewUpdatesError
from federation.aggregation.secure.covered import covered
from federation.secure.bounds import BoundKind, Bounds
from federation.secure.thresholds import Mode
from federation.v1.federation_pb2 import SessionsLeft
from storage.models import Client
from tests.federation.aggregation.scene import cohort
from tests.harness import wait_for
from tests.running import refused
from tests.stage import Player, Stage, spec

NAMES = ("ann", "ben", "cleo", "dora", "emil", "finn")
PRIVATE = 'privacy.secure = "sum"\nevaluate.every = 2'


@pytest.fixture
def players(stage: Stage) -> list[Player]:
    players = stage.cast("digits", *NAMES[:5])
    for player in players:
        tell(stage, player, 7, 4)
    return players


def tell(stage: Stage, player: Player, training: int, evaluation: int) -> None:
    player.say(sessions_left=SessionsLeft(task="digits", training=training, evaluation=evaluation))
    told = {"digits": {"training": min(training, 2**53), "evaluation": min(evaluation, 2**53)}}
    wait_for(lambda: stage.look(lambda session: session.get_one(Client, player.name).sessions_left) == told, "numbers")


def warnings(stage: Stage, document: bytes) -> str:
    return " ".join(stage.dry_run(document).warnings)


def run(rounds: int, more: str = PRIVATE, algorithm: str = "fedavg-n") -> bytes:
    return spec("planned", "digits", rounds, algorithm=algorithm, more=more)


def test_a_run_is_refused_when_too_few_members_allow_as_many_private_rounds(
    stage: Stage, players: list[Player]
) -> None:
    told = warnings(stage, run(7))
    assert "the run needs 7 of training and 4 of evaluation" in told
    assert "missing" not in told
    tell(stage, players[0], 4, 4)
    tell(stage, players[1], 6, 0)
    with refused("FAILED_PRECONDITION", "sessions-left") as messages:
        warnings(stage, run(7))
    assert "missing are: ann (3 of training), ben (1 of training and 4 of evaluation)." in messages[0]
    assert "A round needs 5 members, and 3 have enough" in messages[0]
    shown = run(7, f'{PRIVATE}\nprivacy.disclose = ["evaluation"]')
    for document, words in ((shown, "ben (1 of training)"), (run(4), "missing are: ben (2 of evaluation)")):
        with pytest.raises(grpc.RpcError, match=re.escape(f"{words}. A round")):
            warnings(stage, document)
    assert "missing" not in warnings(stage, run(7, "evaluate.every = 2")), "an open run needs none"


def test_a_private_round_counts_who_serves_all_objectives_and_has_sessions_left(stage: Stage) -> None:
    players = stage.cast("digits", *NAMES, serves={"finn": ["left"]})
    for player in players:
        tell(stage, player, 0 if player.name == "emil" else 1, 1)
    more = f'{PRIVATE}\nprivacy.clip = 1.0\nobjectives.names = ["left", "right"]'
    response = stage.dry_run(run(1, more, "fedavg"))
    assert {other.client_id: other.reason for other in response.others} == {"emil": "sessions", "finn": "objectives"}
    skipped = "each round would be skipped: 4 of the 6 members that could be asked would take part, and a round needs 5"
    assert response.obstacle.startswith(skipped)


def test_a_private_run_is_refused_while_too_few_members_offer_the_task_unless_it_waits_for_more(stage: Stage) -> None:
    task, _ = stage.crew(*NAMES[:4])

    def private(more: str = PRIVATE, algorithm: str = "fedavg-n") -> bytes:
        return spec("early", task, 1, algorithm=algorithm, more=more)

    with refused("FAILED_PRECONDITION", "cohort") as messages:
        stage.dry_run(private())
    assert "needs 5 members, and 4 members offer the task" in messages[0]
    assert "With selection.minimum = 5 the run waits for more" in messages[0]
    assert "privacy.client_noise" in messages[0]
    with refused("FAILED_PRECONDITION", "cohort") as messages:
        stage.dry_run(private(PRIVATE.replace("sum", "private"), "fedmgda+"))
    assert "needs 8 members" in messages[0]
    waiting = f"{PRIVATE}\nselection.minimum = 5"
    outlook = stage.dry_run(private(waiting))
    assert (len(outlook.members), outlook.minimum) == (4, 5)
    assert "could not begin: 4 members could be asked, and a round needs 5" in outlook.obstacle
    begun = stage.submit(private(waiting))
    assert "5" in stage.wait_reason(begun, "4")
    assert not stage.rounds(begun)
    stage.stop_run(begun)


@pytest.mark.parametrize(("large", "too_large"), [(18, True), (17, False)])
def test_a_run_is_refused_in_which_one_member_has_too_large_a_part(stage: Stage, large: int, too_large: bool) -> None:
    """Of five members one may collude, and three of 10 samples are left: 3 * 10^2 is above 17^2 and below 18^2."""
    stage.cast("digits", *NAMES[:5], samples=[large, 10, 10, 10, 10])
    by_samples = run(1, f'{PRIVATE}\nalgorithm.prior = "samples"')
    W = cohort(5, 5, Mode.SUM, [large, 10, 10, 10, 10])
    rule = Bounds(kind=BoundKind.FIXED, prior="samples")
    if not too_large:
        assert "experimental" in warnings(stage, by_samples)
        assert covered(rule, Fraction(2), W, W.replies.prior("samples")).share == 1
        return
    with refused("INVALID_ARGUMENT", "spec") as messages:
        warnings(stage, by_samples)
    assert "ann has 0.310 of the coefficients, too large a part: 1 colluding members could subtract" in messages[0]
    with pytest.raises(TooFewUpdatesError) as skipped:  # as the round would be, if the run began
        covered(rule, Fraction(2), W, W.replies.prior("samples"))
    assert str(skipped.value).replace("silo-000", "ann") in messages[0]
    assert "experimental" in warnings(stage, by_samples.replace(b'"samples"', b'"uniform"'))
    left_out = by_samples + b'selection = { exclude = ["ann"], minimum = 5 }'
    assert "experimental" in warnings(stage, left_out)


def test_operators_see_what_members_have_told(stage: Stage, players: list[Player]) -> None:
    tell(stage, players[2], 0, 2**63)  # no more than a number of JSON can hold
    tell(stage, players[2], 990, 8)
    assert "990 of training, 8 of evaluation" in stage.served.command("client", "cleo", columns=200)
    shown = {one["client_id"]: one for one in stage.served.document("clients")["clients"]}
    (task,) = shown["cleo"]["tasks"]
    assert (int(task["training_sessions_left"]), int(task["evaluation_sessions_left"])) == (990, 8)


def test_a_hello_replaces_what_was_told_and_rounds_of_other_tasks_are_refused(
    stage: Stage, players: list[Player]
) -> None:
    player = players[4]
    player.attend(digits=10)
    assert stage.look(lambda session: session.get_one(Client, player.name).sessions_left) == {}
    player.say(sessions_left=SessionsLeft(task="mnist", training=1))
    assert player.stream is not None
    assert player.stream.end().reason == "limit:tasks"


def test_a_run_is_taken_with_a_caution_when_enough_members_are_left(stage: Stage, players: list[Player]) -> None:
    """A sixth member has not told anything, and counts as able."""
    tell(stage, players[0], 6, 4)
    stage.cast("digits", NAMES[5])
    caution = "missing are: ann (1 of training). They drop out on the way; 5 members have enough"
    assert caution in warnings(stage, run(7))
    with pytest.raises(grpc.RpcError, match="A round needs 8 members, and 5 have enough"):
        warnings(stage, run(7, f"{PRIVATE}\nselection.minimum = 8".replace("sum", "private"), "fedmgda+"))
    with pytest.raises(grpc.RpcError, match="A round needs 6 members, and 5 have enough"):
        warnings(stage, run(7, f"{PRIVATE}\nselection.minimum = 6"))
