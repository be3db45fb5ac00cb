"""Who took part in a run: the first words about it name the members that did not."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from federation.text import counted
from federation.v1.admin_pb2 import MemberSummary, Run
from fedpareto.formatting import natural

_NAMED = 3  # members that a sentence names
_ANSWERS = {"refused": "its owner has refused the run", "waiting": "its owner has not answered the run"}
_VERBS = {"declined": "declined", "refused": "was refused", "missing": "did not reply"}


@dataclass(frozen=True, kw_only=True)
class MemberTurnout:
    """A member's part in the rounds of a run that have ended and needed its reply, by how they ended for it."""

    name: str
    replied: int = 0
    declined: int = 0
    refused: int = 0
    missing: int = 0

    @property
    def asked(self) -> int:
        """The rounds that needed its reply."""
        return self.replied + self.declined + self.refused + self.missing

    @property
    def failures(self) -> str:
        """How its rounds failed: "declined in 40 of 40 rounds", "declined in 30, did not reply in 10 of 40 rounds"."""
        ways = [f"{verb} in {count}" for outcome, verb in _VERBS.items() if (count := getattr(self, outcome))]
        return f"{', '.join(ways)} of {counted(self.asked, 'round')}"


@dataclass(frozen=True)
class Turnout:
    """The members' parts in a run; `never_asked` says why no round asked some members, although it asks every one."""

    parts: Sequence[MemberTurnout] = ()
    never_asked: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, run: Run, members: Iterable[MemberSummary] | None = None) -> "Turnout":
        """That of a run with its members, as `GetRun` gives it; `members` take the place of those of `run`."""
        parts = [
            MemberTurnout(
                name=member.client_id,
                replied=member.replied,
                declined=member.declined,
                refused=member.refused,
                missing=member.missing,
            )
            for member in (run.members if members is None else members)
        ]
        known = {item.name for item in parts}  # `run` may be older than its members
        never = {name: why for name, why in never_asked(run).items() if name not in known}
        return cls([item for item in parts if item.asked], never)

    @property
    def present(self) -> frozenset[str]:
        """The members with a reply that counted."""
        return frozenset(item.name for item in self.parts if item.replied)

    @property
    def names(self) -> frozenset[str]:
        """All members that the run could ask."""
        return frozenset({*self.never_asked, *(item.name for item in self.parts)})

    @property
    def absent(self) -> list[str]:
        """The members without a reply that counted, by name."""
        return sorted(self.names - self.present, key=natural)

    def sentence(self, *, over: bool) -> str:
        """The members that took no part, or a part in less than half of their rounds, and why; empty without any.

        "hospital-c never took part: it declined in 40 of 40 rounds". `over` says that the run has ended.
        """
        rarely = [item for item in self.parts if item.replied and 2 * item.replied < item.asked]
        rarely.sort(key=lambda item: natural(item.name))
        parts = [self._absentees(over=over)] if self.absent else []
        parts += [
            f"{item.name} took part in {item.replied} of {counted(item.asked, 'round')}" for item in rarely[:_NAMED]
        ]
        if more := rarely[_NAMED:]:
            parts.append(f"{counted(len(more), 'more member')} in less than half of their rounds")
        return ", ".join(parts)

    def opening(self, *, over: bool) -> str:
        """The `sentence` with a capital and a full stop; empty if everybody took part."""
        told = self.sentence(over=over)
        begins_with_name = told.partition(" ")[0] in self.names
        return f"{told if begins_with_name else told[:1].upper() + told[1:]}." if told else ""

    @property
    def _failures(self) -> dict[str, str]:
        return {item.name: item.failures for item in self.parts}

    def _absentees(self, *, over: bool) -> str:
        names = self.absent
        if len(names) == 1:
            why = self.never_asked.get(names[0]) or f"it {self._failures[names[0]]}"
            return f"{names[0]} {'never took part' if over else 'has not taken part yet'}: {why}"
        told = [f"{name} ({self.never_asked.get(name) or self._failures[name]})" for name in names[:_NAMED]]
        told += [f"{len(names) - _NAMED} more"] if len(names) > _NAMED else []
        if not self.present:
            return f"no member {'took part' if over else 'has taken part yet'}: {enumerated(told)}"
        return f"{enumerated(told)} {'never took part' if over else 'have not taken part yet'}"


def never_asked(run: Run) -> dict[str, str]:
    """Why no round of a run has asked some members, by name, as `GetRun` gives the run."""
    answers = {consent.client_id: _ANSWERS.get(consent.answer, "") for consent in run.consents}
    return {name: answers.get(name) or "no round asked it" for name in run.never_asked}


def enumerated(names: Iterable[str]) -> str:
    """Names in a sentence: "a", "a and b", "a, b and c"."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
