"""The coordinator's clock as the worker knows it: it is set by signed times, each of which answers a new nonce."""

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from federation.refusals import Refusal
from federation.text import escaped
from federation.trust.certificates import load_certificate
from federation.trust.member_files import MemberFiles
from federation.v1.common_pb2 import SignedEnvelope, TimeManifest
from worker.progress import Progress

# How far a signed time may lie behind the newest one before it is refused: clocks are corrected by small steps.
TOLERANCE = timedelta(minutes=5)


class TimeRefused(Exception):
    """A signed time that this worker rejects; the message says why, and what may have happened."""


class CoordinatorClock:
    """The time by the coordinator's clock, which its deadlines refer to.

    Between two signed times it runs with this machine's monotonic clock: setting the machine's clock changes nothing.
    """

    def __init__(
        self, member: MemberFiles, progress: Progress, *, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._member = member
        self._progress = progress
        self._monotonic = monotonic
        self.renewed(member)
        self._set = (datetime.now(UTC), monotonic())

    def renewed(self, member: MemberFiles) -> None:
        """Stores the validity of a member's certificate; a coordinator's time outside it is rejected."""
        # The coordinator dated the certificate by its own clock, and refuses it after its end.
        certificate = load_certificate(member.certificate)
        self._earliest, self._latest = certificate.not_valid_before_utc, certificate.not_valid_after_utc

    def now(self) -> datetime:
        """The time, aware. Until the coordinator has signed a time, it is this machine's."""
        base, at = self._set
        return base + timedelta(seconds=self._monotonic() - at)

    def set(self, envelope: SignedEnvelope, nonce: bytes) -> timedelta:
        """Sets the clock to a signed time, if it answers the request with this nonce.

        Returns:
            The time by which the coordinator's clock is ahead of this machine's.

        Raises:
            TimeRefused: it is not signed, not for this nonce, outside the certificate's validity, or behind the
                newest signed time.
        """
        now = signed_time(envelope, nonce, self._member)
        if not self._earliest <= now <= self._latest:
            raise TimeRefused(
                f"the coordinator's clock shows {_utc(now)}, outside the validity of this client's certificate "
                f"({_utc(self._earliest)} to {_utc(self._latest)}): its clock is wrong, or it was restored from a "
                "backup onto a machine whose clock is wrong"
            )
        newest = self._progress.time
        if now < newest - TOLERANCE:
            raise TimeRefused(
                f"the coordinator's clock went back, from {_utc(newest)} to {_utc(now)}: it is wrong, or was wrong "
                "before. Its operator sets it right; when the later time was the wrong one, `fedpareto "
                "coordinator restored` signs a statement that workers accept"
            )
        base = max(now, newest)
        self._set = (base, self._monotonic())
        self._progress.saw_time(base)
        return now - datetime.now(UTC)


def signed_time(envelope: SignedEnvelope, nonce: bytes, member: MemberFiles) -> datetime:
    """The time that the coordinator signed for this member and this nonce; raises TimeRefused if it did not."""
    try:
        manifest = member.coordinator.verify(envelope, TimeManifest)
    except Refusal as refusal:
        raise TimeRefused(
            f"the time that was sent is not signed by this federation's coordinator ({refusal.message})"
        ) from None
    expected = (member.federation_id, member.client_id, nonce)
    if (manifest.federation_id, manifest.client_id, manifest.nonce) != expected:
        raise TimeRefused(
            f"the time that was sent is no answer to this worker: it is signed for "
            f"{escaped(manifest.client_id, 80)!r} of {escaped(manifest.federation_id, 80)!r}, or it is an old one"
        )
    try:
        return manifest.now.ToDatetime(tzinfo=UTC)
    except (ValueError, OverflowError) as error:
        raise TimeRefused(f"the coordinator's time does not exist: {error}") from None


def _utc(time: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M:%S} UTC"
