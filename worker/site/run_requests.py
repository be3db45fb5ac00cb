"""The runs that asked a site to take part, and its owner's decisions about them, in the file `runs.db` of its home.

The worker and the owner's commands share the file: `fedpareto worker runs`, `approve` and `refuse`. A decision holds
for the digest of a specification: the same run with another specification needs another decision.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from federation.errors import Error
from federation.spec.run_spec import RunSpec, SpecError
from federation.spec.sharing import Unshared
from federation.v1.common_pb2 import SignedEnvelope
from worker.ledgers.ledger_file import LedgerFile
from worker.site.policy_file import Policy

APPROVED, REFUSED = "approved", "refused"  # by the owner
# Runs about which the owner has not decided, and the bytes of their specifications.
MAX_UNDECIDED = 500
MAX_UNDECIDED_BYTES = 8 << 20
MAX_STATISTICS_BYTES = 1 << 20  # of the document of a result that is kept with a run
MIGRATIONS = (
    (
        """
        CREATE TABLE runs (
            run TEXT, spec TEXT, initial_model TEXT NOT NULL, name TEXT NOT NULL, task TEXT NOT NULL,
            submitted_by TEXT NOT NULL, document BLOB NOT NULL, asked TEXT NOT NULL, owner TEXT NOT NULL DEFAULT '',
            words TEXT NOT NULL DEFAULT '', decided TEXT NOT NULL DEFAULT '', consent BLOB, PRIMARY KEY (run, spec)
        ) WITHOUT ROWID
        """,
    ),
    ("ALTER TABLE runs ADD COLUMN statistics BLOB NOT NULL DEFAULT x''",),
)
_ADVICE = "move it away; runs then ask again"
_COLUMNS = "run, spec, initial_model, name, task, submitted_by, document, asked, owner, words, decided, statistics"


@dataclass(frozen=True)
class Verdict:
    """The answer of a site to a run: "accepted", "waiting" or "refused", a stable reason, and a message for people."""

    answer: str
    reason: str = ""
    message: str = ""


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """A run that asked this site to take part.

    Attributes:
        run: its id.
        spec: the digest of its specification.
        initial_model: the digest of its initial model, as the coordinator signed.
        name, task: as the specification says.
        submitted_by: the administrator who submitted it, as the coordinator signed.
        document: the specification, TOML.
        asked: the time of its first request, ISO 8601.
        owner: the owner's decision, "approved" or "refused"; empty before it.
        words: the owner's reason for a refusal.
        decided: the time of the decision, ISO 8601; empty before it.
        statistics: the document of the result that its model is filled from, JSON; empty where it names none, or it has
            more than `MAX_STATISTICS_BYTES`.
    """

    run: str
    spec: str
    initial_model: str
    name: str
    task: str
    submitted_by: str
    document: bytes
    asked: str
    owner: str
    words: str
    decided: str
    statistics: bytes = b""

    def verdict(self, policy: Policy) -> Verdict:
        """The answer of the site under a policy."""
        try:
            spec = RunSpec.parse(self.document)
        except SpecError as error:
            return Verdict("refused", "spec", f"this worker cannot read the specification: {error}")
        if spec.task != self.task:
            return Verdict("refused", "spec", f"the specification is for the task {spec.task}, the run for {self.task}")
        if policy.algorithms and spec.does not in policy.algorithms:
            return Verdict("refused", "policy:algorithm", f"the owner does not allow {spec.does}")
        summed = spec.describes and spec.privacy.secure != "off"
        if spec.describes and not summed and not policy.statistics.open:
            why = "the owner tells no statistics in the open (statistics.open in policy.toml)"
            return Verdict("refused", "policy:statistics", why)
        if summed and not policy.summed_of([self.task]):
            why = "the data are under [privacy.NAME] of policy.toml, and private statistics have no noise yet"
            return Verdict("refused", "policy:statistics", why)
        if policy.submitters and self.submitted_by not in policy.submitters:
            submitter = self.submitted_by or "nobody"
            return Verdict("refused", "policy:submitter", f"the owner does not allow runs that {submitter} submitted")
        if self.owner == REFUSED:
            return Verdict("refused", "owner", self.words)
        if policy.approve == "each-run" and self.owner != APPROVED:
            return Verdict("waiting", "owner", "the owner approves each run, and has not decided about this one")
        # Section 3, rule 8: a data set is in one sum, so its owner decides which, whatever the policy accepts.
        if summed and self.owner != APPROVED:
            return Verdict("waiting", "owner", "the owner approves each private sum, and has not decided about it")
        return Verdict("accepted")

    @property
    def evaluates(self) -> tuple[str, ...]:
        """The digests of the models that it measures, one in each round; none of a run that trains."""
        try:
            return RunSpec.parse(self.document).models
        except SpecError:
            return ()

    @property
    def approved_models(self) -> tuple[str, ...]:
        """The models that it may measure by the owner's own word: none before the owner has approved it."""
        # Section 3, rule 4: by `worker approve` alone: a policy that accepts runs has not seen these models.
        return self.evaluates if self.owner == APPROVED else ()

    @property
    def describes(self) -> RunSpec | None:
        """The specification of a run that describes the data of this site; None for other runs."""
        try:
            spec = RunSpec.parse(self.document)
        except SpecError:
            return None
        return spec if spec.describes else None

    @property
    def unshared(self) -> Unshared | None:
        """What its specification says of the tensors that it does not share; None if this worker cannot read it."""
        try:
            return Unshared.of(RunSpec.parse(self.document).parameters)
        except SpecError:
            return None

    @property
    def discloses(self) -> frozenset[str] | None:
        """The numbers that its private rounds show in the clear; None if its rounds are open.

        A specification that this worker cannot read counts as private, and discloses nothing.
        """
        try:
            privacy = RunSpec.parse(self.document).privacy
        except SpecError:
            return frozenset()
        return None if privacy.secure == "off" else frozenset(privacy.disclose)


@dataclass(frozen=True)
class AskedPage:
    """Some runs that asked, the newest first, and how many more there are."""

    runs: list[RunRequest]
    total: int


def read_requests(path: Path, owner: str | None, *, limit: int, offset: int = 0) -> AskedPage:
    """Reads a bounded part of a `runs.db`: the newest runs, or those with this decision of the owner.

    It changes nothing, also while a worker uses the file.

    Raises:
        WorkerHomeError, OSError: see `LedgerFile`.
    """
    clause, values = ("", ()) if owner is None else ("WHERE owner = ?", (owner,))
    with LedgerFile.reading(path, MIGRATIONS, _ADVICE) as connection:
        if connection is None:
            return AskedPage([], 0)
        total = connection.execute(f"SELECT count(*) FROM runs {clause}", values).fetchone()[0]  # noqa: S608 - our own
        order = "ORDER BY asked DESC, run, spec LIMIT ? OFFSET ?"
        rows = connection.execute(f"SELECT {_COLUMNS} FROM runs {clause} {order}", (*values, limit, offset))  # noqa: S608 - our own
        return AskedPage([_request(row) for row in rows], total)


def read_request(path: Path, run: str, spec: str) -> tuple[RunRequest | None, RunRequest | None]:
    """The run with this specification, and the other one that the owner approved last; None for none.

    Of the approved runs, those for the same task come first.

    Raises:
        WorkerHomeError, OSError: see `LedgerFile`.
    """
    with LedgerFile.reading(path, MIGRATIONS, _ADVICE) as connection:
        if connection is None:
            return None, None
        found = connection.execute(f"SELECT {_COLUMNS} FROM runs WHERE run = ? AND spec = ?", (run, spec)).fetchone()  # noqa: S608 - our own
        before = connection.execute(
            f"""
            SELECT {_COLUMNS} FROM runs WHERE owner = ?1 AND NOT (run = ?2 AND spec = ?3)
            ORDER BY task IS (SELECT task FROM runs WHERE run = ?2 AND spec = ?3) DESC, decided DESC LIMIT 1
            """,  # noqa: S608 - our own
            (APPROVED, run, spec),
        ).fetchone()
    return _request(found) if found else None, _request(before) if before else None


def _request(row: Sequence[Any]) -> RunRequest:
    return RunRequest(**dict(zip(_COLUMNS.split(", "), row, strict=True)))


class DecisionRefused(Error):
    """A decision that cannot be taken; the message says why."""


def decided(file: "RunsFile", policy: Policy, run: RunRequest, owner: str, words: str, now: datetime) -> RunRequest:
    """Records the owner's decision, "approved" or "refused", about a run with the specification that it asked with.

    Raises:
        DecisionRefused: the owner approves a run that the policy refuses.
        WorkerHomeError, OSError: see `LedgerFile`.
    """
    after = replace(run, owner=owner, words=words[:400], decided=now.isoformat())
    verdict = after.verdict(policy)
    if owner == APPROVED and verdict.answer != "accepted":
        raise DecisionRefused(f"policy.toml refuses this run: {verdict.message}")
    file.decide(run, owner, words[:400], now)
    return after


class RunsFile:
    """The file `runs.db` of a home, made when it is missing. Any thread and any process may use it.

    Raises:
        WorkerHomeError, OSError: see `LedgerFile`.
    """

    def __init__(self, path: Path) -> None:
        self._file = LedgerFile(path, MIGRATIONS, _ADVICE)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def changes(self) -> int:
        """A number that differs after each change by another process."""
        with self._file.using() as connection:
            return int(connection.execute("PRAGMA data_version").fetchone()[0])

    def runs(self, beginning: str = "") -> list[RunRequest]:
        """The runs whose id begins with `beginning` or whose name it is, in the order in which they asked."""
        asked = self._select("ORDER BY asked, run, spec")
        return [run for run in asked if run.run.startswith(beginning) or run.name == beginning]

    def get(self, run: str, spec: str) -> RunRequest | None:
        """The run with this specification; None if it has not asked."""
        return next(iter(self._select("WHERE run = ? AND spec = ?", run, spec)), None)

    def of(self, run: str) -> list[RunRequest]:
        """The run with this id, with each specification with which it has asked; an honest coordinator has one."""
        return self._select("WHERE run = ? ORDER BY asked, spec", run)

    def _select(self, clause: str, *values: str) -> list[RunRequest]:
        with self._file.using() as connection:
            rows = connection.execute(f"SELECT {_COLUMNS} FROM runs {clause}", values).fetchall()  # noqa: S608
        return [_request(row) for row in rows]

    def add(self, run: RunRequest) -> None:
        """Adds a run that asked; a run that is in the file already stays as it is."""
        values = [getattr(run, name) for name in _COLUMNS.split(", ")]
        with self._file.using() as connection:
            connection.execute(f"INSERT OR IGNORE INTO runs ({_COLUMNS}) VALUES (?,?,?,?,?,?,?,?,?,?,?,?)", values)  # noqa: S608

    def make_room(self, size: int, keep: Collection[tuple[str, str]]) -> bool:
        """Makes room for another run whose documents have this size in bytes, by removing older ones.

        Those about which the owner has decided stay, and those in `keep`, each the id and the digest of a run. False if
        there is no room.
        """
        with self._file.using() as connection:
            rows = connection.execute(
                """
                SELECT run, spec, length(document) + length(statistics) FROM runs WHERE owner = ''
                ORDER BY asked, run, spec
                """
            ).fetchall()
            count, taken = len(rows), sum(length for *_, length in rows)
            for run, spec, length in rows:
                if count < MAX_UNDECIDED and taken + size <= MAX_UNDECIDED_BYTES:
                    break
                if (run, spec) not in keep:
                    connection.execute("DELETE FROM runs WHERE run = ? AND spec = ?", (run, spec))
                    count, taken = count - 1, taken - length
        return count < MAX_UNDECIDED and taken + size <= MAX_UNDECIDED_BYTES

    def decide(self, run: RunRequest, owner: str, words: str, decided: datetime) -> None:
        """Records the owner's decision about a run with this specification; `words` is the reason for a refusal."""
        with self._file.using() as connection:
            connection.execute(
                "UPDATE runs SET owner = ?, words = ?, decided = ? WHERE run = ? AND spec = ?",
                (owner, words, decided.isoformat(), run.run, run.spec),
            )

    def consent(self, run: RunRequest) -> SignedEnvelope | None:
        """The newest signed answer to a run; None if it got none."""
        with self._file.using() as connection:
            row = connection.execute(
                "SELECT consent FROM runs WHERE run = ? AND spec = ?", (run.run, run.spec)
            ).fetchone()
        return SignedEnvelope.FromString(row[0]) if row is not None and row[0] is not None else None

    def keep_consent(self, run: RunRequest, envelope: SignedEnvelope) -> None:
        """Keeps the newest signed answer to a run."""
        with self._file.using() as connection:
            connection.execute(
                "UPDATE runs SET consent = ? WHERE run = ? AND spec = ?",
                (envelope.SerializeToString(deterministic=True), run.run, run.spec),
            )
