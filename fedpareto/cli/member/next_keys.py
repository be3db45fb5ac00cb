"""`fedpareto worker renew`, `worker rotate-key` and `coordinator rotate-key`: the next keys and certificates."""

from fedpareto.cli.coordinator.daemon import DEFAULT_HOME as COORDINATOR_HOME
from fedpareto.cli.coordinator.daemon import HomeOption as CoordinatorHomeOption
from fedpareto.cli.coordinator.daemon import explained
from fedpareto.cli.failure import answer, failing
from fedpareto.cli.member.worker import DEFAULT_HOME, HomeOption, connecting
from fedpareto.cli.secret_input import passphrase_for
from fedpareto.cli.shared_options import JsonOption, PassphraseOption, ProxyOption


def renew_command(
    home: HomeOption = DEFAULT_HOME,
    passphrase_file: PassphraseOption = None,
    proxy: ProxyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Get the next certificate of a worker that does not run. One that runs renews its own."""
    from worker.line.renewal import RenewalError, next_certificate, save

    with failing(RenewalError), connecting(home, passphrase_file, proxy) as (worker_home, old, passphrase):
        member = next_certificate(old)
        save(worker_home, member, passphrase)
    answer(
        as_json,
        {"client_id": member.client_id, "certificate_expires": member.not_after.isoformat()},
        f"{member.client_id} has a new certificate, until {member.not_after:%Y-%m-%d %H:%M} UTC; the old one ends when "
        "the worker attends next",
    )


def rotate_key_command(
    home: HomeOption = DEFAULT_HOME,
    passphrase_file: PassphraseOption = None,
    proxy: ProxyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Replace the signing key; the old key signs the new one.

    Stop the worker of this directory first. Owners who have pinned a roster pin the new card of this member.
    """
    from datetime import UTC, datetime

    from worker import rotation
    from worker.site.roster import RosterError

    with (
        failing(rotation.RotationError, RosterError),
        connecting(home, passphrase_file, proxy) as (worker_home, old, passphrase),
    ):
        rotated = rotation.rotate_key(worker_home, old, passphrase=passphrase, now=datetime.now(UTC))
    key = rotated.member.signing_key.public_key().public_bytes_raw().hex()
    answer(
        as_json,
        {"client_id": old.client_id, "key": key, "old_key_until": rotated.until.isoformat()},
        f"{old.client_id} signs with the key {key} now. The old one counts until {rotated.until:%Y-%m-%d %H:%M} UTC, "
        "for replies to what was asked before.",
        "For private rounds, every owner pins a roster with the new card: fedpareto worker roster card",
    )


def rotate_coordinator_key_command(
    home: CoordinatorHomeOption = COORDINATOR_HOME,
    passphrase_file: PassphraseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Replace the coordinator's signing key.

    The old key signs the new one, and the CA certifies it. Stop the coordinator first. Workers follow to the new key
    when they attend next.
    """
    from coordinator.clock import utc_now
    from coordinator.home import CoordinatorHome

    with explained():
        passphrase = passphrase_for(home / "signing.key", passphrase_file)
        changed = CoordinatorHome.load(home, passphrase).rotate_signing_key(now=utc_now(), passphrase=passphrase)
    key = changed.signing_key.public_key().public_bytes_raw().hex()
    answer(
        as_json,
        {"federation_id": changed.federation_id, "key": key, "rotations": len(changed.rotations)},
        f"The coordinator of {changed.federation_id} signs with the key {key} now. Workers follow when they attend.",
        f"Back up the keys in {home} again. Now start the coordinator: fedpareto coordinator serve --home {home}",
    )
