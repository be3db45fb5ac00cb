"""`fedpareto coordinator backup` and `restore`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from federation.text import counted
from fedpareto.cli.coordinator.daemon import DEFAULT_HOME, HomeOption, explained, settled
from fedpareto.cli.failure import CommandFailure, answer, failing
from fedpareto.cli.shared_options import PassphraseOption, ProgressJsonOption
from fedpareto.on_first_use import on_first_use

with on_first_use():
    from rich.progress import BarColumn, DownloadColumn, Progress

    from coordinator.backups.inventory import BackupError, Content
    from coordinator.backups.making import back_up
    from coordinator.backups.restoring import restore, verify_backup
    from coordinator.clock import utc_now
    from fedpareto.cli.show.tables import console


Directory = Annotated[Path, typer.Argument(metavar="DIR", help="The directory of the backup.")]


def backup_command(
    directory: Directory,
    home: HomeOption = DEFAULT_HOME,
    passphrase_file: PassphraseOption = None,
    as_json: ProgressJsonOption = False,
) -> None:
    """Copy database and blobs to a directory.

    The coordinator may serve meanwhile. The next backup into the same directory copies only new blobs.

    The coordinator's signing key signs the backup. Keys and settings are not copied: keep an encrypted copy of them
    elsewhere. Exit code 1 if a blob could not be read.
    """
    with explained(), failing(BackupError), _progress("copying blobs") as progress:
        content, lost = back_up(settled(home, None, passphrase_file), directory, now=utc_now(), progress=progress)
    answer(
        as_json,
        {**_shown(content), "lost": lost},
        f"{directory}: {counted(content.runs, 'run')}, {content.log_entries} entries of the audit log, "
        f"{counted(content.blobs, 'blob')}, {content.bytes / 1e6:.1f} MB",
    )
    if lost:
        raise CommandFailure(
            f"the backup lacks {counted(len(lost), 'blob')} that the coordinator cannot read, the first one {lost[0]}: "
            "see `fedpareto admin audit verify`"
        )


def restore_command(
    directory: Directory,
    home: HomeOption = DEFAULT_HOME,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace a database that holds the record of this federation.")
    ] = False,
    check_only: Annotated[
        bool, typer.Option("--check", help="Only read the backup, and verify its signature and digests.")
    ] = False,
    ca: Annotated[
        str,
        typer.Option(
            "--ca",
            metavar="FINGERPRINT",
            help="With --check: SHA-256 of the CA's certificate, as `coordinator init` printed it.",
        ),
    ] = "",
    passphrase_file: PassphraseOption = None,
    as_json: ProgressJsonOption = False,
) -> None:
    """Restore a backup, while no coordinator serves.

    Put keys and settings into the directory first: the backup must be signed by the signing key there, or by one that
    it has replaced (signing.rotations), and the rows must fit the audit log, which the log key there verifies. The rows
    go into the database that the settings name, SQLite or PostgreSQL.

    With --check no keys are needed, and --home is not read: the signing key is the one that the CA in the backup has
    certified. Give --ca to trust no other CA; without it the command prints the fingerprint, which you compare.

    The command also signs a statement that tells the workers from which round on each run continues. Everything after
    the backup is lost, so --replace is needed if the database is still there. A SQLite file is renamed, and kept.
    """
    with explained(), failing(BackupError), _progress("reading the backup") as progress:
        if check_only:
            content = verify_backup(directory, ca=ca, progress=progress)
        else:
            done = restore(
                settled(home, None, passphrase_file), directory, replace=replace, now=utc_now(), progress=progress
            )
    if check_only:
        trusted = "as you named it" if ca else "which the backup itself names; compare it with that of your federation"
        answer(
            as_json,
            _shown(content),
            f"{directory}: the inventory is signed, and {counted(content.blobs, 'blob')} and the database have their "
            f"digests, of {content.made:%Y-%m-%d %H:%M} UTC",
            f"CA {content.ca_fingerprint}, {trusted}",
        )
        return
    content, runs = done.content, {run.run_id: run.next_round for run in done.statement.runs}
    aside = None if done.aside is None else str(done.aside)
    answer(
        as_json,
        {"made": content.made.isoformat(), "blobs": content.blobs, "runs": runs, "aside": aside},
        f"The record is as of {content.made:%Y-%m-%d %H:%M} UTC: {counted(content.runs, 'run')}, "
        f"{counted(content.blobs, 'blob')}.",
        *([f"The database that was there is now {aside}."] if aside else []),
        *(f"run {run} goes on with round {number}" for run, number in runs.items()),
        f"Now start the coordinator: fedpareto coordinator serve --home {home}",
    )


def _shown(content: "Content") -> dict[str, Any]:
    shown = content.model_dump(mode="json", exclude={"ca", "server", "restored"})
    return {**shown, "ca_fingerprint": content.ca_fingerprint}


@contextmanager
def _progress(words: str) -> Iterator[Callable[[int, int], None]]:
    with Progress(words, BarColumn(), DownloadColumn(), console=console(stderr=True), transient=True) as bars:
        bar = bars.add_task(words, total=None)
        yield lambda done, total: bars.update(bar, completed=done, total=total)
