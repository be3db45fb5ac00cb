"""Plays many schedules of faults, or one again: python -m tests.simulated --seeds 10000 (`make faults`)."""

import argparse
import gc
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.simulated.faults import AWAY, GENTLE, HARSH
from tests.simulated.runner import Outcome, Runner

SHOW_SECONDS = 10.0
HEADING = "## The record"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program. Returns 1 if a schedule has failed, 130 after Ctrl-C."""
    options = _parser().parse_args(arguments)
    os.nice(options.nice)
    logging.disable(logging.CRITICAL)
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)  # the objects of a schedule are freed without it
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as directory:
        runner = Runner(Path(directory))
        if options.seed is not None:
            return _again(runner, options.seed)
        stopped = _many(runner, options)
    rows = list(_rows(options.progress))
    if options.record is not None:
        page = options.record.read_text() if options.record.exists() else "# Faults\n\n"
        options.record.write_text(page.partition(HEADING)[0] + f"{HEADING}\n\n{record(rows)}")
        print(f"the record is in {options.record}")
    failed = [row for row in rows if row["problems"]]
    for row in failed[:20]:
        print(f"seed {row['seed']} ({row['plan']}): {row['problems'][0]}")
    if failed:
        print(f'{len(failed)} failed; one again, with its trace: make faults ARGS="--seed {failed[0]["seed"]}"')
    return 130 if stopped else 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.simulated", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="plays the seeds below this number")
    parser.add_argument("--seed", type=int, help="plays this seed alone, and prints its trace")
    parser.add_argument(
        "--progress",
        type=Path,
        default=Path("build/faults.jsonl"),
        help="the outcomes so far, one a line; a run goes on after the last one",
    )
    parser.add_argument("--record", type=Path, help=f"writes the summary to this page, below {HEADING!r}")
    parser.add_argument("--nice", type=int, default=0, help="lowers the priority of the process")
    return parser


def _again(runner: Runner, seed: int) -> int:
    outcome = runner.run(seed)
    print("\n".join(outcome.trace))
    print(f"seed {seed}, plan {outcome.plan}: {outcome.ended}, trace {outcome.digest[:16]}")
    print("\n".join(outcome.problems) or "no problem")
    return 1 if outcome.problems else 0


def _many(runner: Runner, options: argparse.Namespace) -> bool:
    """Plays the seeds that have not been played yet. True if it was interrupted."""
    progress: Path = options.progress
    progress.parent.mkdir(parents=True, exist_ok=True)
    first = max((row["seed"] + 1 for row in _rows(progress)), default=0)
    failed, shown, commit = 0, time.monotonic(), _commit()
    with progress.open("a") as file:
        try:
            for seed in range(first, options.seeds):
                outcome = runner.run(seed)
                failed += bool(outcome.problems)
                file.write(json.dumps(_row(outcome, commit)) + "\n")
                file.flush()
                if time.monotonic() - shown >= SHOW_SECONDS or seed + 1 == options.seeds:
                    shown = time.monotonic()
                    print(f"{seed + 1} of {options.seeds} schedules, {failed} failed", flush=True)
        except KeyboardInterrupt:
            print("interrupted; the same command goes on", file=sys.stderr)
            return True
    return False


def _row(outcome: Outcome, commit: str) -> dict[str, Any]:
    return {**asdict(outcome), "trace": outcome.digest[:16], "seconds": round(outcome.seconds, 4), "commit": commit}


def _rows(progress: Path) -> Iterator[dict[str, Any]]:
    """The outcomes in a file; a line that was cut off is left out."""
    if progress.exists():
        for line in progress.read_text().splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                return


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def record(rows: Sequence[dict[str, Any]]) -> str:
    """The tables of the record of some outcomes, as Markdown."""
    counts: Counter[str] = Counter()
    for row in rows:
        counts.update(row["counts"])
    hours = sum(row["seconds"] for row in rows) / 3600
    failed = [row["seed"] for row in rows if row["problems"]]
    commits = ", ".join(f"`{commit}`" for commit in dict.fromkeys(row["commit"] for row in rows))
    lines = [
        f"- Command: `make faults SEEDS={len(rows)}`, commit {commits}, one thread.",
        f"- Seeds: {min(row['seed'] for row in rows)} to {max(row['seed'] for row in rows)}; {len(rows)} schedules.",
        f"- Killed processes of the coordinator: {counts['kills']}, {counts['kills'] / len(rows):.1f} a schedule.",
        f"- {hours:.2f} CPU-hours: {len(rows) / hours:,.0f} schedules and {counts['kills'] / hours:,.0f} crashes "
        "in each.",
        f"- Failed: {len(failed)}" + (f" ({', '.join(map(str, failed[:20]))})" if failed else "") + ".",
        "",
        "| Plan | Schedules | The result of the calm run | Another one, with a reason |",
        "|---|---|---|---|",
    ]
    for plan in sorted({row["plan"] for row in rows}):
        some = [row for row in rows if row["plan"] == plan]
        same = sum(row["same"] for row in some)
        lines.append(f"| {plan} | {len(some)} | {same} | {len(some) - same} |")
    for title, kinds in (("must not change the result", [*GENTLE, AWAY]), ("may change the result", HARSH)):
        lines += ["", f"| Faults that {title} | Times |", "|---|---|"]
        lines += [f"| {kind} | {counts[kind]} |" for kind in kinds]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
