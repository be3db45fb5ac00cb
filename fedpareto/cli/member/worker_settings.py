"""The settings of a member's commands, from their options and worker.toml; and `fedpareto worker config`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from federation.text import escaped, without_links
from fedpareto.cli import completion
from fedpareto.cli.failure import USAGE, answer, failing
from fedpareto.cli.member.member_command import DEFAULT_HOME, ConfigOption, HomeOption, config_file, site_config
from fedpareto.cli.shared_options import CodeOption, DataOption, JsonOption, use_code
from fedpareto.on_first_use import on_first_use

with on_first_use():
    from worker.config import OPTIONS, WorkerConfig, WorkerConfigError, in_toml


TaskOption = Annotated[
    list[str] | None,
    typer.Option(
        "--task", help="A task that this worker may train; repeat it for several.", autocompletion=completion.tasks
    ),
]
DeviceOption = Annotated[str | None, typer.Option("--device", help="auto, cpu, cuda or cuda:N. Default: auto.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Any other key of worker.toml, in place of the file's value; repeat it for several. "
        "`fedpareto worker config` lists the keys.",
        autocompletion=completion.worker_keys,
    ),
]


def chosen(
    file: "WorkerConfig",
    settings: Sequence[str] | None,
    *,
    task: Sequence[str] | None,
    data: Path | None,
    code: Sequence[Path] | None,
    device: str | None,
) -> "WorkerConfig":
    """The settings of a command: those of a file, with the command's options in place of them.

    Code in the directories that they name can be imported afterwards.

    Raises:
        CommandFailure: they cannot be used.
    """
    options = {
        "tasks": tuple(dict.fromkeys(task)) if task else None,
        "data": str(data) if data is not None else None,
        "code": tuple(map(str, code)) if code else None,
        "device": device,
    }
    with failing(WorkerConfigError, code=USAGE):
        config = file.changed(settings or (), **options)
    if config.code and not code:  # the directories of --code can be imported already
        use_code([Path(directory) for directory in config.code], "worker.toml: code")
    return config


def config_command(
    context: typer.Context,
    home: HomeOption = DEFAULT_HOME,
    config: ConfigOption = None,
    task: TaskOption = None,
    data: DataOption = None,
    code: CodeOption = None,
    device: DeviceOption = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the settings: their values, where each comes from, and what it means.

    They are those of `fedpareto worker run` with the same options. An option wins over FEDPARETO_CODE, and this over
    worker.toml.
    """
    path, file = config_file(home, config), site_config(home, config)
    found = chosen(file, settings, task=task, data=data, code=code, device=device)
    keys, names = [text.partition("=")[0].strip() for text in settings or ()], WorkerConfig.names()
    given = {key if key in names else key.partition(".")[0] for key in keys}
    for key, option in OPTIONS.items():
        if context.params.get(option.removeprefix("--")):
            given.add(key)
    from_environment = getattr(context.get_parameter_source("code"), "name", "") == "ENVIRONMENT"

    def source(key: str) -> str:
        if key in given:
            return "environment" if key == "code" and from_environment else "option"
        return "file" if file.sets(key) else "default"

    rows = [
        {
            "key": key,
            "value": found.value(key),
            "source": source(key),
            "meaning": without_links(str(WorkerConfig.field(key).description)),
        }
        for key in names
    ]
    there = path.exists()
    document: dict[str, Any] = {"file": str(path) if there else None, "settings": rows}
    lines = [str(path) if there else f"no {path}: the defaults, and the options of the command"]
    for row in rows:
        lines += [f"{row['key']} = {in_toml(row['value'])}  ({row['source']})", f"    {row['meaning']}"]
    answer(as_json, document, *map(escaped, lines))
