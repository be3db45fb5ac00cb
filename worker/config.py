"""What a worker's process runs with: `worker.toml` in its home, or another file that its owner names with `--config`.

    format = 1
    tasks = ["digits"]
    data = "/srv/data"
    threads = 8

It is read when a command starts. An option of the command wins over FEDPARETO_CODE, and this over the file; a list
replaces a list. What the coordinator may ask of the site stands in another file, `policy.toml`.
"""

import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Self, get_origin

from pydantic import BeforeValidator, Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo

from federation.errors import Error
from federation.files.owners_own import NotOwnersOwn, check_owners_own
from federation.monitoring.metrics_section import MetricsSection
from federation.spec.problems import Format, Section, explain, read_document
from federation.tasks import DataSource, Loading, Part
from federation.text import comment, did_you_mean
from federation.text_files import FORMAT

OPTIONS = {"tasks": "--task", "data": "--data", "code": "--code", "device": "--device"}  # by key: options of their own
_KNOWN = "`fedpareto worker config` lists the keys that exist"
_BY_TASK = ("objectives", "trainer", "trainer_command")
_PATHS = frozenset({"data", "code", "accomplices", "passphrase_file", "proxy", "spec", "notify", "metrics"})
_SECRET = frozenset({"proxy"})  # a password may stand in a value that is refused


class WorkerConfigError(Error, ValueError):
    """A `worker.toml` or a `--set` that cannot be used; the message names the file and each key that is wrong."""


def _for_each_task(value: Any) -> Any:
    """A value without a table is that of the one task."""
    return value if isinstance(value, dict) else {"": value}


def _objectives(value: Any) -> Any:
    """Lists of names by task; "left,right" is a list, too."""
    return {
        task: [part.strip() for part in names.split(",") if part.strip()] if isinstance(names, str) else names
        for task, names in _for_each_task(value).items()
    }


Texts = Annotated[tuple[str, ...], Field(strict=False)]
TextByTask = Annotated[dict[str, str], BeforeValidator(_for_each_task)]
NamesByTask = Annotated[dict[str, Texts], BeforeValidator(_objectives)]


class Notify(Section):
    """The table `[notify]`: the command that tells the owner of what needs attention."""

    command: Texts = Field(
        (),
        description="The program, and its arguments, that [tells you](member/worker-file.md#a-command-that-tells-you) "
        "what needs your attention; without the key, the worker's log alone does.",
    )
    seconds: float = Field(
        30.0, ge=1, le=3600, description="The seconds after which that program is ended, with its children."
    )

    @field_validator("command", mode="before")
    @classmethod
    def _no_shell(cls, value: Any) -> Any:
        if isinstance(value, str):
            raise ValueError(f"{value!r} is one text, and no shell reads it: write a list, [program, argument, ...]")
        return value

    @field_validator("command")
    @classmethod
    def _program(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if value and not value[0]:
            raise ValueError("the first text of the list names the program, and it is empty")
        if any("\0" in part for part in value):
            raise ValueError("no argument of a program can hold the character NUL")
        return value


_TABLES: Mapping[str, type[Section]] = {"notify": Notify, "metrics": MetricsSection}


class WorkerConfig(Section):
    """The keys of `worker.toml`. Of a table by task, the key "" has the value of the one task."""

    format: Format
    tasks: Texts = Field((), description="The tasks that this worker may train.")
    data: str = Field("", description="The directory of this client's data; none where the data comes with the task.")
    code: Texts = Field(
        (), description="Directories of your own modules, for classes named `module:Class`; also FEDPARETO_CODE."
    )
    device: str = Field("auto", description='"auto", "cpu", "cuda" or "cuda:N".')
    threads: int = Field(0, ge=0, description="The CPU threads for training; 0 is the trainer's own number.")
    processes: int = Field(
        1, ge=1, description="The processes of this machine that train together, one for each GPU; see torchrun."
    )
    loader_workers: int = Field(
        0, ge=0, description="The processes that read samples which are not in memory; 0 for the trainer's own."
    )
    pin_memory: bool = Field(
        False,
        description="Whether samples that are not in memory are read into pinned memory, from which a GPU copies "
        "faster.",
    )
    download: bool = Field(False, description="Whether tasks may fetch public data sets into `data`.")
    objectives: NamesByTask = Field(
        {}, description="The objectives that this client serves, or a table of them by task; none is all."
    )
    trainer: TextByTask = Field(
        {},
        description='The trainer in place of the task\'s own, or a table by task: "torch", the name that a package '
        "gives, or `module:Class`.",
    )
    trainer_command: TextByTask = Field(
        {}, description="The command that starts a process which trains, or a table of commands by task."
    )
    trainer_silence: float = Field(
        600.0, ge=1, description="The seconds without a message after which that process is ended."
    )
    sketches: Texts = Field((), description="Sketches of your own that this worker may use, each `module:Class`.")
    passphrase_file: str = Field(
        "", description="The file whose first line is the passphrase of the private keys; none where they have none."
    )
    proxy: str = Field(
        "",
        description='The proxy on the way to the coordinator: "http://HOST:PORT"; "@FILE" reads the URL, which may '
        'hold a password, from a file; "direct" is none; without the key, https_proxy and no_proxy of the '
        "environment.",
    )
    part: str = Field("", description="Rehearse with one part of a data set: 3/8 is the third of eight.")
    partition: str = Field(
        "iid",
        description="The partition: iid, shards:S, labels:S, dirichlet:ALPHA or natural; see `fedpareto data show`.",
    )
    sizes: str = Field(
        "equal", description="The number of samples of a part, for iid and dirichlet: equal or lognormal:SIGMA."
    )
    part_seed: int = Field(0, description="The seed of the partition; the same for all parts.")
    spec: str = Field(
        "",
        description="A run specification, which `--rehearse` follows; without `--rehearse`, its smallest minibatch "
        "is tried before the worker attends.",
    )
    attack: str = Field(
        "", description="Rehearse an attack in your own federation: `fedpareto worker attacks` lists them."
    )
    accomplices: str = Field(
        "", description="The directory that attackers share, for attacks that need the updates of several clients."
    )
    notify: Notify = Notify()
    metrics: MetricsSection = MetricsSection()

    @field_validator(*_BY_TASK)
    @classmethod
    def _said(cls, value: Mapping[str, Any]) -> Mapping[str, Any]:
        return {task: item for task, item in value.items() if item}

    @field_validator("proxy")
    @classmethod
    def _no_password(cls, value: str) -> str:
        if "@" in value[1:]:
            raise ValueError("a user and password do not belong here: put the URL into a file, and name it, @FILE")
        return value

    @model_validator(mode="after")
    def _names_tasks(self) -> Self:
        for key in _BY_TASK:
            table = getattr(self, key)
            if "" in table and len(set(self.tasks)) > 1:
                raise ValueError(f"{key} {in_toml(table[''])}: of which task? Write a table: {key}.TASK = VALUE")
            for task in table:
                if task and self.tasks and task not in self.tasks:
                    near = did_you_mean(task, self.tasks)
                    raise ValueError(f"{key}: {task!r} is none of the tasks{near or ':'} {', '.join(self.tasks)}")
        for task in (*self.tasks, ""):
            if task in self.trainer and task in self.trainer_command:
                raise ValueError(f"{task or 'the task'}: choose one of trainer and trainer_command")
        if self.accomplices and not self.attack:
            raise ValueError(f"accomplices {self.accomplices}: without attack there is nothing to do together")
        return self

    def of_tasks(self, key: str) -> dict[str, Any]:
        """The values of a table by task: of each of `tasks` that has one."""
        table = getattr(self, key)
        values = {task: table.get(task, table.get("")) for task in self.tasks}
        return {task: value for task, value in values.items() if value is not None}

    @property
    def passphrase(self) -> Path | None:
        """The file with the passphrase of the private keys, if one is named."""
        return Path(self.passphrase_file) if self.passphrase_file else None

    @property
    def source(self) -> DataSource:
        """The source of the client's data.

        Raises:
            PartError: there is no such part.
        """
        part = Part.parse(self.part, self.partition, self.part_seed, self.sizes) if self.part else None
        loading = Loading(self.loader_workers, self.pin_memory)
        return DataSource(Path(self.data) if self.data else None, part, self.download, loading)

    def changed(self, settings: Sequence[str], **options: Any) -> Self:
        """These settings with others in place of them.

        `settings` are texts KEY=VALUE; of a table by task also KEY.TASK=VALUE. A later one wins. `options` are values
        of keys; a None changes nothing.

        Raises:
            WorkerConfigError: one has no value, an unknown key or a wrong value, or does not fit the others.
        """
        values = self.model_dump(exclude_unset=True)
        values |= {name: value for name, value in options.items() if value is not None}
        left_out = set(self.tasks) - set(values.get("tasks", ()))  # the file may have values for tasks of its own
        for key in values.keys() & set(_BY_TASK):
            values[key] = {task: value for task, value in values[key].items() if task not in left_out}
        for text in settings:
            key, value = type(self)._setting(text)
            name, dot, task = key.partition(".")
            values[name] = {**values.get(name, {}), task: value} if dot else value
        try:
            return type(self).model_validate(values)
        except ValidationError as error:
            problems = "\n".join(explain(problem, _KNOWN, type(self), secret=_SECRET) for problem in error.errors())
            raise WorkerConfigError(f"the settings of this command cannot be used:\n{problems}") from None

    @classmethod
    def _setting(cls, text: str) -> tuple[str, Any]:
        """The key and the value of KEY=VALUE, which is a text, a value of TOML, or a list with commas."""
        key, equals, value = text.partition("=")
        if not equals:
            raise WorkerConfigError(f"--set {text}: write KEY=VALUE; {_KNOWN}")
        key, known = key.strip(), cls.names()
        name, dot, _ = (key, "", "") if key in known else key.partition(".")
        if name not in known:
            near = did_you_mean(key, known) or did_you_mean(name, known) or ";"
            raise WorkerConfigError(f"--set {text}: there is no key {key!r}{near} {_KNOWN}")
        if name in OPTIONS:
            raise WorkerConfigError(f"--set {text}: this key has an option of its own: {OPTIONS[name]} {value}")
        if dot and name not in _BY_TASK:
            raise WorkerConfigError(f"--set {text}: {name} is one value, not a table: write {name}=VALUE")
        kind = cls.field(name).annotation
        if kind is str or name in _BY_TASK:
            return key, value
        with suppress(ValueError, RecursionError):  # what is no TOML stays a text, and is refused with its key
            document = tomllib.loads(f"value = {value}")
            return key, document["value"] if len(document) == 1 else value
        return key, [part.strip() for part in value.split(",")] if get_origin(kind) is tuple else value

    @classmethod
    def default(cls) -> Self:
        """The defaults, without a file."""
        return cls(format=FORMAT)

    @classmethod
    def names(cls) -> list[str]:
        """All keys but `format`; those of a table with its name before them."""
        own = [name for name in cls.model_fields if name not in ("format", *_TABLES)]
        return own + [f"{table}.{name}" for table, section in _TABLES.items() for name in section.model_fields]

    @classmethod
    def field(cls, key: str) -> FieldInfo:
        """The field of one of `names`: its default and its description."""
        table, dot, name = key.partition(".")
        return (_TABLES[table] if dot else cls).model_fields[name or table]

    def value(self, key: str) -> Any:
        """The value of one of `names`."""
        table, dot, name = key.partition(".")
        return getattr(getattr(self, table), name) if dot else getattr(self, table)

    def sets(self, key: str) -> bool:
        """True if this has a value of its own for one of `names`."""
        table, dot, name = key.partition(".")
        return table in self.model_fields_set and (not dot or name in getattr(self, table).model_fields_set)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads the file. A relative path in it is relative to its directory.

        Raises:
            FileNotFoundError: there is no such file.
            WorkerConfigError: others than its owner can write it, it cannot be read, is not TOML, or has keys that are
                unknown or wrong.
        """
        try:
            check_owners_own(path, f"{path} names programs that this worker runs")
        except NotOwnersOwn as error:
            raise WorkerConfigError(str(error)) from None
        config = read_document(path, cls, _KNOWN, WorkerConfigError, secret=_SECRET)
        given, directory = config.model_fields_set & _PATHS, path.absolute().parent
        return config.model_copy(update={name: config._placed(name, directory) for name in given})

    def _placed(self, name: str, directory: Path) -> Any:
        """The value of a key that names files or directories, with `directory` before relative paths."""
        value = getattr(self, name)
        if isinstance(value, Notify):
            program, *arguments = value.command or ("",)
            if "/" not in program:  # a program of the PATH, or none
                return value
            return value.model_copy(update={"command": (str(directory / program), *arguments)})
        if isinstance(value, MetricsSection):
            token = str(directory / value.token_file) if value.token_file else ""
            return value.model_copy(update={"token_file": token})
        if isinstance(value, tuple):
            return tuple(str(directory / item) for item in value)
        if name == "proxy":
            return f"@{directory / value[1:]}" if value.startswith("@") else value
        return str(directory / value) if value else value

    @classmethod
    def template(cls, **values: Any) -> str:
        """The text of a new file: each key with its meaning and its default, in comments but for these values."""
        lines = [
            "# What this worker runs with; it is read when a command starts. Remove the # before a key to change it.",
            "# An option of the command wins over FEDPARETO_CODE, and FEDPARETO_CODE over this file. It names programs",
            "# that run, so it is refused if others can write it. What the coordinator may ask stands in policy.toml.",
            "",
            f"format = {FORMAT}",
        ]
        for name in cls.names():
            field = cls.field(name)
            meaning, chosen = str(field.description), values.get(name)
            line = f"{name} = {in_toml(field.default if chosen is None else chosen)}"
            lines += ["", *comment(meaning), line if chosen is not None else f"# {line}"]
        return "\n".join(lines) + "\n"


def in_toml(value: Any) -> str:
    """A value of a key in TOML, on one line; a table by task is one of JSON unless it is empty."""
    return json.dumps(value, ensure_ascii=False)


def write_template(path: Path, **values: Any) -> bool:
    """Writes a new `worker.toml` that only this user can read; a file that is there stays. True if it is new.

    Raises:
        OSError: it cannot be written.
    """
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(WorkerConfig.template(**values))
    except FileExistsError:
        return False
    return True
