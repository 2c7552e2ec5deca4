"""Finds the constants and the plain numbers that time limits use in Python sources, without running them.

A time limit is an expression that determines when a call or a wait ends:

* an argument of `move_on_after` and similar functions, and the pauses of a `Suspicion`;
* the value of an argument, parameter default, variable, field or function whose name contains timeout or deadline;
* the seconds that are added to a moment, and the value that an elapsed time is compared with.

The search follows an expression through local variables and through attributes that the same class sets, and splits
it into terms: the summands, the alternatives, and the arguments of `min` and `max`. It reports a term that is a number,
but not a number that scales a term. A field of a class, for example of settings, counts as a constant if its default is
a number.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

SCOPES: Final = frozenset({"move_on_after", "fail_after", "move_on_at", "fail_at", "settimeout"})
WAITS: Final = frozenset({"join", "wait"})  # of threads and processes; str and tasks have methods of these names, too
PAUSES: Final = frozenset({"Suspicion"})  # classes whose first two arguments are pauses
CLOCKS: Final = frozenset({"now", "_now", "current_time", "monotonic", "time", "wall"})
MOMENTS: Final = ("_at", "since", "began", "started", "heard", "now", "wall")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Index:
    """Facts about all modules that the search of one module needs."""

    positions: Mapping[str, Collection[int]]  # of parameters that are time limits, by function name
    fields: Mapping[str, Collection[str]]  # fields with a number as default, as module.name, by field name


@dataclass(slots=True)
class Found:
    """What time limits use: `names` of constants as module.NAME, and `numbers` as path:line: number."""

    names: set[str] = field(default_factory=set)
    numbers: set[str] = field(default_factory=set)


def is_limit(name: str) -> bool:
    """True if the name is that of a time limit."""
    return "timeout" in name.lower() or "deadline" in name.lower()


def module_of(path: str) -> str:
    """Dotted name of the module in a file."""
    return ".".join(Path(path).with_suffix("").parts)


def _fields(trees: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    found = defaultdict[str, set[str]](set)
    for path, tree in trees.items():
        classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
        for one in (one for kind in classes for one in kind.body if isinstance(one, ast.AnnAssign)):
            name = _name_of(one.target)
            if _number(one.value) and (_has_unit(name) or is_limit(name)):
                found[name].add(f"{module_of(path)}.{name}")
    return found


def _positions(trees: Iterable[ast.AST]) -> dict[str, set[int]]:
    """Positions of the parameters that are time limits, by function name. Functions of the same name are merged."""
    places = defaultdict[str, set[int]](set)
    for function in (node for tree in trees for node in ast.walk(tree) if isinstance(node, Function)):
        names = [one.arg for one in function.args.args if one.arg not in ("self", "cls")]
        places[function.name].update(at for at, name in enumerate(names) if is_limit(name))
    return {name: found for name, found in places.items() if found}


def search(trees: Mapping[str, ast.Module]) -> Found:
    """Find what the time limits of these modules use. `trees`: by the paths of their files relative to the root."""
    index, found = Index(_positions(trees.values()), _fields(trees)), Found()
    for path, tree in trees.items():
        Search(path, index, found).walk(tree)
    return found


class Search:
    """The search of one module."""

    def __init__(self, path: str, index: Index, found: Found) -> None:
        self._path, self._index, self._found = path, index, found
        self._module = module_of(path)
        self._locals: dict[str, list[ast.expr]] = {}  # of the current function and the enclosing ones
        self._attributes: dict[str, list[ast.expr]] = {}  # that the current class sets on `self`
        self._followed: set[int] = set()
        self._is_sure = True  # the current expression is a time limit by its place or name, not only by its form

    def walk(self, node: ast.AST) -> None:
        """Search a node and all nodes below it."""
        before = self._locals, self._attributes
        if isinstance(node, ast.ClassDef):
            self._attributes = _assigned(node, of_self=True)
        elif isinstance(node, Function | ast.Lambda):
            self._locals = {**self._locals, **_assigned(node, of_self=False)}
        self._note(self._named_limits(node), is_sure=True)
        self._note(self._formed_limits(node), is_sure=False)
        for child in ast.iter_child_nodes(node):
            self.walk(child)
        self._locals, self._attributes = before

    def _note(self, limits: Iterable[ast.expr], is_sure: bool) -> None:
        """Record what these time limits use."""
        self._is_sure = is_sure
        for limit in limits:
            self._followed = set()
            self._term(limit)

    # --- time limits --------------------------------------------------------------------------------------------

    def _named_limits(self, node: ast.AST) -> Iterator[ast.expr]:
        match node:
            case ast.Call():
                yield from self._of_call(node)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield from _of_function(node)
            case ast.Assign(targets=targets, value=value) if any(map(_is_limit_target, targets)):
                yield value
            case ast.AnnAssign(target=target, value=ast.expr() as value) if _is_limit_target(target):
                yield target if self._is_field(target) and _number(value) is not None else value

    def _is_field(self, target: ast.expr) -> bool:
        return f"{self._module}.{_name_of(target)}" in self._index.fields.get(_name_of(target), ())

    def _formed_limits(self, node: ast.AST) -> Iterator[ast.expr]:
        match node:
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                yield from [right] if _is_moment(left) else [left] if _is_moment(right) else []
            case ast.Compare(left=left, comparators=[right]):
                for one, other in ((left, right), (right, left)):
                    if self._is_elapsed(one) and (isinstance(one, ast.BinOp) or _number(other) is None):
                        yield other

    def _of_call(self, call: ast.Call) -> Iterator[ast.expr]:
        func = call.func.value if isinstance(call.func, ast.Subscript) else call.func  # `Suspicion[str](...)`
        name = _name_of(func)
        yield from call.args if name in SCOPES else call.args[:2] if name in PAUSES else ()
        yield from (k.value for k in call.keywords if k.arg and is_limit(k.arg))
        places = {0} if name in WAITS and isinstance(call.func, ast.Attribute) else set[int]()
        places |= set(self._index.positions.get(name, ()))
        yield from (arg for at, arg in enumerate(call.args) if at in places and _is_seconds(arg))

    def _is_elapsed(self, node: ast.expr) -> bool:
        """True for the time since a moment, also if a local variable contains it."""
        match node:
            case ast.NamedExpr(value=value):
                return self._is_elapsed(value)
            case ast.BinOp(left=left, op=ast.Sub()):
                return _is_moment(left)
            case ast.Name(id=name):
                values = self._locals.get(name, [])
                return any(isinstance(one, ast.BinOp | ast.NamedExpr) and self._is_elapsed(one) for one in values)
        return False

    # --- terms of a time limit ----------------------------------------------------------------------------------

    def _term(self, node: ast.expr) -> None:
        """Record the constants and numbers in a term, or in the terms that it consists of."""
        match node:
            case ast.Constant():
                if _number(node) and (self._is_sure or not self._followed):
                    self._found.numbers.add(f"{self._path}:{node.lineno}: {node.value}")
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
                self._terms([left, right])
            case ast.IfExp(body=body, orelse=orelse):
                self._terms([body, orelse])
            case ast.BoolOp(values=values):
                self._terms(values)
            case ast.UnaryOp(operand=operand):
                self._term(operand)
            case ast.NamedExpr(value=value) | ast.Await(value=value):
                self._term(value)
            case ast.Call(func=func, args=args) if _name_of(func) in ("min", "max", "float"):
                self._terms(args)
            case ast.Name() | ast.Attribute():
                self._named(node, True)
            case _:
                self._scaled(ast.iter_child_nodes(node))

    def _terms(self, nodes: Iterable[ast.expr]) -> None:
        for node in nodes:
            self._term(node)

    def _scaled(self, nodes: Iterable[ast.AST]) -> None:
        """Record those factors, or arguments of a function, that have a unit of time."""
        for node in nodes:
            if isinstance(node, ast.Name | ast.Attribute):
                self._named(node, False)
            elif not isinstance(node, ast.Lambda | ast.Constant):
                self._scaled(ast.iter_child_nodes(node))

    def _named(self, node: ast.Name | ast.Attribute, is_term: bool) -> None:
        """Record a constant, or follow a variable, if it is a term by itself or has a unit of time."""
        name = _name_of(node)
        if name.isupper():
            if _has_unit(name) or (self._is_sure and (is_term or not self._followed)):
                self._found.names.add(f"{self._module}.{name}")
            return
        if not (is_term or _has_unit(name)):
            return
        fields = set(self._index.fields.get(name, ())) if name not in self._locals else set()
        self._found.names.update({f"{self._module}.{name}"} & fields or fields)
        is_own = isinstance(node, ast.Attribute) and _name_of(node.value) == "self"
        values = self._attributes if is_own else self._locals if isinstance(node, ast.Name) else {}
        for value in values.get(name, []):
            if id(value) not in self._followed:
                self._followed.add(id(value))
                self._term(value)


def _of_function(function: Function) -> Iterator[ast.expr]:
    """The defaults of parameters that are time limits, and the values returned by a function named as one."""
    arguments = function.args
    given = arguments.args[len(arguments.args) - len(arguments.defaults) :]
    pairs = [
        *zip(given, arguments.defaults, strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    yield from (default for arg, default in pairs if default is not None and is_limit(arg.arg))
    if is_limit(function.name):
        returns = (node for node in ast.walk(function) if isinstance(node, ast.Return))
        yield from (node.value for node in returns if node.value is not None)


def _is_limit_target(target: ast.expr) -> bool:
    """True for a variable, attribute or field that is a time limit. Constants are excluded: they may be numbers."""
    name = _name_of(target)
    return is_limit(name) and not name.isupper()


def _is_moment(node: ast.expr) -> bool:
    """True for a moment on a clock."""
    if isinstance(node, ast.Call):
        return _name_of(node.func) in CLOCKS and not node.args
    return isinstance(node, ast.Name | ast.Attribute) and _name_of(node).endswith(MOMENTS)


def _is_seconds(node: ast.expr) -> bool:
    """True for a number, and for an expression that contains a name with a unit of time."""
    names = (_name_of(one) for one in ast.walk(node))
    return _number(node) is not None or any(_has_unit(name) or is_limit(name) for name in names)


def _has_unit(name: str) -> bool:
    return {"s", "ms"} & set(name.lower().split("_")[1:]) != set()


def _number(node: ast.AST | None) -> float | None:
    """The value of an expression that is a number, else None."""
    value = node.value if isinstance(node, ast.Constant) else None
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _name_of(node: ast.AST) -> str:
    """The last name in `a.b.name`, or an empty string for other expressions."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _assigned(scope: ast.AST, of_self: bool) -> dict[str, list[ast.expr]]:
    """The values that a scope assigns to names, or to attributes of `self` if `of_self`."""
    found = defaultdict[str, list[ast.expr]](list)
    for node in ast.walk(scope):
        match node:
            case ast.Assign(targets=targets, value=value):
                pairs = [pair for target in targets for pair in _pairs(target, value)]
            case ast.AnnAssign(target=target, value=ast.expr() as value) | ast.NamedExpr(target=target, value=value):
                pairs = [(target, value)]
            case ast.AugAssign(target=target, op=ast.Add() | ast.Sub(), value=value):
                pairs = [(target, value)]
            case ast.With(items=items) | ast.AsyncWith(items=items):
                pairs = [(one.optional_vars, one.context_expr) for one in items if one.optional_vars is not None]
            case _:
                continue
        for target, value in pairs:
            if isinstance(target, ast.Attribute) == of_self and (not of_self or _name_of(target.value) == "self"):
                found[_name_of(target)].append(value)
    return dict(found)


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Each target with its value, also in `a, b = x, y`."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        for one, its in zip(target.elts, value.elts, strict=True):
            yield from _pairs(one, its)
    elif not isinstance(target, ast.Tuple):
        yield target, value
