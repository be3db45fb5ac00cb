"""The choice of a coordinator for calls: the first one that serves."""

from collections.abc import Callable, Sequence

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from federation.transport.addresses import each_problem
from federation.transport.channels import refusal_from_rpc_error
from federation.transport.proxies import ProxyChoice, RouteError

ANSWER_SECONDS = 10.0  # for each address
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


def first_serving(
    addresses: Sequence[str], service: str, proxy: ProxyChoice, open_channel: Callable[[str], grpc.Channel]
) -> tuple[str, grpc.Channel]:
    """Asks the coordinators at `addresses` in turn if they serve a `service` ("federation.v1.Admin").

    Since the calls themselves come later, none is made twice. A single address is not asked. If a coordinator answers
    but none serves, the first that answered is taken: it says itself why it refuses a call.

    Returns:
        The address, and an open channel to it.

    Raises:
        RouteError: no coordinator answers; the message names each address and the reason.
    """
    if len(addresses) == 1:
        return addresses[0], open_channel(addresses[0])
    problems, answered = dict[str, str](), ""
    for address in addresses:
        channel = open_channel(address)
        try:
            answer = HealthStub(channel).Check(HealthCheckRequest(service=service), timeout=ANSWER_SECONDS)
        except grpc.RpcError as error:
            if error.code() not in _AWAY:  # such as a certificate that was revoked: the call says so, too
                return address, channel
            refusal = refusal_from_rpc_error(error, proxy=proxy(address))
            problems[address] = refusal.message or refusal.status
        else:
            if answer.status == HealthCheckResponse.SERVING:
                return address, channel
            answered = answered or address
        channel.close()
    if answered:
        return answered, open_channel(answered)
    raise RouteError(f"no coordinator answers: {each_problem(problems)}")
