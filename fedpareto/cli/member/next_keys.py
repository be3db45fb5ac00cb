"""`fedpareto worker renew` and `worker rotate-key`: the next certificate and key of a member."""

from datetime import UTC, datetime

from fedpareto.cli.failure import answer
from fedpareto.cli.member.member_command import MemberSite, member_command
from fedpareto.on_first_use import on_first_use

with on_first_use():
    from worker.connection.renewal import RenewalError, next_certificate, save
    from worker.rotation import RotationError, rotate_key
    from worker.site.roster import RosterError


@member_command(RenewalError, calls=True)
def renew_command(site: MemberSite, as_json: bool) -> None:
    """Get the next certificate of a worker that does not run. One that runs renews its own."""
    member = next_certificate(site.member)
    save(site.home, member, site.passphrase)
    answer(
        as_json,
        {"client_id": member.client_id, "certificate_expires": member.not_after.isoformat()},
        f"{member.client_id} has a new certificate, until {member.not_after:%Y-%m-%d %H:%M} UTC; the old one ends when "
        "the worker attends next",
    )


@member_command(RotationError, RosterError, calls=True)
def rotate_key_command(site: MemberSite, as_json: bool) -> None:
    """Replace the signing key; the old key signs the new one.

    Stop the worker of this directory first. Owners who have pinned a roster pin the new card of this member.
    """
    old = site.member
    rotated = rotate_key(site.home, old, passphrase=site.passphrase, now=datetime.now(UTC))
    key = rotated.member.signing_key.public_key().public_bytes_raw().hex()
    answer(
        as_json,
        {"client_id": old.client_id, "key": key, "old_key_until": rotated.until.isoformat()},
        f"{old.client_id} signs with the key {key} now. The old one counts until {rotated.until:%Y-%m-%d %H:%M} UTC, "
        "for replies to what was asked before.",
        "For private rounds, every owner pins a roster with the new card: fedpareto worker roster card",
    )
