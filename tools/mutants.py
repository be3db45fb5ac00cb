"""Changes the product's code in small ways, and lists the changes that no test detects: `make mutants MODULE=qp`.

Cosmic Ray makes the changes (operators, numbers, `not`, decorators, exceptions, loops), and `DeleteStatement` below
removes a statement. A seed draws the changes, spread over all places in the files. Each change is made in a copy of the
working tree, and a subset of the tests runs there. To prove that the tests and their processes import the copy, each
module is first replaced by one that cannot be imported, and the tests must fail.

Not changed: annotations, docstrings, log lines, `@abstractmethod`, lines with the comment `# no mutant: REASON`, and
what mypy checks: frozen dataclasses and imports for annotations.
"""

import argparse
import ast
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LEFT = ("# no mutant: ", "frozen=True", "if TYPE_CHECKING:")  # in lines that are not changed
# No change for enums, None, flags and booleans.
SAME = re.compile("_(Is_Eq|Eq_Is|IsNot_NotEq|NotEq_IsNot|BitOr_BitXor|BitOr_Add|BitAnd_Mul)$")
DELETABLE = {"expr_stmt", "atom_expr", "raise_stmt", "del_stmt", "return_stmt", "assert_stmt"}


@dataclass(frozen=True)
class Subject:
    """Modules and their tests.

    Attributes:
        files: the modules that are changed.
        tests: the tests of these modules, those that detect most at least cost first; less than 20 seconds in total.
        without: parts of the names of tests in these files that are about other modules.
    """

    files: tuple[str, ...]
    tests: tuple[str, ...]
    without: tuple[str, ...] = ()


def python_files(beginning: str, *names: str) -> tuple[str, ...]:
    """The paths of Python files that begin in this way."""
    return tuple(f"{beginning}{name}.py" for name in names)


ROUNDS = "coordinator/rounds"
MEASURES = "federation/aggregation/metrics"
METRICS = "tests/federation/aggregation/test_metrics.py"
SUBJECTS = {
    "qp": Subject(("federation/aggregation/qp.py",), ("tests/federation/aggregation/test_qp.py",)),
    "conductor": Subject(
        python_files(
            f"{ROUNDS}/", "conductor", "conversation", "opening", "finish", "step", "signed_results", "manifest"
        ),
        (
            METRICS,
            *python_files(f"tests/{ROUNDS}/test_", "attempts", "required"),
            f"tests/{ROUNDS}/replies/test_revoked_replies.py",
            *python_files(f"tests/{ROUNDS}/test_", "record", "phases", "rounds"),
            *python_files(f"tests/{ROUNDS}/runs/test_", "private_evaluation", "client_noise"),
        ),
        (
            *("before[sqlite-2]", "simulation_honours", "cannot_be_a_tag", "seeded", "client_that_declines"),
            *("stragglers", "deadline_of_its_kind", "pool", "joins_while", "not_waited_for", "sign_of_life"),
            *("fedavg\\nalgorithm.prior", "fedmgda]"),
        ),
    ),
    "scores": Subject(
        (f"{ROUNDS}/runs/scores.py", f"{MEASURES}/metrics.py", f"{MEASURES}/model_metrics.py"),
        (METRICS, f"tests/{ROUNDS}/runs/test_scores.py"),
    ),
    "intake": Subject(
        python_files(f"{ROUNDS}/replies/", "intake", "content", "recorder"),
        python_files(f"tests/{ROUNDS}/replies/test_", "content", "claims", "bounds_on_words", "refusals"),
    ),
    "identity": Subject(
        python_files("federation/trust/", "identity", "proofs", "join_string", "member_files"),
        python_files("tests/federation/trust/test_", "certificates", "proofs", "join_string", "member_files"),
    ),
    "blobs": Subject(
        ("storage/blob_directory.py", "storage/blobs.py"),
        ("tests/storage/test_blob_contract.py", "tests/storage/test_blobs.py"),
    ),
    "memory": Subject(
        ("worker/work/memory.py", "worker/ledgers/ledger_file.py"),
        ("tests/worker/work/test_memory.py", "tests/worker/ledgers/test_ledger_files.py"),
    ),
}


class DeleteStatement:
    """Replaces a statement with `pass`; it has the methods of an operator of Cosmic Ray."""

    arguments = tuple  # it takes none

    def mutation_positions(self, node: Any) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        """The place of a statement, unless it is a constant, a field of a class, a docstring or a log line."""
        if node.type == "simple_stmt" and node.children[0].type in DELETABLE:
            block = node.parent
            if block.type == "file_input" or block.parent.type == "classdef":
                return
            if not node.get_code(include_prefix=False).startswith("log."):
                yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        """The node with `pass` in place of the statement."""
        from parso.python.tree import Keyword  # noqa: PLC0415

        node.children[0] = Keyword("pass", node.start_pos, node.get_first_leaf().prefix)
        return node


def annotations(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Where annotations begin and end, which have no effect at run time: lines and columns."""
    nodes = list(ast.walk(ast.parse(source)))
    found: list[Any] = [getattr(node, name, None) for node in nodes for name in ("annotation", "returns")]
    return [((one.lineno, one.col_offset), (one.end_lineno, one.end_col_offset)) for one in found if one]


def places(file: str) -> list[list[Any]]:
    """Every possible change of a file, a `MutationSpec` of Cosmic Ray, by place and family of operators."""
    from cosmic_ray import plugins  # noqa: PLC0415 - not among the dependencies of fedpareto
    from cosmic_ray.ast import ast_nodes, get_ast  # noqa: PLC0415
    from cosmic_ray.work_item import MutationSpec  # noqa: PLC0415

    plugins.OPERATOR_PROVIDERS["project"] = {"DeleteStatement": DeleteStatement}
    found: dict[tuple[str, tuple[int, int]], list[Any]] = defaultdict(list)
    source = (ROOT / file).read_text()
    nodes, lines, unused = list(ast_nodes(get_ast(source))), source.splitlines(), annotations(source)
    for name in sorted(plugins.operator_names()):
        kind = plugins.get_operator(name)
        if kind.arguments() or SAME.search(name):
            continue
        positions = ((node, *ends) for node in nodes for ends in kind().mutation_positions(node))
        for occurrence, (node, start, end) in enumerate(positions):
            abstract = name.endswith("/RemoveDecorator") and "abstractmethod" in node.get_code()
            left = any(words in lines[start[0] - 1] for words in LEFT)
            if not abstract and not left and not any(first <= start < last for first, last in unused):
                found[name.partition("_")[0], start].append(MutationSpec(file, name, occurrence, start, end))
    return list(found.values())


def draw(files: Sequence[str], count: int, seed: int) -> list[Any]:
    """Up to `count` changes of these files: one at each place before a second one anywhere."""
    random_ = random.Random(seed)  # noqa: S311
    found = [variants for file in files for variants in places(file)]
    for variants in found:
        random_.shuffle(variants)
    random_.shuffle(found)
    return list(islice(filter(None, chain.from_iterable(zip_longest(*found))), count))


def copy_tree(root: Path) -> None:
    """Copies the working tree."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_file():
            shutil.copy(ROOT / name, root / name)


def judge(name: str, count: int, seed: int) -> int:
    """Tries mutants of a subject, prints the outcomes and the diff of each survivor, and returns how many survived."""
    from cosmic_ray.mutating import mutate_and_test  # noqa: PLC0415
    from cosmic_ray.testing import run_tests  # noqa: PLC0415
    from cosmic_ray.work_item import TestOutcome  # noqa: PLC0415

    subject = SUBJECTS[name]
    outcomes = Counter(killed=0, late=0, survived=0)
    with tempfile.TemporaryDirectory() as directory:
        copy_tree(Path(directory))
        os.chdir(directory)
        os.environ["PYTHONPATH"] = directory  # for processes of the tests
        left_out = " or ".join(("postgresql", *subject.without))
        options = f"-x -q -p no:xdist -p no:cacheprovider --basetemp={directory}/.temporary".split()
        tests = [str(ROOT / ".venv/bin/python"), "-m", "pytest", *options, "-k", f"not ({left_out})", *subject.tests]
        began = time.monotonic()
        first = subprocess.run(tests, check=False, stdout=subprocess.PIPE, text=True)  # compiles the copy
        if first.returncode:
            raise SystemExit(f"the tests fail before any change:\n{first.stdout}")
        usual, command = time.monotonic() - began, shlex.join(tests)
        for file in subject.files:
            text = Path(file).read_text()
            Path(file).write_text("raise ImportError('this module was changed')\n")
            if run_tests(command, 600)[0] == TestOutcome.SURVIVED:
                raise SystemExit(f"the tests do not import {file}")
            Path(file).write_text(text)
        print(f"{name}: the tests take {usual:.1f} s", flush=True)
        for mutant in draw(subject.files, count, seed):
            result = mutate_and_test([mutant], command, 20 + 3 * usual)
            told = "late" if result.output == "timeout" else result.test_outcome.value
            outcomes[told] += 1
            shown = "" if told == "killed" else f"\n{result.diff or result.output}\n"
            print(f"{told}: {mutant.operator_name} at {mutant.module_path}:{mutant.start_pos[0]}{shown}", flush=True)
    summary = ", ".join(f"{number} {outcome}" for outcome, number in outcomes.items())
    print(f"\n{name}: {outcomes.total()} mutants with seed {seed}: {summary}")
    return outcomes["survived"]


def main() -> None:
    """Exit code 1 when a mutant survived."""
    parser = argparse.ArgumentParser(description="Lists small changes of the code that no test detects.")
    parser.add_argument("module", choices=[*SUBJECTS])
    parser.add_argument("--count", type=int, default=150, help="how many mutants to draw (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (%(default)s)")
    options = parser.parse_args()
    sys.exit(judge(options.module, options.count, options.seed) > 0)


if __name__ == "__main__":
    main()
