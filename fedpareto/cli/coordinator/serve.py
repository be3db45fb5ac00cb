"""`fedpareto coordinator serve`: runs the daemon."""

import json
import logging
import os
from pathlib import Path
from typing import Annotated

import typer

from fedpareto.cli.coordinator.daemon import DEFAULT_HOME, HomeOption, explained, settled
from fedpareto.cli.failure import failing
from fedpareto.cli.shared_options import CodeOption, LogFormatOption, LogLevelOption, PassphraseOption, json_option
from fedpareto.code_path import leave_current_directory
from fedpareto.on_first_use import on_first_use
from fedpareto.standard_streams import print_document

with on_first_use():
    from coordinator.audit.checkpoints import LogError
    from coordinator.home import CoordinatorHome
    from coordinator.monitor import LockLost
    from coordinator.server import Coordinator, PortTaken
    from coordinator.server import serve as run
    from federation.directories import DirectoryGone
    from federation.process.service_manager import ServiceManager
    from federation.trust.keys import replace_private
    from fedpareto.cli import logs


def serve(
    home: HomeOption = DEFAULT_HOME,
    bind: Annotated[
        str | None,
        typer.Option(metavar="HOST[:PORT]", help="Address to listen on, instead of that in coordinator.toml."),
    ] = None,
    port_file: Annotated[
        Path | None,
        typer.Option(help="Also write the ports to this file, as JSON, once it serves. ports.json always has them."),
    ] = None,
    code: CodeOption = None,
    log_level: LogLevelOption = "info",
    log_format: LogFormatOption = "text",
    passphrase_file: PassphraseOption = None,
    hold: Annotated[bool, typer.Option("--hold", help="Serve the record only: no run advances.")] = False,
    as_json: Annotated[bool, json_option("Print ports and process id as JSON once the coordinator serves.")] = False,
) -> None:
    """Run the daemon until it is stopped (SIGTERM or Ctrl-C)."""
    logs.to_standard_error(log_level, "%(asctime)s %(levelname)-7s %(name)s: %(message)s", log_format)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    leave_current_directory()  # a run may name `module:Class`: that is imported from what was installed, or from --code
    with explained(), failing(DirectoryGone, LockLost, LogError, PortTaken):
        centre = settled(home, bind, passphrase_file)
        run(
            centre,
            ready=lambda coordinator: _announce(centre, coordinator, port_file, as_json),
            conduct=not hold,
            manager=ServiceManager.of(os.environ),
        )


def _announce(home: "CoordinatorHome", coordinator: "Coordinator", port_file: Path | None, as_json: bool) -> None:
    ports = {"federation": coordinator.federation_port, "enrollment": coordinator.enrollment_port}
    if port_file is not None:
        replace_private(port_file, json.dumps(ports).encode() + b"\n")
    if as_json:
        document = {"federation_id": home.federation_id, "home": str(home.directory), "pid": os.getpid()}
        print_document(json.dumps({**document, "ports": ports}))
