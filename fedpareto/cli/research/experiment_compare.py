"""`fedpareto experiment compare`: the finished runs beside the published numbers."""

from federation.text import counted
from fedpareto.cli.failure import USAGE, CommandFailure
from fedpareto.cli.research.experiment import Name, Out, QuickForm, Rounds
from fedpareto.cli.shared_options import CodeOption, ProgressJsonOption
from fedpareto.on_first_use import on_first_use

with on_first_use():
    from fedpareto.cli.research import experiment_results as results
    from fedpareto.cli.show.tables import console as make_console
    from fedpareto.experiments.result_store import Store


def compare_command(
    name: Name,
    quick: QuickForm = False,
    rounds: Rounds = None,
    code: CodeOption = None,
    out: Out = None,
    as_json: ProgressJsonOption = False,
) -> None:
    """Compare the finished runs with the published numbers.

    Table and figures are written anew.
    """
    experiment = results.load(name, quick, rounds)
    store = Store(out or results.directory(experiment.name, quick, rounds))
    console = make_console(stderr=as_json)
    with results.usable(store.directory):
        results.mend(console, store)
        if not store.runs():
            raise CommandFailure(
                f"no results in {store.directory}: `fedpareto experiment run {name}` makes them", code=USAGE
            )
        jobs = results.jobs(experiment, experiment.seeds, [], [])
        if not any(store.find(job) for job in jobs):
            many = f"{counted(len(store.runs()), 'finished run')} in {store.directory}"
            raise CommandFailure(f"{many}, none of this specification: was it --quick, --rounds N?", code=USAGE)
        with store.locked():
            results.show(console, experiment, store, {}, as_json=as_json)
