"""``plait group parked | resume | skip``: the parked keys of a strict subject."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import Parameter

from plait.cli.event_loop import with_client
from plait.cli.options import DEFAULT_SERVER, Output, Partition, Server
from plait.cli.output import format_time, print_result, print_rows, reason_fields, shortened
from plait.errors import InvalidArgument, KeyNotParked
from plait.model.names import counted

if TYPE_CHECKING:
    from plait.client.admin.admin import Admin
    from plait.client.admin.parked_key_admin import ParkedKey
    from plait.client.client import Client

Subject = Annotated[str, Parameter(help="The subject.")]
Group = Annotated[str, Parameter(help="The group in which the keys are parked.")]
Key = Annotated[str | None, Parameter(allow_leading_hyphen=True, help="The order key.")]
Hash = Annotated[
    str | None, Parameter(name="--hash", help="The key's hash, as 'plait group parked' shows it, instead of the key.")
]
All = Annotated[bool, Parameter(name="--all", help="Every parked key of the group.", show_default=False)]


def parked(
    subject: Subject,
    group: Group,
    /,
    *,
    partition: Partition = None,
    server: Server = DEFAULT_SERVER,
    output: Output = "table",
) -> None:
    """List the parked keys, oldest first."""
    keys = with_client(server, lambda client: client.admin.parked(subject, group, partition=partition))
    columns: dict[str, Callable[[ParkedKey], str]] = {
        "key": lambda key: "-" if key.key is None else key.key,
        "since": lambda key: "-" if key.since is None else format_time(key.since),
        "attempts": lambda key: str(key.attempts),
        "reason": lambda key: shortened(str(key.reason)),
        "letter": lambda key: "-" if key.sequence is None else str(key.sequence),
        "partition": lambda key: str(key.partition),
        "lp": lambda key: str(key.lp),
        "hash": _hash,
    }
    print_rows(keys, columns, output, right=("attempts", "letter", "lp"), fields=_fields)


def resume(
    subject: Subject,
    group: Group,
    key: Key = None,
    /,
    *,
    by_hash: Hash = None,
    everything: All = False,
    server: Server = DEFAULT_SERVER,
    output: Output = "table",
) -> None:
    """Resume parked keys with the failed messages, which are retried."""
    _run(server, subject, group, _which(key, by_hash, everything=everything), output, skip=False)


def skip(
    subject: Subject,
    group: Group,
    key: Key = None,
    /,
    *,
    by_hash: Hash = None,
    everything: All = False,
    server: Server = DEFAULT_SERVER,
    output: Output = "table",
) -> None:
    """Resume parked keys after the failed messages, which stay dead letters."""
    _run(server, subject, group, _which(key, by_hash, everything=everything), output, skip=True)


def _which(key: str | None, by_hash: str | None, *, everything: bool) -> str | int | None:
    """A key, the hash of one, or None for all parked keys."""
    if (key is not None) + (by_hash is not None) + everything != 1:
        raise InvalidArgument("name one key, or its --hash, or use --all")
    if by_hash is None:
        return key
    try:
        return int(by_hash, 16)
    except ValueError:
        raise InvalidArgument(f"--hash {by_hash!r} is not hexadecimal; copy it from 'plait group parked'") from None


async def _each(client: Client, subject: str, group: str, which: str | int | None, *, skip: bool) -> int:
    admin: Admin = client.admin
    if which is None:
        return await (admin.skip_all if skip else admin.resume_all)(subject, group)
    decide: Callable[[str, str, Any], Awaitable[None]] = admin.skip_key if skip else admin.resume_key
    if isinstance(which, int):
        found = [key for key in await admin.parked(subject, group) if key.hash == which]
        if not found:
            raise KeyNotParked(
                f"no key with hash {which:016x} is parked in group {group!r} on {subject!r}",
                subject=subject,
                group=group,
            )
        await decide(subject, group, found[0])
    else:
        await decide(subject, group, which)
    return 1


def _run(server: str, subject: str, group: str, which: str | int | None, output: str, *, skip: bool) -> None:
    count = with_client(server, lambda client: _each(client, subject, group, which, skip=skip))
    done = "skipped" if skip else "resumed"
    fields = {"subject": subject, "group": group, done: count}
    print_result(output, fields, [("subject", subject), ("group", group), (done, counted(count, "key"))])


def _hash(key: ParkedKey) -> str:
    return f"{key.hash:016x}"


def _fields(key: ParkedKey) -> dict[str, Any]:
    """A key as JSON fields. The hash is text, as ``--hash`` takes it: many JSON readers have no 64-bit integers."""
    shown = {"hash": _hash(key), "partition": str(key.partition), "reason": reason_fields(key.reason)}
    return msgspec.structs.asdict(key) | shown
