"""A bounded number of places for the connections or calls of each group, and in all."""

import ipaddress
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

H = TypeVar("H", bound=Hashable)


class Places(Generic[H]):
    """A bounded number of places, at least one, for each group and in total.

    A new holder always gets a place. When its group is full, the oldest holder of its group loses its place. When all
    places are taken, the oldest holder of the largest group does. So one group cannot keep another one out.
    """

    def __init__(self, per_group: int, total: int) -> None:
        self._per_group = per_group
        self._total = total
        self._groups: dict[str, dict[H, None]] = {}  # holders by group, oldest first
        self._group_of: dict[H, str] = {}

    def __len__(self) -> int:
        return len(self._group_of)

    def __contains__(self, holder: H) -> bool:
        return holder in self._group_of

    def __iter__(self) -> Iterator[H]:
        """Every holder."""
        return iter(self._group_of)

    def taken(self, group: str) -> int:
        """The number of places that a group has."""
        return len(self._groups.get(group, ()))

    def add(self, holder: H, group: str) -> H | None:
        """Gives a place to `holder`; returns the holder that loses its place, if any."""
        loser = None
        if self.taken(group) >= self._per_group:
            loser = self._oldest(group)
        elif len(self._group_of) >= self._total:
            loser = self.oldest_of_largest()
        if loser is not None:
            self.remove(loser)
        self._groups.setdefault(group, {})[holder] = None
        self._group_of[holder] = group
        return loser

    def remove(self, holder: H) -> None:
        """Frees the place of `holder`, if it has one."""
        group = self._group_of.pop(holder, None)
        if group is not None:
            holders = self._groups[group]
            del holders[holder]
            if not holders:
                del self._groups[group]

    def oldest_of_largest(self) -> H | None:
        """The oldest holder of the largest group; None when no place is taken."""
        if not self._groups:
            return None
        return self._oldest(max(self._groups, key=lambda group: len(self._groups[group])))

    def _oldest(self, group: str) -> H:
        return next(iter(self._groups[group]))


def network_of(address: str) -> str:
    """The group of an address: an IPv4 address itself, of an IPv6 address the network of 64 bits that it is in."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:  # not the name of a connection that the front listener made
        return address
    return str(parsed) if parsed.version == 4 else str(ipaddress.IPv6Network((parsed, 64), strict=False))
