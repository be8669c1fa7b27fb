"""What a source file calls of the libraries of a GPU, and whether the installed ones take it. Needs no GPU.

`Source` finds by the syntax tree what a file names of `LIBRARIES`: by import, wherever it stands, and by
``sys.modules[...]``. `signature_of` says what a call takes: by its signature, or by the docstring or stub (``.pyi``)
of what is compiled without one.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

#: their names begin with one of these
LIBRARIES = ("cudf", "cupy", "cuda", "dask_cuda", "dask_cudf", "kvikio", "pylibcudf", "pynvml", "rmm", "ucxx")


class Absent(Exception):
    """The library of a name cannot be imported here."""


class Source:
    """One file.

    Parameters
    ----------
    path
        A Python file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tree = ast.parse(path.read_text())
        #: name in the file -> what it is of a library, or of anything else that is imported
        self.names: dict[str, str] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for a in node.names:
                    top = a.name.partition(".")[0]
                    self.names[a.asname or top] = a.name if a.asname else top
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                self.names.update({a.asname or a.name: f"{node.module}.{a.name}" for a in node.names})
            elif isinstance(node, ast.Assign) and (module := _of_sys_modules(node.value)):
                self.names.update({t.id: module for t in node.targets if isinstance(t, ast.Name)})

    def path_of(self, node: ast.AST) -> str:
        """What of anything imported an expression names; "" when it does not."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, "")
        if isinstance(node, ast.Attribute) and (before := self.path_of(node.value)):
            return f"{before}.{node.attr}"
        return _of_sys_modules(node)

    def of_library(self, node: ast.AST) -> str:
        """The same, where it is one of `LIBRARIES`."""
        path = self.path_of(node)
        return path if path.partition(".")[0] in LIBRARIES else ""

    def imported(self) -> list[str]:
        """Everything imported from a library."""
        return sorted({p for p in self.names.values() if p.partition(".")[0] in LIBRARIES})

    def named(self) -> Iterator[tuple[int, str]]:
        """(line, path) of each attribute of a library."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute) and (path := self.of_library(node)):
                yield node.lineno, path

    def calls(self) -> Iterator[tuple[ast.Call, str]]:
        """Calls of a library by a path."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and (path := self.of_library(node.func)):
                yield node, path

    def on_objects(self) -> Iterator[tuple[ast.Attribute, ast.Call | None]]:
        """Attributes of what is no import and not `self`, with the call if it is called."""
        called = {id(n.func): n for n in ast.walk(self.tree) if isinstance(n, ast.Call)}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute) and not self.path_of(node):
                if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                    continue
                yield node, called.get(id(node))


def _of_sys_modules(node: ast.AST) -> str:
    """``sys.modules["x"]``, or ``sys.modules.get("x")``."""
    match node:
        case ast.Subscript(
            value=ast.Attribute(value=ast.Name(id="sys"), attr="modules"), slice=ast.Constant(value=name)
        ):
            return str(name)
        case ast.Call(
            func=ast.Attribute(value=ast.Attribute(value=ast.Name(id="sys"), attr="modules"), attr="get"),
            args=[ast.Constant(value=name)],
        ):
            return str(name)
    return ""


def found(path: str) -> Any:
    """The object of a path; `Absent` where its library is not to be imported. AttributeError: the name is not there.

    A class comes before the module that it is in and that has its name.
    """
    root, *words = path.split(".")
    try:
        value = importlib.import_module(root)
    except ImportError as e:
        raise Absent(f"{root} cannot be imported") from e
    name = root
    for word in words:
        name = f"{name}.{word}"
        if hasattr(value, word):
            value = getattr(value, word)
            continue
        try:
            value = importlib.import_module(name)
        except ModuleNotFoundError:
            raise AttributeError(f"{path} is not there: {name} is missing") from None
    return value


def signature_of(call: Any) -> inspect.Signature:
    """What a function or class takes. ValueError when nothing says it."""
    try:
        return inspect.signature(call)
    except ValueError:
        pass
    for kind in inspect.getmro(call) if inspect.isclass(call) else [call]:
        for known in (_by_docstring(kind), _by_stub(kind)):
            if known is not None:
                return known
    raise ValueError(f"nothing says what {call!r} takes")


def takes(call: Any, node: ast.Call, *, bound: bool = True) -> None:
    """Raise TypeError unless it takes the arguments of a call; `bound`: there is no self to give."""
    positional = [] if bound else [None]
    if any(isinstance(a, ast.Starred) for a in node.args) or any(k.arg is None for k in node.keywords):
        known = signature_of(call).parameters  # how many is not known: the names at least
        wrong = [k.arg for k in node.keywords if k.arg and k.arg not in known]
        if wrong and not any(p.kind is p.VAR_KEYWORD for p in known.values()):
            raise TypeError(f"it has no parameters {wrong}")
        return
    signature_of(call).bind(*positional, *[None] * len(node.args), **{k.arg: None for k in node.keywords if k.arg})


def method_takes(owner: Any, name: str, node: ast.Call) -> None:
    """The same for a method of a class, or a function of a module. AttributeError: it has none of that name."""
    found = getattr(owner, name)
    free = inspect.ismodule(owner) or isinstance(inspect.getattr_static(owner, name), (staticmethod, classmethod))
    takes(found, node, bound=free)


_PARAMETER = re.compile(r"(\*{0,2})(?:[\w\.\[\]| ]+[ \*&])?(\w+)\s*(?::[^=]*)?(=.*)?$")


def _by_docstring(call: Any) -> inspect.Signature | None:
    """From a first line such as ``Stream(obj=None, flags=None)``, as Cython writes it."""
    line = (call.__doc__ or "").strip().partition("\n")[0]
    head = re.match(rf"(?:\w+\.)*{re.escape(call.__name__)}\((.*)\)", line)
    return None if head is None else _signature(_split(head[1]))


def _split(text: str) -> list[str]:
    """Arguments at commas that are in no bracket."""
    out, depth, start = [], 0, 0
    for at, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            out.append(text[start:at])
            start = at + 1
    return [word.strip() for word in [*out, text[start:]] if word.strip()]


def _signature(words: list[str]) -> inspect.Signature | None:
    out, kind = [], inspect.Parameter.POSITIONAL_OR_KEYWORD
    for word in words:
        if word == "*":
            kind = inspect.Parameter.KEYWORD_ONLY
            continue
        if word == "/" or word == "self":
            continue
        parsed = _PARAMETER.match(word)
        if parsed is None:
            return None
        stars, name, default = parsed.groups()
        this = {"": kind, "*": inspect.Parameter.VAR_POSITIONAL, "**": inspect.Parameter.VAR_KEYWORD}[stars]
        given = None if default and not stars else inspect.Parameter.empty
        out.append(inspect.Parameter(name, this, default=given))
        if stars == "*":
            kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Signature(out)


@functools.cache
def _stub(module: str) -> ast.Module | None:
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return None
    path = Path(file)
    stub = path.parent / f"{path.name.partition('.')[0]}.pyi"
    return ast.parse(stub.read_text()) if stub.exists() else None


def _by_stub(call: Any) -> inspect.Signature | None:
    """From the stub of its module: a function, or the constructor of a class."""
    tree = _stub(call.__module__) if getattr(call, "__module__", None) else None
    if tree is None:
        return None
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == call.__name__:
            return _of_arguments(node.args, skip=0)
        if isinstance(node, ast.ClassDef) and node.name == call.__name__:
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and inner.name in ("__init__", "__cinit__"):
                    return _of_arguments(inner.args, skip=1)
    return None


def _of_arguments(args: ast.arguments, skip: int) -> inspect.Signature:
    kinds, empty = inspect.Parameter, inspect.Parameter.empty
    names = [*args.posonlyargs, *args.args]
    defaults = [empty] * (len(names) - len(args.defaults)) + [None] * len(args.defaults)
    out = [kinds(a.arg, kinds.POSITIONAL_OR_KEYWORD, default=d) for a, d in zip(names, defaults, strict=True)][skip:]
    if args.vararg:
        out.append(kinds(args.vararg.arg, kinds.VAR_POSITIONAL))
    for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        out.append(kinds(a.arg, kinds.KEYWORD_ONLY, default=empty if d is None else None))
    if args.kwarg:
        out.append(kinds(args.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(out)
