"""Attacks for rehearsals in one's own federation, to measure its defence."""

from federation.attacks.base import Attack, AttackError, attack_seed, claimed, distorted, poisoned
from federation.attacks.catalogue import check_exists, parse_attack

__all__ = ["Attack", "AttackError", "attack_seed", "check_exists", "claimed", "distorted", "parse_attack", "poisoned"]
