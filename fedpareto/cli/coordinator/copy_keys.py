"""`fedpareto coordinator copy-keys`: the directory of a further coordinator."""

from pathlib import Path
from typing import Annotated, Any

import typer

from fedpareto.cli.coordinator.daemon import PORT_HELP, explained, own_names
from fedpareto.cli.failure import USAGE, CommandFailure, answer
from fedpareto.cli.secret_input import passphrase_for
from fedpareto.cli.shared_options import JsonOption, PassphraseOption
from fedpareto.on_first_use import on_first_use

with on_first_use():
    from coordinator import settings as coordinator_settings
    from coordinator.backups.home_keys import copy_keys
    from coordinator.clock import utc_now
    from coordinator.home import CoordinatorHome
    from coordinator.settings import Settings
    from federation.trust.certificates import fingerprint


def copy_keys_command(
    source: Annotated[Path, typer.Argument(help="Directory of an existing coordinator; it is not changed.")],
    home: Annotated[Path, typer.Option(help="Directory to make for the further coordinator.")],
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="Name or address under which members reach the further coordinator; repeat it for several. Members "
            "get the first one. Default: localhost, 127.0.0.1 and this host's name."
        ),
    ] = None,
    bind: Annotated[
        str | None, typer.Option(help="Address to listen on. Default: 0.0.0.0 with --host, else 127.0.0.1.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help=f"For members; default: as in SOURCE. {PORT_HELP}")
    ] = None,
    enrollment_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="For newcomers; default: as in SOURCE.")
    ] = None,
    enrollment_host: Annotated[
        str, typer.Option(help="A second name of the further coordinator, for newcomers, as in `coordinator init`.")
    ] = "",
    database: Annotated[
        str | None,
        typer.Option(
            envvar="FEDPARETO_DATABASE",
            show_envvar=True,
            help="The URL under which the further coordinator reaches the same database. Default: as in SOURCE.",
        ),
    ] = None,
    passphrase_file: PassphraseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make the directory of a further coordinator.

    The coordinators of a federation share a PostgreSQL database and the blobs, and have the same keys. This copies the
    keys and settings of SOURCE, and makes a server key and certificate with the host names of the further one. Keys
    with a passphrase keep it. The database is not asked; `coordinator check` compares it with the directory.
    """
    with explained():
        passphrase = passphrase_for(source / "ca.key", passphrase_file)
        existing = CoordinatorHome.load(source, passphrase)
    if existing.settings.enrollment_host and not enrollment_host:
        raise CommandFailure(
            f"{source} serves members and newcomers at one port, with the second name "
            f"{existing.settings.enrollment_host}: give --enrollment-host, the second name of the further coordinator",
            code=USAGE,
        )
    values: dict[str, Any] = {
        **existing.settings.model_dump(),
        "hosts": host or own_names(),
        "bind": bind or ("0.0.0.0" if host else "127.0.0.1"),  # noqa: S104 - with --host, others must reach it
        "enrollment_host": enrollment_host,
    }
    given = {"federation_port": port, "enrollment_port": enrollment_port, "database": database}
    values |= {name: value for name, value in given.items() if value is not None}
    if enrollment_host and enrollment_port is None:
        values["enrollment_port"] = 0
    with explained(usage=True):
        settings = Settings.check(values, "the options")
    with explained():
        further = copy_keys(existing, home, settings, now=utc_now(), passphrase=passphrase)
    document = {
        "federation_id": further.federation_id,
        "source": str(source),
        "home": str(home),
        "settings": str(home / coordinator_settings.SETTINGS_FILE),
        "ca_fingerprint": fingerprint(further.ca),
        "hosts": list(settings.hosts),
    }
    answer(
        as_json,
        document,
        f"{home} is the directory of a further coordinator of {further.federation_id}, with its keys.",
        f"If the coordinator runs on another machine, move the directory there safely, and leave no copy in {home}.",
        f"Next: fedpareto coordinator check --home {home}, then fedpareto coordinator serve --home {home}",
    )
