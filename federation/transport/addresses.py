"""The addresses of a federation's coordinators, in the order in which they are tried."""

from collections.abc import Iterable, Mapping

from federation.digests import digest
from federation.transport.proxies import ADDRESS

MAX_ADDRESSES = 16  # that a member, an administrator or a join string has
MAX_LENGTH = 300


def is_address(text: object) -> bool:
    """True for "host:port", with an IPv6 address in brackets. The port is 0 before a coordinator has served."""
    if not isinstance(text, str) or len(text) > MAX_LENGTH:
        return False
    parts = ADDRESS.fullmatch(text)
    return parts is not None and int(parts[2]) <= 65535


def known_addresses(worked: str, told: Iterable[str], before: Iterable[str]) -> tuple[str, ...]:
    """The addresses to try the next time: the one that worked, those that its coordinator has told, and older ones.

    Older ones stay at the end, since a coordinator names only those that serve at the moment. At most `MAX_ADDRESSES`
    are kept. Texts that are not addresses, and addresses with port 0, are left out. TLS authenticates the coordinator
    at each connection, so a wrong address only costs an attempt. Administrators try them in just this order:
    their calls are few and short, so there is no load to spread.
    """
    addresses = dict.fromkeys((worked, *told, *before))
    return tuple(each for each in addresses if is_address(each) and not each.endswith(":0"))[:MAX_ADDRESSES]


def in_own_order(name: str, addresses: Iterable[str]) -> tuple[str, ...]:
    """Addresses, each once, in the order in which the member `name` tries them: by the digests of name and address.

    So each coordinator is the first one of an equal share of the members, and the members of a coordinator that goes
    away spread over the others. If a coordinator is added or removed, the order of the others stays.
    """
    return tuple(sorted(set(addresses), key=lambda address: digest(f"{name}\n{address}".encode())))


def each_problem(problems: Mapping[str, str]) -> str:
    """The reasons why addresses did not work, each with its address; of a single one the reason alone."""
    if len(problems) == 1:
        return next(iter(problems.values()))
    return "; ".join(f"{address}: {problem}" for address, problem in problems.items())
