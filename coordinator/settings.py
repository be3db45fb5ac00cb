"""The settings of a coordinator, in the file `coordinator.toml` of its directory."""

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from datetime import timedelta
from ipaddress import ip_address
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

import tomli_w
from pydantic import Field, ValidationError, field_validator, model_validator

from coordinator.ownership import CoordinatorHomeError
from federation.monitoring.metrics_section import MetricsSection
from federation.spec.problems import Format, Section, explain
from federation.text import comment
from federation.text_files import FORMAT
from federation.transport.proxies import is_loopback
from federation.trust.identity import Action, check_name

SETTINGS_FILE = "coordinator.toml"
SMALLEST_WINDOW = 1 << 20  # bytes of an upload that may be on their way
SQLITE = "sqlite:///"
_BUCKET = re.compile(r"(s3|gs|az)://[a-z0-9][a-z0-9._-]{1,221}(/[A-Za-z0-9._-]+)*/?")
# The settings that each coordinator of a federation has for its own machine.
_OF_MACHINE = frozenset(
    {
        "hosts", "bind", "federation_port", "enrollment_port", "enrollment_host", "database", "blobs", "blob_cache",
        "blob_cache_bytes", "device", "metrics",
    }
)  # fmt: skip
_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")


class Settings(Section):
    """The settings in `coordinator.toml`. A relative path is relative to the directory of the file."""

    format: Format = FORMAT
    federation_id: str = Field(
        description="The federation's name, in every certificate and signature. Do not change it."
    )
    hosts: tuple[str, ...] = Field(
        ("localhost", "127.0.0.1"),
        strict=False,  # TOML has lists
        min_length=1,
        description="Names and addresses under which members reach this machine; they are given the first one. Set "
        "by `--host`.",
    )
    bind: str = Field(
        "127.0.0.1", description="The address to listen on; `0.0.0.0`, which `--host` sets, is all of this machine."
    )
    federation_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="For members and administrators, mutual TLS. With 0 the kernel picks a port at the first start, "
        "which is kept.",
    )
    enrollment_port: int = Field(
        0, ge=0, le=65535, description="For newcomers, server TLS only. 0 as for `federation_port`."
    )
    enrollment_host: str = Field(
        "",
        description="A second name of this machine, for newcomers: then [one "
        "port](operate/network.md#one-port-for-everything) serves them and members.",
    )
    database: str = Field(
        "sqlite:///coordinator.db",
        description='The database: `"sqlite:///FILE"` or `"postgresql://USER:PASSWORD@HOST/NAME"`. Here and below, '
        "a relative path is relative to the directory of this file.",
    )
    blobs: str = Field(
        "blobs",
        description="The directory of models and updates, or a [bucket](operate/operations.md#blobs-in-a-bucket): "
        '`"s3://BUCKET/PREFIX"`, or the same with `gs` or `az`.',
    )
    blobs_endpoint: str = Field(
        "", description='With `s3://`: the URL of an S3 service other than AWS, such as `"https://minio.example.org"`.'
    )
    blob_cache: str = Field("cache", description="With a bucket: the directory of the cache, on this machine.")
    blob_cache_bytes: int = Field(
        16 << 30,
        ge=1 << 20,
        description="With a bucket: how many bytes the cache keeps; at least a model and the updates of a round.",
    )
    blob_urls_seconds: int = Field(
        0,
        ge=0,
        le=86_400,
        description="With a bucket: for how many seconds a URL holds with which a member [downloads a "
        "model](operate/operations.md#downloads-from-the-bucket), at most 86,400. 0: members download from the "
        "coordinator alone.",
    )
    approval: bool = Field(False, description="Whether a new member waits for `fedpareto admin approve`.")
    join_string_lifetime_seconds: int = Field(
        86_400,
        ge=60,
        le=30 * 86_400,
        description="How long a join string can be used, without `admin join-string --hours`.",
    )
    admin_certificate_seconds: int = Field(
        43_200,
        ge=60,
        le=30 * 86_400,
        description="How long an administrator's certificate lasts after a [login](operate/administrators.md#log-in).",
    )
    two_officers: tuple[Annotated[Action, Field(strict=False)], ...] = Field(
        (),
        strict=False,
        description="The actions that need [two security officers](operate/administrators.md#two-officers): "
        '`"approve"`, `"revoke"`, `"forget"`, `"revoke-admin"`.',
    )
    request_seconds: int = Field(
        86_400,
        ge=60,
        le=30 * 86_400,
        description="How long a request of one officer waits for another officer's consent.",
    )
    lease_seconds: float = Field(
        6.0,
        ge=1.0,
        le=600.0,
        description="With several coordinators: another one takes over a run this long after the last sign of its own.",
    )
    heartbeat_seconds: float = Field(
        5.0,
        ge=0.1,
        le=300,
        description="How often a worker sends a heartbeat; its stream ends after three missed ones.",
    )
    silent_seconds: int = Field(
        3600,
        ge=0,
        description="How long a member may not attend before there is an [alert](operate/alerts.md); 0: none.",
    )
    backup_seconds: int = Field(
        7 * 86_400, ge=0, description="How old the last backup may be before there is an alert; 0: none."
    )
    max_model_bytes: int = Field(
        8 << 30,
        ge=1 << 10,
        description="The largest model that the coordinator accepts; it bounds the size of an update, too.",
    )
    upload_bytes: int = Field(
        16 << 30,
        ge=1 << 10,
        description="The most bytes of one member's uploads that [broke "
        "off](reference/protocol.md#uploads-that-break-off) or are under way together. A single upload may be "
        "larger.",
    )
    transfers: int = Field(
        64, ge=1, le=10_000, description="How many uploads of replies are under way at a time; further ones wait."
    )
    transfer_bytes: int = Field(
        128 << 20,
        ge=SMALLEST_WINDOW,
        description="Memory for bytes on their way. Each of `transfers` has 1 MiB of it; the rest goes to [long "
        "lines](operate/operations.md#long-lines).",
    )
    keep_rounds: int = Field(
        0,
        ge=0,
        description="Of how many last rounds of each run models and updates are [kept](operate/operations.md#disk), "
        "beside the first and the best. 0 keeps all.",
    )
    device: Literal["cpu", "cuda"] = Field(
        "cpu",
        description='Where updates are aggregated: `"cpu"` or `"cuda"` (does not start without the extra `torch` '
        "and a GPU, and [gains little](results/gpu.md)).",
    )
    metrics: MetricsSection = MetricsSection()  # last: in TOML, a table comes after the keys

    @field_validator("federation_id")
    @classmethod
    def _name(cls, value: str) -> str:
        return check_name(value, "federation")

    @field_validator("hosts")
    @classmethod
    def _hosts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for host in value:
            try:
                _HOST_NAME.fullmatch(host) or ip_address(host)
            except ValueError:
                raise ValueError(f"{host!r} is not a host name or an address; a port does not belong here") from None
        return value

    @field_validator("enrollment_host")
    @classmethod
    def _enrollment_host(cls, value: str) -> str:
        if value and (_HOST_NAME.fullmatch(value) is None or value.replace(".", "").isdigit()):
            raise ValueError(f"{value!r} is not a host name: TLS asks for servers by name, not by address")
        return value.lower()

    @field_validator("database")
    @classmethod
    def _database(cls, value: str) -> str:
        if not value.startswith((SQLITE, "postgresql://", "postgres://")):
            raise ValueError("expected sqlite:///FILE or postgresql://USER:PASSWORD@HOST/NAME")
        return value

    @field_validator("blobs")
    @classmethod
    def _blobs(cls, value: str) -> str:
        if "://" in value and _BUCKET.fullmatch(value) is None:
            raise ValueError("expected a directory, or s3://BUCKET/PREFIX, or the same with gs or az")
        return value.rstrip("/") if "://" in value else value

    @field_validator("blobs_endpoint")
    @classmethod
    def _endpoint(cls, value: str) -> str:
        if value and re.fullmatch(r"https?://[A-Za-z0-9.:\[\]-]+", value) is None:
            raise ValueError("expected https://HOST or https://HOST:PORT, or http:// on a line that nobody reads")
        return value

    @model_validator(mode="after")
    def _bucket(self) -> Self:
        if self.blobs_endpoint and not self.blobs.startswith("s3://"):
            raise ValueError(f"blobs_endpoint is of an S3 service, and blobs is {self.blobs!r}")
        if self.blob_urls_seconds and not self.in_bucket:
            raise ValueError(f"blob_urls_seconds is of a bucket, and blobs is {self.blobs!r}, a directory")
        unencrypted = urlsplit(self.blobs_endpoint) if self.blobs_endpoint.startswith("http:") else None
        if self.blob_urls_seconds and unencrypted is not None and not is_loopback(unencrypted.hostname or ""):
            raise ValueError(
                f"blob_urls_seconds: members download by https, and blobs_endpoint is {self.blobs_endpoint}"
            )
        return self

    @model_validator(mode="after")
    def _ports(self) -> Self:
        if (port := self.federation_port) == self.enrollment_port != 0:
            raise ValueError(
                f"federation_port and enrollment_port are both {port}: give each a port of its own, or leave "
                "enrollment_port away and name an enrollment_host"
            )
        if self.enrollment_host and (self.enrollment_port or self.enrollment_host in map(str.lower, self.hosts)):
            raise ValueError("enrollment_host: it is none of hosts, and goes without enrollment_port")
        return self

    @model_validator(mode="after")
    def _officers(self) -> Self:
        if Action.APPROVE in self.two_officers and not self.approval:
            raise ValueError(
                "two_officers: with approve, set approval = true; otherwise the join string of one officer admits a "
                "member"
            )
        return self

    @model_validator(mode="after")
    def _windows(self) -> Self:
        if (least := self.transfers * SMALLEST_WINDOW) > self.transfer_bytes:
            raise ValueError(f"transfer_bytes is {self.transfer_bytes}: {self.transfers} transfers need {least}")
        return self

    @property
    def in_bucket(self) -> bool:
        """True if the blobs are in a bucket."""
        return "://" in self.blobs

    @property
    def names(self) -> tuple[str, ...]:
        """All names and addresses of this machine, for its certificate."""
        return tuple(filter(None, (*self.hosts, self.enrollment_host)))

    @property
    def admin_certificate_lifetime(self) -> timedelta:
        """The lifetime of an administrator's certificate."""
        return timedelta(seconds=self.admin_certificate_seconds)

    @property
    def shared(self) -> Self:
        """These settings without those of this machine: the same for all coordinators of a federation."""
        return self.model_copy(update={name: type(self).model_fields[name].default for name in _OF_MACHINE})

    @property
    def changed_text(self) -> str:
        """The settings that differ from the defaults, for the record: without the password of the database."""
        chosen = dict(sorted(self.model_dump(exclude_defaults=True).items()))
        if "@" in (url := chosen.get("database", "")):
            scheme, _, rest = url.partition("://")
            user, _, host = rest.rpartition("@")
            chosen["database"] = f"{scheme}://{user.partition(':')[0]}@{host}"
        return "; ".join(f"{name} = {json.dumps(value)}" for name, value in chosen.items())

    @classmethod
    def parse(cls, text: str, source: str) -> Self:
        """Reads a TOML document; messages call it `source`.

        Raises:
            HomeError: not TOML (with the line), or keys that are unknown, missing or wrong (each named).
        """
        try:
            values = tomllib.loads(text)
        except (ValueError, RecursionError) as error:  # TOMLDecodeError, an endless number
            raise CoordinatorHomeError(f"{source} is not TOML: {error}") from None
        return cls.check(values, source)

    @classmethod
    def check(cls, values: Mapping[str, Any], source: str) -> Self:
        """Makes settings of values by key; messages name their source.

        Raises:
            HomeError: keys that are unknown, missing or wrong, each named.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            known = f"there are {', '.join(cls.model_fields)}"
            # The database's URL may hold a password.
            problems = [explain(problem, known, cls, secret={"database"}) for problem in error.errors()]
            raise CoordinatorHomeError(f"{source}: {'; '.join(problems)}") from None

    def render(self) -> str:
        """The TOML document, with a description of each key."""
        lines = ["# A federation's coordinator. Read when it starts."]
        lines += [*_described(self), "", "[metrics]", *_described(self.metrics)]
        return "\n".join(lines) + "\n"


def _described(section: Section) -> Iterator[str]:
    """The keys of a section in TOML, each below its description; without tables."""
    for name, field in type(section).model_fields.items():
        if not isinstance(value := getattr(section, name), Section):
            yield from ("", *comment(str(field.description)), tomli_w.dumps({name: value}).rstrip())


def check_torch_device(device: str) -> None:
    """Checks that updates can be aggregated on a device, "cpu" or "cuda".

    Raises:
        HomeError: it is "cuda", and torch is not installed or finds no GPU; the message says what to do.
    """
    if device != "cuda":
        return
    try:
        import torch  # noqa: PLC0415 - only a coordinator that aggregates on a GPU needs it
    except ModuleNotFoundError:
        raise CoordinatorHomeError(
            'device = "cuda" needs torch, which is not installed here: install fedpareto[torch], or set device = "cpu"'
        ) from None
    if not torch.cuda.is_available():
        raise CoordinatorHomeError('device = "cuda": torch finds no GPU on this machine; set device = "cpu"')
