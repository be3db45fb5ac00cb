"""The class of a task as code that other processes on this machine import: the class of a notebook's cell by value.

No object is pickled. The source of the class is written into a module of its own, after what its code uses: imports,
functions and classes of the same notebook or script, and constants. What is none of these is an error that names it.
"""

import ast
import inspect
import linecache
import symtable
import sys
from hashlib import sha256
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from federation.errors import ArgumentError
from fedpareto.face.given_spec import task_name

if TYPE_CHECKING:
    from federation.tasks import Task

_PROGRAM = "__main__"


def importable(task: "type[Task]", directory: Path) -> tuple[str, Path]:
    """The name of a task for other processes, `module:Class`, and the directory of its module for their `--code`.

    The class of a notebook's cell or of a script is written into a module in `directory`, which nobody else can read.

    Raises:
        ArgumentTypeError: it is no class of a task.
        ArgumentError: its source is not known, or uses something that another process cannot have.
    """
    name = task_name(task)
    if task.__module__ != _PROGRAM:
        file = getattr(sys.modules[task.__module__], "__file__", None)
        if file is None:
            raise ArgumentError(f"task: the module {task.__module__} has no file, so other processes cannot import it")
        places = Path(file).resolve().parents
        depth = task.__module__.count(".") + (Path(file).name == "__init__.py")
        return name, places[depth]
    source = _Source(task.__qualname__)
    source.add(task.__qualname__, task)
    text = "\n\n".join(source.parts) + "\n"
    module = f"cell_{sha256(text.encode()).hexdigest()[:12]}"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    (directory / f"{module}.py").write_text(text, encoding="utf-8")
    return f"{module}:{task.__qualname__}", directory


class _Source:
    """The source of a class, in parts, each after those that it uses."""

    def __init__(self, wanted: str) -> None:
        self.parts: list[str] = []
        self._wanted = wanted
        self._added: set[str] = set()

    def add(self, name: str, value: Any) -> None:
        """Adds what a name of the program means."""
        if name in self._added:
            return
        self._added.add(name)
        if isinstance(value, ModuleType):
            self.parts.append(f"import {value.__name__} as {name}")
        elif isinstance(value, type | FunctionType) and value.__module__ == _PROGRAM:
            self._add_code(name, value)
        elif (place := _place(value)) is not None:
            self.parts.append(f"from {place[0]} import {place[1]} as {name}")
        elif _is_constant(value):
            self.parts.append(f"{name} = {value!r}")
        else:
            raise ArgumentError(
                f"task: {self._wanted} uses {name}, of the type {type(value).__name__}, which other processes cannot "
                "have: make it inside the class, or put both into a module (a file) and import it from there"
            )

    def _add_code(self, name: str, value: Any) -> None:
        source = _source(value)
        program = vars(sys.modules[_PROGRAM])
        for used in sorted(_globals(symtable.symtable(source, "cell", "exec"))):
            if used in program and used != value.__name__:
                self.add(used, program[used])
        self.parts.append(source)
        if name != value.__name__:
            self.parts.append(f"{name} = {value.__name__}")


def _globals(table: symtable.SymbolTable) -> set[str]:
    """The names that code takes from its module."""
    top = table.get_type() == "module"
    names = {
        symbol.get_name()
        for symbol in table.get_symbols()
        if (symbol.is_referenced() if top else symbol.is_global() and not symbol.is_assigned())
    }
    return names.union(*map(_globals, table.get_children()))


def _place(value: Any) -> tuple[str, str] | None:
    """The module and the name by which any process imports a value; None if there is none."""
    module = getattr(value, "__module__", None)
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module == _PROGRAM or not name.isidentifier():
        return None
    return (module, name) if getattr(sys.modules.get(module), name, None) is value else None


def _is_constant(value: Any) -> bool:
    """True for numbers, texts, and tuples, lists, sets and dicts of them."""
    try:
        same = bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, TypeError, RecursionError):
        return False
    return same


def _source(value: Any) -> str:
    """The source of a class or function of the program, from the cell or file that defines it."""
    for code in _codes(value):
        text = "".join(linecache.getlines(code.co_filename))
        try:
            nodes = ast.parse(text).body
        except SyntaxError:
            continue
        for node in nodes:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef) or node.name != value.__name__:
                continue
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            if first <= code.co_firstlineno <= (node.end_lineno or 0):
                return "".join(text.splitlines(keepends=True)[first - 1 : node.end_lineno])
    raise ArgumentError(
        f"task: the source of {value.__qualname__} is not known, or it is not at the top of its cell: define it at the "
        "top of a cell or of a file"
    )


def _codes(value: Any) -> list[CodeType]:
    """The code of a function, or of the methods of a class."""
    members = [value] if isinstance(value, FunctionType) else list(vars(value).values())
    inner = (getattr(member, "fget", None) or getattr(member, "__func__", member) for member in members)
    functions = (inspect.unwrap(function) for function in inner if callable(function))
    return [function.__code__ for function in functions if isinstance(function, FunctionType)]
