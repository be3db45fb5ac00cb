"""The audit log: search, and a hundred entries on a page, the newest first."""

from urllib.parse import urlencode

from federation.record.log_kinds import KINDS
from federation.v1 import admin_pb2 as v1
from fedpareto.web.console.federation_reader import PageError, Reader
from fedpareto.web.console.view import PageRequest, PageView, Screen

ENTRIES = 100
_LONGEST = 200
_KINDS = {"": "all", **{kind: kind for kind in KINDS}}  # what the address says, and what the page says


def _view(reader: Reader, asked: PageRequest) -> PageView:
    text, actor = asked.query.get("text", "").strip(), asked.query.get("actor", "").strip()
    if max(len(text), len(actor)) > _LONGEST:
        raise PageError(400, f"Search for at most {_LONGEST} characters.")
    kind = asked.choice("kind", _KINDS)
    before = asked.number("before", default=-1)
    request = v1.ListAuditRequest(newest=ENTRIES + 1, text=text, actor=actor, kind=kind)
    if before >= 0:
        request.before = before
    entries = [entry for page in reader.call(lambda stub: list(stub.ListAudit(request))) for entry in page.entries]
    shown = entries[:ENTRIES]
    return PageView(
        "Audit log",
        "log.html",
        {
            "entries": shown,
            "text": text,
            "actor": actor,
            "kind": kind,
            "kinds": _KINDS,
            "filters": urlencode([("text", text), ("actor", actor), ("kind", kind)]),
            "older": shown[-1].number if len(entries) > ENTRIES else None,
            "newest": before < 0,
        },
    )


SCREEN = Screen(_view, lambda reader, asked: None, "/log")
