"""Servers on loopback that are no web servers: one for mail, and one that sends what a test gives it."""

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def _serving(handler: type[socketserver.BaseRequestHandler]) -> Iterator[int]:
    class Server(socketserver.ThreadingTCPServer):
        daemon_threads, allow_reuse_address = True, True

    with Server(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()


@contextmanager
def raw_server(answer: bytes | None) -> Iterator[int]:
    """The port of a server that reads a request and sends these bytes; None: one letter after another, for ever."""
    over = threading.Event()

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(1 << 16)
            with suppress(OSError):
                if answer is not None:
                    self.request.sendall(answer)
                while answer is None and not over.wait(0.01):
                    self.request.sendall(b"H")

    with _serving(Handler) as port:
        try:
            yield port
        finally:
            over.set()


@contextmanager
def mail_server() -> Iterator[tuple[int, list[str]]]:
    """The port of a server for mail (RFC 5321), and the mails that it has taken."""
    mails: list[str] = []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.say("220 mail")
            for line in self.rfile:
                word = line[:4].upper()
                if word == b"DATA":
                    self.say("354 go on")
                    mails.append("".join(part.decode() for part in iter(self.rfile.readline, b".\r\n")))
                self.say("221 bye" if word == b"QUIT" else "250 well")
                if word == b"QUIT":
                    return

        def say(self, text: str) -> None:
            self.wfile.write(f"{text}\r\n".encode())

    with _serving(Handler) as port:
        yield port, mails
