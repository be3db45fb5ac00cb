"""A worker's directory, for the commands that run in it."""

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from fedpareto.cli.failure import USAGE, CommandFailure, failing
from fedpareto.cli.secret_input import passphrase_for, proxies_for
from fedpareto.cli.shared_options import JsonOption, PassphraseOption, ProxyOption
from fedpareto.on_first_use import on_first_use

with on_first_use():
    from federation.trust.keys import IdentityError
    from federation.trust.member_files import MemberFiles
    from worker.config import WorkerConfig, WorkerConfigError
    from worker.home import WorkerHome, WorkerHomeError


HomeOption = Annotated[Path, typer.Option("--home", help="Directory of this worker: keys, certificate, spool.")]
DEFAULT_HOME = Path("fedpareto-worker")
ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="The worker's settings. Default: worker.toml in its directory."),
]

RunCommand = Callable[..., None]


class MemberSite(NamedTuple):
    """A worker's directory, with the files of the member and the passphrase of its keys."""

    home: "WorkerHome"
    member: "MemberFiles"
    passphrase: bytes | None


def member_command(
    *errors: type[Exception], keys: bool = True, calls: bool = False, alone: bool = True
) -> Callable[[RunCommand], RunCommand]:
    """A command that runs in a worker's directory.

    The decorated function gets the `MemberSite`, `as_json` and the command's arguments. The options --home, --config,
    --passphrase-file and --json are added. Without an option, the passphrase file and the proxy are those of
    worker.toml.

    Args:
        errors: exceptions that end the command with their text, besides those of the directory and of files.
        keys: without keys, the function gets the `WorkerHome` alone, and the command has no --config and no
            --passphrase-file.
        calls: the command calls the coordinator: it has --proxy.
        alone: such a command runs only while no worker runs in the directory.
    """

    def decorate(function: RunCommand) -> RunCommand:
        def run(
            home: HomeOption = DEFAULT_HOME,
            config: ConfigOption = None,
            passphrase_file: PassphraseOption = None,
            proxy: ProxyOption = None,
            as_json: JsonOption = False,
            **arguments: Any,
        ) -> None:
            with failing(*errors, WorkerHomeError, OSError):
                if not keys:
                    function(joined_home(home), as_json=as_json, **arguments)
                    return
                settings = site_config(home, config)
                file, way = passphrase_file or settings.passphrase, settings.proxy or None if proxy is None else proxy
                with connecting(home, file, way, lock=alone) if calls else membership(home, file) as site:
                    function(site, as_json=as_json, **arguments)

        _, *own = (each for each in inspect.signature(function).parameters.values() if each.name != "as_json")
        home, config, passphrase, proxy, as_json, _ = inspect.signature(run).parameters.values()
        first = [each for each in own if each.default is each.empty]
        rest = [each for each in own if each.default is not each.empty]
        options = [*([passphrase] if keys else []), *([proxy] if calls else []), as_json]
        typed: Any = run
        typed.__signature__ = inspect.Signature([*first, home, *([config] if keys else []), *rest, *options])
        run.__doc__ = function.__doc__
        return run

    return decorate


def config_file(home: Path, given: Path | None) -> Path:
    """The path of the settings: that of `--config`, or else in the worker's directory."""
    return WorkerHome(home).config if given is None else given


def site_config(home: Path, given: Path | None) -> "WorkerConfig":
    """The settings in the file; the defaults if there is none, and none was named.

    Raises:
        CommandFailure: the file cannot be used, or `--config` names none.
    """
    path = config_file(home, given)
    with failing(WorkerConfigError, code=USAGE):
        try:
            return WorkerConfig.load(path)
        except FileNotFoundError:
            if given is not None:
                raise CommandFailure(f"--config {given}: there is no such file", code=USAGE) from None
            return WorkerConfig.default()


def joined_home(home: Path) -> "WorkerHome":
    """The directory of a worker that has joined; a CommandFailure if there is none."""
    worker_home = WorkerHome(home)
    with failing(WorkerHomeError):
        worker_home.check_joined()
    return worker_home


@contextmanager
def membership(home: Path, passphrase_file: Path | None, *, lock: bool = False) -> Iterator[MemberSite]:
    """The directory of a member, its files and the passphrase of its keys; `lock` keeps other processes out."""
    worker_home = joined_home(home)
    with failing(WorkerHomeError, IdentityError, OSError), worker_home.lock() if lock else nullcontext():
        passphrase = passphrase_for(home / "tls.key", passphrase_file)
        yield MemberSite(worker_home, MemberFiles.load(home, passphrase), passphrase)


@contextmanager
def connecting(
    home: Path, passphrase_file: Path | None, proxy: str | None, *, lock: bool = True
) -> Iterator[MemberSite]:
    """Like `membership`, for a command that calls the coordinator, through the proxy of the user or the site."""
    with membership(home, passphrase_file, lock=lock) as (worker_home, member, passphrase):
        proxies = proxies_for(member.addresses, proxy)
        if (proxy_in_use := proxies(member.address)) is not None:
            logging.getLogger("fedpareto.worker").info(
                "the way to the coordinator is through the proxy %s", proxy_in_use
            )
        yield MemberSite(worker_home, replace(member, proxy=proxies), passphrase)
