"""A run specification and the algorithm that it names."""

from collections.abc import Iterator
from contextlib import contextmanager

from coordinator.rounds.runs.client_noise import affordable
from federation.aggregation.base import Algorithm
from federation.aggregation.interface import HyperparameterError
from federation.aggregation.registry import algorithm, rule_code
from federation.aggregation.rules.objectives import ObjectiveRule
from federation.aggregation.rules.scalarised import Scalarised
from federation.aggregation.server_optimizers import Optimizer
from federation.attacks import AttackError, check_exists
from federation.secure.evaluation import deviation_of_mean
from federation.secure.thresholds import Mode, Thresholds
from federation.spec.computation import Ability
from federation.spec.objective_names import JOINT
from federation.spec.run_sections import AUTO
from federation.spec.run_spec import RunSpec, SpecError
from federation.spec.task_metrics import BUILT_IN, MetricKind, check_metrics

_LARGE_FOR_ADAM = 0.05
_APPROVED = (
    'members take part only if their owners approve this run (`fedpareto worker approve`): approve = "each-run" in '
    "policy.toml"
)


def parse_run(text: str | bytes) -> tuple[RunSpec, Algorithm]:
    """Reads a TOML document, the algorithm's hyper-parameters included.

    Raises:
        SpecError: it cannot be used; the message names each key that is wrong.
    """
    spec = RunSpec.parse(text)
    if spec.simulation.attack:
        _check_attack(spec.simulation.attack)
    with _named():
        rule = algorithm(spec.algorithm.name, spec.algorithm.hyperparameters)
    if not spec.trains:
        return spec, rule  # the default one, which nothing asks
    if (rule.reads_losses or rule.reads_accuracies) and not spec.train.measure:
        raise SpecError(f"train.measure: {rule.name} needs what clients measure before they train; leave it out")
    if spec.privacy.sample_noise and rule.measures_samples:
        raise SpecError(
            f"privacy.sample_noise: {rule.name} asks clients for losses or gradients on their samples without noise; "
            "choose an algorithm that needs updates only, such as fedmgda+ or fedavg"
        )
    if spec.privacy.client_noise:
        _check_client_noise(spec, rule)
    _check_training(spec, rule)
    with _named(), rule_code(rule, "asking it for an optimiser"):
        optimizer = rule.optimizer()
    if optimizer is not None and spec.server.optimizer != "sgd":
        raise SpecError(f"server.optimizer: {rule.name} brings its own; leave it out")
    if spec.server.learning_rate == AUTO:
        _must_bound_steps(spec, rule, optimizer)
    if spec.privacy.secure != "off":
        check_suits_private_rounds(spec, rule)
        if spec.train.wire_dtype != "float32":
            raise SpecError(
                f"train.wire_dtype: members of a private round send masked sums, which cannot be rounded to "
                f'"{spec.train.wire_dtype}"; leave it out'
            )
    if spec.parameters.buffers == "averaged":
        _check_buffers(spec)
    return spec, rule


def _must_bound_steps(spec: RunSpec, rule: Algorithm, optimizer: Optimizer | None) -> None:
    """Raises SpecError if the server's rate cannot be "auto", with the reason and the remedy."""
    key, number = f'server.learning_rate = "{AUTO}"', "a number, such as 1"
    if spec.server.optimizer != "sgd":
        raise SpecError(
            f'{key}: it bounds a step along the direction, and server.optimizer = "{spec.server.optimizer}" makes '
            'another step from what it remembers; use "sgd", or give a number, such as 0.1'
        )
    if optimizer is not None and optimizer.slots:
        raise SpecError(
            f"{key}: it bounds a step along the direction, and {rule.name} adds momentum to that; give {number}"
        )
    if rule.no_auto:
        raise SpecError(f"{key}: for {rule.name}, {rule.no_auto}; give {number}")
    if spec.privacy.client_noise:
        raise SpecError(
            f"{key}: it takes the lengths of the updates as they are, and privacy.client_noise protects no number "
            f"that depends on them; give {number}"
        )
    if spec.privacy.clip:
        raise SpecError(f"{key}: no step is longer than privacy.clip in any case; leave it out")
    if spec.privacy.secure != "off" and "norm" not in spec.privacy.disclose:
        raise SpecError(
            f'{key}: it needs the lengths of the updates, which a private round hides; give {number}, or add "norm" to '
            "privacy.disclose, which the members' owners must allow"
        )


def _check_attack(description: str) -> None:
    try:
        check_exists(description)
    except AttackError as error:
        raise SpecError(f"simulation.attack: {error}") from error


def _check_buffers(spec: RunSpec) -> None:
    """Raises SpecError if the run protects values that averaged buffers, which are sent in the clear, would reveal."""
    privacy = spec.privacy
    for key, protects, why in (
        ("secure", privacy.secure != "off", "a private round sums updates alone"),
        ("sample_noise", privacy.sample_noise > 0, "no noise protects the samples that they describe"),
        ("client_noise", privacy.client_noise > 0, "no noise protects the client that they describe"),
    ):
        if protects:
            raise SpecError(
                f'parameters.buffers: "averaged" buffers are sent in the clear, and {why} (privacy.{key}): use "local" '
                'or "frozen", or a model with GroupNorm or LayerNorm'
            )


def check_suits_private_rounds(spec: RunSpec, rule: Algorithm) -> None:
    """Checks that a rule can work on the values that a private round opens (section 6 of the protocol).

    Raises:
        SpecError: it cannot; the message says why and what to use instead.
    """
    mode, privacy = spec.privacy.secure, spec.privacy

    def require(holds: bool, problem: str) -> None:
        if not holds:
            raise SpecError(f"privacy.{problem}")

    why = _NOT_PRIVATE.get(rule.name, "it needs more than one weighted sum and the Gram matrix")
    require(
        rule.private is not None,
        f'secure = "{mode}": {rule.name} has no private rounds: {why}; use fedmgda+ with "private" or "verified", or '
        'fedavg-n with "sum"',
    )
    require(
        rule.private == "sum" or mode != "sum",  # section 6: in `sum` nobody opens the Gram matrix that the rule reads
        f'secure = "sum": {rule.name} needs the Gram matrix: use "private" or "verified"',
    )
    mixing = [stage.name for stage in rule.stages if stage.name not in ("normalize", "clip")]
    require(
        not (rule.stages and rule.private == "sum"),  # section 6: members' vectors are summed as they are
        f"secure: algorithm.pre: {rule.name} sums updates of length 1 in a private round; "
        "leave out the stages before the rule",
    )
    require("arc" not in mixing, "secure: algorithm.pre: arc clips by the lengths of updates, which stay hidden")
    require(
        getattr(rule, "tau", 0) == 0,  # section 6: nobody keeps updates of earlier rounds
        f"secure: algorithm.tau: {rule.name} would need updates of earlier rounds, which nobody has; leave tau out",
    )
    require(
        not getattr(rule, "preferences", ()),  # section 3.5: members bound every weight by epsilon and the cover
        f"secure: algorithm.preferences: members of a private round bound each other's weights alike; {rule.name} has "
        "preferences in open rounds only",
    )
    over_objectives = isinstance(rule, ObjectiveRule | Scalarised)
    require(not over_objectives or mode == "sum", f'secure = "{mode}": {rule.name} needs nothing but sums: use "sum"')
    require(
        (rule.name == "fedavg" or over_objectives) == (privacy.clip > 0),
        f"clip: fedavg and the rules over objectives need the length to which a member's vector is shortened, such as "
        f"1.0; others sum updates of length 1, and {rule.name} is one of these"
        if privacy.clip
        else f"clip: {rule.name} needs the length to which a member's vector is shortened, such as 1.0",
    )
    if over_objectives:
        check_suits_private_sums(rule)
    measures = rule.reads_losses or getattr(rule, "measures", False)
    for reads, number in ((measures, "loss"), (rule.reads_accuracies, "accuracy")):
        require(not reads or number in privacy.disclose, f'disclose: {rule.name} needs "{number}"')
    needs_norms = rule.name == "q-fedavg" or (rule.name == "fedfv" and not rule.stages)
    require(
        not needs_norms or "norm" in privacy.disclose,  # section 6: lengths stay with the members
        f'disclose: {rule.name} needs "norm", the lengths of the updates'
        + (', or the stage "normalize"' if rule.name == "fedfv" else ""),
    )
    require(not spec.objectives.serve, "secure: objectives.serve: members of a private round serve all objectives")


def check_suits_private_sums(rule: Algorithm) -> None:
    """Checks that a rule over objectives needs nothing of a member but its part of a sum. Raises SpecError."""
    for key, allowed in (
        ("sketch", {"count", "mask", "exact"}),
        ("bound", {"none"}),
        ("unbiased", {False}),
        ("latecomers", {False}),
        ("exact_stationarity", {False}),
    ):
        value = getattr(rule, key, None)
        if value is not None and value not in allowed:
            choices = " or ".join(
                f'"{choice}"' if isinstance(choice, str) else str(choice).lower() for choice in sorted(allowed)
            )
            raise SpecError(f"privacy.secure: algorithm.{key}: in a private round it is {choices}")


def _check_training(spec: RunSpec, rule: Algorithm) -> None:
    """Raises SpecError if clients cannot train as `[train]` says for this rule, or with noise."""
    sgd = spec.train
    if spec.privacy.sample_noise and (why := sgd.without_noise()):
        raise SpecError(f"train.{why} (privacy.sample_noise)")
    if rule.divides_by_rate and not sgd.plain:
        key = "optimizer" if sgd.optimizer != "sgd" else "step_schedule" if sgd.step_warm_up == 0 else "step_warm_up"
        raise SpecError(
            f"train.{key}: {rule.name} as it is set up divides updates by train.learning_rate and takes the result for "
            "gradients: use plain SGD with one rate in each round, or a rule that does not, such as fedmgda+"
        )


_NOT_PRIVATE = {
    "krum": "it takes one member's update, which the sum would show",
    "median": "it reads single coordinates of the updates",
    "trimmed-mean": "it reads single coordinates of the updates",
    "norm-clipping": "fedavg with privacy.clip does the same with a fixed length",
    "fedmdfg": "its line search needs every member's losses at several models",
}


def _check_client_noise(spec: RunSpec, rule: Algorithm) -> None:
    """Raises SpecError if noise on the steps of a run would not protect its clients."""
    key = "privacy.client_noise"
    if spec.privacy.secure != "off":
        raise SpecError(
            f"{key}: in private rounds the members see the weights, which have no noise; choose one of both"
        )
    if rule.sensitivity(1) is None:
        raise SpecError(
            f"{key}: {rule.name} as it is set up has no bound on how far one client moves the step; fedavg-n, and "
            "fedmgda+ without drop_zero, have one, both without stages (pre)"
        )
    if spec.algorithm.prior != "uniform":
        raise SpecError(
            f'{key}: algorithm.prior = "{spec.algorithm.prior}" weighs clients by their data; use "uniform"'
        )


def needed_abilities(spec: RunSpec, rule: Algorithm, objectives: tuple[str, ...]) -> frozenset[Ability]:
    """The abilities that trainers need, besides training on one loss and evaluating."""
    parameters = spec.parameters
    frozen = frozenset({Ability.FROZEN} if parameters.frozen or parameters.buffers == "frozen" else ())
    frozen |= frozenset({Ability.FIXED} if parameters.fixed else ())
    if not spec.trains:
        return frozen
    with _named(), rule_code(rule, "asking it for the abilities that it needs"):
        needed = rule.needs(objectives)
    conditions = {
        Ability.NOISE: spec.privacy.sample_noise > 0,
        Ability.OPTIMIZERS: not spec.train.bare,
        Ability.PROXIMAL: spec.train.proximal_mu > 0,
    }
    return needed | frozen | {name for name, needed_here in conditions.items() if needed_here}


def cautions(spec: RunSpec, rule: Algorithm) -> tuple[str, ...]:
    """Warnings for the operator of a run, such as claims of members that steer it, or a decay without effect."""
    if not spec.trains:
        return () if spec.privacy.secure == "off" else private_cautions(spec, rule)
    with _named(), rule_code(rule, "asking it for cautions"):
        given = rule.cautions()
        warnings = (given,) if isinstance(given, str) else tuple(map(str, given))  # a plug-in may return one
    if spec.privacy.secure != "off":
        warnings += private_cautions(spec, rule)
    if spec.train.optimizer != "sgd" and spec.train.learning_rate >= _LARGE_FOR_ADAM:
        warnings += (
            f"train.learning_rate = {spec.train.learning_rate:g} is large for {spec.train.optimizer}, which moves each "
            "parameter by about the rate in each step; 0.001 is usual",
        )
    if spec.train.precision == "fp16":
        warnings += ('train.precision = "fp16": members without a CUDA device decline; "bf16" works everywhere',)
    if spec.server.decay and spec.rounds <= spec.server.decay_every:
        warnings += (
            f"server.decay = {spec.server.decay:g} has no effect: the rate changes every {spec.server.decay_every} "
            f"rounds, and the run has {spec.rounds}; server.decay_every = {max(1, spec.rounds // 20)} makes about 20 "
            "reductions",
        )
    if spec.privacy.client_noise:
        short, long = (spec.privacy.client_noise * (rule.sensitivity(replies) or 0.0) for replies in (1000, 10))
        warnings += (
            "privacy.client_noise: the direction of a step is at most 1 long. The noise on it, in square roots of the "
            f"number of parameters, is {short:.2g} long with 1000 replies and {long:.2g} with 10: it is meant for "
            "thousands of clients",
            "privacy.client_noise: the coordinator chooses the noise, and with it the models; `fedpareto verify` "
            "bounds how far each step moves, and cannot verify the models",
        )
        if (rounds := affordable(spec.privacy, spec.rounds)) < spec.rounds:
            warnings += (
                f"privacy.client_epsilon = {spec.privacy.client_epsilon:g} is spent after {rounds} of {spec.rounds} "
                "rounds; the run is then stopped",
            )
    keys = []
    if spec.selection.by == "samples" and spec.selection.method != "all":
        keys.append('selection.by = "samples"')
    if spec.algorithm.prior == "samples":
        keys.append('algorithm.prior = "samples"')
    if keys:
        warnings += (
            f"{' and '.join(keys)}: members claim their numbers of training samples, and nobody can verify them; a "
            f"claim counts up to limits.samples = {spec.limits.samples}: set that near the largest honest number",
        )
    return warnings


def needed_sessions(spec: RunSpec, rule: Algorithm) -> dict[str, int]:
    """The private rounds of a whole run, for "training" and for "evaluation", if no attempt at a round is voided."""
    if not spec.trains:
        return {"training": 0, "evaluation": spec.rounds if spec.measures else 0}
    every, each = spec.evaluate.every, 2 if rule.name.startswith("fedcmoo") else 1
    evaluations = 1 if every == 0 else -(-spec.rounds // every)
    return {
        "training": each * spec.rounds,
        "evaluation": 0 if "evaluation" in spec.privacy.disclose else evaluations,
    }


def private_cautions(spec: RunSpec, rule: Algorithm) -> tuple[str, ...]:
    """Warnings for the operator of private rounds, with the number of sessions that the run needs."""
    needs = needed_sessions(spec, rule)
    asks = " and ".join(f"{count} of {kind}" for kind, count in needs.items() if count)
    experimental = "private rounds are experimental until an outside cryptographer has reviewed them"
    if spec.describes:
        return (
            experimental,
            "a data set is described in one private sum: it then joins no sum over other members, or of other columns, "
            "ranges or bins. Choose all of them now, and wait until all members attend",
            _APPROVED,
        )
    warnings: tuple[str, ...] = (
        experimental,
        f"the run needs {asks} of the sessions that every member's owner allows its data set (policy.toml)",
    )
    if needs["evaluation"]:
        ten, twenty = (deviation_of_mean(spec.privacy.evaluation_noise, Thresholds(m, Mode.SUM), m) for m in (10, 20))
        warnings += (
            f"privacy.evaluation_noise = {spec.privacy.evaluation_noise:g}: the mean accuracy of 10 members has noise "
            f"of {ten:.2g}, of 20 members {twenty:.2g}, and a mean loss 10 times as much. Metrics that not every "
            "member computes are left out, and those on splits that not every member has",
        )
    if not spec.trains:
        return (*warnings, _APPROVED)
    if spec.train.batch_size == 0 and not spec.privacy.sample_noise:
        warnings += (
            "train.batch_size = 0: a member that trains on all its samples at a time makes the same update again from "
            "the same model. If an attempt at a round is voided, and the next one leaves out a member, the difference "
            "of the two sums shows its update: use minibatches, or privacy.sample_noise",
        )
    if spec.algorithm.prior == "samples":
        warnings += (
            'algorithm.prior = "samples": a member that holds much more than the others is not covered by them, and '
            "every round is skipped",
        )
    return warnings


def fitting_objectives(spec: RunSpec, rule: Algorithm, objectives: tuple[str, ...]) -> tuple[str, ...]:
    """The objectives of a run: those that the specification names, otherwise those of the task, in its order.

    Raises:
        SpecError: they do not suit the rule or the specification.
    """
    named = spec.objectives.names or objectives or (JOINT,)
    if len(set(named)) < len(named):
        raise SpecError(f"objectives.names: {', '.join(named)}: each once")
    if objectives and set(named) != set(objectives):
        raise SpecError(
            f"objectives.names: {', '.join(named)} are not those of {spec.task}, which has {', '.join(objectives)}"
        )
    if len(named) > 1 and (spec.parameters.keeps or spec.parameters.buffers == "averaged"):
        key, subject = ("personal", "personal parameters") if spec.parameters.personal else ("buffers", "such buffers")
        raise SpecError(f"parameters.{key}: {spec.task} has {len(named)} objectives; {subject} are for tasks with one")
    for client, served in spec.objectives.serve.items():
        if unknown := [name for name in served if name not in named]:
            raise SpecError(f"objectives.serve.{client}: no objective {unknown[0]!r}; there are {', '.join(named)}")
    with _named(), rule_code(rule, "fitting it to the objectives"):
        rule.fit(named)
        takes_gradients = spec.parameters.buffers and Ability.GRADIENTS in rule.needs(named)
    if takes_gradients:
        raise SpecError(f"parameters.buffers: {rule.name} needs gradients, which a model with buffers has none of here")
    return named


def fitting_metrics(spec: RunSpec, metrics: tuple[MetricKind, ...]) -> tuple[MetricKind, ...]:
    """The metrics of a run: those that the specification names, otherwise those of the task.

    Raises:
        SpecError: they are not the task's or cannot be used, or `stop` or `privacy` does not suit them.
    """
    named = spec.evaluate.kinds
    if metrics and (strange := [kind for kind in named if kind not in metrics]):
        raise SpecError(
            f"evaluate.metrics.{strange[0].name}: the metrics of {spec.task} are "
            + "; ".join(f"{kind.name} (better: {kind.better}, largest: {kind.largest:g})" for kind in metrics)
        )
    fitting = named or metrics
    try:
        check_metrics(fitting)
    except ValueError as error:
        raise SpecError(f"evaluate.metrics: {error}") from None
    if spec.stop.metric:
        _check_stop(spec, fitting)
    return fitting


def _check_stop(spec: RunSpec, metrics: tuple[MetricKind, ...]) -> None:
    """Raises SpecError if members will not report the metric that stops the run."""
    stop = spec.stop
    name, _, key = stop.metric.partition("/")
    if (names := [kind.name for kind in (*BUILT_IN, *metrics)]) and name not in names:
        raise SpecError(f"stop.metric: {spec.task} has no metric {name!r}; there are {', '.join(names)}")
    if stop.split not in spec.evaluated:
        raise SpecError(f'stop.split: "{stop.split}" is not evaluated; evaluate.splits has {list(spec.evaluated)}')
    if spec.evaluate.every == 0:
        raise SpecError("stop: evaluate.every = 0 evaluates no model before the last round")
    if spec.privacy.client_noise:
        raise SpecError("stop: privacy.client_noise hides what members measure; choose one of both")
    if spec.privacy.secure != "off" and "evaluation" not in spec.privacy.disclose and (stop.of != "mean" or key):
        raise SpecError(
            f'stop: a private round shows only the mean of a metric: use of = "mean"{" and no class" if key else ""}, '
            'or privacy.disclose = ["evaluation"], which owners must allow'
        )


@contextmanager
def _named() -> Iterator[None]:
    """Puts the section in front of the key that is wrong."""
    try:
        yield
    except HyperparameterError as error:
        raise SpecError(f"algorithm.{error}") from error
