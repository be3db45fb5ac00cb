"""The choice of a coordinator for calls: the first one that serves, and why the others do not."""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from federation.transport.addresses import MAX_ADDRESSES, each_problem, in_own_order, is_address, known_addresses
from federation.transport.first_serving import first_serving
from federation.transport.proxies import RouteError, no_proxy

SERVICE = "federation.v1.Admin"
NOBODY = "127.0.0.1:1"  # a port of the system, where nothing listens


@contextmanager
def answering(status: "health_pb2.HealthCheckResponse.ServingStatus.ValueType") -> Iterator[str]:
    """The address of a server that answers with this status."""
    servicer, server = health.HealthServicer(), grpc.server(ThreadPoolExecutor(2))
    servicer.set(SERVICE, status)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None)


def chosen(*addresses: str, service: str = SERVICE) -> str:
    address, channel = first_serving(addresses, service, no_proxy, grpc.insecure_channel)
    channel.close()
    return address


def test_the_first_coordinator_that_serves_is_taken() -> None:
    status = health_pb2.HealthCheckResponse
    with answering(status.SERVING) as serving, answering(status.NOT_SERVING) as stopping:
        assert chosen(NOBODY, stopping, serving) == serving
        assert chosen(NOBODY, stopping) == stopping  # its own refusal says why
        assert chosen(NOBODY, stopping, serving, service="none") == stopping  # so does that of a call
        assert chosen(NOBODY) == NOBODY  # the only one is not asked


def test_where_none_answers_each_address_is_named_with_its_reason() -> None:
    with pytest.raises(RouteError, match=r"no coordinator answers: 127.0.0.1:1: .*; nowhere.invalid:2: .* no address"):
        chosen(NOBODY, "nowhere.invalid:2")


def test_the_address_that_worked_comes_first_and_older_ones_stay_up_to_a_limit() -> None:
    assert known_addresses("b:1", ["c:1", "b:1"], ("a:1", "b:1")) == ("b:1", "c:1", "a:1")
    many = [f"host-{number}:1" for number in range(MAX_ADDRESSES + 5)]
    assert known_addresses("b:1", many, ()) == ("b:1", *many[: MAX_ADDRESSES - 1])
    told = ["", "no port", "a:0", "a:70000", "a:1\n", "http://a:1", "x" * 300 + ":1", "[::1]:2"]
    assert known_addresses("", told, ()) == ("[::1]:2",)
    assert is_address("a:0")  # before a coordinator has served
    assert each_problem({"a:1": "gone"}) == "gone"


def test_each_coordinator_is_the_first_one_of_a_fair_share_of_the_members_and_of_those_that_lose_theirs() -> None:
    addresses = ("fl-0.example.org:7443", "fl-1.example.org:7443", "fl-2.example.org:7443")
    members = [f"hospital-{number}" for number in range(60)]
    orders = {member: in_own_order(member, addresses) for member in members}
    assert all(sorted(order) == sorted(addresses) for order in orders.values())
    shares = Counter(order[0] for order in orders.values())
    assert min(shares[address] for address in addresses) >= 15, shares
    for gone in addresses:
        left = [address for address in addresses if address != gone]
        losers = [member for member in members if orders[member][0] == gone]
        shares = Counter(orders[member][1] for member in losers)
        assert min(shares[address] for address in left) >= len(losers) / 4, shares
        assert all(
            in_own_order(member, left) == tuple(one for one in orders[member] if one != gone) for member in members
        )
    assert all(in_own_order(member, reversed(addresses)) == orders[member] for member in members), "in any order"
    assert in_own_order("hospital-0", addresses[:1]) == addresses[:1]
    assert in_own_order("hospital-0", ()) == ()
