"""The application: addresses, pages, the streams that keep them up to date, and the files of scripts and styles."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Mapping
from importlib.resources import files
from urllib.parse import quote, urlencode, urlsplit

from starlette.applications import Starlette
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Match, Route

from federation.text import escaped
from fedpareto.web.console import page_events
from fedpareto.web.console.federation_reader import PageError, Reader
from fedpareto.web.console.render import SCRIPTS, ConsoleSite, Renderer
from fedpareto.web.console.screens import (
    compare_page,
    federation_page,
    log_page,
    member_page,
    round_page,
    run_page,
    system_page,
)
from fedpareto.web.console.view import PageRequest, PageView, Screen
from fedpareto.web.serving.security import EntranceKeys, Guard, RefusedRequest, fields_of
from fedpareto.web.serving.shared_files import shared_files

SCREENS: Mapping[str, Screen] = {
    "/": federation_page.SCREEN,
    "/runs/{run}": run_page.SCREEN,
    "/runs/{run}/rounds/{number}": round_page.SCREEN,
    "/members/{client}": member_page.SCREEN,
    "/compare": compare_page.SCREEN,
    "/log": log_page.SCREEN,
    "/system": system_page.SCREEN,
}
STARTING = Screen(lambda reader, asked: PageView("Federation", "starting.html"), lambda reader, asked: None, "/")
_STARTING_SECONDS = 2
_LONGEST_QUERY = 4000


class Console:
    """The pages of one federation, for the browsers of one operator; `pause` is as for `page_events.stream`."""

    def __init__(
        self,
        site: ConsoleSite,
        reader: Reader,
        bell: page_events.ChangeBell,
        keys: EntranceKeys,
        *,
        pause: float = page_events.PAUSE_SECONDS,
    ) -> None:
        self.reader = reader
        self.keys = keys
        self._administrator = site.administrator
        self._bell = bell
        self._pause = pause
        self._shared = page_events.Shared()
        self._files = _static_files()
        version = hashlib.blake2b(b"".join(body for body, _ in self._files.values()), digest_size=4).hexdigest()
        self._renderer = Renderer(site, keys.root, version)
        pages = [Route(path, self._page, methods=["GET"]) for path in SCREENS]
        self._screens = list(zip(pages, SCREENS.values(), strict=True))
        routes = [
            *pages,
            Route("/runs/{run}/series", self._series, methods=["GET"]),
            Route("/events", self._events, methods=["GET"]),
            Route("/sign-out", self._sign_out, methods=["POST"]),
            Route("/static/{name}", self._file, methods=["GET"]),
        ]
        self._app = Starlette(
            routes=routes,
            middleware=[Middleware(GZipMiddleware, minimum_size=1000, compresslevel=6)],
            exception_handlers=dict.fromkeys((PageError, RefusedRequest, HTTPException, Exception), self._problem),
        )

    def guarded(self, port: int) -> Guard:
        """The application inside its guard, for a server on a port."""
        return Guard(
            self._app,
            self.keys,
            port,
            lambda status, text: self._renderer.problem(status, text).encode(),
            ("/static/",),
        )

    # --- pages

    async def _page(self, request: Request) -> Response:
        screen, asked = self._asked(request.url.path, request.url.query, request.scope["token"])
        self.reader.hurry()
        await asyncio.to_thread(self.reader.wait_for_lists)
        if self.reader.lists is None:
            page = await asyncio.to_thread(self._made, STARTING, asked)
            return HTMLResponse(page, headers={"Refresh": str(_STARTING_SECONDS)})
        return HTMLResponse(await asyncio.to_thread(self._made, screen, asked))

    def _made(self, screen: Screen, asked: PageRequest) -> str:
        view = screen.view(self.reader, asked)
        parts = self._renderer.parts(view, self.reader)
        of = asked.path + (f"?{urlencode(list(asked.query.multi_items()))}" if asked.query else "")
        stream = f"/events?of={quote(of, safe='')}&have={page_events.marks(parts)}"
        return self._renderer.page(view, parts, self.reader, nav=screen.nav, stream=stream, token=asked.token)

    def _asked(self, path: str, query: str, token: str = "") -> tuple[Screen, PageRequest]:
        """The screen of an address.

        Raises:
            PageError: 404: there is none; 400: the address is too long.
            RefusedRequest: 400: it has too many fields.
        """
        if len(query) > _LONGEST_QUERY:
            raise PageError(400, f"What follows the question mark is longer than {_LONGEST_QUERY} characters.")
        for route, screen in self._screens:
            match, scope = route.matches({"type": "http", "path": path, "method": "GET"})
            if match is Match.FULL:
                values = {name: str(value) for name, value in scope["path_params"].items()}
                return screen, PageRequest(path, values, QueryParams(fields_of(query)), token, self._administrator)
        raise PageError(404, "There is no such page.")

    async def _series(self, request: Request) -> Response:
        asked = PageRequest(request.url.path, dict(request.path_params), request.query_params)
        document = await asyncio.to_thread(run_page.series, self.reader, asked)
        return Response(json.dumps(document, separators=(",", ":")), media_type="application/json")

    # --- streams

    async def _events(self, request: Request) -> Response:
        try:
            address = urlsplit(request.query_params.get("of", "/"))
        except ValueError as error:
            raise PageError(400, f"The stream is of no address: {error}.") from None
        screen, asked = self._asked(address.path, address.query)
        have = request.query_params.get("have", "")

        def parts() -> page_events.Parts:
            version = screen.version(self.reader, asked), self.reader.connection
            return self._shared.parts(f"{address.path}?{address.query}", version, lambda: self._parts(screen, asked))

        source = self._watched(page_events.stream(self._bell, have, parts, pause=self._pause), request.scope["session"])
        headers = {"X-Accel-Buffering": "no"}
        if "gzip" in request.headers.get("accept-encoding", ""):
            source, headers["Content-Encoding"] = page_events.compressed(source), "gzip"
        return StreamingResponse(source, media_type="text/event-stream", headers=headers)

    def _parts(self, screen: Screen, asked: PageRequest) -> page_events.Parts:
        try:
            return self._renderer.parts(screen.view(self.reader, asked), self.reader)
        except PageError:
            return self._renderer.common(self.reader)  # what was shown stays

    async def _watched(self, source: AsyncIterator[bytes], session: str) -> AsyncIterator[bytes]:
        """A stream while its session lasts."""
        self.reader.watched += 1
        try:
            async for event in source:
                if not self.keys.holds(session):
                    return
                yield event
        finally:
            self.reader.watched -= 1

    # --- the rest

    async def _sign_out(self, request: Request) -> Response:
        self.keys.end(request.scope["session"])
        return HTMLResponse(self._renderer.problem(200, "You have signed out. You can close this page."))

    async def _file(self, request: Request) -> Response:
        body, kind = self._files.get(request.path_params["name"], (b"", ""))
        if not kind:
            raise PageError(404, "There is no such file.")
        return Response(body, media_type=kind)

    async def _problem(self, request: Request, error: Exception) -> Response:
        status, text = 500, "The console failed; its terminal says more."
        if isinstance(error, PageError | RefusedRequest):
            status, text = error.status, error.message
        elif isinstance(error, HTTPException):
            status, text = error.status_code, _TEXTS.get(error.status_code, error.detail)
        return HTMLResponse(self._renderer.problem(status, escaped(text)), status)


_TEXTS = {404: "There is no such page.", 405: "This address does not take such a request."}


def _static_files() -> dict[str, tuple[bytes, str]]:
    """The scripts and style sheets, by name, with their media types."""
    place = files("fedpareto.web.console").joinpath("static")
    found = {name: (place.joinpath(name).read_bytes(), "text/javascript; charset=utf-8") for name in SCRIPTS}
    found["uPlot.min.css"] = place.joinpath("uPlot.min.css").read_bytes(), "text/css; charset=utf-8"
    return found | shared_files()
