"""Checks a coordinator's directory, database and machine, before it serves or beside it; changes nothing."""

import json
import os
import shutil
import socket
import stat
from collections.abc import Iterator
from contextlib import closing
from datetime import datetime, timedelta

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.audit.checkpoints import LogError, noted
from coordinator.audit.log_verifier import log_problems
from coordinator.clock import BEHIND_RECORD
from coordinator.home import CoordinatorHome
from coordinator.members.administrators import officers
from coordinator.members.logged_rights import LoggedRights
from coordinator.members.requests import officers_caution
from coordinator.ownership import CoordinatorHomeError
from coordinator.run_sizes import open_runs_bytes
from coordinator.settings import check_torch_device
from federation.findings import CheckOutcome, Finding
from federation.monitoring.metrics_section import MetricsError
from federation.trust.certificates import SERVER_LIFETIME
from storage import audit
from storage.blobs import BlobCorrupt, BlobMissing, BlobStore, BlobStoreUnavailable
from storage.database import Database
from storage.models import Run
from storage.reserve import MARGIN_BYTES, RESERVE_BYTES
from storage.revisions import pending_revisions

SAMPLE = 20  # blobs, at equal distances through the store, that are read beside the models of runs
_SOON = timedelta(days=30)
_CHANGED = "; keep a copy of the database, and restore the newest backup"


def check_home(home: CoordinatorHome, *, now: datetime) -> Iterator[Finding]:
    """Checks everything besides settings and keys, which `CoordinatorHome.load` checks; `now` is by this machine."""
    yield Finding.ok("settings", f"{home.directory / 'coordinator.toml'}: federation {home.federation_id}")
    yield from _keys(home)
    yield from _certificates(home, now)
    try:
        check_torch_device(home.settings.device)
    except CoordinatorHomeError as error:
        yield Finding.failed("device", str(error))
    yield from _ports(home)
    yield from _metrics(home)
    yield from _record(home, now)


def _keys(home: CoordinatorHome) -> Iterator[Finding]:
    names = ("ca.key", "server.key", "signing.key", "log.key")
    open_to_others = [name for name in names if stat.S_IMODE((home.directory / name).stat().st_mode) & 0o077]
    if open_to_others:
        files = ", ".join(open_to_others)
        yield Finding.failed("keys", f"others can read {files}: chmod 600 them, and ask who has read them")
    else:
        yield Finding.ok("keys", "all are there, fit their certificates, and are readable by their owner only")


def _certificates(home: CoordinatorHome, now: datetime) -> Iterator[Finding]:
    issued = {"CA": home.ca, "server's": home.server}
    for name, certificate in issued.items():
        begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        dates = f"the {name} certificate is valid from {begins:%Y-%m-%d %H:%M} to {ends:%Y-%m-%d %H:%M} UTC"
        renewed = name == "server's" and now < home.ca.not_valid_after_utc
        if now < begins:
            clock = f"this machine's clock says {now:%Y-%m-%d %H:%M} UTC"
            yield Finding.failed("certificates", f"{dates}; {clock}: set the clock")
        elif renewed and now > ends - SERVER_LIFETIME / 3:
            yield Finding.ok("certificates", f"{dates}; it is renewed at the next start")
        elif now > ends - _SOON:
            finding = Finding.failed if now >= ends else Finding.warning
            remedy = "no certificate can outlive the CA: make a new federation, which every member joins"
            yield finding("certificates", f"{dates}: {remedy}")
        else:
            yield Finding.ok("certificates", dates)


def _ports(home: CoordinatorHome) -> Iterator[Finding]:
    if (pid := _serving(home)) is not None:
        federation, enrollment = home.ports()
        served = f"members at port {federation}, newcomers at {enrollment}"
        yield Finding.ok("ports", f"process {pid} serves this directory: {served}")
        return
    names = ("federation_port",) if home.settings.enrollment_host else ("federation_port", "enrollment_port")
    for name, port in zip(names, home.ports(), strict=False):
        family = socket.AF_INET6 if ":" in home.settings.bind else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_STREAM) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind((home.settings.bind.strip("[]"), port))
        except OSError as error:
            yield Finding.failed("ports", f"{name} {port} on {home.settings.bind} cannot be used: {error.strerror}")
        else:
            yield Finding.ok("ports", f"{name} {port or '(picked at the first start)'} is free")


def _metrics(home: CoordinatorHome) -> Iterator[Finding]:
    try:
        endpoint = home.settings.metrics.endpoint(home.directory)
        if endpoint is None:
            return
        if _serving(home) is None:
            endpoint.bind().close()
    except MetricsError as error:
        yield Finding.failed("metrics", str(error))
    else:
        scrapes = "any process of this machine" if endpoint.token is None else "who has the token"
        yield Finding.ok("metrics", f"/metrics is served at {home.settings.metrics.listen}, to {scrapes}")


def _serving(home: CoordinatorHome) -> int | None:
    """The process that serves the directory; None when none does."""
    try:
        pid = int(json.loads(home.ports_file.read_text())["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    try:
        os.kill(pid, 0)
    except PermissionError:  # it is another user's
        return pid
    except OSError:
        return None
    return pid


def _record(home: CoordinatorHome, now: datetime) -> Iterator[Finding]:
    """Checks the database, and then the clock, the blobs and the disk, which need it."""
    try:
        database = home.open_database()
    except Exception as error:  # of many kinds, each with a message of its own, such as a schema of another version
        yield Finding.failed("database", str(error).partition("\n")[0])
        return
    with closing(database):
        yield Finding.ok("database", f"{database.url} belongs to this directory")
        with database.engine.connect() as connection:
            pending = pending_revisions(connection)
        if pending:
            names = ", ".join(pending)
            yield Finding.warning(
                "database",
                f"its schema is older: the next start migrates it ({names}); first make a backup with the old version",
            )
            return
        with database.read() as session:
            yield _clock(session, now)
            log = _audit_log(session, home)
            yield log
            if log.outcome is CheckOutcome.OK:
                yield _rights(session, home)
            yield _officers(session, home)
            yield from _blobs(session, home, database)


def _clock(session: Session, now: datetime) -> Finding:
    newest = audit.last_time(session)
    if newest is not None and newest > now + BEHIND_RECORD:
        return Finding.failed(
            "clock",
            f"this machine's clock says {now:%Y-%m-%d %H:%M} UTC, but the record's newest entry is of "
            f"{newest:%Y-%m-%d %H:%M} UTC: set the clock",
        )
    return Finding.ok("clock", f"{now:%Y-%m-%d %H:%M} UTC, after everything in the record")


def _audit_log(session: Session, home: CoordinatorHome) -> Finding:
    """Verifies the log itself; `admin audit verify` also compares the record with it."""
    count, problems = 0, list[str]()
    try:
        for item in log_problems(session, home.log_key, noted(home.directory) or b""):
            if isinstance(item, str):
                problems.append(item)
            else:
                count = item
    except LogError as error:
        problems.append(str(error))
    if problems:
        text = f"{len(problems)} problems, the first: {problems[0]}"
        return Finding.failed("audit log", f"{text}{_CHANGED}")
    return Finding.ok("audit log", f"{count} entries are what was signed")


def _rights(session: Session, home: CoordinatorHome) -> Finding:
    """Compares administrators and members with the log, which is verified."""
    problems = LoggedRights.read(session, home.log_key.entry_key).problems(session)
    if problems:
        return Finding.failed("rights", f"{len(problems)} problems, the first: {problems[0]}{_CHANGED}")
    return Finding.ok("rights", "the audit log tells of all administrators and members, as they are")


def _officers(session: Session, home: CoordinatorHome) -> Finding:
    if (caution := officers_caution(session, home.settings)) is not None:
        return Finding.warning("officers", caution)
    return Finding.ok("officers", f"security officers: {', '.join(officers(session)) or 'none'}")


def _blobs(session: Session, home: CoordinatorHome, database: Database) -> Iterator[Finding]:
    if not home.settings.in_bucket and not home.blobs_dir.is_dir():
        yield Finding.failed("blobs", f"{home.blobs_dir} is missing: restore it from a backup")
        return
    try:
        yield from _look_at_blobs(session, home.open_blobs(database))
    except (BlobStoreUnavailable, CoordinatorHomeError) as error:
        yield Finding.failed("blobs", str(error))
    yield _disk(session, home)


def _look_at_blobs(session: Session, blobs: BlobStore) -> Iterator[Finding]:
    needed = set(session.scalars(select(Run.model))) | set(session.scalars(select(Run.initial_model)))
    stored = [blob.digest for blob in blobs.scan()]
    looked_at = sorted({*needed, *stored[:: max(1, len(stored) // SAMPLE)]})
    bad = list[str]()
    for digest in looked_at:
        try:
            blobs.verify(digest)
        except (BlobCorrupt, BlobMissing) as error:
            if isinstance(error, BlobCorrupt) or digest in needed:  # others were removed a moment ago
                bad.append(str(error))
    if bad:
        text = f"{len(bad)} of {len(looked_at)} blobs are missing or damaged, such as: {bad[0]}"
        yield Finding.failed("blobs", f"{text}; restore them from a backup")
    else:
        yield Finding.ok("blobs", f"the models of all runs and a sample, {len(looked_at)} in all, are whole")


def _disk(session: Session, home: CoordinatorHome) -> Finding:
    """The disk of the blobs, or of the cache, which takes the largest rounds or what the settings allow it."""
    free = shutil.disk_usage(home.blobs_dir if home.blobs_dir.is_dir() else home.directory).free
    needed, what = open_runs_bytes(session), "the runs that have not ended will take about"
    if home.settings.in_bucket:
        needed, what = min(needed, home.settings.blob_cache_bytes), "the cache of the bucket will take up to"
    text = f"{free / 1e9:.1f} GB are free; {what} {needed / 1e9:.1f} GB"
    if free < RESERVE_BYTES + MARGIN_BYTES:
        return Finding.failed("disk", f"{text}: free some space")
    return (Finding.warning if needed > free else Finding.ok)("disk", text)
