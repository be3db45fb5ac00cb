"""Every edit of a bundle is found and named, also one by somebody who has the coordinator's key."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf.message import Message
from typer.testing import CliRunner

from federation.digests import digest
from federation.record import bundle
from federation.record.bundle import BundleError, BundleReader
from federation.trust.envelope import envelope_digest
from federation.v1 import common_pb2 as common
from federation.v1.record_pb2 import Answer, Bundle, Exchange, RoundRecord
from fedpareto.cli.main import app
from tests.few import every
from tests.stage import Stage
from tests.verification.scene import Edited, checked, other, refusal, signed_again
from tests.verification.test_bundle import NAMES, exported, played
from verification.errors import Wrong
from verification.holders import read_keys
from verification.run import verify

LAST = 1  # the last round: nothing after it names what is edited in it

# Fields from which nothing follows for an outsider: times, words, and what only the client could judge.
FREE = {
    common.StepManifest: {"created", "code"},
    common.AssignmentManifest: {"created", "deadline"},
    common.ReceiptManifest: {"created", "message"},
    common.ReplyManifest: set[str](),
}


_made: list[tuple[Stage, Edited]] = []  # the record that the tests of this file edit: one for each coordinator


@pytest.fixture
def record(stage: Stage, tmp_path: Path) -> Edited:
    if not _made or _made[-1][0] is not stage:
        run = played(stage, "fedmgda+", "server = { optimiser = 'momentum', learning_rate = 0.5 }", rounds=2)
        _made.append((stage, Edited.of(exported(stage, run, tmp_path / "run.fedpareto"))))
    return _made[-1][1]


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


def test_the_record_itself_is_verified(record: Edited, tmp_path: Path) -> None:
    assert [one.missing for one in checked(record, tmp_path)] == [(), ()]


WHERE: dict[type[Message], Callable[[RoundRecord], common.SignedEnvelope]] = {
    common.StepManifest: lambda record: record.step,
    common.AssignmentManifest: lambda record: exchange(record).assignment,
    common.ReceiptManifest: lambda record: answer(record).receipt,
    common.ReplyManifest: lambda record: answer(record).reply,
}


def fields(kind: type[Message]) -> list[tuple[type[Message], str]]:
    return [(kind, name) for name in kind.DESCRIPTOR.fields_by_name if name not in FREE[kind]]


@pytest.mark.parametrize(("kind", "field"), every(4, [pair for kind in WHERE for pair in fields(kind)]))
def test_each_field_of_each_manifest_counts_even_if_it_is_signed_again(
    stage: Stage, record: Edited, tmp_path: Path, kind: type[Message], field: str
) -> None:
    key = stage.served.home.signing_key
    if kind is common.ReplyManifest:  # its client plays along
        key = stage.players[NAMES[0]].member.files.signing_key

    def edit(found: RoundRecord) -> None:
        signed_again(WHERE[kind](found), kind, key, lambda manifest: other(manifest, field))

    said = refusal(record.with_round(LAST, edit), tmp_path)
    assert said.startswith(f"round {LAST}: ")
    assert "audit log" not in said  # it is found without the log, too


def step_again(stage: Stage, record: RoundRecord, change: Callable[[common.StepManifest], object]) -> None:
    """The coordinator signs another step."""
    signed_again(record.step, common.StepManifest, stage.served.home.signing_key, change)


def test_each_coefficient_counts(stage: Stage, record: Edited, tmp_path: Path) -> None:
    for place in range(len(NAMES)):

        def scale(step: common.StepManifest, place: int = place) -> None:
            step.coefficients[place] *= 1 + 1e-6

        edited = record.with_round(LAST, lambda found: step_again(stage, found, scale))
        assert "the rule gives" in refusal(edited, tmp_path)


def test_two_clients_cannot_be_swapped(stage: Stage, record: Edited, tmp_path: Path) -> None:
    def swap(step: common.StepManifest) -> None:
        step.replies[0], step.replies[1] = step.replies[1], step.replies[0]

    edited = record.with_round(LAST, lambda found: step_again(stage, found, swap))
    assert "replies of the signed step is not what follows" in refusal(edited, tmp_path)


def test_each_blob_counts(record: Edited, tmp_path: Path) -> None:
    assert len(record.blobs) >= 3 + 2 + 2 * len(NAMES) + 2  # models, Gram matrices, updates, momenta
    for name in record.blobs:
        data = record.entries[name]
        edited = record.having({name: data[:-1] + bytes([data[-1] ^ 1])})
        assert refusal(edited, tmp_path).endswith(tuple("0123456789abcdef"))
        assert f"{name} has the digest" in refusal(edited, tmp_path)


def asked_again(record: RoundRecord, key: Ed25519PrivateKey) -> None:
    """The first client has a second assignment."""
    again = record.phases[0].exchanges.add()
    again.assignment.CopyFrom(exchange(record).assignment)
    signed_again(
        again.assignment, common.AssignmentManifest, key, lambda order: setattr(order, "assignment_id", "another")
    )


def test_a_reply_that_is_removed_added_or_moved_is_named(stage: Stage, record: Edited, tmp_path: Path) -> None:
    key = stage.served.home.signing_key
    edits: list[tuple[Callable[[RoundRecord], object], str]] = [
        (lambda found: exchange(found).ClearField("answers"), "is not what follows from the replies"),
        (lambda found: answer(found).ClearField("receipt"), "is not what follows from the replies"),
        (lambda found: exchange(found).answers.append(answer(found)), "has 2 accepted replies"),
        (lambda found: found.phases[0].exchanges.append(exchange(found)), "is on record twice"),
        (lambda found: asked_again(found, key), "was asked twice in phase 0"),
        (lambda found: answer(found).CopyFrom(answer(found, place=1)), "may not sign this"),
        (lambda found: found.phases.pop(0), "phase 1 is at the place of phase 0"),
    ]
    for edit, words in edits:
        assert words in refusal(record.with_round(LAST, edit), tmp_path)


def test_rounds_that_are_removed_or_exchanged_are_named(record: Edited, tmp_path: Path) -> None:
    first, second = (bundle.round_entry(number) for number in (0, 1))
    assert "announces 2 rounds; 1 are there" in refusal(record.having({second: None}), tmp_path)
    shorter = record.having({second: None}).telling(lambda about: setattr(about, "rounds", 1))
    assert "the bundle says that the run ends with the model" in refusal(shorter, tmp_path)
    endless = record.telling(lambda about: setattr(about, "rounds", 2**64 - 1))
    assert f"announces {2**64 - 1} rounds; 2 are there" in refusal(endless, tmp_path)
    swapped = record.having({first: record.entries[second], second: record.entries[first]})
    assert "is the record of round 1" in refusal(swapped, tmp_path)
    again = record.with_round(1, lambda found: found.CopyFrom(record.round(0)))
    assert "is the record of round 0" in refusal(again, tmp_path)
    stepless = record.with_round(LAST, lambda found: found.ClearField("step"))
    assert "it is COMPLETED, and has no step" in refusal(stepless, tmp_path)


def test_another_specification_or_state_is_named(record: Edited, tmp_path: Path) -> None:
    text = record.entries[bundle.SPECIFICATION].decode()
    tuned = text.replace('algorithm.name = "fedmgda+"', 'algorithm.name = "fedmgda+"\nalgorithm.epsilon = 0.5')
    assert tuned != text
    assert "the spec" in refusal(record.having({bundle.SPECIFICATION: tuned.encode()}), tmp_path)

    broken = record.having({bundle.SPECIFICATION: b"rounds = "})
    assert refusal(broken, tmp_path).startswith("the specification: ")
    for state, words in [
        ('{"vectors":{}}', "another digest than the one that was signed"),
        ("[]", "another digest"),
        ("{", "is not JSON"),
    ]:
        edited = record.with_round(LAST, lambda found: setattr(found, "state_after", state))  # noqa: B023 - called at once
        assert words in refusal(edited, tmp_path)
    worse = record.with_round(LAST, lambda found: found.metrics.__setitem__("loss/test", 0.1))
    assert "the record says loss/test = 0.1" in refusal(worse, tmp_path)


@pytest.mark.parametrize("vectors", [None, 5, ["momentum"], {"momentum": 5}, {"momentum": None}])
def test_a_state_that_is_signed_and_names_no_vectors_is_refusal(
    stage: Stage, record: Edited, tmp_path: Path, vectors: object
) -> None:
    state = json.dumps({**json.loads(record.round(LAST).state_after), "vectors": vectors}, separators=(",", ":"))

    def edit(found: RoundRecord) -> None:
        found.state_after = state
        step_again(stage, found, lambda step: setattr(step, "state_after", digest(state.encode())))

    assert "does not name its vectors by their digests" in refusal(record.with_round(LAST, edit), tmp_path)


def test_no_step_follows_from_a_phase_without_clients(record: Edited, tmp_path: Path) -> None:
    emptied = record.with_round(LAST, lambda found: found.phases[0].ClearField("exchanges"))
    assert "0 clients were asked" in refusal(emptied, tmp_path)


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
    for name in names:
        said = refusal(record.having({name: None}), tmp_path)
        assert "no certificate" in said
    ends = [record.having({names[0]: data}) for data in (b"x", record.entries[bundle.CA])]
    assert "not a certificate" in refusal(ends[0], tmp_path)
    assert "names 0 members" in refusal(ends[1], tmp_path)
    with BundleReader(record.write(tmp_path / "same")) as reader, pytest.raises(Wrong, match="another federation"):
        list(verify(reader, "00" * 32))
    with BundleReader(tmp_path / "same") as reader:
        fingerprint = read_keys(reader).ca_fingerprint
        assert len(list(verify(reader, fingerprint.upper()))) == 2


def test_what_is_no_bundle_is_refusal(record: Edited, tmp_path: Path) -> None:
    path = record.write(tmp_path / "whole")
    whole = path.read_bytes()
    for data, words in [
        (b"", "is not a bundle"),
        (b"PK" + bytes(100), "is not a bundle"),
        (whole[: len(whole) // 2], "is not a bundle"),
    ]:
        path.write_bytes(data)
        with pytest.raises(BundleError, match=words):
            BundleReader(path)
    for edited, words in [
        (record.having({bundle.MANIFEST: None}), "has no bundle.json"),
        (record.having({bundle.MANIFEST: b"{"}), "bundle.json: "),
        (record.having({"readme": b""}), "an unknown entry 'readme'"),
        (record.telling(lambda about: setattr(about, "format", 2)), "has format 2"),
        (record.having({bundle.round_entry(0): b"\xff"}), "is not a RoundRecord"),
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
