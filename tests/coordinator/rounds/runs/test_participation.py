"""Who replied in a run and who did not: the summary and its warnings, and that operators see them everywhere."""

import io
import json
import logging
import math
import re
from collections.abc import Callable

import numpy as np
import pytest
from rich.console import Console

from coordinator.rounds.runs import participation
from coordinator.rounds.runs.participation import EndedRound, MemberRound, Participation, RoundOutcome, WarningKind
from federation.v1.admin_pb2 import GetRunRequest, ListRunsRequest, MemberOutcome, MemberSummary
from federation.v1.common_pb2 import AssignmentManifest
from fedpareto import simulate
from fedpareto.cli.admin import runs
from fedpareto.cli.document import document
from fedpareto.cli.failure import CommandFailure
from fedpareto.cli.show import participation_table, tables
from tests.running import refused
from tests.stage import LAYOUT, Player, Stage, spec

REPLIED, DECLINED, REFUSED, MISSING, NOT_NEEDED = RoundOutcome


def fold(*rounds: EndedRound) -> tuple[Participation, list[tuple[int, WarningKind, str]]]:
    """The summary of some rounds, and the warnings that began: (round, kind, member)."""
    made, begun = Participation(), []
    for round_ in rounds:
        begun += [(round_.number, warning.kind, warning.client_id) for warning in made.add(round_)]
    return made, begun


def asked(number: int, *outcomes: RoundOutcome, cosine: float = math.nan, improved: float = math.nan) -> EndedRound:
    """A round that asked the members a, b, c, ... to train."""
    members = (
        MemberRound(name, training=outcome, reason=f"why-{number}" if outcome.failed else "", cosine=cosine)
        for name, outcome in zip("abcdef", outcomes, strict=False)
    )
    return EndedRound(number, tuple(members), improved)


# --- the summary as a function of rounds


def test_each_part_of_each_member_is_counted_and_the_last_reason_kept() -> None:
    made, begun = fold(
        asked(0, REPLIED, DECLINED), asked(1, REFUSED, MISSING), asked(2, NOT_NEEDED, REPLIED), asked(3, REPLIED)
    )
    a, b = made.members
    assert a.outcomes == {REPLIED: 2, REFUSED: 1, NOT_NEEDED: 1}
    assert b.outcomes == {DECLINED: 1, MISSING: 1, REPLIED: 1}
    assert (a.asked, a.last_round, a.last_outcome, a.last_reason, a.last_reason_round) == (4, 3, REPLIED, "why-1", 1)
    assert (b.asked, b.last_round, b.last_outcome, b.failed_in_a_row) == (3, 2, REPLIED, 0)
    assert (begun, made.warnings) == ([], [])


def test_a_member_that_fails_in_three_rounds_in_a_row_is_warned_of_once_and_until_it_replies() -> None:
    rounds = [asked(n, REPLIED, (DECLINED, REFUSED, MISSING)[n % 3]) for n in range(5)]
    made, begun = fold(*rounds)
    assert begun == [(2, WarningKind.MEMBER_FAILS, "b")]
    (warning,) = made.warnings
    assert (warning.client_id, warning.rounds, warning.last_round) == ("b", 5, 4)
    assert "b failed in 5 rounds in a row, last in round 4: why-4" in warning.message
    assert fold(*rounds, asked(5, REPLIED, REPLIED))[0].warnings == []


def test_rounds_that_did_not_ask_a_member_or_did_not_need_it_neither_end_its_failures_nor_add_to_them() -> None:
    others = ((DECLINED,), (), (NOT_NEEDED,), (DECLINED,), (DECLINED,))
    made, begun = fold(*(asked(number, REPLIED, *other) for number, other in enumerate(others)))
    assert begun == [(4, WarningKind.MEMBER_FAILS, "b")]
    assert made.members[1].failed_in_a_row == 3


def test_missed_evaluations_count_though_the_training_went_well() -> None:
    rounds = [
        EndedRound(n, (MemberRound("a", training=REPLIED, evaluation=MISSING, reason="evaluate: deadline"),))
        for n in range(3)
    ]
    made, begun = fold(*rounds)
    (a,) = made.members
    assert (a.outcomes[REPLIED], a.evaluations_missed, a.last_outcome) == (3, 3, MISSING)
    assert begun == [(2, WarningKind.MEMBER_FAILS, "a")]
    assert "evaluate: deadline" in made.warnings[0].message


@pytest.mark.parametrize(("cosine", "warned"), [(-0.97, True), (-0.51, True), (-0.5, False), (0.9, False)])
def test_a_member_whose_cosine_stays_below_minus_a_half_is_warned_of(cosine: float, warned: bool) -> None:
    made, begun = fold(*(asked(n, REPLIED, cosine=cosine) for n in range(4)))
    assert begun == ([(2, WarningKind.MEMBER_OPPOSES, "a")] if warned else [])
    assert [f"{cosine:.2f}" in warning.message for warning in made.warnings] == [True] * warned


def test_one_step_with_a_member_ends_the_count_of_those_against_it() -> None:
    cosines = [-0.9, -0.9, 0.1, -0.9, -0.9]
    assert fold(*(asked(n, REPLIED, cosine=value) for n, value in enumerate(cosines)))[1] == []


def test_nobody_improving_in_three_evaluated_rounds_is_warned_of_however_far_apart_they_are() -> None:
    shares = [0.0, math.nan, 0.0, math.nan, 0.0, 0.0]
    made, begun = fold(*(asked(n, REPLIED, improved=share) for n, share in enumerate(shares)))
    assert begun == [(4, WarningKind.NOBODY_IMPROVES, "")]
    assert (made.warnings[0].rounds, made.warnings[0].last_round) == (4, 5)
    assert fold(*(asked(n, REPLIED, improved=share) for n, share in enumerate([0.0, 0.0, 0.25, 0.0])))[1] == []


def zigzag(losses: list[float], length: float) -> tuple[Participation, list[tuple[int, WarningKind, str]]]:
    """The summary of rounds with these losses, whose steps are this long and whose updates 0.5, at the rate 2."""
    step = participation.StepLength(length, 0.5, 2.0)
    return fold(*(EndedRound(n, (), loss=loss, step=step) for n, loss in enumerate(losses)))


def test_a_loss_that_rises_again_and_again_with_steps_longer_than_the_updates_names_the_rate_that_would_do() -> None:
    made, begun = zigzag([1.0, 2.0, 0.5, 0.7], 1.2)
    assert begun == [(3, WarningKind.STEP_TOO_LONG, "")]
    (warning,) = made.warnings
    assert "rose in 2 of the last 3 evaluated rounds, last in round 3" in warning.message
    assert "2.4 times as long as the median of the updates (0.5)" in warning.message
    assert "Set server.learning_rate to about 0.83 (it is 2)" in warning.message
    assert zigzag([1.0, 2.0, 0.5, 0.4], 1.2)[1] == []  # it rose once
    assert zigzag([1.0, 2.0, 0.5, 0.7], 0.7)[1] == []  # the steps are not much longer than the updates
    assert zigzag([1.0, 2.0, 0.5, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2], 1.2)[0].warnings == []  # it has settled


def test_a_run_that_zigzags_is_warned_of_and_the_rate_that_the_warning_names_ends_it() -> None:
    spec = """
        name = "zigzag"
        task = "digits"
        rounds = 6
        [algorithm]
        name = "fedmgda+"
        [train]
        learning_rate = 0.1
        [server]
        learning_rate = {rate}
        [simulation]
        clients = 2
    """
    (warning,) = [words for words in simulate(spec.format(rate=2.5)).warnings if "server.learning_rate" in words]
    named = re.search(r"about ([0-9.]+) \(it is 2\.5\)", warning)
    assert named is not None, warning
    assert [words for words in simulate(spec.format(rate=named[1])).warnings if "server.learning_rate" in words] == []


# --- what operators see


def shown(picture: object) -> str:
    text = io.StringIO()
    Console(file=text, width=tables.WIDTH).print(picture)
    return text.getvalue()


def play(stage: Stage, run: str, parts: dict[Player, Callable[[AssignmentManifest], object]]) -> None:
    """Plays a run in which each member trains as given, and all of them find each new model worse."""

    def answer() -> None:
        for player, trains in parts.items():
            for _, order in player.orders():
                if order.kind == "train":
                    trains(order)
                else:
                    player.reply(order, metrics={"train/loss": 5.0})

    stage.play(run, until=answer)


def against(player: Player, sign: float) -> Callable[[AssignmentManifest], object]:
    """Sends the same direction in each round, or its opposite."""
    vector = np.linspace(0.5, 1.5, LAYOUT.size, dtype=np.float32) * np.float32(sign)
    return lambda order: player.reply(order, vector, metrics={"train/loss": 1.0})


def refused_for_zeros(player: Player) -> Callable[[AssignmentManifest], object]:
    def send(order: AssignmentManifest) -> None:
        with refused("INVALID_ARGUMENT", "zero"):
            player.submit(order, np.zeros(LAYOUT.size, dtype=np.float32))

    return send


def test_a_single_missed_evaluation_is_told_in_the_singular() -> None:
    one = MemberSummary(client_id="ann", asked=1, replied=1, evaluations_missed=1, last_reason="slow")
    assert participation_table.tally(one) == "ann replied in 1 of 1 round, 1 evaluation missed; round 0: slow"
    many = MemberSummary(client_id="ben", asked=3, declined=1, evaluations_missed=2)
    assert "ben replied in 0 of 3 rounds, 1 declined, 2 evaluations missed; " in participation_table.tally(many)


def test_members_that_fail_or_oppose_are_seen_wherever_a_run_is_shown(
    stage: Stage, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    task = stage.task()
    ann, ben, cleo, dora, emil = stage.cast(task, "ann", "ben", "cleo", "dora", "emil")
    more = "selection.minimum = 5\nselection.quorum = 0.2"
    with caplog.at_level(logging.WARNING, logger="coordinator.rounds.runs.participation"):
        run = stage.submit(spec(f"seen-{stage.count}", task, 4, algorithm="fedavg", more=more))
        why = "IndexError: Target 12 is \x1b[31mout of bounds."
        parts = {ann: against(ann, 1.0), ben: against(ben, 1.0), emil: against(emil, -0.5)}
        play(
            stage, run, {**parts, cleo: lambda order: cleo.decline(order, "failed", why), dora: refused_for_zeros(dora)}
        )
    found = stage._admin.GetRun(GetRunRequest(run=run)).run
    summary = {member.client_id: member for member in found.members}
    assert [(m.asked, m.replied, m.declined, m.refused) for m in summary.values()] == [
        (4, 4, 0, 0), (4, 4, 0, 0), (4, 0, 4, 0), (4, 0, 0, 4), (4, 4, 0, 0)
    ]  # fmt: skip
    assert summary["dora"].last_reason.startswith("zero")
    assert summary["cleo"].last_outcome == MemberOutcome.MEMBER_OUTCOME_DECLINED
    kinds = [(WarningKind(document(warning)["kind"]), warning.client_id) for warning in found.warnings]
    failing = [(WarningKind.MEMBER_FAILS, name) for name in ("cleo", "dora")]
    assert kinds == [(WarningKind.NOBODY_IMPROVES, ""), *failing, (WarningKind.MEMBER_OPPOSES, "emil")]
    # The log of the coordinator has each of them once, in the third of the four rounds.
    lines = [record.getMessage() for record in caplog.records if run in record.getMessage()]
    assert len(lines) == 4
    assert not any("\x1b" in line for line in lines)
    # The same summary in a list of runs, in a run, and in what is watched, whose exit code it decides.
    listed = next(one for one in stage._admin.ListRuns(ListRunsRequest()).runs if one.run_id == run)
    assert (listed.members, listed.warnings) == (found.members, found.warnings)
    for text in (shown(tables.run(found)), shown(tables.runs([listed]))):
        assert "\x1b" not in text
        flat = " ".join(text.split())
        for words in ("Target 12 is", "zero", "nobody improved in 4", "-1.00"):
            assert words in flat, words
    assert "3/5" in shown(tables.runs([listed]))
    with pytest.raises(CommandFailure) as failure:
        runs.follow(stage._admin, run, as_json=False)
    assert failure.value.code == 1
    assert "2 of 5 members failed in the last round: cleo declined" in failure.value.message
    assert "dora was refused: zero" in failure.value.message
    out = capsys.readouterr().out
    assert out.count("warning: cleo failed in 4 rounds in a row") == 1
    with pytest.raises(CommandFailure):
        runs.follow(stage._admin, run, as_json=True)
    last = json.loads(capsys.readouterr().out.splitlines()[-1])["run"]
    failed = [one["client_id"] for one in last["members"] if one["last_outcome"] in ("DECLINED", "REFUSED")]
    assert failed == ["cleo", "dora"]


def test_a_run_whose_last_round_everybody_answered_ends_well_whatever_was_before(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    run, (ann, ben) = stage.begin("ann", "ben", rounds=2, more="selection.minimum = 2\nselection.quorum = 0.5")
    ann.answer()
    ben.decline(ben.order(), "busy")
    stage.play(run, ann, ben)
    runs.follow(stage._admin, run, as_json=False)
    out = capsys.readouterr().out
    assert re.search(r"^ben +2 +1 +1 +0 +0 +round 0: busy", out, re.MULTILINE)
    read = stage.look(lambda session: participation.read_rounds(session, run))
    assert [round_.number for round_ in read] == [0, 1]
    assert {member.outcome for member in read[1].members} == {REPLIED}
