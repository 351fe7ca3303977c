"""Encodes a message as a row of an outbox. Everything that can be refused is refused here, before the commit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from plait.client.send.encoding import Delay, due_of, encode_body, encode_headers, encode_key, encode_tags
from plait.clock import SystemClock
from plait.model import names
from plait.model.logical_partitions import lp_of_key


def outgoing_row(
    subject: str,
    body: Any,
    key: str | int | None,
    tags: Iterable[str] | None,
    headers: Mapping[str, str | int | float | bool] | None,
    delay: Delay | None,
    deliver_at: datetime | None,
) -> dict[str, Any]:
    """The columns of a message that the relay has not assigned yet."""
    names.check("subject", subject)
    now = SystemClock().now()
    text = None if key is None else encode_key(key)
    row: dict[str, Any] = {
        "subject": subject,
        "key": None if text is None else text.encode(),
        "body": encode_body(body),
        "tags": encode_tags(tags) or None,
        "headers": encode_headers(headers) or None,
        "lp": None if text is None else lp_of_key(text),
        "created": now,
        "due": None if delay is None and deliver_at is None else due_of(delay, deliver_at, now + 1),
    }
    row["size"] = sum(len(row[name] or b"") for name in ("key", "body", "tags", "headers"))
    return row
