"""Runs that describe data: one round, no step, a signed result that verifies; and who is asked."""

import json
import re
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from sqlalchemy import select

from federation.digests import digest
from federation.record.log_entries import DESCRIBED
from federation.spec.run_spec import RunSpec, SpecError
from federation.statistics.data_columns import Column
from federation.statistics.held import HeldData
from federation.statistics.rules import MemberRules
from federation.transport.channels import refusal_from_rpc_error
from federation.trust.envelope import envelope_digest, sign, verify
from federation.v1.admin_pb2 import GetRoundRequest
from federation.v1.common_pb2 import ResultManifest
from federation.v1.record_pb2 import RoundRecord
from federation.work.base import Result, WorkError
from federation.work.statistics.work import Statistics
from storage.models import AuditEntry
from storage.states import RoundState, RunState
from tests.coordinator.members.scene import problems
from tests.coordinator.rounds.described import COLUMNS, Held, client, document, drawn, tell
from tests.harness import Attending
from tests.stage import Player, Stage
from tests.verification.scene import Edited, refusal, verified


def begin(stage: Stage, *names: str, more: str = "") -> tuple[str, list[Player]]:
    task, players = stage.crew(*names)
    return stage.submit(document(task, more)), players


def test_a_run_that_describes_data_signs_a_result_that_follows_from_the_replies(stage: Stage, tmp_path: Path) -> None:
    run, players = begin(stage, "ada", "ben", "cleo")
    held = {player.name: drawn(number) for number, player in enumerate(players)}
    for player in players:
        assert tell(player, held[player.name]).accepted
    stage.wait_state(run, RunState.COMPLETED)
    (row,) = stage.rounds(run)
    assert (row.state, row.step, row.result_model, row.deployed_model) == (RoundState.COMPLETED, None, None, None)
    shown = stage._admin.GetRound(GetRoundRequest(run=run, round=0))
    key = stage.served.home.signing_key.public_key()
    manifest = verify(shown.result, ResultManifest, key)
    assert (manifest.document, len(manifest.replies)) == (digest(shown.document), 3)
    entries = select(AuditEntry.digest).where(AuditEntry.action == DESCRIBED, AuditEntry.subject == f"{run}/0")
    assert stage.look(lambda session: session.scalars(entries).all()) == [envelope_digest(shown.result)]
    found = json.loads(shown.document)
    assert (found["samples"], found["members"]) == (600, ["ada", "ben", "cleo"])
    ages = np.concatenate([one.x[:, 0] for one in held.values()])
    age, second, ill = found["columns"]
    assert age["mean"] == pytest.approx(ages.mean(), abs=20 * ages.std() / 600)
    assert second["missing"] == sum(int(np.isnan(one.x[:, 1]).sum()) for one in held.values())
    assert sum(isinstance(count, int) for count in ill["counts"]) == 1
    assert [problem for problem in problems(stage) if run in problem] == []
    (told,) = verified(stage, run, tmp_path)
    assert told.words.startswith("3 members described their data; verified: ")
    assert told.words.endswith(", 3 columns")
    assert not told.missing

    def forged(record: RoundRecord, document: bytes, **changes: Any) -> None:
        """The coordinator signs another result."""
        signed = ResultManifest.FromString(record.result.manifest)
        for name, values in changes.items():
            signed.ClearField(name)  # type: ignore[arg-type]
            getattr(signed, name).extend(values)
        signed.document, signed.document_bytes = digest(document), len(document)
        record.document = document
        record.result.CopyFrom(sign(signed, stage.served.home.signing_key))

    file = Edited.of(tmp_path / "run.fedpareto")
    for change, words in (
        (lambda record: forged(record, shown.document.replace(b"600", b"601")), "not what follows from the replies"),
        (lambda record: forged(record, shown.document, replies=manifest.replies[:2]), "the reply of cleo was accepted"),
        (
            lambda record: forged(record, shown.document, replies=manifest.replies[:2], left_out=["cleo"]),
            "not what follows from the replies",
        ),
        (lambda record: forged(record, shown.document, replies=[*manifest.replies] * 2), "names a reply twice"),
        (lambda record: forged(record, shown.document, left_out=["dan"]), "leaves dan out, and has no reply"),
        (lambda record: setattr(record, "document", record.document.replace(b"600", b"601")), "not the one that was"),
        (lambda record: record.ClearField("result"), "a document, and no signed result"),
        (lambda record: setattr(record, "state", "SKIPPED"), "SKIPPED"),
        (lambda record: record.phases[0].exchanges.pop(), "not accepted in its round|members"),
    ):
        assert re.search(words, said := refusal(file.with_round(0, change), tmp_path)), said


def test_numbers_of_no_data_are_left_out_of_the_result_and_harm_nobody_else(stage: Stage, tmp_path: Path) -> None:
    run, players = begin(stage, "ada", "ben")
    assert tell(players[0], drawn(1)).accepted
    assert tell(players[1], drawn(2), np.full(3, np.nan).tobytes()).accepted
    stage.wait_state(run, RunState.COMPLETED)
    shown = stage._admin.GetRound(GetRoundRequest(run=run, round=0))
    found = json.loads(shown.document)
    assert (found["samples"], found["members"], found["left_out"]) == (200, ["ada"], ["ben"])
    assert len(verified(stage, run, tmp_path)) == 1


def test_a_run_in_which_nobody_describes_data_has_failed(stage: Stage) -> None:
    run, players = begin(stage, "ada", "ben", more="selection.quorum = 1.0\n")
    tell(players[0], drawn(1))
    players[1].decline(players[1].order(), "statistics:samples")
    row = stage.wait_state(run, RunState.FAILED)
    assert "no data were described in its only round" in row.reason
    assert stage.rounds(run)[0].reason == "quorum: 1 of 2 members replied (statistics), 2 are needed"


def test_members_whose_workers_do_not_know_statistics_are_not_asked_and_those_without_a_fit_are(stage: Stage) -> None:
    task, (player, old, unfit) = stage.crew("ada", "old", "ben")
    old.leave()
    old.stream = Attending(old.member, {task: 10}, run_kinds=("evaluate",))
    old.stream.next()
    unfit.attend(**{task: 0})  # offered for statistics alone
    run = stage.submit(document(task))
    tell(player, drawn(1))
    tell(unfit, drawn(2))
    stage.wait_state(run, RunState.COMPLETED)
    assert stage.rounds(run)[0].selected == ["ada", "ben"]


def test_a_member_tells_statistics_by_the_rules_of_its_owner_alone() -> None:
    work = Statistics(columns=COLUMNS, bins=4, splits=("train",))

    def reason(data: HeldData | None, rules: MemberRules | None = MemberRules(), **asked: Any) -> tuple[str, str]:  # noqa: B008 - frozen
        with pytest.raises(WorkError) as error:
            Statistics(**{**vars(work), **asked}).answer(client(data, rules), Result({}, {}, {}, 10))
        return error.value.reason, error.value.wire or str(error.value)

    assert reason(drawn(1), None)[0] == "policy:statistics"
    with pytest.raises(WorkError, match=r"statistics\.open"):
        work.computation(client(drawn(1), None))
    assert reason(None)[0] == "statistics:data"
    assert reason(drawn(1, 49)) == ("statistics:samples", "statistics are told of at least 50 samples")
    assert reason(drawn(1, 60), bins=7)[0] == "statistics:bins"
    secret = Held(np.ones((60, 2)), np.ones(60), (Column(name="secret"), *COLUMNS[1:]))
    assert reason(secret) == ("statistics:column", "there is no column 'age'")
    assert not [*Result.__dataclass_fields__].count("model"), "no result has a model"


def test_a_submission_names_columns_and_keys_of_other_runs_are_refused(stage: Stage) -> None:
    task = stage.task()
    with pytest.raises(grpc.RpcError) as error:
        stage.submit(f'name = "{task}"\ntask = "{task}"\nkind = "statistics"\nstatistics.open = true\n'.encode())
    assert refusal_from_rpc_error(error.value).reason == "spec"
    head = 'name = "x"\ntask = "digits"\nkind = "statistics"\nstatistics.open = true\n'
    for more, words in (
        ("rounds = 3", "rounds: a run of kind"),
        ('algorithm.name = "fedavg"', "algorithm: a run of kind"),
        ("evaluate.every = 2", "evaluate: a run of kind"),
        ("train.epochs = 2", "train: a run of kind"),
        ('stop.metric = "loss"', "stop: a run of kind"),
        ("privacy.client_noise = 1.0", "privacy.client_noise: a run of kind"),
        ('privacy.secure = "sum"', "is open"),
        ("statistics.bins = 65", "statistics.bins"),
        ('statistics.columns = ["a", "a"]', "'a' is there twice"),
        ('statistics.columns = ["a"]\nstatistics.ranges = {b = [0, 1]}', "'b' is none of the columns"),
    ):
        with pytest.raises(SpecError, match=words):
            RunSpec.parse(head + more)
    with pytest.raises(SpecError, match=r"statistics\.open"):
        RunSpec.parse(head.replace("statistics.open = true", ""))
    with pytest.raises(SpecError, match='only a run of kind = "statistics"'):
        RunSpec.parse('name = "x"\ntask = "digits"\nrounds = 1\nstatistics.open = true')
