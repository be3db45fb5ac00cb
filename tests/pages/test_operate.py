"""The pages of docs/operate, from their text."""

import json
import re
from shutil import rmtree

import pytest

from tests.conftest import Postgres, postgresql_database
from tests.federation.transport.connect_proxy import connect_proxy
from tests.fedpareto.delivery.servers import raw_server
from tests.pages.reader import Reader
from tests.paths import DOCS

OPERATE = DOCS / "operate"
HERE = {
    "/srv/fedpareto-worker": "hospital-a",
    "/srv/fedpareto": "coordinator",
    "fl.example.org": "localhost",
    " --port 7443 --enrollment-port 7444": "",
}
SERVE = "fedpareto coordinator serve --home coordinator"
SERVED = "coordinator serve coordinator"


def set_in(reader: Reader, settings: str) -> None:
    """Puts settings before the tables of coordinator.toml, and starts the coordinator with them."""
    file = reader.directory / "coordinator/coordinator.toml"
    text = file.read_text()
    for key in re.findall(r"^\w+", settings, re.MULTILINE):
        text = re.sub(rf"^{key} = .*\n", "", text, flags=re.MULTILINE)
    file.write_text(settings + text)
    reader.enter(SERVE)


@pytest.mark.full
def test_a_coordinator_is_operated_from_its_first_start_to_a_restored_backup(reader: Reader) -> None:
    home = reader.directory / "coordinator"
    (reader.directory / "names.txt").write_text("north\nsouth\n")
    reader.environment("FEDPARETO_ADMIN", "coordinator/admin")

    def join() -> None:
        reader.join_strings.clear()  # one was cancelled
        set_in(reader, "approval = true\n")
        for name in ("hospital-a", "hospital-b"):
            reader.admit(name, name)

    def specify(name: str, rounds: int) -> None:
        text = f'name = "{name}"\ntask = "digits"\nrounds = {rounds}\n'
        (reader.directory / "run.toml").write_text(text)

    def train() -> None:
        reader.work("hospital-a", "hospital-b")
        reader.run("second")
        reader.enter("fedpareto admin export second --out trained.safetensors")
        specify("first", 2)

    def begin_long_one() -> None:
        specify("long", 100_000)
        reader.enter("fedpareto admin submit run.toml")

    def lose_database() -> None:
        reader.leave(SERVED)
        for file in home.glob("coordinator.db*"):
            file.unlink()

    reader.own = {
        "fedpareto coordinator init --home coordinator --name chest-x-ray --host localhost --database "
        "postgresql://fedpareto@db.example.org/fedpareto": lambda: None
    }  # tests/coordinator has PostgreSQL
    reader.before = {
        "fedpareto admin clients": join,
        "fedpareto admin approve --all-pending": lambda: reader.admit("hospital-c", "hospital-c"),
        "fedpareto admin submit run.toml --watch": train,
        "fedpareto admin submit run.toml --model trained.safetensors": lambda: specify("third", 2),
        "fedpareto admin pause long": begin_long_one,
        "fedpareto worker renew --home hospital-a": lambda: reader.leave("worker run hospital-a"),
        "fedpareto coordinator rotate-key --home coordinator": lambda: reader.leave(SERVED),
        "fedpareto admin submit run.toml --dry-run": lambda: reader.work("hospital-a", "hospital-b"),
        "fedpareto coordinator restore backup --home coordinator": lose_database,
    }
    reader.read(
        (OPERATE / "operations.md").read_text(),
        {
            **HERE,
            "admin revoke hospital-a": "admin revoke hospital-c",
            **{f"admin {verb} RUN": f"admin {verb} long" for verb in ("pause", "resume", "stop")},
            "compare RUN RUN": "compare first second",
            "OTHER --beside ./other-coordinator/admin": "second",
            " RUN": " first",
            "/backup": "backup",
        },
    )


@pytest.mark.full
def test_administrators_are_made_log_in_are_revoked_and_two_consent(reader: Reader) -> None:
    reader.begin("hospital-b")
    (reader.directory / "names.txt").write_text("north\nsouth\n")
    (reader.directory / "passphrase").write_text("words\n")
    alice = "fedpareto admin --home alice"

    def two_officers() -> None:
        rmtree(reader.directory / "alice")  # the operator of before
        for name in ("alice", "bob"):
            reader.enter(f"fedpareto coordinator admin {name} --role security-officer --out {name} --home coordinator")
        set_in(reader, 'approval = true\ntwo_officers = ["approve", "revoke", "forget", "revoke-admin"]\n')
        reader.admit("hospital-a", "hospital-a")

    def consent() -> None:
        (request,) = json.loads(reader.enter("fedpareto admin --home bob requests --json"))["requests"]
        reader.enter(f"fedpareto admin --home bob consent {request['request_id'].removeprefix('blake3:')[:8]}")

    def join_all() -> None:
        for file in sorted((reader.directory / "join-strings").glob("*.join")):
            reader.enter(f"fedpareto worker join --home {file.stem} --join-file {file}")

    reader.own = {"fedpareto admin --home bob consent 3f2a9c": consent}
    reader.before = {f"{alice} approve hospital-a": two_officers, f"{alice} approve --all-pending": join_all}
    # There is no terminal to ask for a passphrase at.
    reader.read((OPERATE / "administrators.md").read_text(), {**HERE, " --ask-passphrase": ""})


@pytest.mark.full
def test_alerts_are_listed_and_delivered_and_a_contact_is_noted(reader: Reader) -> None:
    reader.begin("hospital-a")
    with raw_server(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n") as port:
        page = (OPERATE / "alerts.md").read_text()
        chat = re.findall(r"\n\[targets.ops\]\n.*\n", page)[0]  # a mail server, with a password
        receiver = {"https://pager.example/": f"http://127.0.0.1:{port}/", chat: ""}
        file = reader.directory / "notifier/notify.toml"
        reader.before = {"fedpareto admin --home notifier notify --test": lambda: file.chmod(0o600)}
        reader.read(page, {**HERE, **receiver})


@pytest.mark.full
def test_a_second_coordinator_is_made_checked_and_served(reader: Reader, postgres: Postgres) -> None:
    page = (OPERATE / "several-coordinators.md").read_text()
    with postgresql_database(postgres) as url:
        reader.enter(f"fedpareto coordinator init --home coordinator --name clinic --database {url}")
        set_in(reader, f'blobs = "{reader.directory / "blobs"}"\n')
        # No cluster is here; tests/project/test_deploy.py checks the manifests.
        reader.skipped = ("fedpareto coordinator init --home keys", "kubectl ")
        reader.read(page, {**HERE, "/srv/fedpareto-2": "second", "--host fl2.example.org": "--host localhost"})


@pytest.mark.full
def test_the_console_is_opened(reader: Reader) -> None:
    reader.begin(name="radiology")
    reader.skipped = ("ssh ",)
    reader.read((OPERATE / "console.md").read_text())


@pytest.mark.full
def test_the_audit_log_is_shown_followed_and_verified(reader: Reader) -> None:
    reader.begin("hospital-a")
    reader.work("hospital-a")
    reader.run("digits-1")
    reader.read((OPERATE / "audit-log.md").read_text())


@pytest.mark.full
def test_a_federation_has_one_port_a_proxy_is_passed_and_a_connection_is_tested(reader: Reader) -> None:
    reader.enter("fedpareto coordinator init --home coordinator --name clinic --host fl.example.org")
    reader.enter(SERVE)
    reader.environment("FEDPARETO_ADMIN", "coordinator/admin")
    reader.enter("fedpareto admin join-string hospital-a")
    reader.enter("fedpareto coordinator admin alice --role viewer --out alice --home coordinator")
    port = json.loads((reader.directory / "coordinator/ports.json").read_text())["federation"]
    page = (OPERATE / "network.md").read_text()
    (one_port,) = re.findall(r"^\$ (fedpareto coordinator init .*)$", page, re.MULTILINE)
    reader.own = {one_port: lambda: None}  # root's port; tests/coordinator/front/test_one_port.py serves at one port
    with connect_proxy(reader.directory / "log") as proxy:
        (reader.directory / "proxy").write_text(f"http://{proxy}\n")
        here = {
            "@/etc/fedpareto/proxy": "@proxy",
            "proxy.example.org:3128": proxy,
            "--address fl.example.org:7443": f"--address localhost:{port}",
            "--task fashion-mnist --data /data/fashion-mnist": "--task digits",
            "/srv/fedpareto-worker": "hospital-a",
        }
        reader.read(page, here)


@pytest.mark.full
def test_the_numbers_of_a_run_go_to_tensorboard(reader: Reader) -> None:
    pytest.importorskip("tensorboard", reason="needs fedpareto[tracking]")
    reader.begin("hospital-a")
    reader.work("hospital-a")
    reader.run("digits-1")
    page = (OPERATE / "tracking.md").read_text()
    reader.read(page, {" --to mlflow:http://127.0.0.1:5000": "", "RUN --to": "digits-1 --to"})


@pytest.mark.full
def test_a_coordinator_is_upgraded_and_goes_back(reader: Reader) -> None:
    reader.begin("hospital-a")
    reader.work("hospital-a")
    (reader.directory / "run.toml").write_text('name = "long"\ntask = "digits"\nrounds = 100000\n')
    reader.enter("fedpareto admin submit run.toml")
    reader.own = {
        "systemctl stop fedpareto-coordinator": lambda: reader.leave(SERVED),
        "systemctl start fedpareto-coordinator": lambda: reader.enter(SERVE),
    }
    restore = "fedpareto coordinator restore backup/before-upgrade --home coordinator --replace"
    reader.before = {restore: lambda: reader.leave(SERVED)}
    page = (OPERATE / "upgrading.md").read_text()
    reader.read(page, {**HERE, "/backup/": "backup/", "pause RUN": "pause long", "resume RUN": "resume long"})
