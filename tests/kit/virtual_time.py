"""Async tests in virtual time: `virtual` runs one as it is, `within` inside a scene that the test takes first.

The order in which trio runs tasks follows from the argument `seed` of the test, or never changes if there is none:
a scene may depend on it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from tests.worlds.simulation.clock import run_virtual

Scene = Callable[..., AbstractAsyncContextManager[Any]]
Test = Callable[..., Awaitable[None]]


def virtual(test: Test) -> Callable[..., None]:
    """Decorates an async test that runs in virtual time."""

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        run_virtual(functools.partial(test, **arguments), seed=arguments.get("seed", 1))

    return run


def within(scene: Scene, *needs: str, gives: int = 1) -> Callable[[Test], Callable[..., None]]:
    """Decorates an async test that runs in virtual time inside `scene`.

    The scene's value is the first argument of the test; or its values are the first `gives` arguments. `needs`: the
    fixtures that the scene takes.
    """

    def decorate(test: Test) -> Callable[..., None]:
        signature = inspect.signature(test)
        fixtures = {one.name: one for one in [*signature.parameters.values()][gives:]}

        @functools.wraps(test)
        def run(**arguments: Any) -> None:
            async def whole() -> None:
                async with scene(*(arguments[name] for name in needs)) as made:
                    given = made if gives > 1 else (made,)
                    await test(*given, **{name: arguments[name] for name in fixtures})

            run_virtual(whole, seed=1)

        more = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in needs if name not in fixtures]
        run.__signature__ = signature.replace(parameters=[*fixtures.values(), *more])  # type: ignore[attr-defined]
        return run

    return decorate
