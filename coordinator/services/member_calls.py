"""The calls of the Admin service that change membership: join strings, clients, administrators."""

import secrets
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from coordinator.members import administrators, join_strings, membership, requests
from coordinator.members.access.rpc_messages import Context
from coordinator.rounds.fleets.presence import Admitted
from coordinator.services.base import Service
from coordinator.services.views import member_views, overview
from coordinator.thread_pool import to_the_end
from federation.refusals import Refusal
from federation.trust.certificates import fingerprint
from federation.trust.identity import Action
from federation.trust.join_string import SECRET_BYTES, JoinStringFields
from federation.v1 import admin_pb2 as messages
from storage import models
from storage.retention import Collection, remove_forgotten
from storage.states import RequestState

MAX_JOIN_STRING_LIFETIME = timedelta(days=30)

T = TypeVar("T")


class MemberCalls(Service):
    """Changes join strings, clients and administrators for administrators."""

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
        replaced = await self._act(
            join_strings.create_join_string, request.client_id, secret, again=request.again, expires=expires
        )
        addresses = (await self._addresses()).enrollment
        join = JoinStringFields(addresses, fingerprint(self._home.ca), secret, request.client_id)
        response = messages.CreateJoinStringResponse(join_string=join.encode(), replaced=replaced)
        response.expires.FromDatetime(expires)
        return response

    async def CancelJoinStrings(
        self, request: messages.CancelJoinStringsRequest, context: Context
    ) -> messages.CancelJoinStringsResponse:
        """Cancels the open join strings of a new client."""
        cancelled = await self._act(join_strings.cancel_join_strings, request.client_id)
        return messages.CancelJoinStringsResponse(
            join_strings=[member_views.join_string(row, self._clock()) for row in cancelled]
        )

    # --- clients

    @to_the_end
    async def ApproveClient(
        self, request: messages.ApproveClientRequest, context: Context
    ) -> messages.ApproveClientResponse:
        """Lets a pending client work."""
        requests.check_takes_one_officer(self._settings, Action.APPROVE)
        await self._act(membership.approve, request.client_id, request.key_id)
        await self._begin_client(request.client_id)
        return messages.ApproveClientResponse(client=await self._changed(request.client_id))

    async def _begin_client(self, client_id: str) -> None:
        streams = self._presence.streams()
        if client_id in streams:
            streams[client_id].say(Admitted())
        await self._read(self._offers.tell, [streams[client_id]] if client_id in streams else [])
        self._presence.tell_elsewhere(client_id)

    @to_the_end
    async def TagClient(self, request: messages.TagClientRequest, context: Context) -> messages.TagClientResponse:
        """Gives a client its tags, and notes its contact."""
        tags = list(request.tags.tags) if request.HasField("tags") else None
        contact = request.contact if request.HasField("contact") else None
        await self._act(membership.describe, request.client_id, tags, contact)
        return messages.TagClientResponse(client=await self._changed(request.client_id))

    @to_the_end
    async def RevokeClient(
        self, request: messages.RevokeClientRequest, context: Context
    ) -> messages.RevokeClientResponse:
        """Revokes a client, and ends its calls at once."""
        requests.check_takes_one_officer(self._settings, Action.REVOKE)
        await self._end_client(await self._act(membership.revoke, request.client_id, request.reason))
        return messages.RevokeClientResponse(client=await self._changed(request.client_id))

    @to_the_end
    async def ForgetClient(
        self, request: messages.ForgetClientRequest, context: Context
    ) -> messages.ForgetClientResponse:
        """Removes the payloads of a client, and keeps its envelopes."""
        requests.check_takes_one_officer(self._settings, Action.FORGET)
        await self._act(membership.forget, request.client_id, request.reason)
        removed = await self._remove_forgotten(request.client_id)
        return messages.ForgetClientResponse(
            client=await self._read(overview.client, self._presence.attending(), self._clock(), request.client_id),
            removed=removed.deleted,
            removed_bytes=removed.freed,
            kept=removed.kept,
        )

    async def _remove_forgotten(self, client_id: str) -> Collection:
        rounds = self._settings.keep_rounds or None
        remove = partial(
            remove_forgotten, self._database, self._blobs, client_id, now=self._machine_clock(), keep_rounds=rounds
        )
        return await self._in_thread(remove)

    async def _end_client(self, client: models.Client) -> None:
        self._access.revoke_live(client)
        await self._in_thread(self._states.end_revoked)

    async def _changed(self, client_id: str) -> messages.Client:
        """Lets runs that wait for clients look again; shows the client."""
        for run_id in await self._read(overview.active_runs):
            await self._in_thread(self._changes.notify, run_id)
        return await self._read(overview.client, self._presence.attending(), self._clock(), client_id)

    # --- administrators

    @to_the_end
    async def RevokeAdministrator(
        self, request: messages.RevokeAdministratorRequest, context: Context
    ) -> messages.RevokeAdministratorResponse:
        """Ends an administrator's signing key, certificates and calls, at once."""
        requests.check_takes_one_officer(self._settings, Action.REVOKE_ADMIN)
        least = requests.LEAST if self._settings.two_officers else 1
        revoked = await self._act(administrators.revoke_administrator, request.name, request.reason, least=least)
        self._access.revoke_live_administrator(request.name)
        return messages.RevokeAdministratorResponse(administrator=member_views.administrator(revoked))

    # --- actions that need two officers

    async def RequestAction(
        self, request: messages.RequestActionRequest, context: Context
    ) -> messages.RequestActionResponse:
        """Takes the request of one officer."""
        await self._in_thread(self._sequencer.sequence)  # the officer may have been issued a moment ago
        row = await self._act(
            requests.make_request,
            request.request,
            federation_id=self._home.federation_id,
            settings=self._settings,
            rights=self._rights,
        )
        return messages.RequestActionResponse(request=member_views.request(row, self._clock()))

    @to_the_end
    async def DecideRequest(
        self, request: messages.DecideRequestRequest, context: Context
    ) -> messages.DecideRequestResponse:
        """Takes the decision of another officer; with a consent, the requested action is performed."""
        federation = self._home.federation_id
        await self._in_thread(self._sequencer.sequence)  # an officer may have been issued a moment ago
        done = await self._act(requests.decide, request.decision, federation_id=federation, rights=self._rights)
        if done.row.state is RequestState.DONE:
            match done.action:
                case Action.APPROVE:
                    await self._begin_client(done.subject)
                    await self._changed(done.subject)
                case Action.REVOKE if done.client is not None:
                    await self._end_client(done.client)
                    await self._changed(done.subject)
                case Action.FORGET:
                    await self._remove_forgotten(done.subject)
                case Action.REVOKE_ADMIN:
                    self._access.revoke_live_administrator(done.subject)
        return messages.DecideRequestResponse(request=member_views.request(done.row, self._clock()))
