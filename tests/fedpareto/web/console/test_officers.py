"""What the console shows of actions that take two officers: who asks for what, and by which name a command takes it."""

import html
import re
from typing import Any

from storage.states import ClientState
from tests.coordinator.members.scene import Officer, client
from tests.fedpareto.web.console.scene import served as console_of
from tests.running import Running

SETTINGS: dict[str, Any] = {"two_officers": ["revoke", "revoke-admin"]}
BOTH_DATABASES = False


def first_page(officer: Officer) -> str:
    """The text of the first page of an officer's console."""
    with console_of(officer.home, administrator=officer.name) as console:
        source = console.page("/")
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", source)))


def test_a_request_is_shown_with_who_asks_for_what_and_by_the_name_that_a_command_takes(served: Running) -> None:
    ada, bea = Officer(served, "ada"), Officer(served, "bea")
    served.enroll("leaving")
    ada.command("revoke", "leaving", "--reason", "left the study", "--yes")
    to_bea, to_ada = first_page(bea), first_page(ada)
    shown = re.search(r"ada asks to revoke leaving \(left the study\): request ([0-9a-f]{12}), open until", to_bea)
    assert shown, to_bea
    assert f"admin consent {shown[1]}" in to_bea
    assert "You asked to revoke leaving (left the study)" in to_ada
    assert f"request {shown[1]}" in to_ada
    assert "Waits for another officer" in to_ada
    assert "admin consent" not in to_ada  # nobody consents to a request of its own
    bea.command("consent", shown[1], "--yes")
    assert client(served, "leaving").state is ClientState.REVOKED
    assert "leaving" not in first_page(bea)


def test_a_request_about_an_administrator_says_so(served: Running) -> None:
    cyd, dan = Officer(served, "cyd"), Officer(served, "dan")
    Officer(served, "eve")
    cyd.command("revoke-admin", "eve", "--yes")
    assert "cyd asks to revoke the administrator eve: request" in first_page(dan)
