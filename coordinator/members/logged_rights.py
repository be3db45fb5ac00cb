"""The rights of administrators and members as the audit log tells of them: an edited row of the database gives none.

Only a process with the coordinator's directory can make an entry of the log. So a right counts if an entry tells of it
and no later one ends it. The coordinator keeps these facts in memory: it reads them at its start, when it verifies the
log, and learns of later ones when they get their place in the log.
"""

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from sqlalchemy import select
from sqlalchemy.orm import Session

from coordinator.members import administrators, authority, membership
from coordinator.members.administrators import identity_digest
from federation.digests import digest
from federation.record import joinings, log_entries
from federation.record.log_entries import EPOCH, LogEntry
from federation.refusals import Refusal
from federation.trust.identity import PeerIdentity
from federation.trust.proofs import UNSIGNED
from storage import audit
from storage.models import Administrator, AuditEntry, Client, JoinString
from storage.states import ClientState, RequestState

DECIDED = {  # entries of the log
    RequestState.DONE: "request.consented",
    RequestState.REFUSED: "request.refused",
    RequestState.WITHDRAWN: "request.withdrawn",
}
_ACTIONS = frozenset(
    {
        *(administrators.ISSUED, administrators.REVOKED, authority.RETIRED),
        *(audit.ENROLLED, audit.ROTATED, audit.JOIN_CREATED, audit.JOIN_CANCELLED),
        *(membership.APPROVED, membership.CLIENT_REVOKED, joinings.LEFT, joinings.JOINED_AGAIN),
        *(log_entries.SUBMITTED, *DECIDED.values()),
    }
)
_PENDING = f", {ClientState.PENDING}"  # the end of the detail of an enrollment that waits for its approval


@dataclass(frozen=True)
class _LoggedClient:
    """A member: its state, the digest of its present signing key, and whether it has left since it joined last."""

    state: ClientState
    key: str
    left: bool = False

    @property
    def shown(self) -> ClientState:
        """The state that the record has."""
        return ClientState.LEFT if self.left and self.state is not ClientState.REVOKED else self.state


def join_string_digest(row: JoinString) -> str:
    """The digest of a join string in the log: of the hash of its secret, its client, and its end."""
    return digest(f"{row.secret_hash} {row.client_id} {row.expires.isoformat()}".encode())


class LoggedRights:
    """What the entries of the log say, in their order. Any thread may call."""

    def __init__(self, entries: Iterable[LogEntry] = ()) -> None:
        self._lock = threading.Lock()
        self._issued: set[tuple[str, str]] = set()  # names, and digests of keys and roles, of all times
        self._administrators: dict[str, str] = {}  # name -> the digest that counts; "" once it was revoked
        self._retired: set[str] = set()  # serial numbers of certificates
        self._clients: dict[str, _LoggedClient] = {}
        self._join_strings: dict[str, set[str]] = {}  # digests of valid ones, by client
        self._decided: set[str] = set()  # requests of officers
        self._runs: dict[str, str] = {}  # run -> the digest of its specification
        self.learn(entries)

    @classmethod
    def read(cls, session: Session, key: bytes) -> "LoggedRights":
        """Reads the entries in a snapshot, also those without a place in the log that `key` has tagged.

        The caller must verify the log of this snapshot.
        """
        columns = (AuditEntry.action, AuditEntry.subject, AuditEntry.outcome, AuditEntry.detail, AuditEntry.digest)
        chained = select(*columns).where(AuditEntry.number.is_not(None), AuditEntry.action.in_(_ACTIONS))
        rows = session.execute(chained.order_by(AuditEntry.number)).mappings()
        entries = [LogEntry(number=0, entry_id=0, at=EPOCH, actor="", times=1, **dict(row)) for row in rows]
        return cls([*entries, *audit.waiting(session, key)])

    def learn(self, entries: Iterable[LogEntry]) -> None:
        """Takes further entries, in the order of the log."""
        with self._lock:
            for entry in entries:
                if entry.action in _ACTIONS and not entry.outcome:  # not the refusal of such a call
                    self._learn(entry)

    def _learn(self, entry: LogEntry) -> None:
        name = entry.subject
        match entry.action:
            case administrators.ISSUED:
                self._issued.add((name, entry.digest))
                self._administrators[name] = entry.digest
            case administrators.REVOKED:
                self._administrators[name] = ""
            case authority.RETIRED:
                self._retired.add(entry.detail)
            case audit.ENROLLED:
                state = ClientState.PENDING if entry.detail.endswith(_PENDING) else ClientState.ACTIVE
                self._clients[name] = _LoggedClient(state, entry.digest)
            case audit.ROTATED if name in self._clients:
                self._clients[name] = replace(self._clients[name], key=entry.digest)
            case membership.APPROVED if name in self._clients:
                self._clients[name] = replace(self._clients[name], state=ClientState.ACTIVE)
            case membership.CLIENT_REVOKED if name in self._clients:
                self._clients[name] = replace(self._clients[name], state=ClientState.REVOKED)
            case joinings.LEFT | joinings.JOINED_AGAIN if name in self._clients:
                self._clients[name] = replace(self._clients[name], left=entry.action == joinings.LEFT)
            case audit.JOIN_CREATED:
                self._join_strings.setdefault(name, set()).add(entry.digest)
            case audit.JOIN_CANCELLED:
                self._join_strings.pop(name, None)
            case log_entries.SUBMITTED:
                self._runs[name] = entry.digest
            case _ if entry.action in DECIDED.values():
                self._decided.add(name)

    # --- what is compared when somebody acts

    def check_logged(self, row: Administrator) -> None:
        """Raises the Refusal `unlogged` unless the log tells of an administrator's signing key with these roles."""
        with self._lock:
            if self._administrators.get(row.name) == identity_digest(row):
                return
        raise _unlogged(f"the administrator {row.name} with this signing key and the roles {', '.join(row.roles)}")

    def check_join_string_logged(self, row: JoinString) -> None:
        """Raises the Refusal `unlogged` unless the log tells of an open join string with this client and end."""
        with self._lock:
            if join_string_digest(row) in self._join_strings.get(row.client_id, ()):
                return
        raise _unlogged(f"this open join string of {row.client_id}")

    def check_undecided(self, request_id: str) -> None:
        """Raises the Refusal `unlogged` if the log tells of a decision on a request that is open on record."""
        with self._lock:
            if request_id not in self._decided:
                return
        raise Refusal("unlogged", f"the request is open on record, and the audit log tells of its decision{_REMEDY}")

    def tells_of_run(self, run_id: str, spec: str) -> bool:
        """True if a run was submitted with a specification of this digest."""
        with self._lock:
            return self._runs.get(run_id) == spec

    def permit(self, identity: PeerIdentity, state: ClientState | None, signing_key: bytes | None) -> bool:
        """True if the log agrees with the record about a caller.

        Args:
            identity: as in its certificate, which is on record and not revoked there.
            state: of a client, on record; None for an administrator.
            signing_key: likewise.
        """
        with self._lock:
            if identity.serial in self._retired:
                return False
            if identity.kind != "client":
                return bool(self._administrators.get(identity.name))
            client = self._clients.get(identity.name)
        if client is None or signing_key is None:
            return False
        fits = state is client.shown or (state is ClientState.PENDING and client.shown is ClientState.ACTIVE)
        return fits and client.key == digest(signing_key)

    # --- what is compared at the start, at a restore, and in a check

    def problems(self, session: Session) -> list[str]:
        """Describes the administrators and members of a snapshot who differ from what the log tells of them."""
        rows = select(Administrator).order_by(Administrator.name, Administrator.issued, Administrator.key_id)
        listed = session.scalars(rows).all()
        clients = session.scalars(select(Client).where(Client.signing_key != UNSIGNED).order_by(Client.client_id)).all()
        with self._lock:
            return [*self._administrator_problems(listed), *self._client_problems(clients)]

    def _administrator_problems(self, rows: Iterable[Administrator]) -> Iterator[str]:
        names, counting = set[str](), set[str]()
        for row in rows:
            names.add(row.name)
            shown, logged = f"administrator {row.name}", identity_digest(row)
            if (row.name, logged) not in self._issued or digest(row.signing_key) != f"blake3:{row.key_id}":
                yield f"{shown}: no entry of the log tells of its signing key with these roles"
            elif row.ended is not None:
                continue
            elif not self._administrators[row.name]:
                yield f"{shown}: the log tells of its revocation, and the record says otherwise"
            elif self._administrators[row.name] != logged:
                yield f"{shown}: a signing key counts although the log tells of a newer one"
            else:
                counting.add(row.name)
        for name, logged in self._administrators.items():
            if name not in names:
                yield f"administrator {name}: the log tells of it, and it is not in the record"
            elif logged and name not in counting:
                yield f"administrator {name}: the log does not tell of its revocation, and the record says otherwise"

    def _client_problems(self, clients: Iterable[Client]) -> Iterator[str]:
        missing = dict(self._clients)
        for client in clients:
            logged, shown = missing.pop(client.client_id, None), f"client {client.client_id}"
            if logged is None:
                yield f"{shown}: no entry of the log tells of it"
                continue
            if logged.key != digest(client.signing_key):
                yield f"{shown}: its signing keys are not those that the log tells of"
            is_revoked = logged.state is ClientState.REVOKED
            if is_revoked != (client.state is ClientState.REVOKED):
                verb = "tells" if is_revoked else "does not tell"
                yield f"{shown}: it is {client.state}, and the log {verb} of its revocation"
            elif (has_left := logged.shown is ClientState.LEFT) != (client.state is ClientState.LEFT):
                verb = "tells" if has_left else "does not tell"
                yield f"{shown}: it is {client.state}, and the log {verb} that it has left"
            elif client.left_from is ClientState.ACTIVE and logged.state is ClientState.PENDING:
                yield f"{shown}: it left as an ACTIVE member, and the log does not tell of its approval"
            elif client.state is ClientState.ACTIVE and logged.state is ClientState.PENDING:
                yield f"{shown}: it is ACTIVE, and the log does not tell of its approval"
        for name in missing:
            yield f"client {name}: the log tells that it enrolled, and it is not in the record"


def unlogged_caller(identity: PeerIdentity) -> Refusal:
    """The refusal of a caller of whom the log tells something else than the record."""
    if identity.kind == "client":
        return _unlogged(f"the member {identity.name} as the record has it, with this certificate")
    return _unlogged(f"the administrator {identity.name} with this certificate")


_REMEDY = ". Somebody has changed the database: `fedpareto coordinator check` names the row"


def _unlogged(what: str) -> Refusal:
    return Refusal("unlogged", f"no entry of the audit log tells of {what}{_REMEDY}")
