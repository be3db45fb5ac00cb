"""`worker rotate-key` and `coordinator rotate-key`, with real processes: nothing is lost, whatever dies in between."""

import itertools
import json
import shutil
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.home import CoordinatorHome
from federation.record.bundle import BundleReader
from federation.trust.envelope import key_id
from federation.trust.identity import parse_peer
from federation.trust.key_chain import rotate, rotations_text
from federation.trust.keys import FileDamaged, replace_together
from federation.trust.member_files import MemberFiles
from federation.v1.common_pb2 import SignedEnvelope
from tests.harness import Federation, Process, federation, wait_for
from tests.scripted import FEDERATION, scripted
from tests.worker.scene import LAYOUT, Scene, events, serving
from verification.run import verify
from worker.home import WorkerHome
from worker.site.roster import Card, Roster, changes

SPEC = """
task = "digits"
rounds = {rounds}
train.epochs = {epochs}
train.deadline_seconds = 300
evaluate.every = 0
"""


def work(fed: Federation, client: str, crash: str = "") -> Process:
    return fed.work(client, "--set", "part=1/8", "--json", crash=crash)


def rotated(fed: Federation, client: str) -> str:
    document = json.loads(fed.fedpareto("worker", "rotate-key", "--home", str(fed.directory / client), "--json"))
    return str(document["key"])


def own_key(fed: Federation, client: str) -> str:
    return MemberFiles.load(fed.directory / client).signing_key.public_key().public_bytes_raw().hex()


def on_record(fed: Federation, client: str) -> str:
    [(key,)] = fed.query("select signing_key from clients where client_id = :name", name=client)
    return bytes(key).hex()


def signers(fed: Federation, run: str, client: str) -> list[str]:
    """The ids of the keys that signed the accepted replies of a client, in their order."""
    rows = fed.query(
        "select u.envelope from replies u join assignments a on a.assignment_id = u.assignment_id "
        "join phases p on p.phase_id = a.phase_id join rounds r on r.round_id = p.round_id "
        "where r.run_id = :run and u.client_id = :client and u.accepted order by u.reply_id",
        run=run,
        client=client,
    )
    return [SignedEnvelope.FromString(envelope).key_id.hex() for (envelope,) in rows]


def verified(fed: Federation, run: str) -> int:
    """How many rounds of a run `verify` verifies; the audit log is verified too."""
    path = fed.directory / f"{run}.fedpareto"
    fed.fedpareto("admin", "--home", str(fed.home / "admin"), "bundle", run, "--payloads", "--yes", "--out", str(path))
    fed.fedpareto("admin", "--home", str(fed.home / "admin"), "audit", "verify")
    with BundleReader(path) as bundle:
        return len(list(verify(bundle)))


@pytest.mark.full
def test_a_reply_in_the_spool_counts_after_the_key_was_replaced_and_the_next_one_has_the_new_key(
    fed: Federation,
) -> None:
    fed.join("ann")
    old = MemberFiles.load(fed.directory / "ann").signing_key.public_key()
    worker = work(fed, "ann", crash="spooled")
    worker.wait_for_text("attending")
    run = fed.submit("spooled", SPEC.format(rounds=2, epochs=1))
    worker.wait_killed()
    key = rotated(fed, "ann")
    assert (own_key(fed, "ann"), on_record(fed, "ann")) == (key, key)
    worker = work(fed, "ann")
    fed.wait_completed(run)
    assert worker.stop() == 0
    new = MemberFiles.load(fed.directory / "ann").signing_key.public_key()
    first, *later = signers(fed, run, "ann")
    assert (first, set(later)) == (key_id(old).hex(), {key_id(new).hex()})
    assert {"dropped", "declined", "refused"}.isdisjoint(event["event"] for event in events(worker))
    assert verified(fed, run) == 2
    told = fed.query("select subject, digest from audit_log where action = 'key.rotated' and subject = 'ann'")
    assert len(told) == 1


@pytest.mark.full
@pytest.mark.parametrize("point", ["rotation-begun", "rotation-registered", "rotation-saved"])
def test_a_rotation_that_was_interrupted_is_ended_before_the_worker_works_on(fed: Federation, point: str) -> None:
    home = fed.join(point)
    old = own_key(fed, point)
    crashing = ["tests/programs/crashing.py", point, "worker", "rotate-key", "--home", str(home)]
    fed.spawn(point, crashing).wait_killed()
    assert (home / "rotating.json").exists()
    run = fed.submit(point, SPEC.format(rounds=1, epochs=1))
    worker = work(fed, point)
    fed.wait_completed(run)
    assert not (home / "rotating.json").exists()
    assert own_key(fed, point) == on_record(fed, point) != old
    assert parse_peer(MemberFiles.load(home).certificate).signing_key.hex() == own_key(fed, point)
    assert len((home / "signing.rotations").read_text().split()) == 1
    assert worker.stop() == 0
    assert verified(fed, run) == 1


def test_owners_pin_the_new_card_without_a_call_and_the_own_roster_has_it_at_once(
    fed: Federation, tmp_path: Path
) -> None:
    home = fed.join("dora")
    member = MemberFiles.load(home)
    others = [
        Card(member.federation_id, f"other-{number}", Ed25519PrivateKey.generate().public_key().public_bytes_raw())
        for number in range(4)
    ]
    pinned = Roster.parse("\n".join(card.text() for card in (Card.of(member), *others)), member)
    pinned.pin(WorkerHome(home).roster)
    for _ in range(2):
        rotated(fed, "dora")
    member = MemberFiles.load(home)
    assert Roster.parse(WorkerHome(home).roster.read_text(), member).keys["dora"].hex() == own_key(fed, "dora")
    card = fed.fedpareto("worker", "roster", "card", "--home", str(home))
    new = Roster.parse("\n".join([card, *(card.text() for card in others)]), member)
    found = changes(pinned, new)
    assert (found.rotated, found.unsigned) == (("dora",), ()), "both rotations lead to the new key"
    forged = Card(member.federation_id, "dora", others[0].key, rotations=new.cards[0].rotations)
    assert not forged.succeeds(pinned.keys["dora"])


def test_a_coordinator_that_is_away_leaves_the_rotation_to_be_ended_later(fed: Federation, tmp_path: Path) -> None:
    home = fed.join("emil")
    old = own_key(fed, "emil")
    description = (home / "member.toml").read_text()
    port = MemberFiles.load(home).address.rpartition(":")[2]
    (home / "member.toml").write_text(description.replace(f":{port}", ":1"))
    fed.fedpareto("worker", "rotate-key", "--home", str(home), code=1)
    fed.fedpareto("worker", "run", "--home", str(home), "--task", "digits", "--set", "part=1/8", code=1)
    assert own_key(fed, "emil") == old == on_record(fed, "emil")
    (home / "member.toml").write_text(description)
    assert rotated(fed, "emil") == own_key(fed, "emil") == on_record(fed, "emil") != old
    assert len(fed.query("select 1 from rotations where client_id = 'emil'")) == 1


# --- the coordinator


@pytest.mark.full
def test_workers_follow_the_coordinator_and_what_it_signed_before_stays_verifiable(tmp_path: Path) -> None:
    with federation(tmp_path) as fed:
        fed.serve()
        for client in ("ann", "ben"):
            fed.join(client)
        first = CoordinatorHome.load(fed.home).signing_key.public_key()
        ann = work(fed, "ann")
        work(fed, "ben").wait_for_text("attending")
        fed.attending("ann", "ben")
        run = fed.submit("across", SPEC.format(rounds=3, epochs=15))
        wait_for(lambda: fed.query("select 1 from rounds where state = 'COMPLETED'"), "a round")
        ann.wait_for_text('"event": "training"', count=2)  # an assignment that the old key has signed
        fed.processes[-1].kill()  # ben is away for two rotations
        for number in (1, 2):
            assert fed.serving.stop() == 0
            answer = json.loads(fed.fedpareto("coordinator", "rotate-key", "--home", str(fed.home), "--json"))
            assert answer["rotations"] == number
            fed.serve()
            ann.wait_for_text('"event": "coordinator-key"', count=number)
        work(fed, "ben").wait_for_text('"event": "coordinator-key"')
        fed.wait_completed(run)
        home = CoordinatorHome.load(fed.home)
        assert home.signing.chain.former[0].key == first
        assert parse_peer((fed.home / "server.pem").read_bytes()).signing_key.hex() == answer["key"]
        for client in ("ann", "ben"):
            assert MemberFiles.load(fed.directory / client).coordinator.chain == home.signing.chain
            fed.fedpareto("worker", "receipts", "--home", str(fed.directory / client))
        assert verified(fed, run) == 3
        signed = fed.query("select step from rounds where run_id = :run order by number", run=run)
        keys = [SignedEnvelope.FromString(step).key_id for (step,) in signed]
        assert keys[0] == key_id(first)
        assert keys[-1] == key_id(home.signing_key.public_key())
        rotated(fed, "newcomer") if fed.join("newcomer") else None  # who knows the newest key only
        assert MemberFiles.load(fed.directory / "newcomer").coordinator.chain.present == home.signing.chain.present
        told = fed.query("select actor from audit_log where action = 'key.set' and subject = 'signing key'")
        assert [actor for (actor,) in told] == ["coordinator init", *["coordinator rotate-key"] * 2]


def test_a_coordinator_changes_its_keys_as_a_whole_and_not_while_it_serves(fed: Federation, tmp_path: Path) -> None:
    before = (fed.home / "signing.key").read_bytes()
    fed.fedpareto("coordinator", "rotate-key", "--home", str(fed.home), code=1)
    assert (fed.home / "signing.key").read_bytes() == before
    copy = tmp_path / "copy"
    shutil.copytree(fed.home, copy, ignore=shutil.ignore_patterns("blobs", "coordinator.db*"))
    journal = json.dumps({"signing.key": (fed.home / "signing.key").read_text(), "signing.rotations": ""})
    (copy / "signing.key").write_text("half")
    (copy / "replacing.json").write_text(journal)
    home = CoordinatorHome.load(copy)
    assert home.signing_key.public_key() == CoordinatorHome.load(fed.home).signing_key.public_key()
    old, new = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    stranger = rotate(old, new, federation_id=home.federation_id, number=1, now=home.server.not_valid_before_utc)
    replace_together(copy, {"signing.rotations": rotations_text([stranger])})
    with pytest.raises(FileDamaged, match=r"signing\.rotations"):
        CoordinatorHome.load(copy)


@pytest.mark.parametrize("missing", ["the first", "the second", "all"])
def test_a_worker_refuses_a_coordinator_whose_keys_do_not_follow(tmp_path: Path, missing: str) -> None:
    with scripted() as coordinator, serving(Scene(coordinator, tmp_path / "home", {}, (LAYOUT, b""))) as scene:
        member = scene.member
        keys = [coordinator.signing_key, *(Ed25519PrivateKey.generate() for _ in range(2))]
        if missing == "all":
            keys[0] = Ed25519PrivateKey.generate()
        made = [
            rotate(old, new, federation_id=FEDERATION, number=number, now=coordinator.now())
            for number, (old, new) in enumerate(itertools.pairwise(keys), 1)
        ]
        coordinator.signing_key = keys[2]
        coordinator.log.certified = coordinator.log.key.certified(keys[2])
        coordinator.rotations = {"the first": made[1:], "the second": made[:1], "all": made}[missing]
        worker = scene.start(member=member)
        message = worker.wait_for("refused", count=2)[0]["message"]
        expected = "did not sign" if missing == "the second" else "rotation: the signing keys of the coordinator"
        assert expected in message
        assert not worker.events("attending")
        if missing != "all":
            coordinator.rotations = made
            worker.wait_for("attending")
            assert len((tmp_path / "home" / "coordinator.rotations").read_text().split()) == 2
    assert worker.failure is None
