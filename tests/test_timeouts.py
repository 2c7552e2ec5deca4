"""Every constant in a time limit has a row in `service/timeouts`, with the reason that nothing grows beyond it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from peerd.service.timeouts import TIMEOUTS

ROOT = Path(__file__).parent.parent
LIMITS = {"move_on_after", "fail_after", "move_on_at", "fail_at"}


def limits(tree: ast.AST) -> Iterator[ast.expr]:
    """The expressions that say when a call or a wait ends."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            yield from node.args if name in LIMITS else ()
            yield from (k.value for k in node.keywords if k.arg and is_limit(k.arg))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = node.args.args[len(node.args.args) - len(node.args.defaults) :]
            pairs = [
                *zip(given, node.args.defaults, strict=True),
                *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True),
            ]
            yield from (default for arg, default in pairs if default is not None and is_limit(arg.arg))


def is_limit(name: str) -> bool:
    return "timeout" in name or "deadline" in name


def constants(expression: ast.expr) -> set[str]:
    """The names of constants in an expression; its numbers where it has no names."""
    found = {node.id for node in ast.walk(expression) if isinstance(node, ast.Name) and node.id.isupper()}
    found |= {node.attr for node in ast.walk(expression) if isinstance(node, ast.Attribute) and node.attr.isupper()}
    if found:
        return found
    numbers = (node.value for node in ast.walk(expression) if isinstance(node, ast.Constant))
    return {str(number) for number in numbers if isinstance(number, int | float)}


def in_the_code() -> set[str]:
    found = set[str]()
    for path in sorted([*ROOT.glob("peerd/**/*.py"), *ROOT.glob("roles/**/*.py")]):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if parts[:2] != ("peerd", "sim"):
            for expression in limits(ast.parse(path.read_text())):
                found |= {".".join((*parts, name)) for name in constants(expression)}
    return found


def test_every_constant_in_a_time_limit_has_its_reason() -> None:
    found = in_the_code()
    assert len(found) > 50, "the walk finds them"
    assert sorted(found - TIMEOUTS.keys()) == [], "say in service/timeouts why it may be a constant, or let it grow"
    assert sorted(TIMEOUTS.keys() - found) == [], "no time limit uses these any more"
