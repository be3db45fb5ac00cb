"""Rehearsing attacks in one's own federation: what the defence does is seen before somebody else tries them."""

from federation.attacks.base import Attack, AttackError, attack_seed
from federation.attacks.catalogue import must_exist, parse_attack

__all__ = ["Attack", "AttackError", "attack_seed", "must_exist", "parse_attack"]
