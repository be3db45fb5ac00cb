"""Verifies an alert that a webhook has got, and that it is not older than five minutes."""

import base64
import hashlib
import hmac
import time
from collections.abc import Mapping


def is_genuine(headers: Mapping[str, str], body: bytes, secret: str) -> bool:
    key = base64.b64decode(secret.removeprefix("whsec_"))
    sent = headers["webhook-timestamp"]
    signed = f"{headers['webhook-id']}.{sent}.".encode() + body
    mac = base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode()
    known = hmac.compare_digest(f"v1,{mac}", headers["webhook-signature"])
    return known and abs(time.time() - int(sent)) < 300
