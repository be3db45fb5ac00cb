"""The calls of the Admin service that only show the record.

A coordinator serves them. While it is stopped, a command on its machine calls them directly
(`coordinator.services.stopped`), so they use nothing that exists only in a serving process.
"""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC
from typing import Any

from sqlalchemy.orm import Session

from coordinator.alerts import rows
from coordinator.lookup import Choice, check_client, find_round, find_run
from coordinator.members import administrators, join_strings, requests
from coordinator.members.access.rpc_messages import Context
from coordinator.services.views import alerts, details, member_views, overview, system
from coordinator.services.views.conversion import like
from coordinator.services.views.paging import Page, size_of_page
from coordinator.services.views.reader import RecordViews
from coordinator.services.views.summaries import rounds_from, summaries
from coordinator.services.views.watching import run_alone, run_with_members, runs_from
from federation.record.log_kinds import KINDS
from federation.refusals import Refusal
from federation.text import did_you_mean
from federation.v1 import admin_pb2 as messages
from storage import audit
from storage.columns import LARGEST_NUMBER

ALERTS_AT_A_TIME = 200  # of a list
RUNS_AT_A_TIME = 100  # of a list
SUMMARIES_AT_A_TIME = 500  # of a list of rounds
ROUNDS_AT_A_TIME = 20  # of an export: the memory that it takes
REPLIES_AT_A_TIME = 200  # of a list, with their envelopes
CLIENTS_AT_A_TIME = 500  # of a list: each has up to 64 KiB of tasks and objectives
JOIN_STRINGS_AT_A_TIME = 1000
REQUESTS_AT_A_TIME = 200
ENTRIES_AT_A_TIME = 500
FOLLOW_SECONDS = 0.5

_CHOICES = {messages.RUN_CHOICE_ONLY: Choice.ONLY, messages.RUN_CHOICE_OPEN: Choice.OPEN}


class RecordCalls(RecordViews):
    """Shows administrators runs and rounds, members, and the audit log; writes nothing itself."""

    async def _note_export(self, action: str, subject: str) -> None:
        """Notes in the audit log that the caller got rounds or replies; a stopped coordinator does nothing."""

    # --- runs

    async def GetDisk(self, request: messages.GetDiskRequest, context: Context) -> messages.GetDiskResponse:
        """Shows the disk space of the record."""
        from coordinator.run_sizes import usage  # noqa: PLC0415 - with all algorithms, which no other call needs

        use = await self._read(usage, self._blobs)
        runs = [like(messages.RunDisk, run) for run in use.runs]
        return like(messages.GetDiskResponse, use, keep_rounds=self._settings.keep_rounds, runs=runs)

    async def GetSystem(self, request: messages.GetSystemRequest, context: Context) -> messages.GetSystemResponse:
        """Shows the coordinator's software, its newest backup, and the limits that were hit."""
        return await self._read(system.system, self._clock())

    async def ListRuns(self, request: messages.ListRunsRequest, context: Context) -> messages.ListRunsResponse:
        """Lists the runs."""
        page = Page.of(request, RUNS_AT_A_TIME)
        runs = await self._read(runs_from, page.start, page.size + 1, brief=request.brief)
        return messages.ListRunsResponse(runs=runs[: page.size], next_page_token=page.next_token(runs))

    async def GetRun(self, request: messages.GetRunRequest, context: Context) -> messages.GetRunResponse:
        """Shows one run."""
        return messages.GetRunResponse(run=await self._read(self._whole_run, request))

    def _whole_run(self, session: Session, request: messages.GetRunRequest) -> messages.Run:
        item = find_run(session, request.run, _CHOICES.get(request.choice, Choice.NEWEST))
        run = run_alone(session, item, spec=True) if request.brief else run_with_members(session, item, spec=True)
        run.consents.extend(overview.consents(session, self._checks, item))
        return run

    async def ListAlerts(self, request: messages.ListAlertsRequest, context: Context) -> messages.ListAlertsResponse:
        """Lists alerts."""
        size, before = size_of_page(request.page_size, ALERTS_AT_A_TIME), alerts.place_of(request.page_token)

        def read(session: Session) -> messages.ListAlertsResponse:
            run_id = find_run(session, request.run).run_id if request.run else None
            if request.client_id:
                check_client(session, request.client_id)
            of = request.client_id
            found = rows.listed(session, every=request.all, run_id=run_id, client_id=of, before=before, count=size + 1)
            shown = [alerts.alert(row, name) for row, name in found[:size]]
            token = alerts.token_after(found[size - 1][0]) if len(found) > size else ""
            return messages.ListAlertsResponse(alerts=shown, next_page_token=token)

        response = await self._read(read)
        response.now.FromDatetime(self._clock())
        return response

    # --- rounds

    async def ListRounds(self, request: messages.ListRoundsRequest, context: Context) -> messages.ListRoundsResponse:
        """Lists the rounds of a run."""
        page = Page.of(request, SUMMARIES_AT_A_TIME)

        def read(session: Session) -> messages.ListRoundsResponse:
            run = find_run(session, request.run)
            items = rounds_from(session, run.run_id, page.start, page.size + 1)
            rounds = summaries(session, items[: page.size])
            return messages.ListRoundsResponse(
                run=overview.run(session, run), rounds=rounds, next_page_token=page.next_token(items)
            )

        return await self._read(read)

    async def GetRound(self, request: messages.GetRoundRequest, context: Context) -> messages.GetRoundResponse:
        """Shows one round with every client's part in it."""

        def read(session: Session) -> messages.GetRoundResponse:
            round_ = find_round(session, find_run(session, request.run), request.round)
            return details.round_detail(session, self._blobs, self._checks, round_)

        return await self._read(read)

    async def ExportRounds(
        self, request: messages.ExportRoundsRequest, context: Context
    ) -> AsyncIterator[messages.ExportRoundsResponse]:
        """Streams the rounds of a run with every client's part and scores."""
        run_id = await self._read(lambda session: find_run(session, request.run).run_id)
        await self._note_export("rounds.exported", run_id)
        start = min(request.first, LARGEST_NUMBER)
        while rounds := await self._read(details.export_rounds, run_id, start, ROUNDS_AT_A_TIME):
            for message in rounds:
                yield message
            start += len(rounds)

    async def ListReplies(
        self, request: messages.ListRepliesRequest, context: Context
    ) -> AsyncIterator[messages.ListRepliesResponse]:
        """Lists the replies of a run, refused ones included."""

        def find(session: Session) -> tuple[str, int | None]:
            run = find_run(session, request.run)
            number = find_round(session, run, request.round).number if request.HasField("round") else None
            return run.run_id, number

        run_id, number = await self._read(find)
        await self._note_export("replies.exported", run_id if number is None else f"{run_id}/{number}")
        after = 0
        while True:
            replies, after = await self._read(
                overview.replies, self._checks, run_id, number, request.client_id, after, REPLIES_AT_A_TIME
            )
            if not replies:
                return
            yield messages.ListRepliesResponse(replies=replies)

    # --- members

    async def ListJoinStrings(
        self, request: messages.ListJoinStringsRequest, context: Context
    ) -> messages.ListJoinStringsResponse:
        """Lists join strings, without their secrets."""
        page, now = Page.of(request, JOIN_STRINGS_AT_A_TIME), self._clock()
        rows = await self._read(
            join_strings.join_strings, every=request.all, now=now, start=page.start, count=page.size + 1
        )
        return messages.ListJoinStringsResponse(
            join_strings=[member_views.join_string(row, now) for row in rows[: page.size]],
            next_page_token=page.next_token(rows),
        )

    async def ListClients(self, request: messages.ListClientsRequest, context: Context) -> messages.ListClientsResponse:
        """Lists the clients."""
        size = size_of_page(request.page_size, CLIENTS_AT_A_TIME)
        clients = await self._read(
            overview.clients, self._presence.attending(), self._clock(), after=request.page_token, count=size + 1
        )
        more = len(clients) > size
        return messages.ListClientsResponse(
            clients=clients[:size], next_page_token=clients[size - 1].client_id if more else ""
        )

    async def ListAdministrators(
        self, request: messages.ListAdministratorsRequest, context: Context
    ) -> messages.ListAdministratorsResponse:
        """Lists the administrators."""
        everybody = await self._read(administrators.administrators)
        return messages.ListAdministratorsResponse(administrators=map(member_views.administrator, everybody))

    async def ListRequests(
        self, request: messages.ListRequestsRequest, context: Context
    ) -> messages.ListRequestsResponse:
        """Lists the requests of officers."""
        page, now = Page.of(request, REQUESTS_AT_A_TIME), self._clock()
        rows = await self._read(requests.requests, every=request.all, now=now, start=page.start, count=page.size + 1)
        return messages.ListRequestsResponse(
            requests=[member_views.request(row, now) for row in rows[: page.size]],
            actions=self._settings.two_officers,
            lifetime_seconds=self._settings.request_seconds,
            next_page_token=page.next_token(rows),
        )

    # --- the audit log

    async def ListAudit(
        self, request: messages.ListAuditRequest, context: Context
    ) -> AsyncIterator[messages.ListAuditResponse]:
        """Streams the entries of the audit log."""
        since = None
        if request.HasField("since"):
            try:
                since = request.since.ToDatetime(tzinfo=UTC)
            except (ValueError, OverflowError) as error:
                raise Refusal("argument", f"since: {error}") from None
        if request.kind and request.kind not in KINDS:
            near = did_you_mean(request.kind, KINDS) or ";"
            raise Refusal(
                "argument", f"there is no kind {request.kind[:40]!r} of entries{near} the kinds are {', '.join(KINDS)}"
            )
        of: dict[str, Any] = {"since": since, "actor": request.actor, "kind": request.kind}
        if request.newest:
            if request.follow or request.newest > ENTRIES_AT_A_TIME:
                raise Refusal("argument", f"newest: at most {ENTRIES_AT_A_TIME} entries, and not with follow")
            before = min(request.before, LARGEST_NUMBER) if request.HasField("before") else None
            entries = await self._read(audit.newest, request.newest, before, text=request.text, **of)
            if entries:
                yield messages.ListAuditResponse(entries=map(_shown_entry, entries))
            return
        if request.HasField("before") or request.text:
            raise Refusal("argument", "before and text go with newest")
        start = 0
        while True:
            entries = await self._read(audit.chained, start, ENTRIES_AT_A_TIME, **of)
            if entries:
                start = entries[-1].entry.number + 1
                yield messages.ListAuditResponse(entries=map(_shown_entry, entries))
            elif not request.follow:
                return
            else:
                await asyncio.sleep(FOLLOW_SECONDS)


def _shown_entry(entry: audit.ChainedEntry) -> messages.AuditEntry:
    return like(messages.AuditEntry, entry.entry, leaf=entry.leaf)
