"""``App``: runs functions that handle messages as a service.

When a handler returns, the app acks its message. When a handler raises, the app nacks the message, which is retried as
the group's policy says. If it raises ``RetryLater``, the message is retried after the handler's delay; with ``Suspend``
the handler also gets no other message until then. SIGTERM and SIGINT drain the app: it pulls no new messages, waits for
running handlers up to ``drain_seconds``, and returns the rest of the messages.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, Literal, TypeVar

from plait.client.app.app_run import AppRun, LifecycleHook
from plait.client.app.signature import Handler, HandlerTransactions
from plait.client.app.subscription import HandleHook, SubscriberSettings, Subscription
from plait.client.arguments import Duration, Start, seconds_of, wait_of
from plait.client.blocking.loop_thread import new_event_loop
from plait.client.client import DEFAULT_ADDRESS, Client
from plait.client.consume.terms import ConsumerArguments
from plait.client.send.encoding import Delay
from plait.client.types import HeaderValue, Receipt, Ticket
from plait.errors import Closed, InvalidArgument
from plait.limits import ClientLimits
from plait.model import names
from plait.model.filter_terms import TagFilter, filter_terms
from plait.model.retry_policy import Retry
from plait.model.subject_patterns import SubjectPatterns

log = logging.getLogger("plait.app")

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(slots=True)
class Outgoing:
    """A message before it is sent: the arguments of ``app.send``, which send hooks may change."""

    subject: str
    body: Any
    key: str | int | None
    tags: list[str]
    headers: dict[str, HeaderValue]
    oneway: bool
    delay: Delay | None = None
    deliver_at: datetime | None = None
    to_group: str | None = None
    priority: int = 0

    async def send(self, client: Client) -> Receipt:
        """Send the message with its current values."""
        return await client.send(
            self.subject,
            self.body,
            key=self.key,
            tags=self.tags or None,
            headers=self.headers or None,
            delay=self.delay,
            deliver_at=self.deliver_at,
            to_group=self.to_group,
            priority=self.priority,
            oneway=self.oneway,
        )


#: Called around each send, with the message and a function that continues the send.
SendHook = Callable[[Outgoing, Callable[[], Awaitable[Receipt]]], Awaitable[Receipt]]


class App:
    """A service made of handlers. ``group`` is the default group of its subscribers."""

    def __init__(
        self,
        address: str | Sequence[str] = DEFAULT_ADDRESS,
        *,
        group: str | None = None,
        client_id: str | None = None,
        compression: Literal["zstd", "lz4"] | None = None,
        limits: ClientLimits | None = None,
        spool: str | os.PathLike[str] | None = None,
    ) -> None:
        if group is not None:
            names.check_group(group)
        self.group = group
        self.limits = limits or ClientLimits()
        self._address = address
        self._client_id = client_id
        self._compression = compression
        self._spool = spool
        # Refuses an invalid address or client id now, not when the service starts.
        self._new_client()
        self._subscriptions: list[Subscription] = []
        self._handle_hooks: list[HandleHook] = []
        self._send_hooks: list[SendHook] = []
        self._startup: list[LifecycleHook] = []
        self._shutdown: list[LifecycleHook] = []
        self._run: AppRun | None = None

    def _new_client(self) -> Client:
        return Client(
            self._address,
            client_id=self._client_id,
            compression=self._compression,
            limits=self.limits,
            spool=self._spool,
        )

    # --- declaring ------------------------------------------------------------------------------

    def subscriber(
        self,
        subject: str | Iterable[str],
        *,
        group: str | None = None,
        batch: int | None = None,
        concurrency: int = 1,
        delivery: Literal["at_least_once", "at_most_once"] = "at_least_once",
        broadcast: bool = False,
        start: Start | None = None,
        prefetch: int | None = None,
        retry: Retry | None = None,
        timeout: Duration | None = None,
        suspend: Duration | None = None,
        ordered: bool = False,
        affinity: Literal["key"] | None = None,
        handling: Duration | None = None,
        tags: TagFilter | str | Iterable[str] | None = None,
        where: str | None = None,
        fair_by: str | None = None,
        undecodable: Literal["reject", "retry"] = "reject",
        dedup: HandlerTransactions | None = None,
    ) -> Callable[[Function], Function]:
        """Decorates a handler, ``def`` (run in a thread) or ``async def``.

        ``subject`` is a name, a prefix such as "order.*", or a list of both. A parameter annotated ``plait.Message``
        gets the message; another one gets the body, decoded into its annotation
        (bytes, str, dict, a msgspec struct, a dataclass, a pydantic model). With ``batch=n`` the handler gets lists of
        up to n. ``concurrency`` is the number of calls that run at a time. A call that takes longer than ``timeout``
        fails; an ``async def`` is cancelled then. With ``suspend`` any failure suspends the handler for that long, as
        ``plait.Suspend`` does. With ``ordered`` or ``affinity`` messages of one key are handled one after another. A
        body that does not decode is dead at once; with ``undecodable="retry"`` it is retried. With ``dedup``, a
        ``plait.outbox.Dedup``, a parameter gets the database transaction in which the handler runs, and messages that
        it has handled are skipped. The others: ``consumer``.
        """
        group = self._group_of(subject, group, broadcast)
        basics = (subject, group, broadcast, delivery, start, prefetch, retry, ordered, affinity, handling)
        arguments = ConsumerArguments(*basics, filter_terms(where, tags), fair_by)
        arguments.checked()
        for name, value in (("batch", batch), ("concurrency", concurrency), ("prefetch", prefetch)):
            _check_count(name, value)
        _check_undecodable(undecodable)
        self._check_other_subscribers(arguments.subjects, group)
        settings = SubscriberSettings(
            consumer=arguments,
            batch=batch,
            concurrency=concurrency,
            timeout=None if timeout is None else _positive(timeout),
            suspend=None if suspend is None else wait_of(suspend),
            undecodable=undecodable,
        )
        # Annotations may name types that are local to the function in which the handler is defined.
        local_names = dict(sys._getframe(1).f_locals)

        def decorate(function: Function) -> Function:
            handler = Handler(function, batch=batch is not None, local_names=local_names, group=group, dedup=dedup)
            self._subscriptions.append(Subscription(settings, handler, self._handle_hooks))
            return function

        return decorate

    def _group_of(self, subject: str | Iterable[str], group: str | None, broadcast: bool) -> str | None:
        group = None if broadcast else group or self.group
        if group is None and not broadcast:
            raise InvalidArgument(
                f"subscriber of {subject!r} has no group; pass group= here or to App(...), or pass broadcast=True"
            )
        return group

    def _check_other_subscribers(self, subjects: SubjectPatterns, group: str | None) -> None:
        for other in (each.settings.consumer for each in self._subscriptions):
            if group is not None and other.group == group and other.subjects.overlaps(subjects):
                raise InvalidArgument(
                    f"group {group!r} already has a subscriber of {str(other.subjects)!r}: each would get only some of "
                    f"the messages of {str(subjects)!r}; give one of them its own group"
                )

    def around_handle(self, function: Function) -> Function:
        """Decorates an ``async def`` hook that wraps each call of a handler; the first one declared is outermost.

        The hook gets the list of messages (one, except for batch handlers) and ``proceed``: ``await proceed()`` calls
        the handler and raises what it raises. If the hook raises, the handler failed; if it returns, it succeeded.
        """
        _check_hook("around_handle", function)
        self._handle_hooks.append(function)
        return function

    def around_send(self, function: Function) -> Function:
        """Decorates an ``async def`` hook that wraps each ``app.send``; the first one declared is outermost.

        The hook gets the ``plait.Outgoing``, which it may change, and ``proceed``: ``return await proceed()`` sends the
        message and returns the receipt. ``app.post`` and the client's own methods do not call hooks.
        """
        _check_hook("around_send", function)
        self._send_hooks.append(function)
        return function

    def on_startup(self, function: Function) -> Function:
        """Decorates a hook that runs once the app is connected, before the first message.

        It is a ``def`` or ``async def`` without arguments.
        """
        self._startup.append(function)
        return function

    def on_shutdown(self, function: Function) -> Function:
        """Decorates a hook that runs after the last message, while still connected; the last declared runs first."""
        self._shutdown.append(function)
        return function

    # --- sending --------------------------------------------------------------------------------

    @property
    def client(self) -> Client:
        """The client of the running app. Use it only in the thread of the app's loop."""
        if self._run is None or self._run.client is None:
            raise Closed("the app is not running; its client exists from start-up to shutdown")
        return self._run.client

    def _own_client(self) -> Client:
        client = self.client
        if self._run is None or threading.get_ident() != self._run.thread:
            raise InvalidArgument(
                "the app's client works only in the thread of the app's loop; in a def handler send with plait.sync"
            )
        return client

    async def send(
        self,
        subject: str,
        body: Any,
        *,
        key: str | int | None = None,
        tags: Iterable[str] | None = None,
        headers: Mapping[str, str | int | float | bool] | None = None,
        delay: Delay | None = None,
        deliver_at: datetime | None = None,
        to_group: str | None = None,
        priority: int = 0,
        oneway: bool = False,
    ) -> Receipt:
        """``client.send``, from hooks and ``async def`` handlers."""
        client = self._own_client()
        if not self._send_hooks:
            return await client.send(
                subject,
                body,
                key=key,
                tags=tags,
                headers=headers,
                delay=delay,
                deliver_at=deliver_at,
                to_group=to_group,
                priority=priority,
                oneway=oneway,
            )
        listed = [tags] if isinstance(tags, str) else list(tags or ())
        outgoing = Outgoing(
            subject, body, key, listed, dict(headers or {}), oneway, delay, deliver_at, to_group, priority
        )
        proceed: Callable[[], Awaitable[Receipt]] = partial(outgoing.send, client)
        for hook in reversed(self._send_hooks):
            proceed = partial(hook, outgoing, proceed)
        return await proceed()

    def post(
        self,
        subject: str,
        body: Any,
        *,
        key: str | int | None = None,
        tags: Iterable[str] | None = None,
        headers: Mapping[str, str | int | float | bool] | None = None,
        delay: Delay | None = None,
        deliver_at: datetime | None = None,
        to_group: str | None = None,
        priority: int = 0,
    ) -> Ticket:
        """``client.post``, from hooks and ``async def`` handlers; shutdown waits for posted messages."""
        return self._own_client().post(
            subject,
            body,
            key=key,
            tags=tags,
            headers=headers,
            delay=delay,
            deliver_at=deliver_at,
            to_group=to_group,
            priority=priority,
        )

    # --- running --------------------------------------------------------------------------------

    def run_forever(self) -> None:
        """Run until SIGTERM or SIGINT, on a new event loop (uvloop if it is installed).

        Plait logs to standard error from level INFO, unless the program has configured logging.
        """
        _log_to_stderr()
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(self.run())

    def stop(self) -> None:
        """Start to drain, as SIGTERM does; ``run`` returns when that is done. May be called from any thread."""
        run = self._run
        if run is not None:
            try:
                run.loop.call_soon_threadsafe(run.stop)
            except RuntimeError:
                # The loop has ended, and the app with it.
                pass

    async def run(self) -> None:
        """Connect and handle messages until SIGTERM, SIGINT, ``stop`` or cancellation, then drain.

        A second signal cuts the draining short. A stop before the app is ready cancels connecting.
        Raises the error that prevents the service: no server, a group with other settings, a failed start-up hook.
        """
        if self._run is not None:
            raise InvalidArgument("the app is already running; stop it first, or create another App")
        if not self._subscriptions:
            raise InvalidArgument("the app has no subscriber; decorate a function with @app.subscriber(...)")
        self._run = AppRun(self._subscriptions, self._startup, self._shutdown, self.limits)
        try:
            await self._run.run(self._new_client())
        finally:
            self._run = None


def _log_to_stderr() -> None:
    """Log to standard error unless logging is configured: a silent service looks like one that hangs."""
    plait_log = logging.getLogger("plait")
    if not plait_log.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        plait_log.addHandler(handler)
        plait_log.setLevel(logging.INFO)


def _check_hook(name: str, function: Callable[..., Any]) -> None:
    if not inspect.iscoroutinefunction(function):
        raise InvalidArgument(f"{name} takes an async def, not {function!r}")


def _check_undecodable(value: str) -> None:
    if value not in ("reject", "retry"):
        raise InvalidArgument(f"undecodable {value!r} is not known; use 'reject' or 'retry'")


def _check_count(name: str, value: int | None) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise InvalidArgument(f"{name} must be a number from 1, not {value!r}")


def _positive(timeout: Duration) -> float:
    seconds = seconds_of(timeout)
    if seconds <= 0:
        raise InvalidArgument(f"timeout must be more than 0, not {timeout!r}")
    return seconds
