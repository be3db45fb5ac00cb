"""Who may read the pages: only a browser on this machine that was given the key, and only the pages themselves.

All addresses begin with a root that nobody can guess, which is the path of the cookie. Cookies know no ports: without a
path, a browser would send ours to the programs of other users that listen on this machine. No answer outside the root
names it.

The guard is the outermost layer of the server, and imports nothing of it. Each request passes these checks, in order:
the name of the host (a page of another host cannot reach the server under its own name), the origin of the request, the
root of its address, the number of its fields, the session, the size of its body and, for a POST, the token that only
our own pages hold.
"""

import hmac
import ipaddress
import secrets
import threading
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any
from urllib.parse import parse_qsl

KEY_SECONDS = 60.0  # from the start, or from the request for another one
SESSION_SECONDS = 12 * 3600.0
MAX_BODY_BYTES = 16 << 10
MAX_FIELDS = 64  # of an address or a form
MAX_STREAMS = 32
MAX_SESSIONS = 32
ENTER = "/enter"
ICON = "/static/icon.svg"
TOKEN = "token"  # noqa: S105 - the name of the field that carries it

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",  # with "no-referrer", browsers send our own forms with the origin "null"
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
ErrorPage = Callable[[int, str], bytes]  # an HTML document that says in words what was wrong, and what to do


class RefusedRequest(Exception):
    """A request that is refused with a status and a reason."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


def fields_of(text: str) -> list[tuple[str, str]]:
    """The fields of a form, or of what follows the question mark of an address, in their order.

    Raises:
        RefusedRequest: 400: there are more than `MAX_FIELDS`.
    """
    try:
        return parse_qsl(text, keep_blank_values=True, max_num_fields=MAX_FIELDS)
    except ValueError:
        raise RefusedRequest(400, f"The request has more than {MAX_FIELDS} fields.") from None


def check_loopback(host: str, port: int) -> None:
    """Raises ValueError, with the way to reach the pages from elsewhere, if an address is not this machine's own."""
    try:
        local = host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        local = False
    if not local:
        number = port or 8446
        raise ValueError(
            f"{host} is not an address of this machine alone, and the pages have no passwords: leave --host away, and "
            f"from another machine forward the port with `ssh -L {number}:127.0.0.1:{number} THIS-MACHINE`, where "
            f"http://127.0.0.1:{number} then shows them"
        )


@dataclass
class EntranceKeys:
    """One-time keys and the sessions that they began, in memory: when the process ends, all sessions end.

    `clock` gives seconds that only grow. `root` begins the addresses of all pages.
    """

    clock: Callable[[], float]
    root: str = field(default_factory=lambda: f"/{secrets.token_urlsafe(16)}")
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    _keys: dict[str, float] = field(default_factory=dict)  # digest of a key -> when it expires
    _sessions: dict[str, float] = field(default_factory=dict)  # digest of a session -> when it ends
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def new_key(self) -> str:
        """A key that begins one session within `KEY_SECONDS`; an older key is void."""
        key = secrets.token_urlsafe(32)
        with self._lock:
            self._keys = {_digest(key): self.clock() + KEY_SECONDS}
        return key

    def enter(self, key: str) -> str:
        """Uses a key up and begins a session, whose secret is returned.

        Raises:
            RefusedRequest: 401: the key is unknown, was used, or has expired.
        """
        with self._lock:
            expires = self._keys.pop(_digest(key), None)
            now = self.clock()
            if expires is None or now > expires:
                raise RefusedRequest(401, "This address has been used before, or is more than a minute old.")
            self._sessions = {name: end for name, end in self._sessions.items() if end > now}
            while len(self._sessions) >= MAX_SESSIONS:
                self._sessions.pop(next(iter(self._sessions)))
            session = secrets.token_urlsafe(32)
            self._sessions[_digest(session)] = now + SESSION_SECONDS
            return session

    def holds(self, session: str) -> bool:
        """True if a session goes on."""
        with self._lock:
            return self._sessions.get(_digest(session), 0.0) > self.clock()

    def end(self, session: str) -> None:
        """Ends a session."""
        with self._lock:
            self._sessions.pop(_digest(session), None)

    def token(self, session: str) -> str:
        """The token that a page sends with each POST of a session."""
        return hmac.new(self.secret, session.encode(), sha256).hexdigest()


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


class Guard:
    """The outermost layer: checks each request, and adds the headers of safety to each answer.

    Args:
        app: the pages; in the scope of their requests, "session" is the secret of the session and "token" its token.
        keys: of this process.
        port: on which the server listens; part of its names and of the cookie's.
        error_page: makes a document of a status and words.
        open_paths: begin the paths that need no session: style sheets, which the page of errors loads, too.
    """

    def __init__(
        self, app: App, keys: EntranceKeys, port: int, error_page: ErrorPage, open_paths: tuple[str, ...]
    ) -> None:
        self._app = app
        self._keys = keys
        self._hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]")}
        self._cookie = f"fedpareto-console-{port}"
        self._error_page = error_page
        self._open_paths = open_paths
        self._streams = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)  # lifespan; a WebSocket is refused by the router
            return
        send = _with_headers(send)
        page: ErrorPage = _plain_page
        try:
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            self._check_own_origin(scope, headers)
            scope, page = self._below_root(scope), self._error_page
            query = dict(fields_of(scope["query_string"].decode("latin-1")))
            if scope["path"] == ENTER:
                await self._enter(scope["method"], query, send)
                return
            session = self._session(headers)
            if not scope["path"].startswith(self._open_paths):
                if session is None:
                    raise RefusedRequest(401, "This browser has no session of this console, or its session has ended.")
                scope["session"], scope["token"] = session, self._keys.token(session)
            body = await _body(headers, receive)
            if scope["method"] not in ("GET", "HEAD"):
                self._check_token(session, body)
            await self._limited(scope, _once(body, receive), send)
        except RefusedRequest as problem:
            await _answer(send, problem.status, page(problem.status, problem.message))

    def _check_own_origin(self, scope: Scope, headers: Mapping[str, str]) -> None:
        host = headers.get("host", "")
        if host.lower() not in self._hosts:
            raise RefusedRequest(403, "This server answers only under its own address on this machine.")
        origin = headers.get("origin")
        if (origin is not None or scope["method"] not in ("GET", "HEAD")) and origin != f"http://{host}":
            raise RefusedRequest(403, "The request comes from another page.")
        # Pages of other ports of this machine count as the same site, so that browsers send the cookie with what they
        # load; only a reader who follows a link may come from there.
        elsewhere = headers.get("sec-fetch-site", "none") in ("cross-site", "same-site")
        if elsewhere and headers.get("sec-fetch-mode") != "navigate":
            raise RefusedRequest(403, "The request comes from another page.")

    def _below_root(self, scope: Scope) -> Scope:
        """The request as the pages know it: without the root of its address."""
        root, path = self._keys.root, scope["path"]
        if not hmac.compare_digest(path[: len(root)].encode(), root.encode()) or path[len(root) :][:1] not in ("", "/"):
            raise RefusedRequest(404, "There is no such page: open the address that the console has printed.")
        below = path[len(root) :] or "/"
        return {**scope, "path": below, "raw_path": below.encode()}

    def _session(self, headers: Mapping[str, str]) -> str | None:
        """The secret of the session that goes on; None without one.

        Browsers send the cookies of all programs on this machine. Each is read by itself: others need not be well made.
        """
        cookies = (cookie.strip().partition("=") for cookie in headers.get("cookie", "").split(";"))
        ours = (value for name, _, value in cookies if name == self._cookie)
        return next(filter(self._keys.holds, ours), None)

    async def _enter(self, method: str, query: Mapping[str, str], send: Send) -> None:
        """Begins a session; the answer is a page that goes on, because a redirect from another site has no cookie."""
        if method != "GET":
            raise RefusedRequest(405, "This address takes only GET.")
        session = self._keys.enter(query.get("key", ""))
        to = query.get("to", "/")
        if not to.startswith("/") or to.startswith(("//", "/\\")) or not to.isprintable():
            to = "/"
        target = (self._keys.root + to).replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
        page = (
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>fedpareto</title>'
            f'<link rel="icon" href="{self._keys.root}{ICON}">'
            f'<meta http-equiv="refresh" content="0;url={target}"></head>'
            f'<body><p><a href="{target}">Go on to the console</a></p></body></html>'
        )
        lasts = f"Path={self._keys.root}; Max-Age={int(SESSION_SECONDS)}"
        cookie = f"{self._cookie}={session}; HttpOnly; SameSite=Strict; {lasts}"
        await _answer(send, 200, page.encode(), {"Set-Cookie": cookie})

    def _check_token(self, session: str | None, body: bytes) -> None:
        given = dict(fields_of(body.decode("latin-1"))).get(TOKEN, "")
        if session is None or not hmac.compare_digest(given.encode(), self._keys.token(session).encode()):
            raise RefusedRequest(403, "The form is not one of this session: load the page again.")

    async def _limited(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves; a stream of events takes one of `MAX_STREAMS` places."""
        if scope["path"] != "/events":
            await self._app(scope, receive, send)
            return
        if self._streams >= MAX_STREAMS:
            raise RefusedRequest(429, f"{MAX_STREAMS} pages are open already: close some.")
        self._streams += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._streams -= 1


def _plain_page(status: int, message: str) -> bytes:
    """The page of an error outside the root: it loads nothing, so that it does not name the root."""
    head = '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>fedpareto console</title></head>'
    return f"{head}<body><main><h1>{status}</h1><p>{message}</p></main></body></html>".encode()


async def _body(headers: Mapping[str, str], receive: Receive) -> bytes:
    """The body of a request.

    Raises:
        RefusedRequest: 413: it is larger than `MAX_BODY_BYTES`; 400: its length is no number.
    """
    length = headers.get("content-length", "0")
    if not length.isascii() or not length.isdigit():
        raise RefusedRequest(400, "The length of the request is no number.")
    if len(length) > 16 or int(length) > MAX_BODY_BYTES:  # Python converts at most 4,300 digits
        raise RefusedRequest(413, f"The request is larger than {MAX_BODY_BYTES} bytes.")
    body, more = b"", int(length) > 0 or "transfer-encoding" in headers
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > MAX_BODY_BYTES:
            raise RefusedRequest(413, f"The request is larger than {MAX_BODY_BYTES} bytes.")
    return body


def _once(body: bytes, receive: Receive) -> Receive:
    """The body as one message, and then what comes: the end of the connection."""
    given = False

    async def next_message() -> Message:
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return next_message


def _with_headers(send: Send) -> Send:
    async def with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            given = [(name, value) for name, value in message.get("headers", []) if name.lower() != b"cache-control"]
            message["headers"] = [*given, *((name.encode(), value.encode()) for name, value in HEADERS.items())]
        await send(message)

    return with_headers


async def _answer(send: Send, status: int, page: bytes, headers: Mapping[str, str] | None = None) -> None:
    lines = {"Content-Type": "text/html; charset=utf-8", "Content-Length": str(len(page)), **(headers or {})}
    pairs = [(name.encode(), value.encode()) for name, value in lines.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": page})
