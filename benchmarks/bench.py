"""Measures one scenario, or all of them one after the other, and prints tables.

    python benchmarks/bench.py --list                 what is measured
    python benchmarks/bench.py SCENARIO --help        how, and with which sizes
    python benchmarks/bench.py SCENARIO --quick       small sizes
    python benchmarks/bench.py all --quick --json     one JSON document of everything

Long scenarios tell on standard error what they do. Ctrl-C and SIGTERM end every process that was started.
docs/operate/benchmarks.md has the figures that decisions rest on.
"""

import argparse
import ast
import ctypes
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

import numpy.random  # noqa: F401 - as it is loaded, it swallows the exception of a signal: not while work runs
import psutil

HERE = Path(__file__).resolve().parent
sys.path[1:1] = [str(HERE.parent)]

from federation.transport.tls import require_tls13  # noqa: E402

require_tls13()  # gRPC reads it once

SCENARIOS = (
    *("qp", "aggregation", "offline", "private", "round", "large", "verify", "connections", "wan", "start", "simulate"),
    *("console", "population", "scrape", "held"),
)
FORMS = ("quick", "smallest")
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
CLEAN_UP_SECONDS = 60
PR_SET_CHILD_SUBREAPER = 36


def supervised(work: Callable[[], object]) -> None:
    """Runs work in a fork, which a signal ends; ends every process that it has started, and exits with its code.

    After a signal, the work has a minute to remove its files; the exit code is then 128 plus the signal's number.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what our children leave behind becomes our child
    received: list[int] = []

    def leave(number: int, frame: FrameType | None) -> None:
        if not received:  # else it is leaving
            received.append(number)
            for process in multiprocessing.active_children():
                process.kill()  # else the end of a pool waits for its processes
            sys.exit(128 + number)

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        signal.alarm(CLEAN_UP_SECONDS)
        tell_child(signal.SIGTERM)

    def tell_child(number: int) -> None:
        with suppress(ProcessLookupError):  # it has ended, and the rest is being killed
            os.kill(child, number)

    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    child = os.fork()
    for number in SIGNALS:
        signal.signal(number, forward if child else leave)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    if not child:
        work()
        return
    signal.signal(signal.SIGALRM, lambda *_: tell_child(signal.SIGKILL))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    signal.alarm(0)
    while left := [process for process in psutil.Process().children(recursive=True) if killed(process)]:
        psutil.wait_procs(left, 1)
    sys.exit(128 + received[0] if received else code if code >= 0 else 128 - code)


def killed(process: psutil.Process) -> bool:
    """Kills a process that runs; the tracker of shared resources ends by itself once it has removed them."""
    with suppress(psutil.NoSuchProcess):
        if process.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in str(process.cmdline()):
            process.kill()
            return True
    return False


def main() -> None:
    given = next((word for word in sys.argv[1:] if word in SCENARIOS), "")
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=explained(given or "bench"), formatter_class=raw)
    parser.add_argument("scenario", nargs="?", choices=[*SCENARIOS, "all"], help="'all' is every one, in turn")
    parser.add_argument("--list", action="store_true", help="name every scenario, and what it measures")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--quick", dest="form", action="store_const", const="quick", help="small sizes")
    sizes.add_argument("--smallest", dest="form", action="store_const", const="smallest", help="to see that it runs")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    scenario: Any = import_module(given) if given else None
    if given:
        add_options(parser, scenario.FORMS)
    options = vars(parser.parse_args())
    name, listed, form, as_json = (options.pop(key) for key in ("scenario", "list", "form", "json"))
    if listed:
        print("\n".join(f"{name:<12} {explained(name).splitlines()[0]}" for name in SCENARIOS))
    elif name is None:
        parser.error("name a scenario, or give --list")
    elif name == "all":
        every([word for word in (f"--{form}" if form else "", "--json" if as_json else "") if word])
    else:
        result = scenario.measure(**{**scenario.FORMS["full"], **scenario.FORMS.get(form, {}), **options})
        print(json.dumps(result, indent=2) if as_json else "\n".join(shown(result)), flush=True)
        if problem := result.get("problem"):
            raise SystemExit(f"bench {name}: {problem}")


def add_options(parser: argparse.ArgumentParser, forms: Mapping[str, Mapping[str, Any]]) -> None:
    """An option for each value of the full form, with its values in the other forms; only those given are parsed."""
    for name, value in forms["full"].items():
        values = "; ".join(f"{form}: {forms[form][name]!r}" for form in FORMS if name in forms[form])
        text, kind = f"default: {value!r}" + (f" ({values})" if values else ""), type(value)
        parser.add_argument(f"--{name}", type=kind, metavar=kind.__name__.upper(), help=text, default=argparse.SUPPRESS)


def explained(name: str) -> str:
    """The docstring of a scenario, which is not imported for it."""
    return ast.get_docstring(ast.parse((HERE / f"{name}.py").read_text())) or ""


def every(flags: Sequence[str]) -> None:
    """Runs each scenario in an interpreter of its own; raises SystemExit, with their names, if some have failed."""
    results, failed = {}, []
    for name in SCENARIOS:
        print(f"== {name}", file=sys.stderr if "--json" in flags else sys.stdout, flush=True)
        command = [sys.executable, str(HERE / "bench.py"), name, *flags]
        with subprocess.Popen(command, stdout=subprocess.PIPE if "--json" in flags else None, text=True) as process:
            try:
                output, _ = process.communicate()
            except BaseException:
                process.terminate()  # it removes its files
                raise
        if process.returncode:
            failed.append(name)
        elif "--json" in flags:
            results[name] = json.loads(output)
    if "--json" in flags:
        print(json.dumps(results, indent=2))
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def shown(document: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """A document as lines: a list is a table, and any other value a line."""
    from pandas import DataFrame

    for name, value in document.items():
        yield f"{indent}{name}:" + ("" if isinstance(value, Mapping | list) else f" {text_of(value)}")
        if isinstance(value, Mapping):
            yield from shown(value, indent + "  ")
        elif isinstance(value, list):
            cells = DataFrame([{f" {key}": text_of(cell) for key, cell in row.items()} for row in value])
            yield textwrap.indent(cells.to_string(index=False, na_rep=text_of(None)), indent)


def text_of(value: Any) -> str:
    if value is None:
        return "not measured"
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    supervised(main)
