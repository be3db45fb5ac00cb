"""`fedpareto worker doctor` and `worker run --rehearse`: one line for each thing, with what to do."""

import json
import shutil
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from typer.testing import CliRunner

from federation.findings import CheckOutcome
from federation.training.plans import TrainingPlan
from federation.trust.certificates import fingerprint, pem
from federation.trust.identity import Role
from federation.trust.keys import new_tls_key, write_private_key
from federation.trust.member_files import MemberFiles, note_addresses
from federation.v1.admin_pb2 import RevokeClientRequest
from federation.v1.admin_pb2_grpc import AdminStub
from federation.vectors import Array, Vector
from fedpareto.cli.failure import CommandFailure
from fedpareto.cli.main import app
from fedpareto.processes.forked import completed
from tests.command_lines import failure
from tests.federation.training.scene import Halving
from tests.federation.transport.connect_proxy import connect_proxy
from tests.federation.trust.scene import Authority
from tests.running import SECONDS, Running, running
from worker.connection.enroll import enroll
from worker.doctor import check_disk
from worker.home import WorkerHome

OK, WARNING, FAILED, SKIPPED = CheckOutcome
NETWORK = ["membership", "dns", "proxy", "tls", "coordinator", "clock"]


SETTINGS = {"hosts": ["localhost", "fl.example"]}


@pytest.fixture(scope="module")
def home(served: Running) -> Path:
    join = served.join_string("ann")
    enroll(WorkerHome(served.home.directory.parent / "ann"), join)
    return served.home.directory.parent / "ann"


def elsewhere(home: Path, directory: Path, *addresses: str) -> Path:
    """The same membership, with other addresses of coordinators."""
    copy = directory / "copy"
    shutil.copytree(home, copy)
    note_addresses(copy, MemberFiles.name_key, addresses=addresses)
    return copy


def doctor(*arguments: str, env: dict[str, str] | None = None) -> tuple[dict[str, tuple[str, str]], int]:
    """The findings by subject, in order, and the exit code."""
    unset = {"https_proxy": "", "no_proxy": "", **(env or {})}
    done = CliRunner().invoke(app, ["worker", "doctor", "--json", *arguments], env=unset)
    assert done.exception is None or isinstance(done.exception, CommandFailure | SystemExit), done.exception
    found = json.loads(done.stdout)
    code = done.exception.code if isinstance(done.exception, CommandFailure) else done.exit_code
    return {one["subject"]: (one["outcome"], one["message"]) for one in found}, int(code)


def test_a_site_in_order_has_one_line_for_each_check_and_exit_code_0(home: Path) -> None:
    found, code = doctor("--home", str(home), "--task", "digits")
    assert list(found) == ["config", *NETWORK, "device", "task", "data", "disk"]
    assert code == 0, found
    assert {outcome for outcome, _ in found.values()} == {OK}, "no GPU is no failure"
    assert found["membership"][1].startswith("ann of test, certificate from ")
    assert found["data"][1].startswith("digits: 1437 training samples")
    lines = CliRunner().invoke(app, ["worker", "doctor", "--home", str(home)]).stdout.splitlines()
    assert [line.split()[1] for line in lines] == ["config", *NETWORK, "device", "task", "disk"]
    assert lines[8].startswith("skipped  task          name it: --task NAME")


def test_a_wrong_clock_is_measured_and_a_running_worker_is_left_alone(served: Running, home: Path) -> None:
    served.clock.ahead = timedelta(hours=1)
    try:
        found, code = doctor("--home", str(home))
        with WorkerHome(home).lock():
            beside, _ = doctor("--home", str(home))
    finally:
        served.clock.ahead = timedelta()
    assert (code, found["clock"][0], found["coordinator"][0]) == (1, FAILED, OK)
    assert found["clock"][1].startswith(
        ("this machine's clock is 3600 s behind", "this machine's clock is 3599 s behind")
    )
    assert beside["clock"] == (SKIPPED, "a worker runs with this directory: its log warns of a wrong clock")


def test_a_site_whose_clock_is_an_hour_behind_joins_a_new_federation_and_one_further_behind_is_told(
    tmp_path: Path,
) -> None:
    with running(tmp_path / "hour" / "coordinator", timedelta(hours=1), hosts=["localhost"]) as made:
        join = made.join_string("ann")
        enroll(WorkerHome(tmp_path / "ann"), join)
        found, code = doctor("--home", str(tmp_path / "ann"))
        assert [found[name][0] for name in NETWORK] == [OK, OK, OK, OK, OK, FAILED]
        assert (code, "s behind the coordinator's: set the wrong one" in found["clock"][1]) == (1, True)
    with running(tmp_path / "three" / "coordinator", timedelta(hours=3), hosts=["localhost"]) as made:
        found, code = doctor("--address", made.enrollment_address)
        assert (code, found["tls"][0]) == (1, FAILED)
        assert "; this machine's clock says 2" in found["tls"][1]
        assert found["tls"][1].endswith("set the clock, or, if it is right, ask the coordinator's operator")


def test_a_revoked_client_is_told_by_the_coordinator(served: Running) -> None:
    join = served.join_string("eve")
    place = served.home.directory.parent / "eve"
    enroll(WorkerHome(place), join)
    with served.administrator(Role.SECURITY_OFFICER) as officer:
        AdminStub(officer).RevokeClient(RevokeClientRequest(client_id="eve", reason="left"), timeout=SECONDS)
    found, code = doctor("--home", str(place))
    assert (code, found["tls"][0], found["clock"][0]) == (1, OK, SKIPPED)
    assert found["coordinator"][0] == FAILED
    assert found["coordinator"][1].startswith("certificate-revoked: ")


@contextmanager
def plain_server() -> Iterator[int]:
    """The port of an HTTP server without TLS."""
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@contextmanager
def tls_server(directory: Path, authority: Authority) -> Iterator[int]:
    """The port of a server at "localhost", with a certificate of this authority, that only makes handshakes."""
    key = new_tls_key()
    (directory / "pem").write_bytes(pem(authority.issue(["fedpareto://fed/coordinator"], ("localhost",), key)))
    write_private_key(directory / "key", key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / "pem", directory / "key")
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):  # the listener is closed, or the other side does not like the certificate
                while True:
                    plain, _ = listener.accept()
                    with suppress(ssl.SSLError), plain, context.wrap_socket(plain, server_side=True) as connection:
                        connection.recv(1)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_a_device_that_inspects_tls_is_named_with_its_authority(home: Path, tmp_path: Path) -> None:
    with tls_server(tmp_path, Authority()) as port:
        found, code = doctor("--home", str(elsewhere(home, tmp_path, f"localhost:{port}")))
    assert (code, found["dns"][0], found["tls"][0], found["coordinator"][0]) == (1, OK, FAILED, SKIPPED)
    assert "O=fed, not of this federation. A device on the way inspects TLS: ask the network" in found["tls"][1]


def test_the_hosts_from_which_the_owner_allows_downloads_are_tried(
    served: Running, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, policy = elsewhere(home, tmp_path, served.address), tmp_path / "copy" / "policy.toml"

    def tried(host: str, *arguments: str) -> tuple[str, str]:
        policy.write_text(f'downloads_from = ["{host}"]')
        found, code = doctor("--home", str(own), *arguments)
        assert (code, list(found)[:8]) == (0, ["config", *NETWORK, "bucket"]), found
        return found["bucket"]

    authority, later = Authority(), "Until then the coordinator sends the models"
    (tmp_path / "ca.pem").write_bytes(pem(authority.ca))
    with tls_server(tmp_path, authority) as port:
        outcome, message = tried(f"localhost:{port}")
        assert outcome == WARNING
        assert message.startswith(f"the certificate of localhost:{port} is not accepted (")
        assert "name the authority's file in SSL_CERT_FILE; otherwise: A device on the way inspects TLS" in message
        assert message.endswith(later)
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
        assert tried(f"localhost:{port}") == (OK, f"localhost:{port} speaks TLSv1.3, and its certificate is accepted")
        outcome, message = tried(f"127.0.0.1:{port}")
        assert (outcome, "is not valid for '127.0.0.1'" in message) == (WARNING, True), message
        log = tmp_path / "log"
        with connect_proxy(log) as at:
            assert tried(f"localhost:{port}", "--set", f"proxy=http://{at}")[0] == OK
        assert f"localhost:{port} 200\n" in log.read_text()
    outcome, message = tried(f"localhost:{port}")
    assert (outcome, message.endswith(later)) == (WARNING, True)
    assert message.startswith(f"no bucket answers at localhost:{port} (Connection refused): is it running, and does a")
    with plain_server() as port:
        words = f"localhost:{port} answers without TLS, which is allowed on this machine"
        assert tried(f"localhost:{port}") == (OK, words)
    policy.write_text("downloads_from = 3")
    found, code = doctor("--home", str(own))
    assert (code, found["policy"][0]) == (1, FAILED)
    assert "downloads_from" in found["policy"][1]


def test_the_proxy_has_a_line_and_what_it_refuses_is_said(served: Running, home: Path, tmp_path: Path) -> None:
    copy = elsewhere(home, tmp_path, f"fl.example:{served.coordinator.federation_port}")
    with connect_proxy(tmp_path / "log") as at:
        found, code = doctor("--home", str(copy), env={"https_proxy": f"http://u:secret@{at}"})
        assert (code, list(found)[:7]) == (0, ["config", *NETWORK]), found
        assert found["proxy"] == (OK, f"http://{at} connects to fl.example:{served.coordinator.federation_port}")
        assert found["dns"][1] == "127.0.0.1 is 127.0.0.1; the proxy resolves fl.example"
    with connect_proxy(tmp_path / "log", "--credentials", "a:b") as at:
        found, code = doctor("--home", str(copy), "--set", f"proxy=http://{at}")
    assert (code, found["proxy"][0], "tls" in found) == (1, FAILED, False)
    assert "answered 407: it asks for user and password" in found["proxy"][1]
    found, _ = doctor("--home", str(copy), "--set", "proxy=direct")
    assert found["dns"][0] == FAILED
    assert "where only a proxy knows it, set https_proxy, or proxy in worker.toml" in found["dns"][1]


def test_before_joining_the_way_to_an_address_is_checked(served: Running, tmp_path: Path) -> None:
    found, code = doctor("--home", str(tmp_path / "none"), "--address", served.enrollment_address)
    assert (code, list(found)[:5]) == (0, ["config", "dns", "proxy", "tls", "coordinator"])
    assert found["tls"][0] == OK
    words = f"a coordinator's certificate, which names the CA {fingerprint(served.home.ca)}, until "
    assert found["tls"][1].startswith(words)
    found, code = doctor("--home", str(tmp_path / "none"))
    assert (code, found["membership"][0]) == (1, FAILED)
    assert "holds no membership" in found["membership"][1]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        nobody = f"localhost:{listener.getsockname()[1]}"
    found, _ = doctor("--address", nobody)
    assert found["tcp"][0] == FAILED
    assert found["tcp"][1].startswith(f"no coordinator answers at {nobody} (Connection refused)")


def test_data_tasks_and_devices_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    found, code = doctor("--address", "localhost:1", "--task", "mnist", "--data", str(tmp_path), "--device", "cuda:99")
    assert code == 1
    assert found["data"][0] == FAILED
    assert str(tmp_path) in found["data"][1]
    assert found["device"] == (FAILED, found["device"][1])
    assert found["device"][1].startswith("cannot use device 'cuda:99'")
    found, _ = doctor("--address", "localhost:1", "--task", "digitz")
    assert found["task"][0] == FAILED
    assert found["task"][1].startswith("digitz: no task 'digitz'; there are adult, ")


def test_a_disk_that_is_too_small_for_the_models_is_named(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    assert check_disk(tmp_path / "not" / "yet", 0).outcome is OK
    assert check_disk(tmp_path, free // 4).outcome is WARNING
    failed = check_disk(tmp_path, free)
    assert failed.outcome is FAILED
    assert failed.message.endswith(": free some space")


REHEARSE = ("worker", "run", "--rehearse", "--task", "digits")


def rehearse(*arguments: str) -> tuple[str, BaseException | None]:
    done = CliRunner().invoke(app, [*REHEARSE, *arguments])
    return done.stdout, done.exception


def test_a_rehearsal_needs_no_membership_writes_nothing_and_tells_time_memory_and_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = json.loads(rehearse("--json", "--device", "cpu")[0])
    assert (found["task"], found["device"], found["samples"], found["steps"]) == ("digits", "cpu", 1437, 144)
    model = found["parameters"] * 4
    assert 0 < found["upload_bytes"] - model < 1000
    assert 0 < found["download_bytes"] - model < 1000
    assert found["training_seconds"] > 0 < found["evaluation_seconds"]
    assert found["memory_bytes"] > 10_000_000
    assert found["device_bytes"] == (torch.cuda.max_memory_allocated() or None)  # by tests before it in this process
    assert list(tmp_path.iterdir()) == []
    words, _ = rehearse("--device", "cpu")
    assert "1437 training samples, 4810 shared parameters, 144 steps a round" in words
    assert words.endswith("nothing was sent\n")


def test_a_rehearsal_trains_as_the_specification_says(tmp_path: Path) -> None:
    spec = tmp_path / "run.toml"
    spec.write_text('name = "x"\ntask = "digits"\nrounds = 1\n[train]\nsteps = 3\nbatch_size = 7\n')
    assert json.loads(rehearse("--json", "--set", f"spec={spec}")[0])["steps"] == 3
    spec.write_text('name = "x"\ntask = "digits"\nrounds = 1\n[train]\nlearning_rate = 1e30\n')
    diverged = failure(*REHEARSE, "--set", f"spec={spec}")
    assert diverged.message == "training diverged at step 2: try a smaller learning rate"
    assert "missing.toml: No such file" in failure(*REHEARSE, "--set", f"spec={tmp_path / 'missing.toml'}").message


def test_a_rehearsal_counts_the_bytes_and_needs_the_abilities_of_the_run(tmp_path: Path) -> None:
    spec, start = tmp_path / "run.toml", 'name = "x"\ntask = "digits"\nrounds = 1\ntrain.steps = 1\n'

    def rehearsed(more: str, *arguments: str) -> Any:
        spec.write_text(start + more)
        said, error = rehearse("--json", "--device", "cpu", "--set", f"spec={spec}", *arguments)
        return error.message if isinstance(error, CommandFailure) else json.loads(said)

    keys = ("", 'train.wire_dtype = "bf16"', 'parameters.personal = ["out.*"]')
    whole, half, personal = map(rehearsed, keys)
    assert half["download_bytes"] == whole["download_bytes"]
    assert whole["upload_bytes"] - half["upload_bytes"] == pytest.approx(2 * 4810, abs=10)  # the header names the dtype
    assert (whole["parameters"], personal["parameters"]) == (4810, 4160)
    for way in ("download_bytes", "upload_bytes"):
        assert whole[way] - personal[way] == pytest.approx(4 * 650, abs=200)  # the header names the tensors
    other = ("--set", "trainer=tests.federation.training.test_trainers:Halving")
    assert rehearsed("", *other)["parameters"] == 4810
    assert rehearsed('parameters.frozen = ["out.*"]', *other) == (
        "the trainer of this worker cannot leave some parameters as they are (parameters.frozen)"
    )
    assert rehearsed("privacy.sample_noise = 1.0", *other) == (
        "the trainer of this worker cannot add noise to the gradients of samples"
    )
    assert rehearsed('parameters.personal = ["nowhere"]').startswith("parameters.personal: 'nowhere' matches no")


def test_the_doctor_and_a_rehearsal_take_the_same_part_of_a_data_set() -> None:
    part = ("--set", "part=2/4", "--set", "partition=shards:2", "--set", "part_seed=3")
    rehearsed = json.loads(rehearse("--json", "--device", "cpu", *part)[0])
    checked, _ = doctor("--address", "localhost:1", "--task", "digits", *part)
    assert f"{rehearsed['samples']} training samples" in checked["data"][1]
    assert rehearsed["samples"] < 1437 // 3


def test_the_doctor_and_a_rehearsal_find_code_of_the_owners_own(tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "own_digits.py").write_text(
        "from federation.tasks.digits import Digits\n\n\nclass Mine(Digits):\n    pass\n"
    )
    for arguments in (["doctor", "--address", "localhost:1"], ["run", "--rehearse"]):
        own = ["-m", "fedpareto", "worker", *arguments, "--task", "own_digits:Mine", "--code", str(code)]
        own += ["--device", "cpu"]
        done = completed(own, cwd=tmp_path)
        assert "own_digits:Mine: 4810 parameters" in done.stdout or "own_digits:Mine on cpu" in done.stdout, done.stderr


class Abacus(Halving):
    """Says where it computes, and notes the steps that it was asked for; 0 where whole passes count."""

    asked: ClassVar[list[int]] = []

    def prepare(self) -> None:
        self.device = "an abacus"

    def train(self, model: Vector, plan: TrainingPlan) -> Array:
        self.asked.append(plan.sgd.steps)
        return super().train(model, plan)


def test_a_rehearsal_makes_an_uncounted_step_for_imports_and_names_the_device_that_a_trainer_says() -> None:
    said, _ = rehearse("--json", "--set", "trainer=tests.worker.test_doctor:Abacus")
    assert Abacus.asked == [1, 0]
    assert json.loads(said)["device"] == "an abacus"
    words, _ = rehearse("--set", "trainer=tests.federation.training.test_trainers:Halving")
    assert words.startswith("digits: 1437 training samples")


def test_another_trainer_is_tried_and_one_that_is_not_there_is_named() -> None:
    found = json.loads(rehearse("--json", "--set", "trainer=tests.federation.training.test_trainers:Halving")[0])
    assert (found["task"], found["samples"], found["parameters"]) == ("digits", 1437, 4810)
    arguments = ("--address", "localhost:1", "--task", "digits")
    checked, _ = doctor(*arguments, "--set", "trainer=tests.federation.training.test_trainers:Halving")
    assert (checked["task"][0], checked["data"][0]) == (OK, OK)
    checked, _ = doctor(*arguments, "--set", "trainer=nowhere:Thing")
    assert checked["task"][0] == FAILED
    assert "nowhere" in checked["task"][1]
    failure(*REHEARSE, "--set", "trainer=nowhere:Thing")
