"""Who replied in a run and who did not: the summary, and that operators see it and the alerts everywhere."""

import io
import json
import logging
import re
from collections.abc import Callable

import numpy as np
import pytest
from rich.console import Console

from coordinator.rounds.runs import participation
from federation.v1.admin_pb2 import GetRunRequest, ListRunsRequest, MemberOutcome, MemberSummary, WatchRunRequest
from federation.v1.common_pb2 import AssignmentManifest
from fedpareto.cli.admin import runs
from fedpareto.cli.document import document
from fedpareto.cli.failure import CommandFailure
from fedpareto.cli.show import participation_table, tables
from tests.running import SECONDS
from tests.stage import LAYOUT, Player, Stage, spec

REPLIED, DECLINED, REFUSED, MISSING, NOT_NEEDED = participation.RoundOutcome


def fold(*rounds: participation.EndedRound) -> participation.Participation:
    """The summary of some rounds."""
    made = participation.Participation()
    for round_ in rounds:
        made.add(round_)
    return made


def asked(number: int, *outcomes: participation.RoundOutcome) -> participation.EndedRound:
    """A round that asked the members a, b, c, ... to train."""
    members = [
        participation.MemberRound(name, training=outcome, reason=f"why-{number}" if outcome.failed else "")
        for name, outcome in zip("abcdef", outcomes, strict=False)
    ]
    return participation.EndedRound(number, tuple(members))


# --- the summary as a function of rounds


def test_each_part_of_each_member_is_counted_and_the_last_reason_kept() -> None:
    rounds = asked(0, REPLIED, DECLINED), asked(1, REFUSED, MISSING), asked(2, NOT_NEEDED, REPLIED), asked(3, REPLIED)
    a, b = fold(*rounds).members
    assert a.outcomes == {REPLIED: 2, REFUSED: 1, NOT_NEEDED: 1}
    assert b.outcomes == {DECLINED: 1, MISSING: 1, REPLIED: 1}
    assert (a.asked, a.last_round, a.last_outcome, a.last_reason, a.last_reason_round) == (4, 3, REPLIED, "why-1", 1)
    assert (b.asked, b.last_round, b.last_outcome, b.failed_in_a_row) == (3, 2, REPLIED, 0)


def test_rounds_that_did_not_ask_a_member_or_did_not_need_it_neither_end_its_failures_nor_add_to_them() -> None:
    outcomes = [(REPLIED, DECLINED), (REPLIED,), (REPLIED, NOT_NEEDED), (REPLIED, DECLINED), (REPLIED, DECLINED)]
    made = fold(*(asked(number, *given) for number, given in enumerate(outcomes)))
    assert made.members[1].failed_in_a_row == 3


def test_missed_evaluations_count_though_the_training_went_well() -> None:
    missed = participation.MemberRound("a", training=REPLIED, evaluation=MISSING, reason="evaluate: deadline")
    (a,) = fold(*(participation.EndedRound(number, (missed,)) for number in range(3))).members
    assert (a.outcomes[REPLIED], a.evaluations_missed, a.failed_in_a_row, a.last_outcome) == (3, 3, 3, MISSING)
    assert a.last_reason == "evaluate: deadline"


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


def test_a_single_missed_evaluation_is_told_in_the_singular() -> None:
    one = MemberSummary(client_id="ann", asked=1, replied=1, evaluations_missed=1, last_reason="slow")
    assert participation_table.tally(one) == "ann replied in 1 of 1 round, 1 evaluation missed; round 0: slow"
    many = MemberSummary(client_id="ben", asked=3, declined=1, evaluations_missed=2)
    assert "ben replied in 0 of 3 rounds, 1 declined, 2 evaluations missed; " in participation_table.tally(many)


@pytest.mark.full
def test_members_that_fail_or_oppose_are_seen_wherever_a_run_is_shown(
    stage: Stage, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    task, (ann, ben, cleo, dora, emil) = stage.crew("ann", "ben", "cleo", "dora", "emil")
    more = "selection.minimum = 5\nselection.quorum = 0.2"
    with caplog.at_level(logging.WARNING, logger="coordinator.alerts.maker"):
        run = stage.submit(spec(f"seen-{stage.count}", task, 4, algorithm="fedavg", more=more))
        parts = {
            ann: against(ann, 1.0),
            ben: against(ben, 1.0),
            cleo: lambda order: cleo.decline(order, "failed", "IndexError: Target 12 is \x1b[31mout of bounds."),
            dora: dora.submit_zeros,
            emil: against(emil, -0.5),
        }
        play(stage, run, parts)
    *_, last_message = stage._admin.WatchRun(WatchRunRequest(run=run), timeout=SECONDS)
    found = stage._admin.GetRun(GetRunRequest(run=run)).run
    assert last_message.run.alerts == found.alerts  # the stream ends after the last alert
    summary = {member.client_id: member for member in found.members}
    assert [(m.asked, m.replied, m.declined, m.refused) for m in summary.values()] == [
        (4, 4, 0, 0), (4, 4, 0, 0), (4, 0, 4, 0), (4, 0, 0, 4), (4, 4, 0, 0)
    ]  # fmt: skip
    assert summary["dora"].last_reason.startswith("zero")
    assert summary["cleo"].last_outcome == MemberOutcome.MEMBER_OUTCOME_DECLINED
    assert [(document(alert)["kind"], alert.client_id) for alert in found.alerts] == [
        ("RUN_ENDED", ""),
        ("MEMBER_OPPOSES", "emil"),
        ("MEMBER_FAILS", "dora"),
        ("MEMBER_FAILS", "cleo"),
        ("NOBODY_IMPROVES", ""),
    ]
    # The log of the coordinator has each of them once.
    lines = [record.getMessage() for record in caplog.records if run in record.getMessage()]
    assert len(lines) == 4
    assert not any("\x1b" in line for line in lines)
    # The same summary in a list of runs, in a run, and in what is watched, whose exit code it decides.
    listed = next(one for one in stage._admin.ListRuns(ListRunsRequest()).runs if one.run_id == run)
    assert (listed.members, listed.alerts) == (found.members, found.alerts)
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
    assert capsys.readouterr().out.count("warning: cleo failed in 4 rounds in a row") == 1
    with pytest.raises(CommandFailure):
        runs.follow(stage._admin, run, as_json=True)
    last = json.loads(capsys.readouterr().out.splitlines()[-1])["run"]
    failed = [one["client_id"] for one in last["members"] if one["last_outcome"] in ("DECLINED", "REFUSED")]
    assert failed == ["cleo", "dora"]


def test_a_run_whose_last_round_everybody_answered_ends_well_whatever_was_before(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    run, (ann, ben) = stage.begin("ann", "ben", rounds=2, more="selection.minimum = 2\nselection.quorum = 0.5")
    ann.reply(ann.order())
    ben.decline(ben.order(), "busy")
    stage.play(run, ann, ben)
    runs.follow(stage._admin, run, as_json=False)
    out = capsys.readouterr().out
    assert re.search(r"^ben +2 +1 +1 +0 +0 +round 0: busy", out, re.MULTILINE)
    read = stage.look(lambda session: participation.read_rounds(session, run))
    assert [round_.number for round_ in read] == [0, 1]
    assert {member.outcome for member in read[1].members} == {REPLIED}
