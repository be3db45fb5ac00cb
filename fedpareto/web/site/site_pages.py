"""The member's console: six screens of what a worker's files say, and forms that write the owner's decisions.

It holds no key and takes no lock of the home, so it works while coordinator or worker are down, and disturbs neither. A
page reads a bounded part of a ledger, and holds SQLite's shared lock of this file only while it reads. A decision is
written as the commands of `fedpareto worker` write it.
"""

import asyncio
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from html import escape
from itertools import chain, islice
from shlex import quote
from typing import Any
from urllib.parse import quote as quoted
from urllib.parse import urlencode

from jinja2 import Environment
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from federation.errors import Error
from federation.text import escaped
from fedpareto.formatting import number, size
from fedpareto.web.pages.html import Html
from fedpareto.web.pages.rendering import environment
from fedpareto.web.pages.skeleton import Link, WebPage, served
from fedpareto.web.serving.security import ICON, EntranceKeys, Guard, RefusedRequest, fields_of
from fedpareto.web.serving.shared_files import shared_files
from fedpareto.web.site.asked import (
    SiteFacts,
    asked_words,
    can_be_approved,
    changed_lines,
    changes,
    compared_words,
)
from fedpareto.web.site.fetched_results import read_results
from fedpareto.web.site.left_table import COLUMNS, cells, csv_text, local_time
from fedpareto.web.site.now import closing_words, site_now
from fedpareto.web.site.policy_rules import refused_runs, refused_work, rules
from worker.config import WorkerConfig, WorkerConfigError
from worker.home import WorkerHome
from worker.ledgers.left_reading import earlier_receipts, read_declines, read_left
from worker.site.leaving import Leave, write_leave
from worker.site.pause import Pause, end_pause, write_pause
from worker.site.policy_file import Policy
from worker.site.run_requests import (
    APPROVED,
    REFUSED,
    DecisionRefused,
    RunRequest,
    RunsFile,
    decided,
    read_request,
    read_requests,
)

PAGE = 100
_LONGEST_WORDS = 400
_MENU = {
    "/": "Now", "/runs": "Asked", "/left": "What left", "/budgets": "Budgets", "/policy": "Policy",
    "/results": "Results",
}  # fmt: skip
_OWNER = {"all": None, "undecided": "", "approved": APPROVED, "refused": REFUSED}
_WHY = {
    "owner": "by you",
    "policy:algorithm": "by your rule algorithms",
    "policy:submitter": "by your rule submitters",
    "spec": "since it cannot be read",
}  # the reasons of a verdict


class SiteConsole:
    """The pages of the worker's directory `home`.

    `own` reads this site's data and gives, as lines, what it would tell in a run that describes data; None for others.
    """

    def __init__(
        self, home: WorkerHome, keys: EntranceKeys, own: Callable[[RunRequest], Sequence[str] | None] = lambda run: None
    ) -> None:
        self.home = home
        self._own = own
        self.keys = keys
        self._files = shared_files()
        self._environment: Environment = environment("fedpareto.web.site")
        self._environment.finalize = _plain
        self._environment.filters["dotted"] = _dotted
        self._environment.globals |= {
            "root": keys.root,
            "home": quote(str(home.directory)),
            "local": local_time,
            "number": number,
            "shell": _shell,
        }
        screens: Mapping[str, Callable[[Request], Response]] = {
            "/": self._now,
            "/runs": self._runs,
            "/run": self._run,
            "/left": self._left,
            "/left.csv": self._csv,
            "/budgets": self._budgets,
            "/policy": self._policy,
            "/results": self._results,
            "/static/{name}": self._file,
        }
        posts: Mapping[str, Callable[[Request], Any]] = {
            "/pause": self._pause,
            "/resume": self._resume,
            "/withdraw": self._withdraw,
            "/decide": self._decide,
            "/sign-out": self._sign_out,
        }
        routes = [Route(path, screen, methods=["GET"]) for path, screen in screens.items()]
        routes += [Route(path, form, methods=["POST"]) for path, form in posts.items()]
        kinds = (RefusedRequest, HTTPException, Error, OSError, Exception)
        self.pages = Starlette(routes=routes, exception_handlers=dict.fromkeys(kinds, self._problem))

    def guarded(self, port: int) -> Guard:
        """The application inside its guard, for a server on a port."""
        return Guard(
            self.pages, self.keys, port, lambda status, text: self._problem_page(status, text).encode(), ("/static/",)
        )

    # --- screens

    def _now(self, request: Request) -> Response:
        now = site_now(self.home, datetime.now(UTC))
        free = shutil.disk_usage(self.home.directory)
        waiting = read_requests(self.home.runs, "", limit=1).total
        values = {
            "now": now,
            "sentence": f"{now.sentence[:1].upper()}{now.sentence[1:]}.",
            "closing": "" if now.closing is None else closing_words(now.closing),
            "disk": f"{size(free.free)} free of {size(free.total)}",
            "device": self._device(),
            "waiting": waiting if Policy.load(self.home.policy).approve == "each-run" else 0,
        }
        return self._shown(request, "/", "now", values)

    def _device(self) -> str:
        try:
            return WorkerConfig.load(self.home.config).device
        except FileNotFoundError:
            return WorkerConfig.default().device
        except WorkerConfigError as error:
            return str(error)

    def _runs(self, request: Request) -> Response:
        show, page = request.query_params.get("show", "all"), _number(request, "page")
        if show not in _OWNER:
            raise RefusedRequest(400, f"show must be one of {', '.join(_OWNER)}.")
        policy = Policy.load(self.home.policy)
        found = read_requests(self.home.runs, _OWNER[show], limit=PAGE, offset=page * PAGE)
        rows = [(run, run.verdict(policy), _address(run.run, run.spec)) for run in found.runs]
        more = (page + 1) * PAGE < found.total
        values = {
            "rows": rows,
            "why": _WHY,
            "total": found.total,
            "show": show,
            "kinds": list(_OWNER),
            "page": page,
            "more": more,
        }
        return self._shown(request, "/runs", "runs", values)

    def _run(self, request: Request) -> Response:
        name, spec = request.query_params.get("run", ""), request.query_params.get("spec", "")
        run, before = read_request(self.home.runs, name, spec)
        if run is None:
            raise RefusedRequest(404, "No run with this specification has asked this site.")
        facts = SiteFacts.read(self.home)
        described = run.describes is not None
        values = {
            "run": run,
            "described": described,
            "address": _address(run.run, run.spec),
            "numbers": self._numbers(run) if described and request.query_params.get("numbers") else None,
            "verdict": run.verdict(facts.policy),
            "words": list(asked_words(run, facts)),
            "compared": compared_words(run, facts.policy),
            "approvable": can_be_approved(run, facts.policy),
            "before": before,
            "changes": [] if before is None else changes(run, before),
            "lines": [] if before is None else changed_lines(run, before),
            "document": [escaped(line) for line in run.document.decode(errors="replace").splitlines()],
        }
        return self._shown(request, "/runs", "run", values)

    def _numbers(self, run: RunRequest) -> Sequence[str] | None:
        """What this site would tell in a run that describes data, as lines."""
        try:
            return self._own(run)
        except Error as error:
            raise RefusedRequest(503, f"The numbers of this site cannot be shown: {escaped(str(error))}") from error

    def _left(self, request: Request) -> Response:
        run = request.query_params.get("run", "")
        before = _number(request, "before") if "before" in request.query_params else None
        page = read_left(self.home.left, run=run, before=before, limit=PAGE)
        values = {
            "run": run,
            "rows": [cells(row) for row in page.rows],
            "columns": COLUMNS,
            "narrow": ("time", "round", "work", "bytes"),
            "older": "" if page.before is None else _left_address("/left", run, page.before),
            "newest": _left_address("/left", run) if before is not None else "",
            "csv": _left_address("/left.csv", run),
            "earlier": page.before is None and earlier_receipts(self.home.left, self.home.receipts),
        }
        return self._shown(request, "/left", "left", values)

    def _csv(self, request: Request) -> Response:
        headers = {"Content-Disposition": 'attachment; filename="what-left.csv"'}
        parts = csv_text(self.home.left, request.query_params.get("run", ""))
        # Read before the answer begins: an error then has a page. A later error breaks the download off.
        first = [*islice(parts, 2)]
        return StreamingResponse(chain(first, parts), media_type="text/csv; charset=utf-8", headers=headers)

    def _budgets(self, request: Request) -> Response:
        facts = SiteFacts.read(self.home)
        budgets = facts.budgets
        tasks = sorted({*budgets.counts, *facts.policy.secure.tasks, *facts.offers})
        values = {
            "accounts": list(budgets.noise.values()),
            "problem": budgets.problem,
            "rounds": [budgets.rounds(task) for task in tasks[:PAGE]],
            "more": max(0, len(tasks) - PAGE),
        }
        return self._shown(request, "/budgets", "budgets", values)

    def _policy(self, request: Request) -> Response:
        policy = Policy.load(self.home.policy)
        newest = read_requests(self.home.runs, None, limit=PAGE).runs
        declines = read_declines(self.home.left)
        kept = sum(1 for _ in self.home.evidence.glob("*.order")) if self.home.evidence.is_dir() else 0
        shown = rules(policy)
        values = {
            "set": [rule for rule in shown if rule.is_set],
            "defaults": [rule for rule in shown if not rule.is_set],
            "refused": refused_runs(newest, policy, by_rules=True) + refused_work(declines, by_rules=True),
            "others": refused_runs(newest, policy, by_rules=False) + refused_work(declines, by_rules=False),
            "kept": kept,
        }
        return self._shown(request, "/policy", "policy", values)

    def _results(self, request: Request) -> Response:
        page = _number(request, "page")
        found = read_results(self.home.models, page)
        values = {"results": found.results, "page": page, "more": found.more}
        return self._shown(request, "/results", "results", values)

    # --- decisions

    async def _pause(self, request: Request) -> Response:
        write_pause(self.home.pause, Pause(None))
        return self._go("/")

    async def _resume(self, request: Request) -> Response:
        end_pause(self.home.pause)
        return self._go("/")

    async def _withdraw(self, request: Request) -> Response:
        form = dict(fields_of((await request.body()).decode("utf-8", errors="replace")))
        leave = Leave(datetime.now(UTC), now="now" in form, forget="forget" in form)
        write_leave(self.home.leave, leave)
        return self._go("/")

    async def _decide(self, request: Request) -> Response:
        form = dict(fields_of((await request.body()).decode("utf-8", errors="replace")))
        owner, words = form.get("owner", ""), form.get("words", "").strip()
        if owner not in (APPROVED, REFUSED):
            raise RefusedRequest(400, f"owner must be {APPROVED} or {REFUSED}.")
        if owner == REFUSED and not words:
            raise RefusedRequest(400, "A refusal needs a reason: go back, and write one.")
        if len(words) > _LONGEST_WORDS:
            raise RefusedRequest(400, f"The reason has {len(words)} characters; at most {_LONGEST_WORDS}.")
        name, spec = form.get("run", ""), form.get("spec", "")
        await asyncio.to_thread(self._write_decision, name, spec, owner, words)  # it may wait for the file
        return self._go(_address(name, spec))

    def _write_decision(self, name: str, spec: str, owner: str, words: str) -> None:
        if not self.home.runs.exists():
            raise RefusedRequest(404, "No run has asked this site.")
        with closing(RunsFile(self.home.runs)) as file:
            asked = file.of(name)
            run = next((each for each in asked if each.spec == spec), None)
            if run is None:
                raise RefusedRequest(404, "No run with this specification has asked this site.")
            if asked[-1].spec != spec:
                raise RefusedRequest(
                    409,
                    "The run has asked with another specification since this page was made, and nothing was decided: "
                    "open the run again.",
                )
            try:
                decided(file, Policy.load(self.home.policy), run, owner, words, datetime.now(UTC))
            except DecisionRefused as error:
                raise RefusedRequest(409, str(error)) from None

    async def _sign_out(self, request: Request) -> Response:
        self.keys.end(request.scope["session"])
        return HTMLResponse(self._problem_page(200, "You have signed out. You can close this page."))

    # --- the rest

    def _go(self, to: str) -> Response:
        return RedirectResponse(self.keys.root + to, 303)

    def _file(self, request: Request) -> Response:
        body, kind = self._files.get(request.path_params["name"], (b"", ""))
        if not kind:
            raise RefusedRequest(404, "There is no such file.")
        return Response(body, media_type=kind)

    def _shown(self, request: Request, nav: str, template: str, values: Mapping[str, Any]) -> Response:
        token = request.scope["token"]
        made = self._environment.get_template(f"{template}.html").render({**values, "token": token})
        header = self._environment.get_template("sign-out.html").render(token=token)
        links = tuple(Link(title, self.keys.root + href, current=href == nav) for href, title in _MENU.items())
        page = WebPage(
            title=f"{_MENU[nav]} · fedpareto worker", body=[Html(made)], nav=links, nav_label="Console",
            header=[Html(header)],
        )  # fmt: skip
        return HTMLResponse(served(page, icon=self.keys.root + ICON, styles=self._styles()))

    def _styles(self) -> list[str]:
        return [f"{self.keys.root}/static/{name}" for name in ("style.css", "console.css")]

    def _problem_page(self, status: int, text: str) -> str:
        made = self._environment.get_template("problem.html").render(status=status, text=text)
        page = WebPage(title="fedpareto worker", body=[Html(made)])
        return served(page, icon=self.keys.root + ICON, styles=self._styles())

    async def _problem(self, request: Request, error: Exception) -> Response:
        status, text = 500, "The console failed; its terminal says more."
        if isinstance(error, RefusedRequest):
            status, text = error.status, error.message
        elif isinstance(error, HTTPException):
            status, text = error.status_code, "There is no such page, or it does not take such a request."
        elif isinstance(error, Error | OSError):
            status, text = 503, f"A file of this worker cannot be used: {error}"
        return HTMLResponse(self._problem_page(status, text), status)


def _plain(value: object) -> object:
    """A text without control characters, for a template, which escapes HTML."""
    return escaped(value, 2000) if isinstance(value, str) and not hasattr(value, "__html__") else value


def _dotted(name: str) -> Html:
    """A name with dots, after each of which a line may end."""
    return Html(".<wbr>".join(map(escape, escaped(name, 2000).split("."))))


def _shell(text: str) -> str:
    """A text as one word of a command to copy."""
    return quote(escaped(text))


def _address(run: str, spec: str) -> str:
    return f"/run?run={quoted(run, safe='')}&spec={quoted(spec, safe='')}"


def _left_address(path: str, run: str, before: int | None = None) -> str:
    fields = ({"run": run} if run else {}) | ({} if before is None else {"before": before})
    return f"{path}?{urlencode(fields)}" if fields else path


def _number(request: Request, name: str) -> int:
    text = request.query_params.get(name, "") or "0"
    if not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise RefusedRequest(400, f"{name} must be a whole number.")
    return int(text)
