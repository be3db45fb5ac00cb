"""The operators' side against a real coordinator: commands as processes, members played by hand."""

import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from bundles import Edited
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from forked import completed
from harness import Attending, Federation, Member, Process, federation, refused, wait_for
from sqlalchemy import select

from coordinator import finding
from coordinator.aggregation.fedavg import FedAvg
from coordinator.rounds.metrics import DEFINITIONS
from coordinator.rounds.presence import Presence
from coordinator.rounds.submission import Submission
from coordinator.rounds.supervisor import Supervisor
from coordinator.rounds.uploads import Upload, Uploads
from coordinator.services import summaries, watching
from coordinator.signing_keys import Signing
from federation.certificates import der, load_certificate_file
from federation.channels import refusal_from_rpc_error
from federation.digests import digest
from federation.key_chain import KeyChain
from federation.payload_check import PayloadCheck
from federation.provenance import read_exported
from federation.refusals import Refusal
from federation.v1.admin_pb2 import (
    ApproveClientRequest,
    CreateJoinStringRequest,
    ExportRoundsRequest,
    GetRoundRequest,
    GetRunRequest,
    ListRoundsRequest,
    ListRunsRequest,
    PauseRunRequest,
    RevokeClientRequest,
    RunHeader,
    SubmitRunRequest,
    WatchRunRequest,
)
from federation.v1.admin_pb2_grpc import AdminStub
from federation.v1.common_pb2 import RunState
from federation.vectors import Layout, Tensor, to_bytes
from storage import models, states
from storage.database import Database
from storage.directory import DirectoryStore

LAYOUT = Layout((Tensor("a", (3, 4)), Tensor("b", (5,))))
SPEC = 'task = "digits"\nrounds = 2\n[algorithm]\nname = "fedmgda+"\n[selection]\nminimum = 3\n'


@pytest.fixture(scope="module")
def centre(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """One coordinator for all tests of this file; each test has runs and clients of its own."""
    with federation(tmp_path_factory.mktemp("admin"), "--approval") as made:
        made.serve()
        yield made


@pytest.fixture
def stub(centre: Federation) -> Iterator[AdminStub]:
    with centre.administrator() as channel:
        yield AdminStub(channel)


def enroll(centre: Federation, stub: AdminStub, client_id: str) -> Member:
    member = centre.enroll(client_id)
    stub.ApproveClient(ApproveClientRequest(client_id=client_id))
    return member


def model_file(path: Path) -> Path:
    vector = np.random.default_rng(0).standard_normal(LAYOUT.size).astype(np.float32)
    path.write_bytes(to_bytes(LAYOUT, vector))
    return path


def submit(centre: Federation, name: str, spec: str = SPEC, *options: str) -> str:
    model = model_file(centre.directory / "model.safetensors")
    return centre.submit(name, spec, "--model", str(model), *options)


def command(centre: Federation, *arguments: str) -> "subprocess.CompletedProcess[str]":
    home = str(centre.home / "admin")
    return completed(["-m", "fedpareto", "admin", "--home", home, *arguments], cwd=centre.directory)


def play(streams: dict[Member, Attending], assignments: int) -> None:
    """Lets every member answer so many assignments honestly."""
    for _ in range(assignments):
        for member, stream in streams.items():
            member.answer(stream.assignment(), seed=hash(member.files.client_id) % 1000)


def conduct(centre: Federation, stub: AdminStub, name: str, clients: tuple[str, ...]) -> str:
    """A whole run of two rounds, with members played by hand; returns its id."""
    members = {client: enroll(centre, stub, client) for client in clients}
    streams = {member: member.attend(digits=10) for member in members.values()}
    run_id = submit(centre, name)
    play(streams, 4)  # train and evaluate, twice
    centre.wait_completed(run_id)
    for member, stream in streams.items():
        stream.close()
        member.channel.close()
    return run_id


@pytest.fixture(scope="module")
def finished(centre: Federation) -> tuple[str, tuple[str, ...]]:
    clients = ("alpha", "beta", "gamma")
    with centre.administrator() as channel:
        return conduct(centre, AdminStub(channel), "finished", clients), clients


# --- what the commands show


def test_a_round_shows_every_clients_part_and_the_cosines(
    centre: Federation, finished: tuple[str, tuple[str, ...]]
) -> None:
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


def test_the_tables_for_people_fit_and_name_what_they_show(
    centre: Federation, finished: tuple[str, tuple[str, ...]]
) -> None:
    run_id, _ = finished
    for arguments, expected in {
        ("rounds", run_id): "COMPLETED",
        ("round", run_id, "-1"): "cosines between the accepted updates",
        ("runs",): "finished",
        ("run", "finished"): "minimum = 3",
        ("updates", run_id, "--round", "0"): "alpha",
        ("clients",): "beta",
    }.items():
        done = command(centre, *arguments)
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout
        assert max(len(line.rstrip()) for line in done.stdout.splitlines()) <= 100


def test_a_bundle_is_written_and_verified_by_commands(
    centre: Federation, finished: tuple[str, tuple[str, ...]], tmp_path: Path
) -> None:
    def verify(*arguments: str) -> "subprocess.CompletedProcess[str]":
        return completed(["-m", "fedpareto", "verify", *arguments], cwd=tmp_path)

    bare, whole, wrong = (tmp_path / f"{name}.fedpareto" for name in ("bare", "whole", "wrong"))
    shown = command(centre, "bundle", finished[0], "--out", str(whole), "--payloads", "--json")
    told = json.loads(shown.stdout)
    assert (told["rounds"], told["size"]) == (2, whole.stat().st_size)
    again = command(centre, "bundle", finished[0], "--out", str(whole))
    assert again.returncode == 2
    assert "exists: give --force" in again.stderr
    assert command(centre, "bundle", "finished", "--out", str(bare)).returncode == 0
    fingerprint = hashlib.sha256(der(load_certificate_file(centre.home / "ca.pem"))).hexdigest()
    done = verify(str(whole), "--ca", fingerprint)
    assert done.returncode == 0, done.stderr
    assert f"CA {fingerprint}, as you named it" in done.stdout
    assert done.stdout.splitlines()[-2:] == [
        f"digest of the record: {told['record']}",
        f"{whole}: everything was verified",
    ]
    document = json.loads(verify(str(whole), "--json").stdout)
    assert (document["verified"], document["record"]) == (True, told["record"])
    partly = verify(str(bare))
    assert partly.returncode == 3
    assert "round 0: not verified, because K and the model: blake3:" in partly.stdout
    edited = Edited.of(whole).with_round(1, lambda found: found.metrics.__setitem__("loss/test", 0.25))
    failed = verify(str(edited.write(wrong)))
    assert failed.returncode == 1
    assert "does not verify: round 1: the record says loss/test = 0.25" in failed.stderr
    assert "round 0: 3 updates" in failed.stdout
    krum = command(centre, "replay", "finished", "1", "--algorithm", "krum", "--set", "byzantine=0", "--json")
    assert [sorted(one["other"]) for one in json.loads(krum.stdout)["rounds"]] == [[0, 0, 1]]
    assert "round 0: cosine" in command(centre, "replay", "finished", "--algorithm", "fedavg").stdout
    misspelt = command(centre, "replay", "finished", "--algorithm", "krum", "--set", "byzantine")
    assert (misspelt.returncode, "expected KEY=VALUE" in misspelt.stderr) == (2, True)
    stranger = verify(str(whole), "--ca", "00" * 32)
    assert stranger.returncode == 1
    assert "it is of another federation" in stranger.stderr
    absent = verify(str(tmp_path / "nothing"))
    assert (absent.returncode, "No such file" in absent.stderr) == (1, True)


def test_an_export_has_every_round_with_every_clients_part_and_scores(
    stub: AdminStub, finished: tuple[str, tuple[str, ...]]
) -> None:
    run_id, _ = finished
    rounds = list(stub.ExportRounds(ExportRoundsRequest(run="finished")))
    assert [item.summary for item in rounds] == list(stub.ListRounds(ListRoundsRequest(run=run_id)).rounds)
    for item in rounds:
        detail = stub.GetRound(GetRoundRequest(run=run_id, round=item.summary.round))
        for part in detail.participations:
            assert part.key_id
            part.key_id = ""
            del part.envelopes[:]
        assert list(item.participations) == list(detail.participations)
        assert {scored.client_id: dict(scored.scores) for scored in item.scores} == {
            part.client_id: dict(part.evaluation) for part in item.participations
        }
    with refused("NOT_FOUND", "run-unknown"):
        list(stub.ExportRounds(ExportRoundsRequest(run="nothing")))


def test_every_number_that_a_round_records_is_defined(
    centre: Federation, finished: tuple[str, tuple[str, ...]]
) -> None:
    found = centre.admin("round", finished[0], "-1")["summary"]["metrics"]
    of_the_algorithm = {"residual", "iterations"}
    assert set(found) - of_the_algorithm <= set(DEFINITIONS)
    missing = {"accuracy/weighted", "loss/validation", "loss/worst", "loss/jain", "backdoor"}  # nobody has those here
    others = ("objective/", "preference/", "epsilon/", "private/", "metric/", "stop/", "required/")  # of other runs
    of_others = {name for name in DEFINITIONS if "<objective>" in name or name.startswith(others)}
    assert set(DEFINITIONS) - set(found) == missing | of_others


def test_a_report_is_written_once_unless_told_otherwise(
    centre: Federation, finished: tuple[str, tuple[str, ...]]
) -> None:
    arguments = ["-m", "fedpareto", "report", finished[0][:8], "--home", str(centre.home / "admin")]

    def report(*more: str) -> "subprocess.CompletedProcess[str]":
        return completed([*arguments, *more], cwd=centre.directory)

    done = report()
    assert done.returncode == 0, done.stderr
    assert done.stdout == "report-finished.html: 2 rounds, 3 clients\n"
    page = (centre.directory / "report-finished.html").read_text()
    assert page.startswith("<!doctype html>")
    assert finished[0] in page
    again = report()
    assert (again.returncode, "--force" in again.stderr) == (2, True)
    assert report("--force").returncode == 0
    nowhere = report("--out", "no/such/page.html")
    assert (nowhere.returncode, "cannot write no/such/page.html" in nowhere.stderr) == (1, True)


def test_updates_carry_the_signed_envelope_for_a_third_party(
    centre: Federation, stub: AdminStub, finished: tuple[str, tuple[str, ...]]
) -> None:
    run_id, clients = finished
    updates = centre.admin("updates", run_id, "--client", "alpha")["updates"]
    assert {update["client_id"] for update in updates} == {"alpha"}
    assert len(updates) == 4
    assert updates[0]["envelope"]["decoded"]["run_id"] == run_id
    assert updates[0]["received"].endswith("Z")
    assert len(centre.admin("updates", run_id, "--round", "1")["updates"]) == 2 * len(clients)


def test_an_unknown_run_or_round_is_refused_by_name(
    centre: Federation, stub: AdminStub, finished: tuple[str, tuple[str, ...]]
) -> None:
    run_id, _ = finished
    with refused("NOT_FOUND", "run-unknown"):
        stub.GetRun(GetRunRequest(run="nothing"))
    with refused("NOT_FOUND", "run-unknown"):
        stub.GetRun(GetRunRequest(run=""))
    for number in (2, -3):
        with refused("NOT_FOUND", "round-unknown"):
            stub.GetRound(GetRoundRequest(run=run_id, round=number))
    done = command(centre, "round", run_id, "7")
    assert done.returncode == 1
    assert "has no round 7: it has rounds 0 to 1 [round-unknown]" in done.stderr


def test_a_run_goes_by_the_beginning_of_its_id(stub: AdminStub, finished: tuple[str, tuple[str, ...]]) -> None:
    run_id, _ = finished
    assert stub.GetRun(GetRunRequest(run=run_id[:6])).run.run_id == run_id


# --- models


def test_a_model_is_exported_with_its_digest_checked_and_no_file_overwritten(
    centre: Federation, finished: tuple[str, tuple[str, ...]]
) -> None:
    run_id, _ = finished
    out = centre.directory / "out.safetensors"
    found = centre.admin("export", run_id, "--out", str(out))
    assert read_exported(out, "blake3")[0] == found["digest"] == centre.admin("run", run_id)["run"]["model"]
    again = command(centre, "export", run_id, "--out", str(out))
    assert (again.returncode, "--force" in again.stderr) == (2, True)
    first = centre.admin("export", run_id, "--round", "0", "--out", str(out), "--force")
    assert first["digest"] == centre.admin("round", run_id, "0")["summary"]["result_model"]
    assert read_exported(out, "blake3")[0] == first["digest"] != found["digest"]
    nowhere = command(centre, "export", run_id, "--out", str(centre.directory / "no" / "such"))
    assert nowhere.returncode == 1
    assert "cannot write" in nowhere.stderr


def requests(spec: str, data: bytes, *, model: str = "", size: int | None = None) -> Iterator[SubmitRunRequest]:
    header = RunHeader(
        spec=spec.encode(), model=model or digest(data), model_bytes=len(data) if size is None else size, paused=True
    )
    yield SubmitRunRequest(header=header)
    for start in range(0, len(data), 7):
        yield SubmitRunRequest(chunk=data[start : start + 7])


def good_model() -> bytes:
    return to_bytes(LAYOUT, np.ones(LAYOUT.size, dtype=np.float32))


def test_what_a_submission_promises_must_arrive(stub: AdminStub) -> None:
    spec, data = 'name = "promises"\n' + SPEC, good_model()
    other = digest(b"other")
    with refused("INVALID_ARGUMENT", "payload-digest"):
        stub.SubmitRun(requests(spec, data, model=other))
    with refused("INVALID_ARGUMENT", "payload-length"):
        stub.SubmitRun(requests(spec, data, size=len(data) - 1))
    with refused("INVALID_ARGUMENT", "payload-length"):
        stub.SubmitRun(requests(spec, data, size=len(data) + 1))
    with refused("RESOURCE_EXHAUSTED", "limit:model"):
        stub.SubmitRun(requests(spec, data, size=1 << 60))
    with refused("INVALID_ARGUMENT", "argument"):
        stub.SubmitRun(requests(spec, data, model="blake3:../../etc/passwd"))
    with refused("INVALID_ARGUMENT", "argument"):
        stub.SubmitRun(iter([SubmitRunRequest(chunk=data)]))
    with refused("INVALID_ARGUMENT", "argument"):
        stub.SubmitRun(iter([]))
    with refused("INVALID_ARGUMENT", "spec"):
        stub.SubmitRun(requests("rounds = 1", data))
    with refused("INVALID_ARGUMENT", "spec"):
        stub.SubmitRun(requests(spec.replace("fedmgda+", "fedmagic"), data))
    with refused("INVALID_ARGUMENT", "layout"):
        stub.SubmitRun(requests(spec, b"\x10\0\0\0\0\0\0\0not a header at all"))
    with refused("INVALID_ARGUMENT", "layout"):
        stub.SubmitRun(requests(spec, b"abc"))
    with refused("RESOURCE_EXHAUSTED", "limit:header"):
        stub.SubmitRun(requests(spec, b"\xff" * 16))
    with refused("INVALID_ARGUMENT", "non-finite"):
        stub.SubmitRun(requests(spec, to_bytes(LAYOUT, np.full(LAYOUT.size, np.nan, dtype=np.float32))))
    assert "promises" not in {run.name for run in stub.ListRuns(ListRunsRequest()).runs}


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
    data, check = good_model(), PayloadCheck(None)
    upload = Upload(blobs.writer(hash=False), check, digest(data), len(data))
    for start in range(0, len(data), chunk):
        upload.take(data[start : start + chunk])
    upload.finish()
    assert (check.problem, check.layout) == (None, LAYOUT)
    upload.store()
    assert blobs.read(digest(data)) == data
    bad = to_bytes(LAYOUT, np.full(LAYOUT.size, np.nan, dtype=np.float32))
    check = PayloadCheck(None)
    upload = Upload(blobs.writer(hash=False), check, digest(bad), len(bad))
    upload.take(bad)
    upload.finish()
    assert check.problem is not None
    assert check.problem.reason == "non-finite"
    upload.discard()
    assert not blobs.exists(digest(bad))
    assert list((blobs.root / "tmp").iterdir()) == []


def test_a_file_that_is_no_model_is_refused_before_anything_is_sent(centre: Federation) -> None:
    path = centre.directory / "bad.safetensors"
    path.write_bytes(b"nonsense")
    (centre.directory / "bad.toml").write_text('name = "bad"\n' + SPEC)
    done = command(centre, "submit", "bad.toml", "--model", str(path))
    assert done.returncode == 2
    assert "cannot be the initial model" in done.stderr


# --- runs


def test_a_run_is_held_and_stopped_and_refuses_what_does_not_fit_its_state(centre: Federation, stub: AdminStub) -> None:
    run_id = submit(centre, "held", SPEC.replace("minimum = 3", "minimum = 60"), "--paused")
    assert centre.run_state(run_id)["state"] == "PAUSED"
    assert centre.admin("resume", run_id)["run"]["state"] == "RUNNING"
    with refused("ALREADY_EXISTS", "run-exists"):
        stub.SubmitRun(requests('name = "held"\n' + SPEC, good_model()))
    wait_for(lambda: "waiting for clients" in centre.run_state(run_id)["reason"], "the run to say what it waits for")
    assert centre.admin("pause", "held")["run"]["state"] == "PAUSED"
    with refused("FAILED_PRECONDITION", "run-state"):
        stub.PauseRun(PauseRunRequest(run=run_id))
    stopped = centre.admin("stop", run_id, "--yes", "--reason", "enough")["run"]
    assert (stopped["state"], stopped["reason"]) == ("STOPPED", "enough")
    done = command(centre, "watch", run_id)
    assert done.returncode == 1
    assert "did not complete: STOPPED enough" in done.stderr


def test_watching_begins_with_the_present_and_ends_with_the_run(centre: Federation, stub: AdminStub) -> None:
    members = [enroll(centre, stub, name) for name in ("watched-a", "watched-b", "watched-c")]
    streams = {member: member.attend(digits=10) for member in members}
    run_id = submit(centre, "watched", SPEC, "--paused")
    seen: list[Any] = []
    call = stub.WatchRun(WatchRunRequest(run=run_id))
    first = next(call)
    assert first.run.state == RunState.RUN_STATE_PAUSED
    assert not first.HasField("ended")
    centre.admin("resume", run_id)
    play(streams, 4)
    seen = list(call)
    assert [update.ended.round for update in seen if update.HasField("ended")] == [0, 1]
    assert seen[-1].run.state == RunState.RUN_STATE_COMPLETED
    assert any(update.phase.asked == 3 for update in seen)
    (only,) = map(json.loads, command(centre, "watch", run_id, "--json").stdout.splitlines())
    assert (only["run"]["state"], only["run"]["rounds_done"]) == ("COMPLETED", 2)
    assert [member["last_outcome"] for member in only["run"]["members"]] == ["REPLIED"] * 3
    for stream in streams.values():
        stream.close()


def rounds_in(text: str) -> list[int]:
    """The rounds that have a line in what `watch` prints."""
    return [int(line.split()[0]) for line in text.splitlines() if line.split()[0].isdecimal()]


def test_watching_shows_the_rounds_so_far_and_then_each_one_once(centre: Federation, stub: AdminStub) -> None:
    members = [enroll(centre, stub, name) for name in ("joined-a", "joined-b", "joined-c")]
    streams = {member: member.attend(digits=10) for member in members}
    run_id = submit(centre, "joined")
    play(streams, 2)
    wait_for(lambda: centre.run_state(run_id)["rounds_done"] == 1, "the first round to end")
    log = centre.directory / "watch.log"
    arguments = ["-m", "fedpareto", "admin", "--home", str(centre.home / "admin"), "watch", run_id]
    watching = Process(arguments, log)
    wait_for(lambda: log.exists() and rounds_in(log.read_text()) == [0], "the round so far")
    play(streams, 2)
    assert watching.popen.wait(120) == 0
    assert rounds_in(log.read_text()) == [0, 1]
    assert "joined  COMPLETED  2/2 rounds" in log.read_text()
    for stream in streams.values():
        stream.close()


def test_watching_a_run_that_has_ended_shows_its_rounds_and_how_it_ended(
    centre: Federation, finished: tuple[str, tuple[str, ...]]
) -> None:
    run_id, _ = finished
    done = command(centre, "watch", run_id)
    assert done.returncode == 0, done.stderr
    assert rounds_in(done.stdout) == [0, 1]
    assert done.stdout.splitlines()[-1] == "finished  COMPLETED  2/2 rounds"
    assert len(done.stdout.splitlines()) == 4


@pytest.mark.parametrize(
    ("rule", "warned"),
    [
        ('"fedmgda"', True),
        ('"fedmgda"\nepsilon = 0.5', False),
        ('"fedmgda+"', False),
        ('"fedmgda+"\nepsilon = 1.0', True),
        ('"fedmgda+"\nepsilon = 0.1', False),
        ('"fedavg"', False),
    ],
)
def test_a_run_that_one_client_could_bring_to_a_standstill_is_taken_with_a_warning(
    stub: AdminStub, rule: str, warned: bool
) -> None:
    spec = f'name = "warned-{digest(rule.encode())[7:15]}"\n' + SPEC.replace('"fedmgda+"', rule)
    warnings = stub.SubmitRun(requests(spec, good_model())).warnings
    assert len(warnings) == warned
    assert all("standstill" in warning and "epsilon" in warning for warning in warnings)


def test_a_rule_that_reads_losses_says_who_could_abuse_it() -> None:
    class Believing(FedAvg):
        reads_losses = True

    assert ["inflates its loss" in caution for caution in Believing().cautions()] == [True]


# --- members


def test_a_join_string_is_shown_once_and_nowhere_else(centre: Federation) -> None:
    done = command(centre, "join-string", "discreet")
    assert done.returncode == 0
    assert done.stdout.startswith("fpjoin1_")
    assert "fedpareto worker join --home discreet" in done.stderr
    assert "fpjoin1_" not in done.stderr


def test_a_member_is_made_approved_and_shut_out(centre: Federation, stub: AdminStub) -> None:
    member = centre.enroll("visitor")
    with refused("ALREADY_EXISTS", "client-exists"):
        stub.CreateJoinString(CreateJoinStringRequest(client_id="visitor"))
    for name in ("", "Upper", "../etc", "a" * 64):
        with refused("INVALID_ARGUMENT", "argument"):
            stub.CreateJoinString(CreateJoinStringRequest(client_id=name))
    with refused("INVALID_ARGUMENT", "argument"):
        stub.CreateJoinString(CreateJoinStringRequest(client_id="later", lifetime_seconds=40 * 86_400))
    for name in ("nobody", "", "nobo\0dy"):
        with refused("NOT_FOUND", "client-unknown"):
            stub.ApproveClient(ApproveClientRequest(client_id=name))
    stream = member.attend(digits=10)
    states = {client["client_id"]: client for client in centre.admin("clients")["clients"]}
    assert states["visitor"]["state"] == "PENDING"
    assert centre.admin("approve", "visitor")["client"]["state"] == "ACTIVE"
    with refused("FAILED_PRECONDITION", "client-state"):
        stub.ApproveClient(ApproveClientRequest(client_id="visitor"))
    centre.attending("visitor")
    assert centre.admin("revoke", "visitor", "--yes", "--reason", "left the consortium")["client"]["state"] == "REVOKED"
    found = stream.next()
    while not (found is None or isinstance(found, grpc.RpcError)):
        found = stream.next()
    with refused("UNAUTHENTICATED", "certificate-revoked"):
        assert found is not None
        raise found
    with refused("FAILED_PRECONDITION", "client-state"):
        stub.RevokeClient(RevokeClientRequest(client_id="visitor"))
    actions = {row[0] for row in centre.query("select action from audit_log where subject = 'visitor'")}
    assert {"join-string.created", "client.approved", "client.revoked"} <= actions


def test_a_run_that_waits_for_clients_begins_when_one_is_approved(centre: Federation, stub: AdminStub) -> None:
    member = centre.enroll("latecomer")
    stream = member.attend(**{"digits-late": 10})
    spec = SPEC.replace('"digits"', '"digits-late"').replace("minimum = 3", "minimum = 1")
    run_id = submit(centre, "late", spec)
    wait_for(lambda: "0 of 1" in centre.run_state(run_id)["reason"], "the run to wait")
    stub.ApproveClient(ApproveClientRequest(client_id="latecomer"))
    play({member: stream}, 4)
    centre.wait_completed(run_id)
    stream.close()


def test_a_viewer_sees_and_cannot_touch(centre: Federation) -> None:
    from federation.admin_files import AdminFiles

    out = centre.directory / "viewer"
    centre.fedpareto(
        "coordinator", "admin", "watcher", "--role", "viewer", "--out", str(out), "--home", str(centre.home)
    )
    with AdminFiles.load(out).channel() as channel:
        viewer = AdminStub(channel)
        viewer.ListRuns(ListRunsRequest())
        for call in (
            lambda: viewer.CreateJoinString(CreateJoinStringRequest(client_id="mole")),
            lambda: viewer.RevokeClient(RevokeClientRequest(client_id="alpha")),
            lambda: viewer.PauseRun(PauseRunRequest(run="finished")),
            lambda: viewer.SubmitRun(requests('name = "mine"\n' + SPEC, good_model())),
        ):
            with refused("PERMISSION_DENIED", "role"):
                call()


# --- the record, when nobody serves it


def test_reading_commands_serve_a_coordinators_own_directory_themselves(tmp_path: Path) -> None:
    with federation(tmp_path) as made:
        process = made.serve()
        run_id = submit(made, "idle", SPEC, "--paused")
        process.stop()
        done = command(made, "run", "idle", "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["run"]["run_id"] == run_id
        assert "starting one for this command" in done.stderr
        assert not (made.home / "ports.json").exists()  # and it is gone again
        refusing = command(made, "pause", "idle")
        assert refusing.returncode == 1
        assert "cannot reach the coordinator" in refusing.stderr


def test_reading_commands_leave_a_run_that_is_under_way_as_it_is(tmp_path: Path) -> None:
    with federation(tmp_path) as made:
        process = made.serve()
        stream = made.enroll("reader").attend(digits=10)
        run_id = submit(made, "open", SPEC.replace("minimum = 3", "minimum = 1"))
        stream.assignment()
        process.stop()
        database = Database.open(f"sqlite:///{made.home / 'coordinator.db'}")
        with database.begin() as session:
            phase = session.scalars(select(models.Phase)).one()
            phase.deadline = datetime(2026, 1, 1, tzinfo=UTC)  # long past
        tables = ("runs", "rounds", "phases", "assignments", "audit_log")
        before = [made.query(f"select * from {table}") for table in tables]
        for arguments in (("runs",), ("rounds", "open"), ("round", "open", "0")):
            assert command(made, *arguments).returncode == 0
        assert [made.query(f"select * from {table}") for table in tables] == before
        database.close()
        made.serve()  # and now it goes on: nobody replied in time
        wait_for(lambda: made.query("select 1 from rounds where state = 'SKIPPED'"), "the round to end")
        assert made.run_state(run_id)["state"] in ("RUNNING", "FAILED", "COMPLETED")


def test_an_engine_that_does_not_conduct_notes_what_operators_say_and_asks_nobody(
    database: Database, blobs: DirectoryStore
) -> None:
    data, key = good_model(), Ed25519PrivateKey.generate()
    supervisor = Supervisor(
        database=database,
        blobs=blobs,
        presence=Presence(),
        uploads=Uploads(database, blobs, quota=1 << 30),
        signing=Signing("test", key, KeyChain(key.public_key()), bytes(32)),
    )
    with database.begin() as session:
        now = datetime.now(UTC)
        session.add(models.Model(digest=blobs.put(data), size=len(data), parameters=LAYOUT.size, created=now))
    supervisor.start(conduct=False)
    submission = Submission.parse(b'name = "held"\n' + SPEC.encode(), ())
    run_id = supervisor.submit(submission, digest(data), by="test", paused=True)
    supervisor.resume(run_id, by="test")
    assert not [thread.name for thread in threading.enumerate() if thread.name == f"run-{run_id}"]
    supervisor.stop()
    with database.read() as session:
        assert session.get_one(models.Run, run_id).state is states.RunState.RUNNING
        assert session.scalars(select(models.Round)).all() == []


@pytest.mark.parametrize("options", [("--json",), ()])
def test_serving_prints_one_document_with_the_ports_or_nothing(tmp_path: Path, options: tuple[str, ...]) -> None:
    with federation(tmp_path, "--name", "printed") as made:
        serving = subprocess.Popen(
            [sys.executable, "-m", "fedpareto", "coordinator", "serve", "--home", str(made.home), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            ports = made.home / "ports.json"
            wait_for(ports.exists, "the coordinator to serve")
            noted = json.loads(ports.read_text())
            if options:
                assert serving.stdout is not None
                assert json.loads(serving.stdout.readline()) == {
                    "federation_id": "printed",
                    "home": str(made.home),
                    "pid": serving.pid,
                    "ports": {"federation": noted["federation"], "enrollment": noted["enrollment"]},
                }
            serving.terminate()
            assert serving.communicate(timeout=60)[0] == ""
            assert serving.returncode == 0
        finally:
            serving.kill()


# --- views, on both databases


def a_run(run_id: str, name: str, minute: int) -> models.Run:
    return models.Run(
        run_id=run_id,
        name=name,
        state=states.RunState.STOPPED,
        spec=f'name = "{name}"\ntask = "digits"\nrounds = 3'.encode(),
        spec_digest=digest(b""),
        initial_model=digest(b"model"),
        model=digest(b"model"),
        submitted_by="test",
        created=datetime(2026, 1, 1, 12, minute, tzinfo=UTC),
    )


def test_a_run_is_found_by_id_by_its_beginning_or_by_its_name(database: Database) -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    with database.begin() as session:
        session.add(models.Model(digest=digest(b"model"), size=1, parameters=1, created=now))
        session.flush()
        session.add_all([a_run("abc1", "x", 0), a_run("abc2", "x", 1), a_run("abd3", "abc", 2)])
    with database.read() as session:
        assert finding.find_run(session, "abc1").run_id == "abc1"
        assert finding.find_run(session, "x").run_id == "abc2"  # the newest of that name
        assert finding.find_run(session, "abc").run_id == "abd3"  # a name before a beginning
        assert finding.find_run(session, "abd").run_id == "abd3"
        with pytest.raises(Refusal, match=r"run-ambiguous.*abc1, abc2, abd3"):
            finding.find_run(session, "ab")
        for nothing in ("", "%", "zzz", "abc1\0"):
            with pytest.raises(Refusal, match="run-unknown"):
                finding.find_run(session, nothing)
        assert [run.run_id for run in watching.runs_from(session, 0, 10)] == ["abd3", "abc2", "abc1"]
        assert summaries.rounds_from(session, "abc1", 0, 10) == []
        watcher = watching.Watching("abc1")
        assert len(watcher.look(session, {}, now)) == 1
        assert watcher.over
        with pytest.raises(Refusal, match=r"round-unknown.*it has none yet"):
            finding.find_round(session, finding.find_run(session, "abc1"), -1)
