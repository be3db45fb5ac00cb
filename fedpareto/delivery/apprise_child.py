"""The process in which apprise sends one message, which it reads from standard input as JSON.

    python -m fedpareto.delivery.apprise_child < message.json

Its exit status says how it went, and nothing else does: what apprise prints may name the address.
"""

import json
import resource
import signal
import sys
from typing import Any

NOT_SENT, UNKNOWN = 3, 4  # exit statuses
LONGEST_SECONDS = 300  # also if the process that started it is no more
MEMORY_BYTES = 2 << 30  # a receiver may answer with more than this machine has
_TYPES = {"notice": "info", "warning": "warning", "critical": "failure"}
_MENTIONS = str.maketrans({"@": "\uff20", "<": "\u2039"})  # chats read @everyone and <!channel> as calls


def send(message: Any) -> int:
    """Sends a message, and returns the exit status."""
    import apprise  # noqa: PLC0415 - an extra

    asset = apprise.AppriseAsset(
        app_id="fedpareto",
        app_desc="fedpareto alerts",
        app_url="",
        plugin_paths=[],
        http_redirects=False,
        storage_mode=apprise.PersistentStoreMode.MEMORY,
    )
    apprise_of_one = apprise.Apprise(asset=asset)
    if not apprise_of_one.add(message["address"]):
        return UNKNOWN
    sent = apprise_of_one.notify(
        title=message["title"].translate(_MENTIONS),
        body=message["body"].translate(_MENTIONS),
        body_format=apprise.NotifyFormat.TEXT,
        notify_type="success" if message["state"] == "ended" else _TYPES.get(message["severity"], "failure"),
        interpret_escapes=False,
    )
    return 0 if sent else NOT_SENT


if __name__ == "__main__":
    signal.alarm(LONGEST_SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    sys.exit(send(json.loads(sys.stdin.buffer.read())))
