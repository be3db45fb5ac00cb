"""The members that are left in W after opening 0 (section 2.4): a pure function of answers and accusations.

Members leave in this order: those that did not answer; those accused by more than t; those that accuse more than t;
then, through the remaining pairs (accuser, accused) in sorted order, both of a pair if both are still in. So each of at
most t liars takes at most one honest member with it, and a member that accuses more than t leaves alone.

The second and the third step count the accusations of all members that answered, also accusations against members that
have left by then: at most t dealers are bad, so a member that names more than t has lied.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from federation.secure.errors import Fault, Malformed


@dataclass(frozen=True)
class Left:
    """The members that stay, and why the others leave; ids are sorted.

    Attributes:
        W: the members that stay.
        silent: did not answer.
        accused: are accused by more than t.
        accusers: accuse more than t.
        pairs: (accuser, accused), both of whom leave.
    """

    W: tuple[str, ...]
    silent: tuple[str, ...]
    accused: tuple[str, ...]
    accusers: tuple[str, ...]
    pairs: tuple[tuple[str, str], ...]


def check(dealt: Collection[str], accuser: str, accused: Collection[str]) -> None:
    """Checks the accusations of one answer.

    Raises:
        Malformed: somebody is accused who did not deal, or twice, or who is the accuser.
    """
    # Section 2.4: a name that stands twice, or that did not deal, would count and could lift an honest dealer above t.
    if len(set(accused)) < len(accused) or accuser in accused or not set(accused) <= set(dealt):
        raise Malformed(Fault.ACCUSATION, f"{accuser!r} accuses {sorted(accused)}: not members that dealt, once each")


def shrink(dealt: Collection[str], answers: Mapping[str, Collection[str]], t: int) -> Left:
    """W after opening 0.

    Args:
        dealt: the ids of the members that dealt.
        answers: for each member that answered, the ids of the dealers whose ciphertexts were bad.
        t: liars.

    Raises:
        Malformed: an answer is not of a member that dealt, or its accusations are malformed.
    """
    for name, names in answers.items():
        if name not in dealt:
            raise Malformed(Fault.ACCUSATION, f"{name!r} did not deal")
        check(dealt, name, names)
    # All answers count, also those of members that are removed below: otherwise liars who are removed first would
    # take their accusations against a bad dealer with them.
    accusations = Counter(name for names in answers.values() for name in names)
    left = set(answers)
    # Section 2.4: of more than t accusers one is honest, so the dealer is bad. At t or fewer, liars alone could remove
    # an honest dealer.
    accused = tuple(sorted(name for name in left if accusations[name] > t))
    left -= set(accused)
    # Section 2.4: at most t dealers are bad, so who names more has lied, and leaves alone. In a pair, it would take an
    # honest dealer with it.
    accusers = tuple(sorted(name for name in left if len(answers[name]) > t))
    left -= set(accusers)
    pairs = []
    # Section 2.4: in sorted order, so that a verifier removes the same pairs. Both leave: nobody can tell who lied, and
    # a liar that stays would cost an honest member again.
    for pair in sorted((name, other) for name, names in answers.items() for other in names):
        if left.issuperset(pair):
            pairs.append(pair)
            left -= set(pair)
    silent = tuple(sorted(set(dealt) - set(answers)))
    return Left(tuple(sorted(left)), silent, accused, accusers, tuple(pairs))
