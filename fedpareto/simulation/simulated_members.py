"""Simulated clients as members of private rounds: keys, a pinned roster, and secrets, all derived from the run's seed.

They behave like members of a real federation: they verify each other's signatures, and refuse all that a worker
refuses. Their secrets are derived and not secret, so that a simulation can be repeated.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property

from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from federation.attacks import Attack
from federation.statistics.rules import MemberRules
from federation.work.peers import open_reply
from federation.work.site import SCALARS, MemoryLedger, SecurePolicy, Site

_ENDLESS = 2**62


class SimulatedMembers:
    """The members of a simulation of one task.

    Args:
        seed: the run's seed.
        names: the clients.
        task: the run's task.
        assumed: the number of colluding members that every owner assumes; None for the owners' default.
        effective_members: E* that every owner requires; None for the owners' default.
    """

    def __init__(
        self,
        seed: int,
        names: Iterable[str],
        task: str,
        assumed: int | None = None,
        effective_members: float | None = None,
    ) -> None:
        self._seed, self._names, self._task, self._assumed = seed, tuple(names), task, assumed
        self._effective_members = effective_members

    @cached_property
    def keys(self) -> dict[str, Ed25519PrivateKey]:
        """Each member's signing key."""
        return {name: Ed25519PrivateKey.from_private_bytes(self.derive("key", name)) for name in self._names}

    @cached_property
    def _roster(self) -> dict[str, bytes]:
        return {name: key.public_key().public_bytes_raw() for name, key in self.keys.items()}

    @cached_property
    def _sites(self) -> dict[str, Site]:
        endless = SecurePolicy(
            assumed=self._assumed,
            effective_members=self._effective_members,
            disclose=SCALARS,
            sessions=_ENDLESS,
            evaluations=_ENDLESS,
            sessions_per_model=_ENDLESS,
            sums_per_model=_ENDLESS,
            blur=0.0,
            evaluation_noise=0.0,
        )
        return {
            name: Site(
                roster=self._roster,
                policies={self._task: endless},
                ledger=MemoryLedger(),
                open_reply=open_reply,
                evaluations_ahead=_ENDLESS,
                failures=_ENDLESS,
                summed={self._task: MemberRules()},
                new_secret=lambda session, name=name: self.derive("secret", f"{name}\0{session}"),  # type: ignore[misc]
            )
            for name in self._names
        }

    def key_ids(self) -> dict[str, bytes]:
        """The id of each member's signing key."""
        return {name: blake3(key).digest() for name, key in self._roster.items()}

    def site(self, name: str, attack: Attack | None = None) -> Site:
        """A member's site; an attacker's vector may be longer than allowed."""
        return self._sites[name] if attack is None else replace(self._sites[name], stretch=attack.stretch)

    def derive(self, label: str, context: str) -> bytes:
        """32 bytes that follow from the seed, a label and a context."""
        return blake3(f"fedpareto/simulation/{label}\0{self._seed}\0{context}".encode()).digest()
