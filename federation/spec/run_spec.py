"""RunSpec: the typed, validated description of a run, written as TOML.

    name = "digits"
    task = "digits"
    rounds = 30

    [algorithm]
    name = "fedmgda+"
    epsilon = 0.1

Every key is optional but `name`, `task` and `rounds`. An unknown or wrong key is refused with its path.
"""

import codecs
import json
import re
import tomllib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from federation.errors import Error
from federation.spec.client_sections import SelectionSpec, SimulationSpec, StatisticsSpec
from federation.spec.problems import Section, explain
from federation.spec.run_sections import (
    IDENTIFIER,
    TASK,
    AlgorithmSpec,
    EvaluateSpec,
    JacobianSpec,
    LimitsSpec,
    ObjectivesSpec,
    ParametersSpec,
    PrivacySpec,
    ServerSpec,
    Split,
    StopSpec,
)
from federation.spec.train_section import TrainSpec
from federation.statistics.data_columns import Column, ColumnError, check_summable
from federation.text_files import decoded, unmarked

# What a run does not do that trains nothing: it makes no step, and has a round for each model, or a single one.
_OF_TRAINING = ("rounds", "algorithm", "server", "train", "jacobian", "stop")
_OF_UPDATES = (
    *("clip", "blur", "disclose", "effective_members"),
    *("sample_noise", "sample_clip", "client_noise", "client_epsilon", "client_delta"),
)
EVALUATE = "evaluate"  # the kind of a run that measures models
STATISTICS = "statistics"  # the kind of a run that describes the members' data
RUN_KINDS = (EVALUATE, STATISTICS)  # besides "train"
_NOT_IN = {EVALUATE: (*_OF_TRAINING, "statistics"), STATISTICS: (*_OF_TRAINING, "models", "evaluate", "parameters")}
MAX_MODELS = 1000
_HEADER = rb"^[ \t]*\[[ \t]*%s[ \t]*\][^\n\r]*"  # of a section
Digest = Annotated[str, Field(pattern=r"^(blake3|sha256):[0-9a-f]{64}$")]
_KEYS = "see `fedpareto admin submit --explain` for the keys that exist"
MAX_LINE = 1000
MAX_PROBLEMS = 20


class SpecError(Error, ValueError):
    """The run specification cannot be used; the message names each wrong key."""


class RunSpec(Section):
    """A run specification; `RunSpec.parse` reads it from TOML."""

    name: str = Field(
        pattern=IDENTIFIER,
        description="The name of the run: at most 63 lower-case letters, digits, `.` and `-`. The name can be used "
        "again after the run has ended.",
    )
    task: str = Field(
        pattern=f"^{TASK}$",
        description="The [task](research/tasks.md). A worker takes part if its owner has allowed a task of this name.",
    )
    kind: Literal["train", "evaluate", "statistics"] = Field(
        "train",
        description='`"train"` trains a model. `"evaluate"` only [measures models](research/evaluation.md): it has '
        'one round for each model and makes no step. `"statistics"` only [describes the members\' '
        "data](research/statistics.md), in one round. Both refuse `rounds`, `[algorithm]`, `[server]`, `[train]`, "
        "`[jacobian]` and `[stop]`.",
    )
    models: Annotated[tuple[Digest, ...], Field(strict=False, max_length=MAX_MODELS)] = Field(
        (),
        description='With `kind = "evaluate"`: the digests of the models, one for each round. `submit` writes them '
        "from `--model` or `--model-of`.",
    )
    rounds: int = Field(
        ge=1, le=1_000_000, description='The number of rounds, 1 to 1 000 000. Only with `kind = "train"`.'
    )
    seed: int = Field(
        0,
        ge=0,
        lt=2**63,
        description="The seed of the initial model, of the selection of clients and, together with round and client, "
        "of the order of minibatches.",
    )
    results: Literal["members", "admins"] = Field(
        "members",
        description='Who gets the run\'s models with a command: `"members"` are administrators, and each member with '
        'an accepted reply ([`fedpareto worker model`](member/your-site.md#the-model)); `"admins"` are administrators '
        "alone. This keeps no model secret: members that train or evaluate have it.",
    )
    algorithm: AlgorithmSpec = AlgorithmSpec()
    server: ServerSpec = ServerSpec()
    train: TrainSpec = TrainSpec()
    parameters: ParametersSpec = ParametersSpec()
    objectives: ObjectivesSpec = ObjectivesSpec()
    jacobian: JacobianSpec = JacobianSpec()
    evaluate: EvaluateSpec = EvaluateSpec()
    statistics: StatisticsSpec = StatisticsSpec()
    stop: StopSpec = StopSpec()
    privacy: PrivacySpec = PrivacySpec()
    selection: SelectionSpec = SelectionSpec()
    limits: LimitsSpec = LimitsSpec()
    simulation: SimulationSpec = SimulationSpec()

    @model_validator(mode="before")
    @classmethod
    def _of_kind(cls, values: Any) -> Any:
        """Refuses the keys that another kind of run has, and counts the rounds of a run that does not train."""
        kind = values.get("kind", "train") if isinstance(values, dict) else "train"
        if kind not in RUN_KINDS:
            return values
        unsuitable = [key for key in _NOT_IN[kind] if key in values]
        for section, keys in (("privacy", _OF_UPDATES), ("evaluate", ("every",)), ("simulation", ("attack",))):
            given = values.get(section)
            unsuitable += [f"{section}.{key}" for key in keys if isinstance(given, dict) and key in given]
        if unsuitable:
            raise ValueError(f'{unsuitable[0]}: a run of kind = "{kind}" has no such key: it trains nothing')
        models = values.get("models")
        return {**values, "rounds": max(1, len(models)) if isinstance(models, list | tuple) else 1}

    @model_validator(mode="after")
    def _suits_kind(self) -> Self:
        if self.kind == "train":
            if self.models:
                raise ValueError('models: only a run of kind = "evaluate" measures models of others')
            if self.statistics != StatisticsSpec():
                raise ValueError('statistics: only a run of kind = "statistics" describes the data of members')
            return self
        self.model_fields_set.discard("rounds")  # it follows from the kind
        if len(set(self.models)) < len(self.models):
            raise ValueError("models: one model is there twice; a run measures each once")
        if self.parameters.keeps:
            raise ValueError(
                "parameters: a run that evaluates measures models of files, which hold no personal parameters and no "
                'local buffers: leave out `personal`, and use buffers = "averaged" or "frozen"'
            )
        if self.privacy.secure not in ("off", "sum"):
            raise ValueError(
                f'privacy.secure: a run of kind = "{self.kind}" has no updates to compare: "sum" in place of '
                f'"{self.privacy.secure}" hides each member\'s values'
            )
        if self.describes:
            self._check_form()
        return self

    def _check_form(self) -> None:
        """Raises ValueError unless a run that describes data is either private or open."""
        private = self.privacy.secure != "off"
        if private == self.statistics.open:
            raise ValueError(
                'statistics.open: choose one: privacy.secure = "sum", with which the coordinator learns sums over the '
                "members alone, or statistics.open = true, with which it reads the statistics of each member, here and "
                "in the policy.toml of each member"
            )
        if private and self.statistics.columns:
            try:
                check_summable(self.statistics.described)
            except ColumnError as error:
                raise ValueError(f"statistics.ranges: {error}") from None

    @property
    def trains(self) -> bool:
        """True if rounds end in a step; False if they only measure a model, or describe data."""
        return self.kind == "train"

    @property
    def does(self) -> str:
        """The name of its algorithm; the kind of a run that has none."""
        return self.algorithm.name if self.trains else self.kind

    @property
    def evaluates_privately(self) -> bool:
        """True if members show no measurement of their own, but only means over all of them."""
        return self.privacy.secure != "off" and "evaluation" not in self.privacy.disclose

    @property
    def measures(self) -> bool:
        """True if each round measures a model."""
        return self.kind == EVALUATE

    @property
    def describes(self) -> bool:
        """True if its only round describes the members' data."""
        return self.kind == STATISTICS

    @property
    def seed_of_model(self) -> int:
        """The seed of the initial model of a simulation."""
        return self.seed if self.simulation.model_seed is None else self.simulation.model_seed

    @property
    def evaluated(self) -> tuple[Split, ...]:
        """The splits that clients measure after a round, without the training split if its samples are protected."""
        private = self.privacy.sample_noise > 0
        return tuple(split for split in self.evaluate.splits if not (private and split == "train"))

    def evaluates_after(self, number: int, *, conceals: bool) -> bool:
        """True if clients evaluate the model of the round with this number, from 0, if it has a step.

        If noise conceals their replies they are asked for no evaluation: their scores would have no noise. A simulation
        conceals nothing.
        """
        over, every = number + 1, self.evaluate.every
        due = over == self.rounds or (every > 0 and over % every == 0)
        return bool(self.evaluated) and due and not conceals

    @classmethod
    def parse(cls, text: str | bytes) -> "RunSpec":
        """Reads a TOML document.

        Raises:
            SpecError: not TOML (with the line), or keys that are unknown, missing or wrong (each with its path).
        """
        try:
            text = decoded(text) if isinstance(text, bytes) else unmarked(text)
            _check_line_lengths(text)
            document = tomllib.loads(text)
            _check_integers(document)
        except (ValueError, RecursionError) as error:  # TOMLDecodeError, UnicodeDecodeError, an endless number
            raise SpecError(f"not a TOML document: {str(error)[:400]}") from error
        try:
            return cls.model_validate(document)
        except ValidationError as error:
            problems = error.errors()
            more = [f"and {len(problems) - MAX_PROBLEMS} more"] if len(problems) > MAX_PROBLEMS else []
            raise SpecError(
                "\n".join([explain(problem, _KEYS, cls) for problem in problems[:MAX_PROBLEMS]] + more)
            ) from error


def with_models(document: bytes, models: Sequence[str], source: RunSpec | None = None) -> bytes:
    """A specification of the kind "evaluate" that names its models by their digests.

    With a `source`, the specification of the run that has made them, it gets the seed and the parameters of that.

    Raises:
        SpecError: it names other models, another task, seed or parameters; or a model has personal parameters.
    """
    spec, given = RunSpec.parse(document), tomllib.loads(unmarked(decoded(document)))
    lines = []
    if spec.models not in ((), tuple(models)):
        raise SpecError("models: they are other models than the given ones: leave the key out, and it is written")
    if not spec.models:
        lines += ["models = [", *(f"    {json.dumps(model)}," for model in models), "]"]
    if source is not None and spec.task != source.task:
        raise SpecError(f"task: the models are of {source.task}, and the specification is for {spec.task}")
    for key in ("seed", "parameters") if source is not None else ():
        if getattr(spec, key) == (wanted := getattr(source, key)):
            continue
        if key in given:
            raise SpecError(f"{key}: it differs from that of the run that has made the models: leave it out")
        if key == "seed":
            lines.append(f"seed = {wanted}")
            continue
        for name, value in wanted.model_dump(exclude_defaults=True).items():
            many = [f"    {json.dumps(item)}," for item in value] if isinstance(value, tuple) else []
            lines += [f"parameters.{name} = [", *many, "]"] if many else [f"parameters.{name} = {json.dumps(value)}"]
    return _checked(lines, document)


def with_columns(document: bytes, columns: Sequence[Column]) -> bytes:
    """A specification of the kind "statistics" that names its columns, those of the task if it names none itself.

    Raises:
        SpecError: neither names any; or it names one that the task, which names its columns, does not have.
    """
    spec = RunSpec.parse(document)
    asked, known = spec.statistics, {column.name: column for column in columns}
    if not (asked.columns or known):
        raise SpecError(
            f"statistics.columns: missing, and the task {spec.task} names none (Task.columns): name those that members "
            "shall describe"
        )
    for name in (*asked.columns, *asked.ranges, *asked.classes) if known else ():
        if name not in known:
            raise SpecError(f"statistics: the task {spec.task} has no column {name!r}; it has {', '.join(known)[:200]}")
    chosen = [known[name] for name in asked.columns or known if name in known]
    lines = []
    if not asked.columns:
        lines += ["columns = [", *(f"    {json.dumps(column.name)}," for column in chosen), "]"]
    if not asked.ranges:
        ranged = [column for column in chosen if column.low is not None and column.name not in asked.classes]
        lines += [f"ranges.{json.dumps(column.name)} = [{column.low!r}, {column.high!r}]" for column in ranged]
    if not asked.classes:
        counted = [column for column in chosen if column.classes and column.name not in asked.ranges]
        lines += [f"classes.{json.dumps(column.name)} = {column.classes}" for column in counted]
    return _within(document, "statistics", lines)


def with_scale(document: bytes, result: str, tensors: Sequence[str]) -> bytes:
    """A specification that names the result with which the layer Standardise of its model is filled.

    Args:
        document: the specification.
        result: the digest of the signed result.
        tensors: the names of the layer's tensors, which are fixed.

    Raises:
        SpecError: it describes data; it names another result; or its `parameters.fixed` leaves one of the tensors out.
    """
    spec = RunSpec.parse(document)
    if spec.describes:
        raise SpecError(f'kind = "{spec.kind}": a run that describes data takes no model, so nothing is filled')
    named = spec.parameters
    if named.statistics not in ("", result):
        raise SpecError(f"parameters.statistics: {named.statistics} is another result than {result}: leave it out")
    lines = [] if named.statistics else [f"statistics = {json.dumps(result)}"]
    if not named.fixed:
        lines += ["fixed = [", *(f"    {json.dumps(name)}," for name in tensors), "]"]
    for name in tensors if named.fixed else ():
        if not any(fnmatchcase(name, pattern) for pattern in named.fixed):
            raise SpecError(
                f"parameters.fixed: {name!r} is filled from the result, so it has to be fixed: leave fixed out"
            )
    return _within(document, "parameters", lines)


def _within(document: bytes, section: str, lines: Sequence[str]) -> bytes:
    """The document, which can be used, with these lines in a section. Raises SpecError if it cannot be used then."""
    header = re.compile(_HEADER % section.encode(), re.MULTILINE).search(document)
    if header is not None:
        added = "".join(f"\n{line}" for line in lines).encode()
        return _checked([], document[: header.end()] + added + document[header.end() :])
    try:
        return _checked([line if line[:1] in " ]" else f"{section}.{line}" for line in lines], document)
    except SpecError as error:
        if not isinstance(error.__cause__, tomllib.TOMLDecodeError):
            raise
        raise SpecError(
            f"{section}: keys are written into it, so it has to be a section [{section}], or keys such as "
            f"{section}.{lines[0].partition(' ')[0]} = ..., and no table in one line"
        ) from error


def _checked(lines: Sequence[str], document: bytes) -> bytes:
    """The document with these lines before it. Raises SpecError if it cannot be used."""
    named = "".join(f"{line}\n" for line in lines).encode() + document.removeprefix(codecs.BOM_UTF8)
    RunSpec.parse(named)
    return named


def _check_line_lengths(text: str) -> None:
    # The time that tomllib needs grows with the square of the length of a dotted key.
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > MAX_LINE:
            raise ValueError(f"line {number} has {len(line)} characters; at most {MAX_LINE}")


def _check_integers(value: Any) -> None:
    # TOML's integers have 64 bits; Python's have no limit, and cannot be shown beyond some thousand digits.
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError("an integer of more than 64 bits")
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_integers(item)
