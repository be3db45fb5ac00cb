"""The calls of the Admin service on membership: join strings, clients, administrators."""

import secrets
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial
from typing import Any, TypeVar

from coordinator.members import administrators, join_strings, membership
from coordinator.members.administrators import Listed
from coordinator.members.messages import Context
from coordinator.services import views
from coordinator.services.base import Service
from coordinator.services.messages import like
from coordinator.services.paging import Page, size_of_page
from federation.certificates import fingerprint
from federation.join_string import SECRET_BYTES, JoinString
from federation.refusals import Refusal
from federation.v1 import admin_pb2 as messages
from storage import models
from storage.retention import remove_forgotten

MAX_JOIN_STRING_LIFETIME = timedelta(days=30)
CLIENTS_AT_A_TIME = 500  # of a list: each has up to 64 KiB of tasks and objectives
JOIN_STRINGS_AT_A_TIME = 1000

T = TypeVar("T")


class MemberCalls(Service):
    """Serves administrators: join strings, clients, administrators."""

    async def _act(self, function: Callable[..., T], *arguments: Any, **more: Any) -> T:
        """Calls `function` in a transaction, with the caller and the time for the record."""
        by, now = self._access.caller().uri, self._clock()
        return await self._write(function, *arguments, by=by, now=now, **more)

    # --- join strings

    async def CreateJoinString(
        self, request: messages.CreateJoinStringRequest, context: Context
    ) -> messages.CreateJoinStringResponse:
        """Makes a join string for a new client, or for one that joins again."""
        lifetime = timedelta(seconds=request.lifetime_seconds or self._settings.join_string_lifetime_seconds)
        if lifetime > MAX_JOIN_STRING_LIFETIME:
            raise Refusal("argument", f"a join string is valid for at most {MAX_JOIN_STRING_LIFETIME.days} days")
        secret = secrets.token_bytes(SECRET_BYTES)
        expires = self._clock() + lifetime
        await self._act(
            join_strings.create_join_string, request.client_id, secret, again=request.again, expires=expires
        )
        join = JoinString(self._enrollment_address, fingerprint(self._home.ca), secret, request.client_id)
        response = messages.CreateJoinStringResponse(join_string=join.encode())
        response.expires.FromDatetime(expires)
        return response

    async def ListJoinStrings(
        self, request: messages.ListJoinStringsRequest, context: Context
    ) -> messages.ListJoinStringsResponse:
        """Lists join strings, without their secrets."""
        page, now = Page.of(request, JOIN_STRINGS_AT_A_TIME), self._clock()
        rows = await self._read(
            join_strings.join_strings, every=request.all, now=now, start=page.start, count=page.size + 1
        )
        return messages.ListJoinStringsResponse(
            join_strings=[_join_string(row, now) for row in rows[: page.size]], next_page_token=page.next_token(rows)
        )

    async def CancelJoinStrings(
        self, request: messages.CancelJoinStringsRequest, context: Context
    ) -> messages.CancelJoinStringsResponse:
        """Ends the open join strings of a client to be."""
        cancelled = await self._act(join_strings.cancel_join_strings, request.client_id)
        return messages.CancelJoinStringsResponse(join_strings=[_join_string(row, self._clock()) for row in cancelled])

    # --- clients

    async def ListClients(self, request: messages.ListClientsRequest, context: Context) -> messages.ListClientsResponse:
        """Lists the clients."""
        size = size_of_page(request.page_size, CLIENTS_AT_A_TIME)
        clients = await self._read(views.clients, self._presence.attending(), after=request.page_token, count=size + 1)
        more = len(clients) > size
        return messages.ListClientsResponse(
            clients=clients[:size], next_page_token=clients[size - 1].client_id if more else ""
        )

    async def ApproveClient(
        self, request: messages.ApproveClientRequest, context: Context
    ) -> messages.ApproveClientResponse:
        """Lets a pending client work."""
        await self._act(membership.approve, request.client_id)
        attending = self._presence.attending()
        told = [attending[request.client_id]] if request.client_id in attending else []
        await self._read(self._offers.tell, told)
        return messages.ApproveClientResponse(client=await self._changed(request.client_id))

    async def TagClient(self, request: messages.TagClientRequest, context: Context) -> messages.TagClientResponse:
        """Gives a client its tags."""
        await self._act(membership.tag, request.client_id, list(request.tags))
        return messages.TagClientResponse(client=await self._changed(request.client_id))

    async def RevokeClient(
        self, request: messages.RevokeClientRequest, context: Context
    ) -> messages.RevokeClientResponse:
        """Revokes a client, and ends its calls at once."""
        self._access.revoke_live(await self._act(membership.revoke, request.client_id, request.reason))
        await self._in_thread(self._supervisor.client_revoked, request.client_id)
        return messages.RevokeClientResponse(client=await self._changed(request.client_id))

    async def ForgetClient(
        self, request: messages.ForgetClientRequest, context: Context
    ) -> messages.ForgetClientResponse:
        """Removes the payloads of a client, and keeps its envelopes."""
        await self._act(membership.forget, request.client_id, request.reason)
        removed = await self._in_thread(
            partial(
                remove_forgotten,
                self._database,
                self._blobs,
                request.client_id,
                now=self._clock(),
                keep_rounds=self._settings.keep_rounds or None,
            )
        )
        return messages.ForgetClientResponse(
            client=await self._read(views.client, self._presence.attending(), request.client_id),
            removed=removed.deleted,
            removed_bytes=removed.freed,
            kept=removed.kept,
        )

    async def _changed(self, client_id: str) -> messages.Client:
        """Lets runs that wait for clients look again; shows the client."""
        for run_id in await self._read(views.active_runs):
            await self._in_thread(self._supervisor.notify, run_id)
        return await self._read(views.client, self._presence.attending(), client_id)

    # --- administrators

    async def ListAdministrators(
        self, request: messages.ListAdministratorsRequest, context: Context
    ) -> messages.ListAdministratorsResponse:
        """Lists the administrators."""
        everybody = await self._read(administrators.administrators)
        return messages.ListAdministratorsResponse(administrators=map(_administrator, everybody))

    async def RevokeAdministrator(
        self, request: messages.RevokeAdministratorRequest, context: Context
    ) -> messages.RevokeAdministratorResponse:
        """Ends an administrator's certificates and calls, at once."""
        revoked = await self._act(administrators.revoke_administrator, request.name, request.reason)
        self._access.revoke_live_administrator(request.name)
        return messages.RevokeAdministratorResponse(administrator=_administrator(revoked))


def _join_string(row: models.JoinString, now: datetime) -> messages.JoinString:
    state = "OPEN"
    if row.used is not None:
        state = "USED"
    elif row.cancelled is not None:
        state = "CANCELLED"
    elif row.expires <= now:
        state = "EXPIRED"
    return like(messages.JoinString, row, state=f"JOIN_STRING_STATE_{state}", ended=row.used or row.cancelled)


def _administrator(one: Listed) -> messages.Administrator:
    return like(
        messages.Administrator,
        one.row,
        serial=one.certificate and one.certificate.serial,
        certificate_expires=one.certificate and one.certificate.not_after,
        revoked=one.row.ended,
    )
