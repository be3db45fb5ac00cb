"""The rules of a site for people: each key of policy.toml with what it means, and what each of them refused."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from federation.spec.problems import Section
from federation.text import counted
from fedpareto.web.site.left_table import local_time
from worker.ledgers.left_reading import CountedDeclines
from worker.site.policy_file import Policy, SecureSection
from worker.site.run_requests import RunRequest

BY_REASON: Mapping[str, tuple[str, ...]] = {
    "task-not-allowed": ("tasks",),
    "policy:algorithm": ("algorithms",),
    "policy:submitter": ("submitters",),
    "consent": ("approve",),
    "owner": ("approve",),
    "policy:approved": ("approve", "secure.disclose"),
    "round": ("limits.rounds_forward",),
    "limit:samples": ("limits.samples",),
    "limit:steps": ("limits.steps", "limits.max_steps"),
    "limit:epochs": ("limits.max_epochs",),
    "limit:bytes": ("limits.max_bytes",),
    "limit:members": ("limits.members",),
    "limit:rows": ("limits.rows",),
    "limit:hours": ("limits.hours",),
    "limit:waiting": ("limits.waiting",),
    "limit:disk": ("limits.home_bytes",),
    "closed": ("open.begin", "open.end", "open.days", "open.zone"),
    "policy:required": ("secure.required", "secure.disclose"),
    "policy:mode": ("secure.modes",),
    "policy:disclose": ("secure.disclose",),
    "cohort": ("secure.smallest", "secure.assumed"),
    "sessions": ("secure.sessions", "secure.evaluations"),
    "model-sessions": ("secure.sessions_per_model",),
    "model-sums": ("secure.sums_per_model",),
    "cover": ("secure.effective_members",),
    "policy:blur": ("secure.blur",),
    "policy:evaluation-noise": ("secure.evaluation_noise",),
    "policy:statistics": ("statistics.open",),
    "statistics:approval": ("approve",),
    "statistics:samples": ("statistics.samples",),
    "statistics:bins": ("statistics.samples_per_bin",),
    "dp-budget": ("privacy.epsilon", "privacy.delta"),
    "dp-work": ("privacy.noise", "privacy.clip"),
    "dp-model": ("privacy.noise",),
    "dp-missing": ("privacy.noise",),
}
"""By reason of a decline, the keys of policy.toml that give it; of `privacy.NAME`, without the name."""
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_ABOUT_EMPTY = ("Empty:", "0 is", "Without the key")
_SENTENCE = re.compile(r"(?<=\.)\s")


@dataclass(frozen=True)
class SiteRule:
    """A key of policy.toml, its value in words, whether the owner has set it, and its meaning."""

    key: str
    value: str
    is_set: bool
    means: str


@dataclass(frozen=True)
class RefusedKind:
    """What was refused for one reason.

    Attributes:
        by: the keys of the rules that give the reason; the reason itself if no rule does.
        count: how much was refused, in words.
        last: when the last time was, in words; empty if it is not on record.
        example: the message of the last one.
    """

    by: str
    count: str
    last: str
    example: str


def rules(policy: Policy) -> list[SiteRule]:
    """The rules of a policy, in the order of the document."""
    return [rule for rule in _rules(policy, "") if rule.key != "format"]


def refused_runs(runs: Sequence[RunRequest], policy: Policy, *, by_rules: bool) -> list[RefusedKind]:
    """What is refused of some runs that asked, the most frequent reason first: by rules, or for all other reasons."""
    verdicts = [
        verdict
        for run in runs
        if (verdict := run.verdict(policy)).answer == "refused" and (verdict.reason in BY_REASON) is by_rules
    ]
    messages = {verdict.reason: verdict.message for verdict in reversed(verdicts)}
    of = f"of the {counted(len(runs), 'run')} that asked last"
    return [
        RefusedKind(_by(reason), f"{count} {of}", "", messages[reason])
        for reason, count in Counter(verdict.reason for verdict in verdicts).most_common()
    ]


def refused_work(declines: Sequence[CountedDeclines], *, by_rules: bool) -> list[RefusedKind]:
    """The declined assignments, the last one first: those that rules have refused, or all others."""
    return [
        RefusedKind(_by(each.reason), counted(each.count, "assignment"), local_time(each.last), each.message)
        for each in declines
        if (each.reason in BY_REASON) is by_rules
    ]


def _by(reason: str) -> str:
    return ", ".join(BY_REASON.get(reason, (reason,)))


def _rules(section: Section, path: str) -> Iterator[SiteRule]:
    for name, field in type(section).model_fields.items():
        value, key = getattr(section, name), f"{path}{name}"
        if isinstance(value, Section):
            yield from _rules(value, f"{key}.")
        elif isinstance(value, dict) and value and all(isinstance(each, Section) for each in value.values()):
            for each, inner in value.items():
                # An exception for one task says nothing of the keys that it does not set.
                exception = isinstance(section, SecureSection)
                yield from (rule for rule in _rules(inner, f"{key}.{each}.") if rule.is_set or not exception)
        else:
            yield SiteRule(key, _words(value), name in section.model_fields_set, _meaning(field.description or ""))


def _words(value: object) -> str:
    match value:
        case None:
            return "not set"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:g}"
        case tuple():
            return ", ".join(str(each) for each in value) or "none named"
        case dict():
            return "; ".join(f"{name}: {', '.join(each)}" for name, each in value.items()) or "none named"
        case _:
            return str(value)


def _meaning(description: str) -> str:
    """Of a description in Markdown, as plain text: its first sentence, and those about an empty value."""
    text = _LINK.sub(r"\1", description).replace("`", "").replace("; see below", "")
    first, *others = _SENTENCE.split(text)
    return " ".join([first, *(other for other in others if other.startswith(_ABOUT_EMPTY))])
