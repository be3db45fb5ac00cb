"""Signing keys over time: who follows whom, and which envelope counts when."""

from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import pairwise

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from federation.refusals import Refusal
from federation.trust.envelope import sign
from federation.trust.key_chain import CoordinatorKeys, KeyChain, open_rotation, receipt, rotate, whole_chain
from federation.v1.common_pb2 import KeyRotation, ReceiptManifest, RotationManifest, SignedEnvelope, TimeManifest

FEDERATION = "test"
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)


def keys(count: int) -> list[Ed25519PrivateKey]:
    return [Ed25519PrivateKey.generate() for _ in range(count)]


def rotations(
    keys: list[Ed25519PrivateKey], federation_id: str = FEDERATION, client_id: str = "", number: int = 1
) -> list[KeyRotation]:
    """Of each key by the next one, an hour apart, from noon on."""
    return [
        rotate(
            old, new, federation_id=federation_id, client_id=client_id, number=number + place, now=NOON + place * HOUR
        )
        for place, (old, new) in enumerate(pairwise(keys))
    ]


def refusal(known: CoordinatorKeys, shown: list[KeyRotation]) -> tuple[str, str]:
    """How the rotations are refused; nothing is learned."""
    before = known.chain
    with pytest.raises(Refusal) as caught:
        known.learn(shown)
    assert known.chain == before
    return caught.value.reason, caught.value.message


def received(key: Ed25519PrivateKey, at: datetime) -> SignedEnvelope:
    manifest = ReceiptManifest(federation_id=FEDERATION)
    manifest.created.FromDatetime(at)
    return sign(manifest, key)


def test_a_member_follows_any_number_of_rotations_from_any_key_on_and_again_from_what_it_kept() -> None:
    made = keys(4)
    shown = rotations(made)
    for start in range(4):
        known = CoordinatorKeys(FEDERATION, made[start].public_key())
        assert known.learn(shown) == (start < 3)
        assert known.chain.present == made[3].public_key()
        assert not known.learn(shown)
        assert CoordinatorKeys(FEDERATION, made[start].public_key(), known.rotations).chain == known.chain
    gradually = CoordinatorKeys(FEDERATION, made[0].public_key())
    for count in range(4):
        assert gradually.learn(shown[:count]) == (count > 0)
    assert gradually.chain.raw == tuple(key.public_key().public_bytes_raw() for key in made)


def test_a_key_counts_for_what_was_made_before_it_ended() -> None:
    first, second = keys(2)
    known = CoordinatorKeys(FEDERATION, first.public_key(), rotations([first, second]))
    for key, at in ((first, NOON - HOUR), (first, NOON), (second, NOON + HOUR)):
        known.verify(received(key, at), ReceiptManifest)
    with pytest.raises(Refusal, match="key-ended", check=lambda error: error.status == "UNAUTHENTICATED"):
        known.verify(received(first, NOON + timedelta(seconds=1)), ReceiptManifest)
    now = TimeManifest(federation_id=FEDERATION)
    now.now.FromDatetime(NOON - HOUR)
    with pytest.raises(Refusal, match="key-ended"):  # what is signed for one call needs the present key
        known.verify(sign(now, first), TimeManifest)
    with pytest.raises(Refusal, match="key-unknown"):
        known.verify(received(keys(1)[0], NOON), ReceiptManifest)


def test_a_chain_with_a_gap_or_from_elsewhere_is_not_followed() -> None:
    made, foreign = keys(4), keys(2)
    shown = rotations(made)
    fork = rotations([made[0], foreign[0]])
    known, later = (CoordinatorKeys(FEDERATION, key.public_key()) for key in made[:2])
    for keys_, wrong, reason in (
        (known, [shown[0], shown[2]], "rotation"),  # the second one is missing
        (known, [shown[1], shown[0]], "rotation"),  # in another order
        (known, rotations(foreign), "rotation"),
        (known, [*shown, *rotations(foreign)], "rotation"),
        (later, fork, "rotation"),  # the key that is known here was passed over
        (known, rotations(made, "another"), "rotation"),
        (known, rotations(made, client_id="ann"), "rotation"),
        (known, [shown[0], rotations(made[1:], number=3)[0]], "rotation"),
        (known, [KeyRotation(statement=SignedEnvelope(manifest=b"\xff"))], "manifest"),
        (known, [KeyRotation()], "rotation"),
    ):
        found, message = refusal(keys_, wrong)
        assert found == reason, (found, message)
    found, message = refusal(known, shown[1:])
    assert (found, "a rotation is missing, or they are of another federation" in message) == ("rotation", True)


def test_nobody_else_signs_a_rotation_and_nobody_takes_the_key_of_another() -> None:
    old, new, thief = keys(3)
    good = rotations([old, new])[0]
    known = CoordinatorKeys(FEDERATION, old.public_key())
    manifest = RotationManifest.FromString(good.statement.manifest)
    forged = KeyRotation(statement=sign(manifest, thief), possession=good.possession)
    assert refusal(known, [forged])[0] == "key-unknown"
    forged.statement.key_id = good.statement.key_id
    assert refusal(known, [forged])[0] == "signature"
    for possession in (b"", bytes(64), rotations([old, thief])[0].possession, good.statement.signature):
        stolen = KeyRotation(statement=good.statement, possession=possession)
        assert refusal(known, [stolen])[0] == "proof"
    manifest.new_key = bytes(32)
    assert refusal(known, [KeyRotation(statement=sign(manifest, old), possession=bytes(64))])[0] == "signing-key"


def test_the_keys_of_a_client_need_receipts_of_the_coordinator() -> None:
    coordinator, other, old, new = keys(4)
    trusted = KeyChain(coordinator.public_key())
    rotation = rotations([old, new], client_id="ann")[0]

    def chain(key: Ed25519PrivateKey | None, of: str = "ann") -> KeyChain:
        made = KeyRotation()
        made.CopyFrom(rotation)
        if key is not None:
            times = {"ended": NOON + HOUR, "until": NOON + 3 * HOUR}
            made.receipt.CopyFrom(receipt(rotation, key, federation_id=FEDERATION, client_id=of, **times))
        return whole_chain([made], new.public_key(), federation_id=FEDERATION, client_id="ann", coordinator=trusted)

    for key, of, reason in ((None, "ann", "rotation"), (other, "ann", "key-unknown"), (coordinator, "ben", "rotation")):
        with pytest.raises(Refusal) as caught:
            chain(key, of)
        assert caught.value.reason == reason
    found = chain(coordinator)
    signed = sign(ReceiptManifest(), old)
    found.must_count(signed, NOON + HOUR, NOON + 3 * HOUR)
    for asked, at in ((NOON + 2 * HOUR, NOON + 2 * HOUR), (NOON, NOON + 4 * HOUR)):
        with pytest.raises(Refusal, match="key-ended"):
            found.must_count(signed, asked, at)
    with pytest.raises(Refusal, match="rotation"):
        whole_chain([], new.public_key(), federation_id=FEDERATION) and whole_chain(
            rotations([old, new], number=2), new.public_key(), federation_id=FEDERATION
        )


def test_a_rotation_is_for_one_number() -> None:
    old, new = keys(2)
    rotation = rotations([old, new], client_id="ann", number=2)[0]
    opened = partial(open_rotation, rotation, old.public_key(), federation_id=FEDERATION, client_id="ann")
    opened(number=2)
    for number in (1, 3):
        with pytest.raises(Refusal, match="another number"):
            opened(number=number)
