"""What a run asks of a site, in words: for `worker runs RUN` and the member's console.

The words say what the run's specification asks for, and apart from that what the worker compares with it. They promise
no more than this.
"""

from collections.abc import Iterator

from federation.spec.run_spec import RunSpec, SpecError
from federation.text import counted, escaped
from worker.site.policy_file import Policy
from worker.site.run_requests import RunRequest

_SEEN = {
    "off": "the coordinator's operator sees the update of every member, and a security officer can export it",
    "sum": "the coordinator sees one weighted sum of the updates of a round, and no member's own",
    "private": "the coordinator sees one weighted sum of the updates of a round, and inner products of sketches of "
    "them; no member's own update",
    "verified": "the coordinator sees one weighted sum of the updates of a round, and inner products of sketches of "
    "them; no member's own update. It checks the length of each",
}


def asked_words(run: RunRequest, policy: Policy) -> Iterator[tuple[str, str]]:
    """Names and sentences, without control characters."""
    yield "asked by", escaped(run.submitted_by or "nobody whom the coordinator names")
    yield "task", escaped(run.task)
    try:
        spec = RunSpec.parse(run.document)
    except SpecError as error:
        yield "specification", escaped(f"this worker cannot read it: {error}")
        return
    yield "rounds", f"{spec.rounds} at most"
    rule = ", ".join(f"{name} = {value}" for name, value in spec.algorithm.hyperparameters.items())
    yield "algorithm", escaped(spec.algorithm.name + (f" ({rule})" if rule else ""))
    secure = spec.privacy.secure
    update = "an update of the model" if secure == "off" else "a masked vector of your update"
    yield "would leave", f"after each training {update}; after each evaluation {_measured(spec)}"
    yield (
        "bytes",
        "4 for each parameter that the run shares and each row, in each round; `limits.max_bytes` bounds them",
    )
    yield "who sees it", f"{_SEEN[secure]}. Administrators see the numbers and names"
    yield (
        "who gets the model",
        "administrators, and each member with an accepted reply"
        if spec.results == "members"
        else "administrators alone by a command; members that train or evaluate have it, too",
    )
    yield "budgets", _budgets(run, spec, policy)
    yield "your worker compares", _compared(run, policy)


def changed_words(run: RunRequest, before: RunRequest) -> list[str]:
    """The lines of the specification that differ from another one, each with + or -, without control characters."""
    new, old = (each.document.decode(errors="replace").splitlines() for each in (run, before))
    lines = [f"+ {line}" for line in new if line not in old] + [f"- {line}" for line in old if line not in new]
    if run.initial_model != before.initial_model:
        lines += [f"+ initial model {run.initial_model}", f"- initial model {before.initial_model}"]
    return [escaped(line) for line in lines]


def _measured(spec: RunSpec) -> str:
    splits = ", ".join(spec.evaluated) or "no split"
    if spec.privacy.client_noise:
        return "nothing: this run measures no model"
    if spec.privacy.secure == "off" or "evaluation" in spec.privacy.disclose:
        return f"losses and metrics on {splits}, in the clear"
    return f"losses and metrics on {splits}, in a sum with noise"


def _budgets(run: RunRequest, spec: RunSpec, policy: Policy) -> str:
    rule = next((rule for name, rule in policy.privacy.items() if run.task in (rule.tasks or (name,))), None)
    noise = (
        "no budget of epsilon bounds it: policy.toml has no [privacy] section for this task"
        if rule is None
        else f"of epsilon at most what is left of {rule.epsilon:g}"
    )
    if spec.privacy.secure == "off":
        return f"{noise}; its rounds are not private, so it uses no private rounds"
    allowed = policy.secure.of(run.task)
    return (
        f"{noise}; of private rounds at most what is left of {allowed.sessions} trainings and {allowed.evaluations} "
        f"evaluations ({counted(spec.rounds, 'round')} are planned, and an attempt that fails counts too)"
    )


def _compared(run: RunRequest, policy: Policy) -> str:
    parts = ["the digest of the specification", "the task", "in round 0 the initial model"]
    if run.discloses is not None:
        parts.append("that no update leaves in the clear")
        ending = "your limits"
    else:
        ending = "your limits; the rest of an open run's work is not compared with the specification"
    return f"{', '.join(parts)}, and {ending}"
