"""What the commands of administrators show, and models on their way in and out."""

import hashlib
import json
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from coordinator.rounds.replies.uploads import Upload
from federation.digests import digest
from federation.record.metric_definitions import DEFINITIONS
from federation.record.provenance import read_exported
from federation.transport.channels import refusal_from_rpc_error
from federation.transport.payload_check import PayloadCheck
from federation.trust.certificates import der, load_certificate_file
from federation.v1 import admin_pb2 as admin
from federation.v1.admin_pb2_grpc import AdminStub
from federation.v1.common_pb2 import ClientState
from federation.vectors import to_bytes
from fedpareto.cli.admin.bundle import payloads_question
from fedpareto.cli.show import member_tables, tables
from fedpareto.formatting import natural
from fedpareto.run_names import RunNames
from storage.blob_directory import DirectoryStore
from tests.fedpareto.cli.scene import LAYOUT, SPEC, Finished, command, good_model, requests, shown, submit
from tests.fedpareto.sinks.scene import installed, rounds_in
from tests.harness import Federation, fedpareto, refused
from tests.verification.scene import Edited

__all__ = ["installed"]

# --- what the commands show


@pytest.mark.full
def test_a_round_shows_every_clients_part_and_the_cosines(centre: Federation, finished: Finished) -> None:
    run_id, clients = finished
    last = centre.admin("round", run_id, "-1")
    assert last["summary"]["round"] == 1
    assert last["summary"]["state"] == "COMPLETED"
    assert [part["client_id"] for part in last["participations"]] == list(clients)
    for part in last["participations"]:
        assert part["state"] == "FULFILLED"
        assert part["samples"] == 10
        assert part["loss_before"] == 2.0
        assert part["update_norm"] > 0
        assert len(part["key_id"]) == 64
        assert part["payload_bytes"] > 4 * LAYOUT.size
        assert part["evaluation"]["test/accuracy"] == 0.5
    assert sum(part["weight"] for part in last["participations"]) == pytest.approx(1)
    assert last["gram_clients"] == list(clients)
    cosines = np.array(last["cosines"])
    assert cosines.shape == (3, 3)
    assert np.allclose(np.diag(cosines), 1)
    assert np.allclose(cosines, cosines.T)
    assert [phase["kind"] for phase in last["phases"]] == ["train", "evaluate"]
    assert last["step"]["decoded"]["result_model"] == last["summary"]["result_model"]
    assert last["summary"]["worst_client"] == "alpha"  # all are equal: the first by name
    numbers = last["summary"]["metrics"]
    assert numbers["bytes/up"] == 3 * last["participations"][0]["payload_bytes"] > 3 * 4 * LAYOUT.size
    assert numbers["bytes/refused"] == 0
    # Each member fetched the new model to evaluate it; the one that it trained from it had evaluated before.
    assert numbers["bytes/down"] == 3 * len(to_bytes(LAYOUT, np.zeros(LAYOUT.size, dtype=np.float32)))
    first = centre.admin("round", run_id, "0")["summary"]["metrics"]
    assert first["bytes/down"] == 2 * numbers["bytes/down"]
    assert centre.admin("round", "finished", "0")["summary"]["round"] == 0


def test_the_tables_for_people_fit_and_name_what_they_show(centre: Federation, finished: Finished) -> None:
    run_id, _ = finished
    for arguments, expected in {
        ("rounds", run_id): "COMPLETED",
        ("round", run_id, "-1"): "cosines between the accepted updates",
        ("runs",): "finished",
        ("run", "finished"): "minimum = 3",
        ("replies", run_id, "--round", "0"): "alpha",
        ("clients",): "beta",
    }.items():
        printed = command(centre, *arguments).stdout
        assert expected in printed
        assert max(len(line.rstrip()) for line in printed.splitlines()) <= 100


def test_a_table_of_members_says_what_is_wrong_and_one_member_shows_the_rest(centre: Federation) -> None:
    now = datetime(2026, 5, 4, 12, tzinfo=UTC)

    def member(name: str, days: int = 5, **fields: Any) -> admin.Client:
        made = admin.Client(client_id=name, state=ClientState.CLIENT_STATE_ACTIVE, **fields)
        made.certificate_expires.FromDatetime(now + timedelta(days=days))
        return made

    task = admin.TaskSummary(task="digits", samples=10, abilities=["repeatable"], training_sessions_left=0)
    members = [
        member("member-10", attending=True, tasks=[task]),
        member("member-2", attending=True, tasks=[admin.TaskSummary(task="digits", samples=7)]),
        member("member-1", -1, tags=["north"]),
    ]
    text = shown(member_tables.clients(members, now, RunNames()))
    wrong = {line.split()[0]: line for line in text.splitlines() if line.startswith("member-")}
    assert [*wrong] == ["member-1", "member-2", "member-10"]
    assert "does not attend" in wrong["member-1"]
    assert "its certificate has ended" in text
    assert wrong["member-2"].rstrip().endswith("digits (7)")
    assert "no private rounds left for digits" in wrong["member-10"]
    lines = [line.strip() for line in shown(member_tables.client(members[0], now, RunNames())).splitlines()]
    assert "private rounds left  0 of training, 0 of evaluation" in lines
    assert ["can", "repeatable"] in [line.split() for line in lines]
    assert "there is no member 'nobody'; `fedpareto" in command(centre, "client", "nobody", code=1).stderr


def test_a_run_shows_its_members_before_raw_metrics(centre: Federation, finished: Finished) -> None:
    members, _, metrics = command(centre, "run", "finished").stdout.partition("metrics of round 1")
    assert "members in the rounds that have ended" in members
    assert "accuracy/mean" in metrics


def test_names_in_tables_are_never_broken_and_stand_in_natural_order() -> None:
    table = tables.new_table("run", "name", "text")
    table.add_row("1" * 12, "hospital-north-2", "a sentence that needs more than one line " * 2)
    assert "hospital-north-2" in shown(table, width=50)
    names = ["member-10", "member-2", "a", "member-2-b"]
    assert sorted(names, key=natural) == ["a", "member-2", "member-2-b", "member-10"]


def test_a_bundle_is_written_and_verified_by_commands(centre: Federation, finished: Finished, tmp_path: Path) -> None:
    run, _ = finished
    bare, whole, wrong = (tmp_path / f"{name}.fedpareto" for name in ("bare", "whole", "wrong"))
    told = json.loads(command(centre, "bundle", run, "--out", whole, "--payloads", "--yes", "--json").stdout)
    assert (told["rounds"], told["size"]) == (2, whole.stat().st_size)
    assert "exists: give --force" in command(centre, "bundle", run, "--out", whole, code=2).stderr
    unasked = command(centre, "bundle", "finished", "--out", bare, "--payloads", code=2)
    assert ("each member's updates" in unasked.stderr, bare.exists()) == (True, False)
    (warning,) = command(centre, "bundle", "finished", "--out", bare).stderr.splitlines()
    assert "cannot show that K and the models follow from the updates; --payloads adds them" in warning
    fingerprint = hashlib.sha256(der(load_certificate_file(centre.home / "ca.pem"))).hexdigest()
    lines = fedpareto("verify", whole, "--ca", fingerprint).stdout.splitlines()
    assert f"CA {fingerprint}, as you named it" in "\n".join(lines)
    measured = "metrics not verified, because only the coordinator measured them: bytes/down, iterations, residual"
    assert measured in lines
    assert lines[-2:] == [f"digest of the record: {told['record']}", f"{whole}: everything else was verified"]
    document = json.loads(fedpareto("verify", whole, "--json").stdout)
    assert (document["verified"], document["record"]) == (True, told["record"])
    partly = fedpareto("verify", bare, code=3)
    assert [line for line in partly.stdout.splitlines() if "not verified" in line] == [
        "not verified: K and the model, because the file has no updates and no models; `fedpareto admin bundle "
        f"{run} --payloads --out FILE` adds them",
        measured,
        f"{bare}: nothing is wrong; what is named above was not verified",
    ]
    edited = Edited.of(whole).with_round(1, lambda found: found.metrics.__setitem__("loss/test", 0.25))
    failed = fedpareto("verify", edited.write(wrong), code=1)
    assert "does not verify: round 1: the record says loss/test = 0.25" in failed.stderr
    assert "round 0: 3 updates" in failed.stdout
    krum = command(centre, "replay", "finished", "1", "--algorithm", "krum", "--set", "byzantine=0", "--json")
    assert [sorted(one["other"]) for one in json.loads(krum.stdout)["rounds"]] == [[0, 0, 1]]
    assert "round 0: cosine" in command(centre, "replay", "finished", "--algorithm", "fedavg").stdout
    misspelt = command(centre, "replay", "finished", "--algorithm", "krum", "--set", "byzantine", code=2)
    assert "expected KEY=VALUE" in misspelt.stderr
    assert "it is of another federation" in fedpareto("verify", whole, "--ca", "00" * 32, code=1).stderr
    assert "No such file" in fedpareto("verify", tmp_path / "nothing", code=1).stderr


@pytest.mark.full
def test_a_bundle_with_payloads_says_before_what_it_would_show_also_what_noise_would_not_hide(
    centre: Federation, stub: AdminStub, finished: Finished
) -> None:
    asked = payloads_question(stub, "finished", Path("run.fedpareto"))
    assert "the updates of 3 members (" in asked
    assert "Everybody who gets the file sees each member's updates" in asked
    assert "noise" not in asked
    spec = SPEC.replace('"fedmgda+"', '"fedmgda+"\nepsilon = 0.1') + "[privacy]\nclient_noise = 5.0\n"
    submit(centre, "noisy", spec, "--paused")
    assert "those from before the noise: nothing protects them there" in payloads_question(
        stub, "noisy", Path("run.fedpareto")
    )


@pytest.mark.full
def test_an_export_has_every_round_with_every_clients_part_and_scores(stub: AdminStub, finished: Finished) -> None:
    run_id, _ = finished
    rounds = list(stub.ExportRounds(admin.ExportRoundsRequest(run="finished")))
    assert [item.summary for item in rounds] == list(stub.ListRounds(admin.ListRoundsRequest(run=run_id)).rounds)
    for item in rounds:
        detail = stub.GetRound(admin.GetRoundRequest(run=run_id, round=item.summary.round))
        for part in detail.participations:
            assert part.key_id
            part.key_id = ""
            del part.envelopes[:]
        assert list(item.participations) == list(detail.participations)
        assert {scored.client_id: dict(scored.scores) for scored in item.scores} == {
            part.client_id: dict(part.evaluation) for part in item.participations
        }
    with refused("NOT_FOUND", "run-unknown"):
        list(stub.ExportRounds(admin.ExportRoundsRequest(run="nothing")))


def test_every_number_that_a_round_records_is_defined(centre: Federation, finished: Finished) -> None:
    found = centre.admin("round", finished[0], "-1")["summary"]["metrics"]
    assert set(found) <= set(DEFINITIONS)
    missing = {"accuracy/weighted", "loss/validation", "loss/worst", "loss/jain", "backdoor"}  # nobody has those here
    others = ["objective", "preference", "epsilon", "private", "evaluation", "metric", "stop", "required"]
    # Groups of metrics of other runs:
    of_others = {name for name in DEFINITIONS if "<objective>" in name or name.partition("/")[0] in others}
    assert set(DEFINITIONS) - set(found) == missing | of_others


def test_a_report_is_written_once_unless_told_otherwise(centre: Federation, finished: Finished) -> None:
    report = partial(fedpareto, "report", finished[0][:8], "--home", centre.home / "admin", cwd=centre.directory)
    assert report().stdout == "report-finished.html: 2 rounds, 3 clients\n"
    page = (centre.directory / "report-finished.html").read_text()
    assert page.startswith("<!doctype html>")
    assert finished[0] in page
    assert "--force" in report(code=2).stderr
    report("--force")
    assert "cannot write no/such/page.html" in report("--out", "no/such/page.html", code=1).stderr


def test_replies_carry_the_signed_envelope_for_a_third_party(
    centre: Federation, stub: AdminStub, finished: Finished
) -> None:
    run_id, clients = finished
    replies = centre.admin("replies", run_id, "--client", "alpha")["replies"]
    assert {reply["client_id"] for reply in replies} == {"alpha"}
    assert len(replies) == 4
    assert replies[0]["envelope"]["decoded"]["run_id"] == run_id
    assert replies[0]["received"].endswith("Z")
    assert len(centre.admin("replies", run_id, "--round", "1")["replies"]) == 2 * len(clients)


def test_an_unknown_run_or_round_is_refused_by_name(centre: Federation, stub: AdminStub, finished: Finished) -> None:
    run_id, _ = finished
    for name in ("nothing", ""):
        with refused("NOT_FOUND", "run-unknown"):
            stub.GetRun(admin.GetRunRequest(run=name))
    for number in (2, -3):
        with refused("NOT_FOUND", "round-unknown"):
            stub.GetRound(admin.GetRoundRequest(run=run_id, round=number))
    said = command(centre, "round", run_id, "7", code=1).stderr
    assert "has no round 7: it has rounds 0 to 1 [round-unknown]" in said


# --- models


@pytest.mark.full
def test_a_model_is_exported_with_its_digest_checked_and_no_file_overwritten(
    centre: Federation, finished: Finished
) -> None:
    run_id, _ = finished
    out = centre.directory / "out.safetensors"
    found = centre.admin("export", run_id, "--out", str(out))
    assert read_exported(out, "blake3")[0] == found["digest"] == centre.admin("run", run_id)["run"]["model"]
    assert "--force" in command(centre, "export", run_id, "--out", out, code=2).stderr
    first = centre.admin("export", run_id, "--round", "0", "--out", str(out), "--force")
    assert first["digest"] == centre.admin("round", run_id, "0")["summary"]["result_model"]
    assert read_exported(out, "blake3")[0] == first["digest"] != found["digest"]
    nowhere = centre.directory / "no" / "such"
    assert "cannot write" in command(centre, "export", run_id, "--out", nowhere, code=1).stderr


def test_what_a_submission_promises_must_arrive(stub: AdminStub) -> None:
    spec, data = 'name = "promises"\n' + SPEC, good_model()
    other = digest(b"other")
    infinite = to_bytes(LAYOUT, np.full(LAYOUT.size, np.nan, dtype=np.float32))
    header, values = LAYOUT.header, data[len(LAYOUT.header) :]
    spaced = len(header).to_bytes(8, "little") + header[8:] + b" " * 8 + values
    for status, reason, submission in (
        ("INVALID_ARGUMENT", "payload-digest", requests(spec, data, model=other)),
        ("INVALID_ARGUMENT", "payload-length", requests(spec, data, size=len(data) - 1)),
        ("INVALID_ARGUMENT", "payload-length", requests(spec, data, size=len(data) + 1)),
        ("RESOURCE_EXHAUSTED", "limit:model", requests(spec, data, size=1 << 60)),
        ("INVALID_ARGUMENT", "argument", requests(spec, data, model="blake3:../../etc/passwd")),
        ("INVALID_ARGUMENT", "argument", iter([admin.SubmitRunRequest(chunk=data)])),
        ("INVALID_ARGUMENT", "argument", iter([])),
        ("INVALID_ARGUMENT", "spec", requests("rounds = 1", data)),
        ("INVALID_ARGUMENT", "spec", requests(spec.replace("fedmgda+", "fedmagic"), data)),
        ("INVALID_ARGUMENT", "layout", requests(spec, b"\x10\0\0\0\0\0\0\0not a header at all")),
        ("INVALID_ARGUMENT", "layout", requests(spec, b"abc")),
        ("RESOURCE_EXHAUSTED", "limit:header", requests(spec, b"\xff" * 16)),
        ("INVALID_ARGUMENT", "non-finite", requests(spec, infinite)),
        ("INVALID_ARGUMENT", "layout", requests(spec, spaced)),  # members would take a file of another size
    ):
        with refused(status, reason):
            stub.SubmitRun(submission)
    assert "promises" not in {run.name for run in stub.ListRuns(admin.ListRunsRequest()).runs}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("epsilon = 7", 'algorithm.epsilon must be "auto" or lie in [0, 1]; got 7.0'),
        ("delta = 1", "algorithm.delta: fedmgda+ has no such hyper-parameter"),
        ('prior = "none"', "algorithm.prior: "),
    ],
)
def test_a_wrong_hyperparameter_is_refused_by_its_key_before_the_model_is_sent(
    stub: AdminStub, line: str, message: str
) -> None:
    spec = 'name = "wrong"\n' + SPEC.replace("[selection]", f"{line}\n[selection]")
    with pytest.raises(grpc.RpcError) as caught:
        stub.SubmitRun(requests(spec, b""))
    refusal = refusal_from_rpc_error(caught.value)
    assert (refusal.status, refusal.reason) == ("INVALID_ARGUMENT", "spec")
    assert refusal.message.startswith(message)


@pytest.mark.parametrize("chunk", [1, 3, 8, 9, 1000])
def test_a_model_is_taken_in_pieces_of_any_size_and_refused_when_not_finite(blobs: DirectoryStore, chunk: int) -> None:
    def uploaded(data: bytes, check: PayloadCheck) -> Upload:
        upload = Upload(blobs.writer(hash=False), check, digest(data), len(data))
        for start in range(0, len(data), chunk):
            upload.take(data[start : start + chunk])
        upload.finish()
        return upload

    data, check = good_model(), PayloadCheck(None)
    uploaded(data, check).store()
    assert (check.problem, check.layout) == (None, LAYOUT)
    assert blobs.read(digest(data)) == data
    bad, check = to_bytes(LAYOUT, np.full(LAYOUT.size, np.nan, dtype=np.float32)), PayloadCheck(None)
    uploaded(bad, check).discard()
    assert check.problem is not None
    assert check.problem.reason == "non-finite"
    assert not blobs.exists(digest(bad))
    assert list((blobs.root / "tmp").iterdir()) == []


def test_a_file_that_is_no_model_is_refused_before_anything_is_sent(centre: Federation) -> None:
    path = centre.directory / "bad.safetensors"
    path.write_bytes(b"nonsense")
    (centre.directory / "bad.toml").write_text('name = "bad"\n' + SPEC)
    assert "cannot be the initial model" in command(centre, "submit", "bad.toml", "--model", path, code=2).stderr


# --- a run on its way to other tools


@pytest.mark.full
def test_a_target_that_lacks_something_is_a_failure_and_the_same_command_goes_on(
    centre: Federation, finished: Finished, installed: Path
) -> None:
    away, there = f"own:{installed / 'none' / 'a.jsonl'}", f"own:{installed / 'b.jsonl'}"
    failed = command(centre, "follow", finished[0], "--to", away, "--to", there, code=1)
    assert "1 of 2 targets lack something; the same command goes on where each target is" in failed.stderr
    assert failed.stderr.count("cannot be reached") == 1
    assert f"{there} has 2 rounds of finished" in failed.stdout
    assert rounds_in(installed / "b.jsonl") == [0, 1]
    (installed / "none").mkdir()
    done = command(centre, "follow", finished[0], "--to", away, "--to", there, "--json")
    found = json.loads(done.stdout)
    assert (found["state"], found["targets"]) == (
        "COMPLETED",
        [{"target": target, "rounds": 2, "problem": ""} for target in (away, there)],
    )
    assert rounds_in(installed / "none" / "a.jsonl") == rounds_in(installed / "b.jsonl") == [0, 1]
    assert (installed / "b.end").read_text() == "COMPLETED model.safetensors card.md report.html"
    assert "name a target" in command(centre, "follow", finished[0], code=2).stderr
    assert "no sink 'x'" in command(centre, "follow", finished[0], "--to", "x:y", code=2).stderr
