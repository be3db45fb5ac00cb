"""The calls of the Admin service on membership: join strings, clients, administrators."""

import secrets
from collections.abc import Callable
from concurrent.futures import Executor
from datetime import datetime, timedelta

from sqlalchemy.orm import Session

from coordinator.members import administrators, join_strings, membership
from coordinator.members.access import Access
from coordinator.members.administrators import Administrator
from coordinator.rounds.presence import Presence
from coordinator.rounds.supervisor import Supervisor
from coordinator.services import paging, views
from coordinator.services.desk import Context, Desk
from coordinator.services.summaries import timestamp
from federation.identity import Role
from federation.join_string import SECRET_BYTES
from federation.refusals import Refusal
from federation.v1 import admin_pb2 as messages
from storage.database import Database
from storage.models import JoinString

MAX_JOIN_STRING_LIFETIME = timedelta(days=30)
CLIENTS_AT_A_TIME = 500  # of a list: each has up to 64 KiB of tasks and objectives
JOIN_STRINGS_AT_A_TIME = 1000


class MemberCalls(Desk):
    """Serves administrators in what concerns membership.

    Args:
        database: where facts are kept.
        presence: who attends.
        supervisor: conducts runs.
        access: who calls.
        executor: threads for the database and the disk, so that the event loop never waits for either.
        join: makes the join string of a client id and a secret.
        join_string_lifetime: how long a join string holds unless its maker says otherwise.
        clock: the time, aware.
    """

    def __init__(
        self,
        *,
        database: Database,
        presence: Presence,
        supervisor: Supervisor,
        access: Access,
        executor: Executor,
        join: Callable[[str, bytes], str],
        join_string_lifetime: timedelta,
        clock: Callable[[], datetime],
    ) -> None:
        super().__init__(database=database, access=access, executor=executor, clock=clock)
        self._presence = presence
        self._supervisor = supervisor
        self._join = join
        self._join_string_lifetime = join_string_lifetime

    # --- join strings

    async def CreateJoinString(  # noqa: N802 - the name of the rpc, here and below
        self, request: messages.CreateJoinStringRequest, context: Context
    ) -> messages.CreateJoinStringResponse:
        """Makes a join string for a new client."""
        by = await self._authorise(context, Role.SECURITY_OFFICER)
        lifetime = timedelta(seconds=request.lifetime_seconds) or self._join_string_lifetime
        if lifetime > MAX_JOIN_STRING_LIFETIME:
            raise Refusal("argument", f"a join string is valid for at most {MAX_JOIN_STRING_LIFETIME.days} days")
        secret = secrets.token_bytes(SECRET_BYTES)
        now = self._clock()
        arguments = {"by": by, "now": now, "expires": now + lifetime}
        await self._write(join_strings.create_join_string, request.client_id, secret, **arguments)
        response = messages.CreateJoinStringResponse(join_string=self._join(request.client_id, secret))
        response.expires.FromDatetime(now + lifetime)
        return response

    async def ListJoinStrings(  # noqa: N802
        self, request: messages.ListJoinStringsRequest, context: Context
    ) -> messages.ListJoinStringsResponse:
        """Lists join strings, without their secrets."""
        await self._authorise(context, Role.VIEWER)
        size, start = (
            paging.size_of_page(request.page_size, JOIN_STRINGS_AT_A_TIME),
            paging.number_in(request.page_token),
        )
        now = self._clock()
        found = await self._read(join_strings.join_strings, every=request.all, now=now, start=start, count=size + 1)
        shown, more = paging.page(found, size)
        return messages.ListJoinStringsResponse(
            join_strings=[_join_string(row, now) for row in shown], next_page_token=str(start + size) if more else ""
        )

    async def CancelJoinStrings(  # noqa: N802
        self, request: messages.CancelJoinStringsRequest, context: Context
    ) -> messages.CancelJoinStringsResponse:
        """Ends the open join strings of a client to be."""
        by = await self._authorise(context, Role.SECURITY_OFFICER)
        now = self._clock()
        cancelled = await self._write(join_strings.cancel_join_strings, request.client_id, by=by, now=now)
        return messages.CancelJoinStringsResponse(join_strings=[_join_string(row, now) for row in cancelled])

    # --- clients

    async def ListClients(  # noqa: N802
        self, request: messages.ListClientsRequest, context: Context
    ) -> messages.ListClientsResponse:
        """Lists the clients."""
        await self._authorise(context, Role.VIEWER)
        size = paging.size_of_page(request.page_size, CLIENTS_AT_A_TIME)
        found = await self._read(views.clients, self._presence.attending(), after=request.page_token, count=size + 1)
        shown, more = paging.page(found, size)
        return messages.ListClientsResponse(clients=shown, next_page_token=shown[-1].client_id if more else "")

    async def ApproveClient(  # noqa: N802
        self, request: messages.ApproveClientRequest, context: Context
    ) -> messages.ApproveClientResponse:
        """Lets a pending client work."""
        by = await self._authorise(context, Role.SECURITY_OFFICER)
        await self._write(membership.approve, request.client_id, by=by, now=self._clock())
        await self._wake_runs()
        return messages.ApproveClientResponse(client=await self._client(request.client_id))

    async def RevokeClient(  # noqa: N802
        self, request: messages.RevokeClientRequest, context: Context
    ) -> messages.RevokeClientResponse:
        """Shuts a client out, at once."""
        by = await self._authorise(context, Role.SECURITY_OFFICER)
        await self._write(
            membership.revoke,
            request.client_id,
            request.reason,
            by=by,
            now=self._clock(),
        )
        await self._in_thread(self._access.revoke_live, request.client_id)
        await self._in_thread(self._supervisor.client_revoked, request.client_id)
        await self._wake_runs()
        return messages.RevokeClientResponse(client=await self._client(request.client_id))

    async def _client(self, client_id: str) -> messages.Client:
        return await self._read(views.client, self._presence.attending(), client_id)

    async def _wake_runs(self) -> None:
        """Runs that wait for clients look again."""
        for run_id in await self._read(views.active_runs):
            await self._in_thread(self._supervisor.notify, run_id)

    # --- administrators

    async def ListAdministrators(  # noqa: N802
        self, request: messages.ListAdministratorsRequest, context: Context
    ) -> messages.ListAdministratorsResponse:
        """Lists the administrators."""
        await self._authorise(context, Role.VIEWER)

        def read(session: Session) -> list[messages.Administrator]:
            return [_administrator(one) for one in administrators.administrators(session)]

        return messages.ListAdministratorsResponse(administrators=await self._read(read))

    async def RevokeAdministrator(  # noqa: N802
        self, request: messages.RevokeAdministratorRequest, context: Context
    ) -> messages.RevokeAdministratorResponse:
        """Ends an administrator's certificates and calls, at once."""
        by = await self._authorise(context, Role.SECURITY_OFFICER)
        found = await self._write(
            administrators.revoke_administrator, request.name, request.reason, by=by, now=self._clock()
        )
        self._access.revoke_live_administrator(request.name)
        return messages.RevokeAdministratorResponse(administrator=_administrator(found))


def _join_string(row: JoinString, now: datetime) -> messages.JoinString:
    state = messages.JOIN_STRING_STATE_OPEN
    if row.used is not None:
        state = messages.JOIN_STRING_STATE_USED
    elif row.cancelled is not None:
        state = messages.JOIN_STRING_STATE_CANCELLED
    elif row.expires <= now:
        state = messages.JOIN_STRING_STATE_EXPIRED
    return messages.JoinString(
        client_id=row.client_id,
        state=state,
        created_by=row.created_by,
        created=timestamp(row.created),
        expires=timestamp(row.expires),
        ended=timestamp(row.used or row.cancelled),
    )


def _administrator(one: Administrator) -> messages.Administrator:
    row = one.certificate
    return messages.Administrator(
        name=one.name,
        roles=sorted(one.roles),
        serial=row.serial,
        issued=timestamp(row.not_before),
        certificate_expires=timestamp(row.not_after),
        last_seen=timestamp(row.last_seen),
        revoked=timestamp(row.revoked),
    )
