"""Channels to the coordinator, and the meaning of its refusals."""

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple, TypeAlias

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from federation.transport.proxies import Proxy
from federation.v1.common_pb2 import SignedEnvelope

ERROR_DOMAIN = "fedpareto"
STATUS_KEY = "grpc-status-details-bin"
Option: TypeAlias = tuple[str, int | str]
MAX_CHUNK_BYTES = 1 << 20  # the largest piece of a file in one message of a stream
CHUNK_BYTES = 1 << 18  # the size of the first chunk of a transfer
FRAME_BYTES: Option = (
    "grpc.http2.max_frame_size",
    MAX_CHUNK_BYTES,
)  # a chunk is one frame, and not one for each 16 KiB
MAX_ADMIN_MESSAGE_BYTES = 256 << 20  # the cosines of a round of 1000 clients are 8 MB
LONGEST_RETRY_SECONDS = 86_400.0
_PROXY_REFUSED = re.compile(r"proxy returned response code (\d+)")  # the text of gRPC's error

_CHANNEL_OPTIONS: tuple[Option, ...] = (
    ("grpc.max_receive_message_length", MAX_ADMIN_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.max_reconnect_backoff_ms", 10_000),
    FRAME_BYTES,
    # A fresh channel connects at once: it must not inherit the back-off of another channel to the same address.
    ("grpc.use_local_subchannel_pool", 1),
)


def server_verified_channel(
    address: str, ca: bytes, options: Sequence[Option] = (), *, proxy: Proxy | None = None
) -> grpc.Channel:
    """A TLS channel to "host:port" that verifies the server against the CA (PEM) and shows no certificate."""
    return _channel(address, grpc.ssl_channel_credentials(ca), options, proxy)


def mutual_channel(
    address: str,
    *,
    ca: bytes,
    key: bytes,
    certificate: bytes,
    options: Sequence[Option] = (),
    proxy: Proxy | None = None,
) -> grpc.Channel:
    """A mutual-TLS channel to the federation port, "host:port"; the key is not encrypted, and all three are PEM."""
    return _channel(address, grpc.ssl_channel_credentials(ca, key, certificate), options, proxy)


def _channel(
    address: str, credentials: grpc.ChannelCredentials, options: Sequence[Option], proxy: Proxy | None
) -> grpc.Channel:
    """A channel with or without a proxy: without one, gRPC must not take one from the environment."""
    route: Option = ("grpc.enable_http_proxy", 0) if proxy is None else ("grpc.http_proxy", proxy.url)
    return grpc.secure_channel(address, credentials, options=(*_CHANNEL_OPTIONS, route, *options))


class RpcRefusal(NamedTuple):
    """The reason why a call failed.

    Attributes:
        status: the name of the gRPC status, such as "PERMISSION_DENIED".
        reason: the stable reason ("role"); "unreachable" if no coordinator answered; empty if none was given.
        message: for people.
        retry_seconds: the wait that the coordinator asks for before the next attempt; 0 if it asks for none.
    """

    status: str
    reason: str
    message: str
    retry_seconds: float = 0.0


def refusal_from_rpc_error(
    error: grpc.RpcError, *, not_after: datetime | None = None, proxy: Proxy | None = None
) -> RpcRefusal:
    """Reads the coordinator's reason from a failed call; without one, names the probable cause.

    `not_after` is the time at which the caller's own certificate expires, if known: an expired one is the likeliest
    cause. The call went through `proxy`.
    """
    if not isinstance(error, grpc.Call):
        return RpcRefusal("UNKNOWN", "", str(error))
    status, details = error.code().name, error.details() or ""
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    if _unpack(error, info, retry) and info.domain == ERROR_DOMAIN:
        seconds = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
        return RpcRefusal(status, info.reason, details, min(max(seconds, 0.0), LONGEST_RETRY_SECONDS))
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return RpcRefusal(status, "unreachable", _probable_cause(details, not_after, proxy))
    return RpcRefusal(status, "", details)


def signed_detail(error: grpc.RpcError) -> SignedEnvelope | None:
    """The unverified receipt or revocation that the coordinator sent with a refusal; None when there is none."""
    envelope = SignedEnvelope()
    return envelope if _unpack(error, envelope) else None


def _unpack(error: grpc.RpcError, *messages: Message) -> bool:
    """Fills messages from the details of a failed call's status; False if there is none of them, or one is damaged."""
    if not isinstance(error, grpc.Call):
        return False
    unpacked = False
    for key, value in error.trailing_metadata() or ():
        if key == STATUS_KEY and isinstance(value, bytes):
            try:
                for detail in status_pb2.Status.FromString(value).details:
                    unpacked |= any(detail.Unpack(message) for message in messages)
            except (ValueError, DecodeError):  # not ours
                return False
    return unpacked


def _now() -> datetime:
    return datetime.now(UTC)


def _probable_cause(details: str, not_after: datetime | None, proxy: Proxy | None) -> str:
    """The candidates, as text: gRPC reports a failed handshake as UNAVAILABLE, without a reason."""
    lower = details.lower()
    refused = _PROXY_REFUSED.search(lower)
    if refused and proxy is not None:
        cause = proxy.refusal(int(refused[1]))
    elif not_after is not None and not_after <= _now():
        cause = (
            f"your certificate ended on {not_after:%Y-%m-%d %H:%M} UTC, and this machine's clock says "
            f"{_now():%Y-%m-%d %H:%M} UTC: set the clock if it is wrong, or else get a new certificate"
        )
    elif "certificate_verify_failed" in lower or "handshake failed" in lower or "verification check failed" in lower:
        cause = (
            "the server at this address did not prove that it is this federation's coordinator: its certificate is not "
            "from the federation's CA, not for this host name, or not valid at the time of this machine's clock, "
            f"{_now():%Y-%m-%d %H:%M} UTC. Check the address and the clock. Where a device on the way inspects TLS, it "
            "shows a certificate of its own: ask the network department for an exception"
        )
    elif "errors resolving" in lower or "address lookup failed" in lower:
        host = "the proxy's name" if proxy is not None else "the coordinator's name"
        cause = f"{host} has no address on this machine: check its spelling and this machine's DNS"
    elif any(text in lower for text in ("socket closed", "connection reset", "broken pipe", "stream removed", "eof")):
        peer = "the coordinator" if proxy is None else f"the coordinator, or the proxy {proxy} on the way to it,"
        cause = (
            f"{peer} hung up. It was stopped, or it did not accept your certificate: expired, of another "
            "federation's CA, or missing"
        )
    elif proxy is not None and "expected 'h'" in lower:
        cause = f"what listens at {proxy} is no HTTP proxy: check host and port"
    elif proxy is not None and "failed to connect to remote host" in lower:
        cause = f"the proxy {proxy} does not answer: is it running, and is its address right?"
    elif proxy is not None:
        cause = (
            f"the proxy {proxy} takes connections, but nothing came through it in time: the coordinator is not "
            "running, or a firewall behind the proxy is in the way"
        )
    else:
        cause = "no coordinator answers there. It is not running, or the address or a firewall is in the way"
    return f"{cause} (gRPC: {details[:300]})"
