"""Every edit of a bundle, and of the audit log in it, is found and named, also one with the coordinator's key."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from typer.testing import CliRunner

from federation.digests import digest
from federation.record import bundle
from federation.record.bundle import BundleError, BundleReader
from federation.trust.envelope import envelope_digest
from federation.v1 import common_pb2 as common
from federation.v1.record_pb2 import Answer, Bundle, Exchange, LoggedEntry, LogRecord, RoundRecord
from fedpareto.cli.main import app
from tests.few import few
from tests.stage import Stage, spec
from tests.verification.every_value import other
from tests.verification.scene import NAMES, Edited, checked, exported, log_signed_again, played, refusal, signed_again
from verification.errors import VerificationError
from verification.keys import read_keys
from verification.run import OpenedRun, verify

LAST = 1  # the last round: nothing after it names what is edited in it


@pytest.fixture(scope="module")
def record(_module_stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> Edited:
    """The record that the tests of this file edit."""
    stage = _module_stage
    played(stage, "fedavg", "", rounds=1)  # entries of another run, which the bundle does not show
    task, players = stage.crew(*NAMES)
    more = f"server = {{ optimizer = 'momentum', learning_rate = 0.5 }}\nselection.minimum = {len(NAMES)}"
    run = stage.submit(spec("edited", task, 2, more=more))
    stage.play(run, *players, until=lambda: len(stage.rounds(run)) == 2)
    stage.served.coordinator.record.sequencer.sequence(show=True)  # a checkpoint for each step
    stage.play(run, *players)
    return Edited.of(exported(stage, run, tmp_path_factory.mktemp("bundle") / "run.fedpareto"))


def exchange(record: RoundRecord, phase: int = 0, place: int = 0) -> Exchange:
    return record.phases[phase].exchanges[place]


def answer(record: RoundRecord, phase: int = 0, place: int = 0) -> Answer:
    return exchange(record, phase, place).answers[0]


def test_the_decline_of_a_member_is_verified(stage: Stage, tmp_path: Path) -> None:
    run, players = stage.begin("ann", "ben", "cleo", more="selection.minimum = 3")
    players[2].decline(players[2].order(), "limit:steps", "too many")
    stage.complete(run, *players)
    whole = Edited.of(exported(stage, run, tmp_path / "run.fedpareto"))
    declined = exchange(whole.round(0), 0, 2)
    assert common.DeclineManifest.FromString(declined.decline.manifest).reason == "limit:steps"
    assert [one.missing for one in checked(whole, tmp_path)] == [()]

    def contradicting(record: RoundRecord) -> None:
        told = exchange(record)
        name = common.AssignmentManifest.FromString(told.assignment.manifest).assignment_id
        told.decline.CopyFrom(players[0].member.declined(name, "disk"))

    unsigned = whole.with_round(0, lambda record: setattr(exchange(record, 0, 2).decline, "signature", bytes(64)))
    assert "the decline of cleo in phase 0: the signature" in refusal(unsigned, tmp_path)
    both = whole.with_round(0, contradicting)
    assert "ann in phase 0 was declined, and has an accepted reply" in refusal(both, tmp_path)


def step_again(stage: Stage, record: RoundRecord, change: Callable[[common.StepManifest], object]) -> None:
    """The coordinator signs another step."""
    signed_again(record.step, common.StepManifest, stage.served.home.signing_key, change)


def test_two_clients_cannot_be_swapped(stage: Stage, record: Edited, tmp_path: Path) -> None:
    def swap(step: common.StepManifest) -> None:
        step.replies[0], step.replies[1] = step.replies[1], step.replies[0]

    edited = record.with_round(LAST, lambda found: step_again(stage, found, swap))
    assert "replies of the signed step is not what follows" in refusal(edited, tmp_path)


@pytest.mark.parametrize("vectors", [None, 5, ["momentum"], {"momentum": 5}, {"momentum": None}])
def test_a_state_that_is_signed_and_names_no_vectors_is_refusal(
    stage: Stage, record: Edited, tmp_path: Path, vectors: object
) -> None:
    state = json.dumps({**json.loads(record.round(LAST).state_after), "vectors": vectors}, separators=(",", ":"))

    def edit(found: RoundRecord) -> None:
        found.state_after = state
        step_again(stage, found, lambda step: setattr(step, "state_after", digest(state.encode())))

    assert "does not name its vectors by their digests" in refusal(record.with_round(LAST, edit), tmp_path)


def test_no_step_follows_from_a_reply_that_is_signed_and_has_no_payload(
    stage: Stage, record: Edited, tmp_path: Path
) -> None:
    def edit(found: RoundRecord) -> None:
        reply, receipt = answer(found).reply, answer(found).receipt
        before, key = envelope_digest(reply), stage.served.home.signing_key
        client = stage.players[NAMES[0]].member.files.signing_key
        signed_again(reply, common.ReplyManifest, client, lambda said: said.ClearField("payload"))
        after = envelope_digest(reply)

        def without(said: common.ReceiptManifest) -> None:
            said.payload, said.envelope = "", after

        def naming(said: common.StepManifest) -> None:
            said.replies[:] = [after if name == before else name for name in said.replies]

        signed_again(receipt, common.ReceiptManifest, key, without)
        step_again(stage, found, naming)

    assert "no step follows from the replies" in refusal(record.with_round(LAST, edit), tmp_path)


def test_the_certificates_say_whose_key_is_whose(stage: Stage, record: Edited, tmp_path: Path) -> None:
    names = [name for name in record.entries if name.startswith("certificates/") and name != bundle.CA]
    assert len(names) == 1 + len(NAMES)
    assert "names 0 members" in refusal(record.having({names[0]: record.entries[bundle.CA]}), tmp_path)
    with (
        BundleReader(record.write(tmp_path / "same")) as reader,
        pytest.raises(VerificationError, match="another federation"),
    ):
        list(verify(reader, "00" * 32))
    with BundleReader(tmp_path / "same") as reader:
        fingerprint = read_keys(reader).ca_fingerprint
        assert len(list(verify(reader, fingerprint.upper()))) == 2


def test_what_is_no_bundle_is_refusal(record: Edited, tmp_path: Path) -> None:
    path = record.write(tmp_path / "whole")
    whole = path.read_bytes()
    for data in (b"", b"PK" + bytes(100), whole[: len(whole) // 2]):
        path.write_bytes(data)
        with pytest.raises(BundleError, match="is not a bundle"):
            BundleReader(path)
    for edited, words in [
        (record.having({"readme": b""}), "an unknown entry 'readme'"),
        (record.having({bundle.CA: b"x"}), "the CA's certificate: not a certificate"),
    ]:
        assert words in refusal(edited, tmp_path)


def test_the_text_of_a_bundle_cannot_write_on_the_terminal_of_its_reader(record: Edited, tmp_path: Path) -> None:
    forged = "run\x1b[2J\neverything was verified"
    edited = record.telling(lambda about: setattr(about, "run_id", forged)).write(tmp_path / "forged.fedpareto")
    output = CliRunner().invoke(app, ["verify", str(edited)]).output
    assert "\x1b" not in output
    assert r"run\x1b[2J\neverything was verified" in output.splitlines()[0]


def test_the_text_of_a_bundle_that_cannot_be_read_forges_no_line(record: Edited, tmp_path: Path) -> None:
    forged = "x\n\rrun open: everything was verified"
    manifests = {
        "has format 2": record.telling(lambda about: about.MergeFrom(Bundle(format=2, software=forged))),
        "has no field": record.having({bundle.MANIFEST: json.dumps({forged: 1}).encode()}),
    }
    for words, edited in manifests.items():
        said = refusal(edited, tmp_path)
        assert words in said
        assert said.isprintable()


# --- the audit log


def find(record: LogRecord, action: str, place: int = 0) -> LoggedEntry:
    return [entry for entry in record.entries if entry.action == action][place]


def test_the_bundle_shows_the_entries_of_its_run_and_of_no_other(record: Edited, tmp_path: Path) -> None:
    log = record.log
    actions = [entry.action for entry in log.entries]
    assert {action: actions.count(action) for action in set(actions)} == {
        "key.set": 4,
        "join-string.created": len(NAMES),
        "Enroll": len(NAMES),
        "run.submitted": 1,
        "assignment.issued": 4 * len(NAMES),
        "reply.accepted": 4 * len(NAMES),
        "round.stepped": 2,
        "run.completed": 1,
        "bundle.exported": 1,
    }
    assert len(log.nodes) < 20
    sizes = [common.CheckpointManifest.FromString(one.manifest).size for one in log.checkpoints]
    assert len(sizes) >= 2
    assert all(any(entry.number < size for size in sizes) for entry in log.entries)
    with BundleReader(record.write(tmp_path / "same")) as reader:
        run = OpenedRun.of(reader)
        list(run.verify())
        assert run.log.end == find(log, "run.completed")


@few("Enroll", "round.stepped")
@pytest.mark.parametrize("action", ["run.submitted", "Enroll", "reply.accepted", "round.stepped", "run.completed"])
@pytest.mark.parametrize(
    "column", ["entry_id", "at", "times", "actor", "action", "subject", "outcome", "detail", "digest", "previous"]
)
def test_each_column_of_an_entry_counts(record: Edited, tmp_path: Path, action: str, column: str) -> None:
    number = find(record.log, action).number
    said = refusal(record.with_log(lambda log: other(find(log, action), column)), tmp_path)
    names = f"entry {number} ", f"entry {number + 1} does not continue the entry before it", "an entry from "
    assert any(name in said for name in names), said


def test_a_log_under_the_key_of_a_stranger_is_named(stage: Stage, record: Edited, tmp_path: Path) -> None:
    stranger = Ed25519PrivateKey.generate()

    def other_key(log: LogRecord) -> None:
        raw = stranger.public_key().public_bytes_raw()
        signed_again(
            log.key, common.LogKeyManifest, stage.served.home.signing_key, lambda found: setattr(found, "key", raw)
        )
        log_signed_again(log, stranger)

    assert "the key of the audit log: entry" in refusal(record.with_log(other_key), tmp_path)


def test_the_bundle_of_a_run_that_goes_on_has_the_rounds_that_have_ended(stage: Stage, tmp_path: Path) -> None:
    run, players = stage.begin("ann", "ben", rounds=2, more="evaluate.every = 0")
    for player in players:
        player.reply(player.order())
    stage.wait_round(run, 0)
    orders = [player.order() for player in players]
    with BundleReader(exported(stage, run, tmp_path / "early")) as reader:
        assert reader.about.rounds == 1
        opened = OpenedRun.of(reader)
        assert [found.missing for found in opened.verify()] == [()]
        assert opened.log.end is None
    for player, order in zip(players, orders, strict=True):
        player.reply(order)
    stage.play(run, *players)
    with BundleReader(exported(stage, run, tmp_path / "late")) as reader:
        assert len(list(OpenedRun.of(reader).verify())) == 2
