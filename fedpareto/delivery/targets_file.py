"""`notify.toml` in an administrator's directory: the receivers of alerts.

    format = 1

    [targets.pager]
    webhook = "https://pager.example/alerts"
    secret = "whsec_..."
    severity = "critical"

    [targets.ops]
    apprise = "mailtos://user:password@example.org?to=ops@example.org"

The addresses hold passwords: no message repeats one, so that a receiver is called by its name everywhere.
"""

import base64
import binascii
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, StringConstraints, model_validator

from federation.errors import Error
from federation.files.owners_own import NotOwnersOwn, check_owners_own
from federation.spec.problems import Format, Section, read_document
from federation.transport.proxies import is_loopback

NAME = "notify.toml"
SECRET = "whsec_"  # noqa: S105 - the form of a secret, as Standard Webhooks has it
_KNOWN = "docs/operate/alerts.md lists the keys that exist"
_FORM = (
    f"expected {SECRET} and 24 to 64 random bytes in base64, as of: echo {SECRET}$(head -c 32 /dev/urandom | base64)"
)
Severity = Literal["notice", "warning", "critical"]
TargetName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,39}$")]


class TargetsError(Error, ValueError):
    """A `notify.toml` that cannot be used; the message names the file and each key that is wrong, and no value."""


class AlertTarget(Section):
    """A receiver: a webhook, or an address of apprise."""

    webhook: str = Field(
        "", description="The address that gets each alert by POST: https, or http on this machine's loopback."
    )
    secret: str = Field("", description=f"The key of the webhook's signatures: `{SECRET}` and base64.")
    ca: str = Field("", description="A file with the certificates that a webhook's own has to come from, as PEM.")
    apprise: str = Field(
        "",
        description="An address of [apprise](https://github.com/caronc/apprise) for e-mail or chat, in place of "
        "`webhook`.",
    )
    severity: Severity = Field("notice", description='The least severity: "notice", "warning" or "critical".')

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.webhook) == bool(self.apprise):
            raise ValueError("a target has one of the keys webhook and apprise")
        if self.apprise:
            if self.secret or self.ca:
                raise ValueError("secret and ca are for a webhook, not for apprise")
            if "://" not in self.apprise:
                raise ValueError("apprise: it is not an address of apprise, such as mailtos://...")
            return self
        self._check_address()
        self.key()
        return self

    def _check_address(self) -> None:
        try:
            parts = urlsplit(self.webhook)
            host, _ = parts.hostname or "", parts.port
        except ValueError:
            host, parts = "", urlsplit("")
        if not host or not self.webhook.isascii() or not self.webhook.isprintable() or " " in self.webhook:
            raise ValueError("webhook: it is not an address, such as https://HOST/PATH")
        if parts.scheme != "https" and not (parts.scheme == "http" and is_loopback(host)):
            raise ValueError("webhook: it begins with https://, or with http:// for this machine's own addresses")
        if parts.username is not None or parts.fragment:
            raise ValueError("webhook: it has no user, no password and no fragment; secret signs what is sent")

    def key(self) -> bytes:
        """The key of the signatures of a webhook, 24 to 64 bytes. Raises ValueError if `secret` has another form."""
        try:
            key = base64.b64decode(self.secret.removeprefix(SECRET), validate=True)
        except binascii.Error:
            key = b""
        if not self.secret.startswith(SECRET) or not 24 <= len(key) <= 64:
            raise ValueError(f"secret: {_FORM}")
        return key


class Targets(Section):
    """The keys of `notify.toml`."""

    format: Format
    away_seconds: float = Field(
        120.0, ge=10, le=86400, description="The seconds without an answer after which the coordinator counts as away."
    )
    targets: dict[TargetName, AlertTarget] = Field(
        min_length=1, max_length=20, description="The receivers, by their names."
    )

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads the file. A relative path in it is relative to its directory.

        Raises:
            TargetsError: there is none, others than its owner can write or read it, or it cannot be used.
        """
        try:
            check_owners_own(path, f"{path} names where alerts go, with passwords", secret=True)
            found = read_document(path, cls, _KNOWN, TargetsError, secret={"targets"})
        except FileNotFoundError:
            raise TargetsError(
                f"there is no {path}: it names the receivers of alerts. docs/operate/alerts.md has an example"
            ) from None
        except NotOwnersOwn as error:
            raise TargetsError(str(error)) from None
        placed = {
            name: target.model_copy(update={"ca": str(path.absolute().parent / target.ca)}) if target.ca else target
            for name, target in found.targets.items()
        }
        return found.model_copy(update={"targets": placed})
