"""`python -m comparison choose|verdict|picture DIRECTORY ...`: reads the runs.jsonl of a directory; makes no runs."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from comparison import picture
from comparison.catalogue import AFTER, TASKS
from comparison.choice import BY, choose
from comparison.verdict import RULES, against_rivals, row, under_attacks
from fedpareto.experiments.result_store import RunResult, Store


def main() -> None:
    """Shows the chosen rates as lines of comparison.toml, or the table of the procedure; or draws the picture."""
    parser = argparse.ArgumentParser(prog="python -m comparison", description=main.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, told in (
        ("choose", "rates by the validation split, from the runs of comparison-rates"),
        ("verdict", "whether a rule is never dominated, from the runs of comparison"),
        ("picture", "mean against worst member, from the runs of comparison"),
    ):
        command = commands.add_parser(name, help=told)
        command.add_argument("directory", type=Path, help="of an experiment's runs.jsonl")
        if name == "verdict":
            command.add_argument("--rule", required=True, choices=RULES)
            command.add_argument("--after", type=int, choices=AFTER, default=AFTER[-1], help="rounds")
        if name == "picture":
            command.add_argument("--out", type=Path, required=True, help="the PNG file")
    options = parser.parse_args()
    results = list(Store(options.directory).runs().values())
    if options.command == "picture":
        picture.draw(results, options.out)
    elif options.command == "choose":
        sys.stdout.writelines(f"{line}\n" for line in _rates(results))
    else:
        sys.stdout.writelines(f"{line}\n" for line in _table(results, options.rule, options.after))


def _rates(results: Sequence[RunResult]) -> Iterator[str]:
    for by in BY:
        yield f"by the {by}:"
        for rule in RULES:
            choices = {task: choose(results, task, rule, by) for task in TASKS}
            chosen = ", ".join(f"{task} = {own.rate}" for task, own in choices.items() if own.rate is not None)
            yield f"  {rule}: rates = {{ {chosen} }}"
            for task, own in choices.items():
                if own.missing:
                    yield f"    {task}: still to be run at {', '.join(f'{rate:g}' for rate in own.missing)}"


def _table(results: Sequence[RunResult], rule: str, after: int) -> Iterator[str]:
    bounds = [
        bound
        for task in TASKS
        for bound in (*against_rivals(results, rule, task, after), *under_attacks(results, rule, task, after))
    ]
    yield f"{rule} after {after} rounds: lower 97.5 % bounds of the difference"
    yield "\n| Task | Against | Seeds | Mean | Worst member | |\n| --- | --- | ---: | ---: | ---: | --- |"
    yield from map(row, bounds)
    yield ""
    for tasks, held_out in (("the tasks that fixed the rule", False), ("the held-out tasks", True)):
        own = [bound.shown for bound in bounds if TASKS[bound.task].held_out is held_out]
        yield f"On {tasks}: {sum(own)} of {len(own)} comparisons shown."


if __name__ == "__main__":
    main()
