"""Reads the parameters of a handler when it is decorated, and builds its arguments.

A parameter annotated ``plait.Message`` gets the message, the other one the body, decoded into its annotation. A batch
handler takes lists of both. With ``dedup``, another parameter gets the database transaction in which the handler runs.
An invalid signature is refused at once; the error names the handler and the parameter.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from plait.client.codec import Decode, decoder_for
from plait.client.types import Message
from plait.errors import InvalidArgument

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


#: Runs a call of a handler in a transaction: (group, messages, call). ``call`` takes the transaction and the indexes of
#: the messages that were not handled before; it is not called if there is none.
RunInTransaction = Callable[[str, Sequence[Message], Callable[[Any, list[int]], Any]], Any]


class HandlerTransactions(Protocol):
    """Runs handlers in transactions that record their messages: ``plait.outbox.Dedup``."""

    def runner(self, handler: str, *, is_async: bool, annotations: Sequence[Any]) -> tuple[RunInTransaction, int]:
        """How to run a handler, and the index of the parameter that gets the transaction."""
        ...


class Handler:
    """A user's function and how to call it."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        batch: bool,
        local_names: Mapping[str, Any],
        group: str | None = None,
        dedup: HandlerTransactions | None = None,
    ) -> None:
        self.function = function
        self.batch = batch
        self.name = getattr(function, "__qualname__", type(function).__qualname__).replace("<locals>.", "")
        self.is_async = _is_async(function)
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise InvalidArgument(
                f"handler {self.name} is a generator; a handler returns to ack its message and raises to nack it"
            )
        #: Decodes a body; None if the handler takes no body.
        self._decode: Decode | None = None
        #: True if the function runs in a transaction: its first argument is the message then.
        self._transactional = dedup is not None
        #: For each argument: True for the message, False for the body.
        self._takes_message: list[bool] = []
        parameters = self._parameters(local_names)
        position = None
        if dedup is not None:
            if group is None:
                raise InvalidArgument(f"handler {self.name}: dedup= needs a group, and a broadcast has none")
            annotations = [parameter.annotation for parameter in parameters]
            run, position = dedup.runner(self.name, is_async=self.is_async, annotations=annotations)
            self.function = self._in_transaction(run, group, position)
        for index, parameter in enumerate(parameters):
            if index != position:
                self._add(parameter)
        if not self._takes_message:
            raise InvalidArgument(f"handler {self.name} takes no argument; give it one for the body or the message")

    def _parameters(self, local_names: Mapping[str, Any]) -> list[inspect.Parameter]:
        """The parameters with their annotations evaluated."""
        try:
            parameters = list(inspect.signature(self.function).parameters.values())
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"the signature of handler {self.name} cannot be read: {error}") from None
        annotations = {p.name: p.annotation for p in parameters if p.annotation is not p.empty}

        def stand_in() -> None:
            """Carries only the annotations of the parameters: the return annotation is not evaluated."""

        stand_in.__annotations__ = annotations
        try:
            evaluated = inspect.get_annotations(
                stand_in, globals=_globals(self.function), locals=local_names, eval_str=True
            )
        except (NameError, SyntaxError, AttributeError, TypeError) as error:
            raise InvalidArgument(
                f"handler {self.name}: an annotation cannot be read ({error}); define its type above the handler"
            ) from None
        return [p.replace(annotation=evaluated.get(p.name, p.empty)) for p in parameters]

    def _add(self, parameter: inspect.Parameter) -> None:
        where = f"handler {self.name}, parameter {parameter.name!r}"
        if parameter.kind not in _POSITIONAL:
            if parameter.default is not parameter.empty:
                return
            raise InvalidArgument(f"{where}: make it positional; a handler takes a body and a message, nothing else")
        annotation = parameter.annotation
        if annotation is parameter.empty:
            raise InvalidArgument(
                f"{where} has no annotation; write the type of the body, as in {parameter.name}: bytes, "
                f"or {parameter.name}: plait.Message"
            )
        if annotation is Message or annotation == list[Message]:
            if self.batch != (annotation is not Message):
                wanted = "list[plait.Message], because of batch=" if self.batch else "plait.Message"
                raise InvalidArgument(f"{where}: annotate it {wanted}")
            self._takes_message.append(True)
            return
        if False in self._takes_message:
            if parameter.default is not parameter.empty:
                return
            raise InvalidArgument(
                f"{where}: another parameter takes the body; annotate it plait.Message to get the message"
            )
        self._decode = self._decoder(annotation, where)
        self._takes_message.append(False)

    def _decoder(self, annotation: Any, where: str) -> Decode:
        kind = annotation
        if self.batch:
            items = typing.get_args(annotation)
            if typing.get_origin(annotation) is not list or len(items) != 1:
                raise InvalidArgument(f"{where}: with batch= it gets a list of bodies; annotate it list[...]")
            kind = items[0]
        try:
            return decoder_for(kind)
        except InvalidArgument as error:
            raise InvalidArgument(f"{where}: {error}") from None

    def decode(self, message: Message) -> Any:
        """The body decoded into the handler's annotation; ``CodecError`` if that is not possible."""
        return None if self._decode is None else self._decode(message.body)

    def _in_transaction(self, run: RunInTransaction, group: str, position: int) -> Callable[..., Any]:
        """The handler as a function of the other arguments, which runs in a transaction and skips handled messages."""
        function = self.function

        def handle(messages: Any, *others: Any) -> Any:
            def call(transaction: Any, new: list[int]) -> Any:
                chosen = [[each[index] for index in new] for each in others] if self.batch else list(others)
                chosen.insert(position, transaction)
                result = function(*chosen)
                if not self.is_async and inspect.isawaitable(result):
                    # It would run after the commit.
                    raise InvalidArgument(f"handler {self.name} returns an awaitable; with dedup= write async def")
                return result

            return run(group, messages if self.batch else [messages], call)

        return handle

    def arguments(self, body: Any, message: Message | Sequence[Message]) -> list[Any]:
        found = [message if wanted else body for wanted in self._takes_message]
        return [message, *found] if self._transactional else found


def _is_async(function: Callable[..., Any]) -> bool:
    called = getattr(type(function), "__call__", None)  # noqa: B004 - an object's method is looked at, not whether
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)


def _globals(function: Callable[..., Any]) -> dict[str, Any]:
    inner: Any = inspect.unwrap(function)
    while hasattr(inner, "func"):
        inner = inner.func
    if not hasattr(inner, "__globals__"):
        inner = type(inner).__call__
    found: dict[str, Any] = getattr(inner, "__globals__", {})
    return found
