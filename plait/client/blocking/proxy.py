"""Makes the blocking form of the client's asynchronous methods: the same signature and docstring, without ``await``.

A blocking class wraps an object of the asynchronous client (``_inner``) and has a function that runs coroutines on the
client's loop (``_run``). Its methods are made from those of the wrapped class: no signature and no docstring exists
twice, and a type checker knows the arguments and results.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from plait.client.blocking.loop_thread import RunInLoop

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
Owner = TypeVar("Owner")


class Blocking(Generic[T]):
    """Base of the blocking classes: wraps an object of the asynchronous client."""

    def __init__(self, inner: T, run: RunInLoop) -> None:
        self._inner = inner
        self._run = run

    def __repr__(self) -> str:
        return repr(self._inner)


def blocking(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]) -> Callable[Concatenate[Any, P], R]:
    """The blocking form of an asynchronous method: runs it on the loop and waits for its result."""

    @functools.wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = self._run(method(self._inner, *args, **kwargs))
        return result

    return call


def signed_as(
    method: Callable[Concatenate[Any, P], Any],
) -> Callable[[Callable[Concatenate[Owner, P], R]], Callable[Concatenate[Owner, P], R]]:
    """Gives a method the signature of one of the asynchronous client; its docstring stays, if it has one.

    The names of the result's classes are those that ``plait.sync`` exports: ``Consumer`` is ``SyncConsumer`` there.
    """

    def decorate(function: Callable[Concatenate[Owner, P], R]) -> Callable[Concatenate[Owner, P], R]:
        function.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]
        function.__doc__ = function.__doc__ or method.__doc__
        return function

    return decorate
