"""``@app.subscriber`` reads the parameters of a handler and refuses invalid ones at declaration."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

import plait
from plait.client.app.signature import Handler

if TYPE_CHECKING:
    from decimal import Decimal


class Order(msgspec.Struct):
    number: str


@pytest.fixture
def app() -> plait.App:
    return plait.App(group="billing")


class Callable_:
    async def __call__(self, order: Order, message: plait.Message) -> None: ...


def body_only(order: Order) -> None: ...
def body_and_message(order: Order, message: plait.Message) -> None: ...
def message_and_body(message: plait.Message, order: Order) -> None: ...
def message_only(message: plait.Message) -> None: ...
def optional_rest(order: Order, verbose: bool = False, *, level: int = 1) -> None: ...
async def asynchronous(order: Order, /) -> None: ...
def odd_return_type(order: Order) -> Decimal: ...  # type: ignore[empty-body]


@pytest.mark.parametrize(
    ("function", "is_async", "arguments"),
    [
        (body_only, False, ["body"]),
        (body_and_message, False, ["body", "message"]),
        (message_and_body, False, ["message", "body"]),
        (message_only, False, ["message"]),
        (optional_rest, False, ["body"]),
        (asynchronous, True, ["body"]),
        (odd_return_type, False, ["body"]),
        (Callable_(), True, ["body", "message"]),
        (functools.partial(body_and_message), False, ["body", "message"]),
        (functools.partial(asynchronous), True, ["body"]),
    ],
)
def test_handler_parameters_are_matched_by_annotation(
    function: Callable[..., Any], is_async: bool, arguments: list[str]
) -> None:
    handler = Handler(function, batch=False, local_names={})
    assert handler.is_async == is_async
    message: Any = "message"
    assert handler.arguments("body", message) == arguments


def test_the_decorator_returns_the_function_unchanged(app: plait.App) -> None:
    assert app.subscriber("s")(body_only) is body_only


def test_annotations_may_name_local_types(app: plait.App) -> None:
    class Local(msgspec.Struct):
        number: str

    @app.subscriber("s")
    def handle(order: Local) -> None: ...

    @app.subscriber("t", batch=10)
    def handle_many(orders: list[Local], messages: list[plait.Message]) -> None: ...


def unannotated(order): ...  # type: ignore[no-untyped-def]  # noqa: ANN001
def nothing() -> None: ...
def two_bodies(order: Order, other: Order) -> None: ...
def keyword_only(*, order: Order) -> None: ...
def variable(*orders: Order) -> None: ...
def unknown_type(order: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821
def impossible(order: object) -> None: ...
def list_of_messages(messages: list[plait.Message]) -> None: ...
def generator(order: Order) -> Any:
    yield order


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (unannotated, r"handler unannotated, parameter 'order' has no annotation; write .* order: bytes"),
        (nothing, "handler nothing takes no argument"),
        (two_bodies, "parameter 'other': another parameter takes the body"),
        (keyword_only, "parameter 'order': make it positional"),
        (variable, "parameter 'orders': make it positional"),
        (unknown_type, r"unknown_type: an annotation cannot be read \(name 'Nowhere'.*define its type above"),
        (impossible, "parameter 'order': a body cannot be decoded as object"),
        (list_of_messages, "parameter 'messages': annotate it plait.Message"),
        (generator, "handler generator is a generator"),
        (len, "len.*parameter 'obj'.* no annotation|given by position"),
    ],
)
def test_a_handler_that_cannot_be_called_is_refused(app: plait.App, function: Callable[..., Any], reason: str) -> None:
    with pytest.raises(plait.InvalidArgument, match=reason):
        app.subscriber("s")(function)
    with pytest.raises(plait.InvalidArgument, match="no subscriber"):
        app.run_forever()


def bare_list(orders: list) -> None: ...  # type: ignore[type-arg]
def one_message(orders: list[Order], message: plait.Message) -> None: ...


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (body_only, r"with batch= it gets a list of bodies; annotate it list\[...\]"),
        (bare_list, r"annotate it list\[...\]"),
        (one_message, r"parameter 'message': annotate it list\[plait.Message\]"),
    ],
)
def test_a_batch_handler_takes_lists(app: plait.App, function: Callable[..., Any], reason: str) -> None:
    with pytest.raises(plait.InvalidArgument, match=reason):
        app.subscriber("s", batch=10)(function)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"subject": ""}, "subject name"),
        ({"group": "a b"}, "group name"),
        ({"batch": 0}, "batch must be a number from 1, not 0"),
        ({"batch": True}, "batch must be a number from 1, not True"),
        ({"concurrency": 0}, "concurrency must be"),
        ({"prefetch": -1}, "prefetch must be"),
        ({"delivery": "once"}, "'once' is not known"),
        ({"start": "yesterday"}, "start 'yesterday'"),
        ({"retry": 5}, r"retry is 5; use plait.Retry"),
        ({"timeout": -1}, "must be 0 or more"),
        ({"timeout": 0}, "timeout must be more than 0"),
        ({"suspend": "3y"}, "not understood"),
    ],
)
def test_invalid_settings_are_refused(app: plait.App, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(plait.InvalidArgument, match=reason):
        app.subscriber(**{"subject": "s", **settings})


def test_a_subscriber_needs_a_group_or_broadcast() -> None:
    app = plait.App()
    with pytest.raises(plait.InvalidArgument, match=r"'s' has no group.*broadcast=True"):
        app.subscriber("s")
    app.subscriber("s", group="g")(body_only)
    app.subscriber("s", broadcast=True)(body_only)
    app.subscriber("s", broadcast=True)(message_only)


def test_a_second_subscriber_of_the_same_group_is_refused(app: plait.App) -> None:
    app.subscriber("s")(body_only)
    with pytest.raises(plait.InvalidArgument, match="'billing' already has a subscriber of 's'"):
        app.subscriber("s")
    app.subscriber("s", group="other")(body_only)


@pytest.mark.parametrize(
    "arguments", [{"address": "http://localhost:7450"}, {"group": ""}, {"client_id": "a b"}, {"compression": "zip"}]
)
def test_invalid_app_arguments_are_refused_at_construction(arguments: dict[str, Any]) -> None:
    with pytest.raises(plait.InvalidArgument):
        plait.App(**arguments)


def test_the_client_exists_only_while_the_app_runs(app: plait.App) -> None:
    with pytest.raises(plait.Closed, match="not running"):
        app.post("s", b"")
    app.stop()
