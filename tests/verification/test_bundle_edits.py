"""Every edit of a bundle is found and named, also one by somebody who has the coordinator's key."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from federation.digests import digest
from federation.record import bundle
from federation.record.bundle import BundleError, BundleReader
from federation.trust.envelope import envelope_digest
from federation.v1 import common_pb2 as common
from federation.v1.record_pb2 import Answer, Bundle, Exchange, RoundRecord
from fedpareto.cli.main import app
from tests.stage import Stage
from tests.verification.scene import Edited, checked, refusal, signed_again
from tests.verification.test_bundle import NAMES, exported, played
from verification.errors import Wrong
from verification.holders import read_keys
from verification.run import verify

LAST = 1  # the last round: nothing after it names what is edited in it


@pytest.fixture(scope="module")
def record(_module_stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> Edited:
    """The record that the tests of this file edit."""
    more = "server = { optimiser = 'momentum', learning_rate = 0.5 }"
    run = played(_module_stage, "fedmgda+", more, rounds=2)
    return Edited.of(exported(_module_stage, run, tmp_path_factory.mktemp("bundle") / "run.fedpareto"))


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
