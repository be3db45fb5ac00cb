"""The name of the server that a TLS client asks for, which stands unencrypted in its first message."""

_RECORD_HEADER = 5
_MAX_RECORD = 1 << 14
MOST_BYTES = _RECORD_HEADER + _MAX_RECORD  # of which the name can be read
_CLIENT_HELLO = 1
_SERVER_NAME = 0
_HOST_NAME = 0


def server_name(data: bytes) -> str | None:
    """The server name (SNI) of a ClientHello (RFC 8446, 4.1.2; RFC 6066, 3), in lower case.

    `data` are the bytes that the client has sent so far. Returns None while the ClientHello is not complete, and "" if
    it names no server, is no ClientHello, or is longer than one record.
    """
    end = _RECORD_HEADER + int.from_bytes(data[3:5])
    if len(data) >= _RECORD_HEADER and end > MOST_BYTES:
        return ""
    if len(data) < max(end, _RECORD_HEADER):
        return None
    record = _Reader(data[_RECORD_HEADER:end])
    if record.number(1) != _CLIENT_HELLO:
        return ""
    hello = record.part(3)
    hello.skip(2 + 32)  # version, random
    hello.part(1)  # session
    hello.part(2)  # cipher suites
    hello.part(1)  # compression methods
    extensions = hello.part(2)
    while extensions:
        kind, content = extensions.number(2), extensions.part(2)
        if kind == _SERVER_NAME:
            names = content.part(2)
            if names.number(1) == _HOST_NAME:
                return names.part(2).text()
    return ""


class _Reader:
    """Reads from the front of bytes; beyond the end, numbers are 0 and parts are empty."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def skip(self, count: int) -> None:
        self._at += count

    def number(self, size: int) -> int:
        self._at += size
        return int.from_bytes(self._data[self._at - size : self._at])

    def part(self, size: int) -> "_Reader":
        """The bytes after a length of `size` bytes, as many as the length says."""
        length = self.number(size)
        self._at += length
        return _Reader(self._data[self._at - length : self._at])

    def text(self) -> str:
        return self._data.decode("ascii", errors="replace").lower()
