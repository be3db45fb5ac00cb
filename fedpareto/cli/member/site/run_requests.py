"""`fedpareto worker runs`, `approve` and `refuse`: the decisions of a site's owner about runs."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from federation.text import escaped
from fedpareto.cli import completion
from fedpareto.cli.failure import CommandFailure, answer, failing
from fedpareto.cli.member.member_command import member_command, site_config
from fedpareto.cli.shared_options import CodeOption, use_code
from fedpareto.on_first_use import on_first_use

with on_first_use():
    from fedpareto.cli.member.site.own_statistics import own_statistics
    from fedpareto.web.site.asked import SiteFacts, asked_words, compared_words
    from worker.home import WorkerHome
    from worker.site.model_origin import model_origin
    from worker.site.policy_file import Policy, PolicyError
    from worker.site.run_requests import DecisionRefused, RunRequest, RunsFile, decided


RunArgument = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="The id, the beginning of it, or the name.", autocompletion=completion.run_requests
    ),
]


@member_command(PolicyError, keys=False)
def runs_command(
    home: "WorkerHome",
    as_json: bool,
    run: Annotated[
        str,
        typer.Argument(
            metavar="[RUN]",
            autocompletion=completion.run_requests,
            help="Show this run alone, with its specification, and where its initial model comes from.",
        ),
    ] = "",
    code: CodeOption = None,
) -> None:
    """List the runs that asked this site to take part.

    A run asks where policy.toml names algorithms or submitters, allows statistics, or says approve = "each-run". The
    command can be used while the worker runs. For one run, it makes the initial model from task and seed, and compares
    it with the run's; of a run that describes data, it reads your data and shows the numbers that would leave. It finds
    your own tasks in the directories of `code` in worker.toml, or of --code.
    """
    site = site_config(home.directory, None)
    if run and not code:
        use_code([Path(directory) for directory in site.code], "worker.toml: code")
    with _opened(home) as (file, policy):
        run_requests = file.runs(run)
    origins = [model_origin(request) if run else None for request in run_requests]
    told = [own_statistics(request, site, policy) if run else None for request in run_requests]
    documents = [
        {
            **_document(request, policy),
            "origin": None if origin is None else asdict(origin),
            "statistics": None if own is None else asdict(own),
        }
        for request, origin, own in zip(run_requests, origins, told, strict=True)
    ]
    if run and not run_requests:
        raise CommandFailure(f"no run {run!r} has asked this site: `fedpareto worker runs` lists those that have")
    lines = []
    for request, origin, own, asked in zip(run_requests, origins, told, documents, strict=True):
        reason = f", {asked['reason']}: {asked['message']}" if asked["reason"] else ""
        by = request.submitted_by or "nobody"
        lines.append(
            escaped(
                f"{request.run} {request.name} ({request.task}, by {by}): {asked['answer']}{reason}; "
                f"specification {request.spec}"
            )
        )
        if origin is not None:
            warning = "" if origin.source == "task" else "warning: "
            lines.append(escaped(f"{warning}initial model {request.initial_model}: {origin.message}"))
            lines += [f"{name}: {value}" for name, value in asked_words(request, SiteFacts.read(home))]
            lines += own.lines() if own is not None else ()
            lines += [f"your worker compares: {sentence}" for sentence in compared_words(request, policy)]
            lines += [escaped(line) for line in request.document.decode(errors="replace").splitlines()]
    answer(as_json, documents, *lines or ["no run has asked this site"])


@member_command(PolicyError, keys=False)
def approve_command(home: "WorkerHome", as_json: bool, run: RunArgument) -> None:
    """Approve a run, with its present specification.

    `worker runs RUN` shows it. A worker that runs tells the coordinator within seconds. A run with another
    specification waits again.
    """
    _decide(home, run, "approved", "", as_json=as_json)


@member_command(PolicyError, keys=False)
def refuse_command(
    home: "WorkerHome",
    as_json: bool,
    run: RunArgument,
    reason: Annotated[str, typer.Option(help="Why; the worker signs it, and the federation's operators see it.")],
) -> None:
    """Refuse a run, also one that was approved before.

    A worker that runs drops what it does for the run, and tells the coordinator within seconds.
    """
    _decide(home, run, "refused", reason, as_json=as_json)


def _decide(home: "WorkerHome", name: str, owner: str, reason: str, *, as_json: bool) -> None:
    with _opened(home) as (file, policy), failing(DecisionRefused):
        run = _named_run(file, name)
        after = decided(file, policy, run, owner, reason, datetime.now(UTC))
        document = _document(after, policy)
    answer(as_json, document, escaped(f"{owner}: run {run.run} ({run.name}) with the specification {run.spec}"))


def _named_run(file: "RunsFile", name: str) -> "RunRequest":
    """The run with this id or name, with the specification that asked last."""
    run_requests = file.runs(name)
    if not run_requests:
        raise CommandFailure(f"no run {name!r} has asked this site: `fedpareto worker runs` lists those that have")
    if len(runs := sorted({request.run for request in run_requests})) > 1:
        raise CommandFailure(f"{name!r} is several runs ({', '.join(runs)}): give the id")
    return run_requests[-1]


def _document(run: "RunRequest", policy: "Policy") -> dict[str, Any]:
    document = {**asdict(run), **asdict(run.verdict(policy))}
    del document["statistics"]  # of what its model is filled from; its origin tells of it
    return {**document, "document": run.document.decode(errors="replace")}


@contextmanager
def _opened(home: "WorkerHome") -> "Iterator[tuple[RunsFile, Policy]]":
    policy = Policy.load(home.policy)
    with closing(RunsFile(home.runs)) as file:
        yield file, policy
