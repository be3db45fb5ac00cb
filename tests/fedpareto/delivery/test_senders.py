"""The ways to a receiver: what it gets, and what it cannot do, whatever it answers."""

import json
import os
import runpy
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from cryptography.x509 import Certificate

from federation.transport.proxies import ProxyError
from federation.trust.certificates import pem
from federation.trust.keys import new_tls_key, private_key_pem
from fedpareto.delivery.senders import DeliveryFailed, SendingTimes, sender_of
from fedpareto.delivery.targets_file import AlertTarget
from fedpareto.missing_packages import PackagesMissing
from tests.federation.trust.scene import Authority
from tests.fedpareto.delivery.scene import SECRET, Receiver, news, receivers, webhook
from tests.fedpareto.delivery.servers import mail_server, raw_server
from tests.paths import EXAMPLES

TIMES = SendingTimes(webhook=0.4, apprise=30.0)
is_genuine = runpy.run_path(str(EXAMPLES / "verify_alert.py"))["is_genuine"]


def send(target: AlertTarget, *, dropped: int = 0, times: SendingTimes = TIMES, **environment: str) -> str:
    """Sends a message; what went wrong, if anything. It says neither the address nor the secret."""
    sender = sender_of(target, {"PATH": os.defpath, **environment}, lambda: None, times)
    problem = ""
    try:
        sender.send(news(), dropped)
    except DeliveryFailed as failure:
        problem = str(failure)
    assert not any(part in problem for part in ("hidden", "127.0.0.1", "localhost", SECRET))
    return problem


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receivers(1) as [made]:
        yield made


def test_a_webhook_gets_the_facts_signed_as_the_example_of_the_documents_verifies(receiver: Receiver) -> None:
    assert send(webhook(receiver.address), dropped=3) == ""
    [(headers, body)] = receiver.requests
    document = json.loads(body)
    assert (document["state"], document["severity"], document["dropped"]) == ("begins", "warning", 3)
    assert document["id"] == headers["webhook-id"] == news().id
    assert is_genuine(headers, body, SECRET)
    later = str(int(headers["webhook-timestamp"]) + 1)
    for other in ({"webhook-timestamp": later}, {"webhook-id": "x"}):
        assert not is_genuine({**headers, **other}, body, SECRET)
    assert not is_genuine(headers, body + b" ", SECRET)
    assert not is_genuine(headers, body, SECRET[:-4] + "AAA=")


def test_what_a_receiver_answers_neither_holds_up_nor_leads_elsewhere_nor_fills_the_memory(receiver: Receiver) -> None:
    receiver.size = 200_000
    assert send(webhook(receiver.address)) == ""
    receiver.status = 500
    assert send(webhook(receiver.address)) == "it answered 500"
    receiver.status, receiver.headers = 302, {"Location": receiver.address}
    assert send(webhook(receiver.address)) == "it answered 302, and no redirect is followed"
    assert len(receiver.requests) == 3
    receiver.status = 0
    assert send(webhook(receiver.address)) == "it has not answered within 0.4 s"


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "what it answered is not HTTP"),
        (b"x" * 100_000, "what it answered is not HTTP"),
        (b"HTTP/1.1 2000 OK\r\n", "what it answered is not HTTP"),
        (b"", "what it answered is not HTTP"),
        (None, "it has not answered within 0.4 s"),  # a letter now and then, for ever
    ],
)
def test_what_is_no_web_server_is_told_apart(answer: bytes | None, problem: str) -> None:
    with raw_server(answer) as port:
        assert send(webhook(f"http://localhost:{port}/hidden")) == problem


def test_a_receiver_that_is_not_there_is_named_by_no_message(receiver: Receiver) -> None:
    receiver.close()
    told = send(webhook(receiver.address))
    assert told == "no connection to it, or it was broken off"
    assert send(webhook("https://no-such-host.invalid/hidden")) == told


def test_a_certificate_has_to_come_from_a_known_ca_and_be_of_the_host(tmp_path: Path) -> None:
    authority = Authority()
    (tmp_path / "ca.pem").write_bytes(pem(authority.ca))
    for host, problem in (("localhost", ""), ("other.example", "its TLS certificate does not hold")):
        with _served(tmp_path, authority, host) as port:
            target = webhook(f"https://localhost:{port}/hidden", ca=str(tmp_path / "ca.pem"))
            assert send(target).startswith(problem)
            assert bool(send(target)) == bool(problem)
            assert "ca names those" in send(webhook(f"https://localhost:{port}/hidden"))
    with pytest.raises(OSError, match="No such file"):
        send(webhook("https://localhost:1/", ca=str(tmp_path / "none.pem")))


@contextmanager
def _served(directory: Path, authority: Authority, host: str) -> Iterator[int]:
    key = new_tls_key()
    certificate: Certificate = authority.issue([], (host,), key=key)
    path = directory / f"{host}.pem"
    path.write_bytes(private_key_pem(key) + pem(certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    made = Receiver(tls=context)
    try:
        yield made.port
    finally:
        made.close()


def test_a_proxy_of_the_environment_is_used_for_other_machines_alone(receiver: Receiver) -> None:
    assert send(webhook(receiver.address), https_proxy="http://localhost:1") == ""
    told = send(webhook("https://far.example/"), https_proxy=f"http://hidden:hidden@localhost:{receiver.port}")
    assert told.startswith("no connection to it")
    with pytest.raises(ProxyError):
        send(webhook("https://far.example/"), https_proxy="ftp://hidden:hidden@localhost")


# --- apprise

needs_apprise = pytest.mark.skipif(find_spec("apprise") is None, reason="the extra `alerts` is not installed here")


def environment() -> dict[str, Any]:
    return {name: value for name, value in os.environ.items() if name.startswith("PYTHON")}


def test_without_apprise_the_message_names_the_extra() -> None:
    if find_spec("apprise") is not None:
        pytest.skip("apprise is installed here")
    with pytest.raises(PackagesMissing, match=r"apprise, not installed here: install fedpareto\[alerts\]"):
        sender_of(AlertTarget(apprise="json://localhost"), {}, lambda: None)


@needs_apprise
@pytest.mark.full
def test_apprise_sends_the_facts_and_a_text_of_a_stranger_calls_nobody(receiver: Receiver) -> None:
    sender = sender_of(
        AlertTarget(apprise=f"json://localhost:{receiver.port}/hidden"), environment(), lambda: None, TIMES
    )
    sender.send(news("@everyone <!channel>"), 2)
    [document] = receiver.documents()
    assert document["title"] == "test: NORM_OUTLIER trial \uff20everyone \u2039!channel> begins (warning)"
    assert document["message"].startswith("the update of \uff20everyone \u2039!channel> was long.")
    for part in ("What to do: ask.", "2 earlier messages were not delivered", news("@everyone <!channel>").id):
        assert part in document["message"]


@needs_apprise
@pytest.mark.full
def test_an_email_arrives() -> None:
    with mail_server() as (port, mails):
        address = f"mailto://localhost:{port}?from=a@example.org&to=ops@example.org&mode=insecure"
        assert send(AlertTarget(apprise=address), **environment()) == ""
        [mail] = mails
    assert "test: NORM_OUTLIER trial ann begins (warning)" in mail
    assert "the update of ann was long" in mail


@needs_apprise
@pytest.mark.full
def test_a_chat_gets_the_facts_and_its_server_neither_leads_elsewhere_nor_holds_up(receiver: Receiver) -> None:
    address = f"mmost://localhost:{receiver.port}/hiddentokenhiddentoken12"
    assert send(AlertTarget(apprise=address), **environment()) == ""
    [document] = receiver.documents()
    assert "the update of ann was long" in document["text"]
    receiver.size = 200_000
    assert send(AlertTarget(apprise=address), **environment()) == ""
    receiver.status = 500
    assert send(AlertTarget(apprise=address), **environment()) == "apprise could not deliver it"
    receiver.status, receiver.headers, before = 302, {"Location": receiver.address}, len(receiver.requests)
    assert send(AlertTarget(apprise=address), **environment()) == "apprise could not deliver it"
    assert len(receiver.requests) == before + 1
    receiver.status = 0
    told = send(AlertTarget(apprise=f"{address}?rto=600"), times=SendingTimes(apprise=5.0), **environment())
    assert told == "apprise was ended after 5 s"
    assert send(AlertTarget(apprise="no-such-chat://hidden"), **environment()).startswith(
        "apprise knows no such address"
    )
