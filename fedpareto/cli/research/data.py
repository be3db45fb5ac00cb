"""`fedpareto data`: the samples that each client would hold."""

import json
import math
from pathlib import Path
from typing import Annotated

import typer

from fedpareto.cli import completion
from fedpareto.cli.failure import USAGE, failing, require
from fedpareto.cli.shared_options import CodeOption, DataOption, DownloadOption, JsonOption
from fedpareto.on_first_use import on_first_use
from fedpareto.standard_streams import print_document

with on_first_use():
    from federation.tasks import DataError, DataSource, Part
    from federation.tasks import task as find_task
    from federation.tasks.census import census
    from fedpareto.cli.show import shares
    from fedpareto.cli.show.tables import console
    from fedpareto.experiments.plots import draw_census
    from fedpareto.simulation.population import client_names


def show(
    task: Annotated[
        str,
        typer.Argument(
            metavar="TASK",
            help="A built-in task, or your own as module:Class.",
            autocompletion=completion.tasks,
        ),
    ],
    clients: Annotated[int, typer.Option(min=1, help="How many clients share the data.")] = 10,
    partition: Annotated[
        str, typer.Option(metavar="SCHEME", help="The partition: iid, shards:S, labels:S, dirichlet:ALPHA or natural.")
    ] = "iid",
    sizes: Annotated[
        str, typer.Option(metavar="SIZES", help="Number of samples of each client: equal or lognormal:SIGMA.")
    ] = "equal",
    seed: Annotated[int, typer.Option(min=0, help="Seed of the partition; `part_seed` of workers.")] = 0,
    data: DataOption = None,
    code: CodeOption = None,
    download: DownloadOption = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Also draw a bar for each client, stacked by class.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show how many samples of which class each client would hold.

    The partition is that of a simulation or of workers that rehearse. First, the task is tried on a batch of the data.

    iid: every client gets a random part. shards:2: the data is sorted by class and cut into twice as many
    shards as clients; each gets two, and so has few classes. dirichlet:0.3: each client draws its own shares of the
    classes; a smaller number makes them more unequal. natural: each client holds the data of one owner, if the data set
    names owners; the owners with the most samples come first.

    lognormal:1 makes the clients of iid and dirichlet differ in size, by a factor of e at one standard deviation.
    Each client gets at least 10 samples, if there are enough.

    After the table stand the classes that a split lacks, and whether the rows count as independent.

        fedpareto data show digits --clients 8 --partition shards:2

        fedpareto data show digits --clients 30 --partition dirichlet:0.3 --sizes lognormal:1 --plot digits.png

    The same words go into a specification, [simulation] partition = "shards:2", and to a worker:
    --set part=3/8 --set partition=shards:2.
    """
    require("a task's data is read with", "torch")
    if plot is not None:
        require("--plot draws with", "matplotlib", extra="experiments")
    with failing(ValueError, code=USAGE), failing(DataError):  # of the task, the trainer, the partition
        part = Part(0, clients, partition, seed, sizes)
        counts = census(find_task(task), DataSource(data, download=download), part, tried=True)
    names = client_names(clients)
    if as_json:
        document = {
            "task": task,
            "partition": partition,
            "sizes": sizes,
            "seed": seed,
            "samples": int(counts.sizes.sum()),
            "heterogeneity": None if math.isnan(counts.heterogeneity) else counts.heterogeneity,
            "groups": counts.grouped,
            "stratified": counts.stratified,
            "clients": list(shares.document(counts, names)),
        }
        print_document(json.dumps(document))
    else:
        screen = console()
        screen.print(shares.table(counts, counts.owners or names))
        screen.print(f"\n{shares.sentence(counts)}")
        for remark in shares.remarks(counts, counts.owners or names):
            screen.print(f"\n{remark}")
    if plot is not None:
        title = f"{task}: {partition}, sizes {sizes}, seed {seed}"
        with failing(OSError, ValueError, what=f"cannot draw {plot}"):
            draw_census(counts, counts.owners or names, title, plot)
