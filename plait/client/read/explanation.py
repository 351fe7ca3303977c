"""Explains in words where a message is for a group, and why."""

from __future__ import annotations

from datetime import datetime
from typing import Final

import msgspec

from plait.client.arguments import to_datetime
from plait.client.transactions.transaction_info import TransactionInfo
from plait.client.types import Message, MessageId, PartitionName
from plait.model.filter_terms import FilterTerms
from plait.model.reason import Reason
from plait.wire.admin.why import HistoryRow, MessageState

#: States of messages that the group gets later, or again.
_WAITING: Final = ("next", "returned", "retry", "behind", "parked")


class WhyEvent(msgspec.Struct, frozen=True):
    """Something that happened to a message. ``certain`` is False if it may concern other keys of its group only."""

    time: datetime
    text: str
    certain: bool = True


class Explanation(msgspec.Struct, frozen=True):
    """Where a message is for a group: in words, and as values for programs."""

    message_id: MessageId
    group: str
    #: One or two sentences.
    text: str
    #: "unknown", "delayed", "undecided", "no_group", or a state of docs/query.md.
    state: str
    subject: str | None = None
    partition: PartitionName | None = None
    sequence: int | None = None
    store_time: datetime | None = None
    #: The consumer that has the message.
    client: str | None = None
    attempt: int = 0
    #: When a delayed message, or a retry, is delivered.
    due: datetime | None = None
    #: The newest first.
    history: list[WhyEvent] = []
    #: True if the history does not reach back to the time at which the message was stored.
    partial: bool = False


def explained(message: Message, group: str, state: MessageState, reason: Reason | None = None) -> Explanation:
    """The explanation of a stored message; ``reason``: why it became a dead letter."""
    text = _text(message, group, state)
    if reason is not None and (reason.type or reason.text):
        text += f" The reason: {': '.join(part for part in (reason.type, reason.text) if part)}."
    events = [WhyEvent(to_datetime(row.time), _event_text(row, state), row.certain) for row in state.history]
    return Explanation(
        message.message_id,
        group,
        text,
        state.state,
        message.subject,
        message.partition,
        message.sequence,
        message.store_time,
        state.client or None,
        state.attempt,
        to_datetime(state.due) if state.due else None,
        events,
        state.partial,
    )


def undecided(message_id: MessageId, group: str, transaction: TransactionInfo) -> Explanation:
    """The explanation of a message whose transaction is not committed, or not published yet."""
    what = f"transaction {transaction.id} of producer group {transaction.producer_group}"
    if transaction.state == "committed":
        text = f"The message belongs to {what}, which is committed: it is published soon."
    else:
        text = (
            f"The message belongs to {what}, which is {transaction.state} and not decided: no group gets it before "
            "the transaction is committed."
        )
    subject = transaction.subjects[0] if len(transaction.subjects) == 1 else None
    return Explanation(message_id, group, text, "undecided", subject)


def _text(message: Message, group: str, state: MessageState) -> str:
    stored = f"The message is stored in {message.partition} as sequence {message.sequence} since {message.store_time}."
    if message.to_group is not None:
        stored = f"{stored} It is addressed to group {message.to_group}."
    if message.to_group not in (None, group):
        return f"{stored} Group {group} does not get it."
    text = f"{stored} {_state_text(group, state)}"
    if state.filter is not None and any(row.action == "filtered" for row in state.history[:1]):
        text += f" {_filter_text(message, state, state.filter)}"
    if state.paused and state.state in _WAITING:
        text += f" The group is paused since {to_datetime(state.paused)}: it gets no messages until it is resumed."
    return text


def _filter_text(message: Message, state: MessageState, terms: FilterTerms) -> str:
    """The present filter of the group, and the values of the message that it looks at."""
    parts = [f"tags {kind} {', '.join(tags)}" for kind, tags in msgspec.structs.asdict(terms.tags).items() if tags]
    parts += [terms.where] if terms.where else []
    values = [
        f"{name} = {message.headers[name]!r}" if name in message.headers else f"no header {name}"
        for name in state.filter_headers
    ]
    if state.filter_tags:
        values.append(f"tags = {message.tags}" if message.tags else "no tags")
    if state.filter_key:
        values.append("no key" if message.key is None else f"key = {message.key!r}")
    has = f" The message has {', '.join(values)}." if values else ""
    return f"The filter is now: {'; '.join(parts)}.{has}"


def _state_text(group: str, state: MessageState) -> str:
    who = f"consumer {state.client}" if state.client else "a consumer that is not known"
    since = next((f" since {to_datetime(row.time)}" for row in state.history if row.action == "pull"), "")
    match state.state:
        case "invisible":
            return "It is not delivered yet, because its send is not acknowledged yet."
        case "removed":
            return f"Retention or damage removed it before group {group} was done with it."
        case "before":
            return f"Group {group} does not get it: the group began after it."
        case "next":
            online = "" if state.online else " No consumer of the group is connected."
            overtaken = ", and later ones overtook it" if state.overtaken else ""
            return (
                f"No consumer of group {group} has begun it; {state.ahead} sequences are before it{overtaken}.{online}"
            )
        case "behind":
            return f"Group {group} gets it after an earlier message of its key, sequence {state.blocker}, is done."
        case "parked":
            blocker = f"sequence {state.blocker}" if state.blocker >= 0 else "a message of another partition"
            return f"Its key is parked in group {group} behind a dead letter, {blocker}: resume or skip the key."
        case "held":
            return f"It was delivered to {who}{since} (attempt {state.attempt}) and is not acked yet."
        case "returned":
            return f"It was delivered {_times(state.attempt)}; group {group} gets it again as soon as possible."
        case "retry":
            due = to_datetime(state.due)
            return f"It was delivered {_times(state.attempt)}; group {group} gets it again at {due}."
        case "dead":
            attempts = f" after {state.attempt} attempt{'s' * (state.attempt > 1)}" if state.attempt else ""
            return f"It is a dead letter of group {group}{attempts}."
    return _done_text(group, state)


def _done_text(group: str, state: MessageState) -> str:
    if state.broadcast:
        return f"Group {group} is past it. Deliveries to broadcast consumers are not recorded."
    last = next((row for row in state.history if row.action in ("ack", "filtered", "skip", "purge", "passed")), None)
    if last is None:
        end = "its history is older than what was read" if state.partial else "no event of it is left in the action log"
        return f"Group {group} is done with it; {end}."
    time, by = to_datetime(last.time), f" by consumer {last.client}" if last.client else ""
    match last.action:
        case "ack" if state.delivery == "at_most_once":
            return f"Group {group} delivered it{by} at {time}; at-most-once groups record no ack."
        case "ack":
            return f"Group {group} is done with it: it was acked{by} at {time}."
        case "filtered":
            return f"The filter of group {group} left it out at {time}."
        case "skip":
            return f"Group {group} never finished it: retention, damage or an operator skipped it at {time}."
        case "purge":
            return f"It was a dead letter of group {group}, deleted at {time}."
    return f"Group {group} passed it by a rewind that skips messages at {time}."


def _times(attempts: int) -> str:
    return "once" if attempts == 1 else f"{attempts} times" if attempts else "before"


def _event_text(row: HistoryRow, state: MessageState) -> str:
    who = f" {row.client}" if row.client else ""
    attempt = f" (attempt {row.attempt})" if row.attempt else ""
    match row.action:
        case "pull":
            return f"delivered to{who or ' a consumer'}{attempt}"
        case "ack" if state.delivery == "at_most_once":
            return f"delivered to{who or ' a consumer'}{attempt}"
        case "ack":
            return f"acked{' by' + who if who else ''}"
        case "nack" if row.uncounted:
            return f"returned{' by' + who if who else ''} before it was handled"
        case "nack":
            again = f"again at {to_datetime(row.due)}" if row.due else "again at once"
            return f"failed{' at' + who if who else ''}{attempt}, {again}"
        case "offline":
            return f"returned, because{who or ' its consumer'} disconnected"
        case "bury":
            return f"became a dead letter{attempt}"
        case "revive":
            return "resent from the dead letters"
        case "purge":
            return "deleted from the dead letters"
        case "filtered":
            return "left out by the filter of the group"
        case "skip":
            return "skipped"
        case "rewind":
            return "delivered again, because the group was rewound"
        case "passed":
            return "passed by a rewind of the group that skips messages"
    return row.action
