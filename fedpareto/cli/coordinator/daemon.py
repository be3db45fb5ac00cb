"""`fedpareto coordinator`: make and check a federation, its administrators and its keys."""

import re
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from federation.findings import CheckOutcome, Finding
from fedpareto.cli.failure import USAGE, CommandFailure, answer, failing
from fedpareto.cli.secret_input import new_passphrase, passphrase_for
from fedpareto.cli.shared_options import AskOption, JsonOption, PassphraseOption
from fedpareto.on_first_use import on_first_use

with on_first_use():
    from sqlalchemy import exc

    from coordinator import settings as coordinator_settings
    from coordinator.backups.home_keys import rotate_signing_key
    from coordinator.backups.statement import sign_restore
    from coordinator.check import check_home
    from coordinator.clock import utc_now
    from coordinator.home import CoordinatorHome
    from coordinator.ownership import CoordinatorHomeError
    from coordinator.settings import Settings
    from federation.trust import identity
    from federation.trust.certificates import fingerprint
    from federation.trust.keys import IdentityError
    from storage.database import DatabaseBusy, DatabaseIncompatible


DEFAULT_HOME = Path("fedpareto-coordinator")
HomeOption = Annotated[Path, typer.Option("--home", help="Directory of the coordinator: settings, keys, database.")]
PORT_HELP = "0: the kernel picks one at the first start, which is then kept."


def init(
    home: HomeOption = DEFAULT_HOME,
    name: Annotated[
        str, typer.Option(help="The federation's name, in every certificate and signature.")
    ] = "federation",
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="Name or address under which members reach this machine; repeat it for several. Members get the "
            "first one. Default: localhost, 127.0.0.1 and the host's name."
        ),
    ] = None,
    bind: Annotated[
        str | None, typer.Option(help="Address to listen on. Default: 0.0.0.0 with --host, else 127.0.0.1.")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help=f"For members, mutual TLS. {PORT_HELP}")] = 0,
    enrollment_port: Annotated[int, typer.Option(min=0, max=65535, help=f"For newcomers. {PORT_HELP}")] = 0,
    enrollment_host: Annotated[
        str,
        typer.Option(
            help="A second name of this machine, for newcomers: they use the same port as members, and ask for this "
            "name."
        ),
    ] = "",
    database: Annotated[
        str | None,
        typer.Option(
            envvar="FEDPARETO_DATABASE",
            show_envvar=True,
            help="postgresql://USER:PASSWORD@HOST/NAME, or sqlite:///FILE. Default: SQLite in the directory.",
        ),
    ] = None,
    approval: Annotated[
        bool, typer.Option("--approval", help="New members get no work before `admin approve`.")
    ] = False,
    passphrase_file: PassphraseOption = None,
    ask_passphrase: AskOption = False,
    as_json: JsonOption = False,
) -> None:
    """Make a federation.

    This makes a certificate authority, keys, a database, and an administrator with every role.
    """
    values: dict[str, Any] = {
        "federation_id": name,
        "hosts": host or own_names(),
        "bind": bind or ("0.0.0.0" if host else "127.0.0.1"),  # noqa: S104 - with --host, others must reach it
        "federation_port": port,
        "enrollment_port": enrollment_port,
        "enrollment_host": enrollment_host,
        "approval": approval,
    }
    if database is not None:
        values["database"] = database
    passphrase = new_passphrase(passphrase_file, ask=ask_passphrase)
    with explained(usage=True):
        settings = Settings.check(values, "the options")
    with explained():
        centre = CoordinatorHome.init(home, settings, now=utc_now(), passphrase=passphrase)
    document = {
        "federation_id": centre.federation_id,
        "home": str(home),
        "settings": str(home / "coordinator.toml"),
        "admin": str(centre.admin_dir),
        "ca": str(home / "ca.pem"),
        "ca_fingerprint": fingerprint(centre.ca),
        "hosts": list(centre.settings.hosts),
    }
    unencrypted = "The private keys are not encrypted: anyone who can read the directory can act for the federation."
    answer(
        as_json,
        document,
        f"Federation {centre.federation_id} is in {home}; its settings, with comments, in coordinator.toml there.",
        f"CA fingerprint (SHA-256): {document['ca_fingerprint']}",
        f"Administrator with every role: {centre.admin_dir}",
        *([unencrypted] if passphrase is None else []),
        f"Next: fedpareto coordinator serve --home {home}",
    )


def check(
    home: HomeOption = DEFAULT_HOME, passphrase_file: PassphraseOption = None, as_json: JsonOption = False
) -> None:
    """Check settings, keys, ports, database, blobs, clock and disk.

    Nothing is changed, and the coordinator may run meanwhile. The exit code is 1 when a check failed.
    """
    findings = list[Finding]()
    try:
        with explained():
            findings += check_home(settled(home, None, passphrase_file), now=utc_now())
    except CommandFailure as failure:
        findings.append(Finding.failed("directory", failure.message))
    answer(as_json, [asdict(finding) for finding in findings], *(finding.line for finding in findings))
    failed = sum(finding.outcome is CheckOutcome.FAILED for finding in findings)
    if failed:
        raise CommandFailure(f"{failed} of {len(findings)} checks failed")


def admin(
    name: Annotated[str, typer.Argument(help="The administrator's name.")],
    role: Annotated[list[str], typer.Option(help="viewer, operator or security-officer; repeat it for several.")],
    out: Annotated[Path, typer.Option(help="Directory for its keys; hand it over safely.")],
    home: HomeOption = DEFAULT_HOME,
    passphrase_file: PassphraseOption = None,
    new_passphrase_file: Annotated[
        Path | None, typer.Option(help="File whose first line is the passphrase of the administrator's signing key.")
    ] = None,
    ask_passphrase: Annotated[bool, typer.Option(help="Ask for a passphrase for the signing key.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Make another administrator: its signing key and directory.

    Run it on the coordinator's own machine. An older key and certificate of the name end.
    """
    try:
        roles = [identity.Role(text) for text in role]
    except ValueError:
        raise CommandFailure(f"--role {' '.join(role)}: expected {', '.join(identity.Role)}", code=USAGE) from None
    with explained():
        centre = settled(home, None, passphrase_file)
        if centre.ports()[0] == 0:
            raise CommandFailure(
                "the port for members is not known yet, because the coordinator has never served: start it once, or "
                f"set federation_port in {home / 'coordinator.toml'}"
            )
        passphrase = new_passphrase(new_passphrase_file, ask=ask_passphrase)
        with closing(centre.open_database()) as database:
            files = centre.issue_admin(
                database, name, roles, out, now=utc_now(), by="coordinator admin", passphrase=passphrase
            )
    document = {"name": name, "home": str(out), "certificate_expires": files.not_after.isoformat()}
    answer(
        as_json,
        {**document, "roles": sorted({"viewer", *role})},
        f"Administrator {name} is in {out}, logged in until {files.not_after:%Y-%m-%d %H:%M} UTC.",
        f"Its commands: fedpareto admin --home {out} ...",
    )


def restored(
    home: HomeOption = DEFAULT_HOME, passphrase_file: PassphraseOption = None, as_json: JsonOption = False
) -> None:
    """Sign a statement for workers that a backup was restored.

    Run it after the files are restored, before the coordinator starts.
    """
    with explained():
        manifest = sign_restore(settled(home, None, passphrase_file), now=utc_now())
    runs = {run.run_id: run.next_round for run in manifest.runs}
    answer(
        as_json,
        {"restored": manifest.restored.ToJsonString(), "runs": runs},
        *(f"run {run} goes on with round {number}" for run, number in runs.items()),
        "Workers get this statement when they next attend. Now start the coordinator: "
        f"fedpareto coordinator serve --home {home}",
    )


def rotate_key(
    home: HomeOption = DEFAULT_HOME,
    passphrase_file: PassphraseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Replace the coordinator's signing key.

    The old key signs the new one, and the CA certifies it. Stop the coordinator first. Workers follow to the new key
    when they attend next.
    """
    with explained():
        passphrase = passphrase_for(home / "signing.key", passphrase_file)
        centre = CoordinatorHome.load(home, passphrase)
        changed = rotate_signing_key(centre, now=utc_now(), passphrase=passphrase)
    key = changed.signing_key.public_key().public_bytes_raw().hex()
    answer(
        as_json,
        {"federation_id": changed.federation_id, "key": key, "rotations": len(changed.rotations)},
        f"The coordinator of {changed.federation_id} signs with the key {key} now. Workers follow when they attend.",
        f"Back up the keys in {home} again. Now start the coordinator: fedpareto coordinator serve --home {home}",
    )


def settled(home: Path, bind: str | None, passphrase_file: Path | None) -> "CoordinatorHome":
    """The coordinator's directory, with `--bind` in the place of its setting."""
    passphrase = None
    if (home / coordinator_settings.SETTINGS_FILE).is_file():
        passphrase = passphrase_for(home / "ca.key", passphrase_file)
    loaded = CoordinatorHome.load(home, passphrase)
    if bind is None:
        return loaded
    values: dict[str, Any] = {**loaded.settings.model_dump(), "bind": bind}
    host, colon, port = bind.rpartition(":")
    if colon and port.isdecimal() and (":" not in host or host.startswith("[")):
        values |= {"bind": host.strip("[]"), "federation_port": int(port)}
    return replace(loaded, settings=Settings.check(values, "--bind"))


def own_names() -> list[str]:
    """The names of this machine, where no host is given."""
    name = socket.gethostname()
    own = [name] if re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?", name) else []
    return list(dict.fromkeys(["localhost", "127.0.0.1", *own]))


@contextmanager
def explained(*, usage: bool = False) -> Iterator[None]:
    """Turns the expected errors of this module into a CommandFailure."""
    with (
        failing(CoordinatorHomeError, IdentityError, code=USAGE if usage else 1),
        failing(DatabaseBusy, DatabaseIncompatible, OSError),
    ):
        try:
            yield
        except exc.DBAPIError as error:
            raise CommandFailure(f"the database does not answer as it should: {error.orig}") from None
