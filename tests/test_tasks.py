"""The end of a background task is logged, and the task is restarted or its owner gets the error."""

from __future__ import annotations

import asyncio
import logging

import pytest

from plait import tasks
from plait.errors import InternalError, Unavailable


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "TASK_RESTART_SECONDS", 0.0)


async def failing() -> None:
    raise OverflowError("int too large")


async def cancelled_by_none() -> None:
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    await future


@pytest.mark.parametrize("job", [failing, cancelled_by_none])
async def test_a_failed_job_is_restarted(job: object, caplog: pytest.LogCaptureFixture) -> None:
    runs = 0
    done = asyncio.Event()

    async def work() -> None:
        nonlocal runs
        runs += 1
        if runs < 3:
            await job()  # type: ignore[operator]
        done.set()
        await asyncio.Event().wait()

    task = tasks.keep(work, "plait-work")
    async with asyncio.timeout(60):
        await done.wait()
    assert runs == 3
    assert caplog.text.count("background task plait-work failed") == 2
    assert "it is restarted" in caplog.text
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    assert runs == 3


async def test_a_job_that_returns_is_not_restarted(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        return

    await tasks.keep(work, "plait-work")
    assert caplog.text == ""


@pytest.mark.parametrize(("job", "kind"), [(failing, OverflowError), (cancelled_by_none, InternalError)])
async def test_the_owner_of_a_job_gets_its_error(
    job: object, kind: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    errors: list[Exception] = []
    task = tasks.start(job(), "plait-once", failed=errors.append)  # type: ignore[operator]
    await asyncio.wait([task])
    await asyncio.sleep(0)
    assert [type(error) for error in errors] == [kind]
    assert "background task plait-once failed" in caplog.text


async def test_a_job_without_an_owner_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    await asyncio.wait([tasks.start(failing(), "plait-once")])
    await asyncio.sleep(0)
    assert caplog.records[0].levelno == logging.ERROR
    assert caplog.records[0].exc_info is not None


async def test_a_cancelled_job_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    errors: list[Exception] = []
    task = tasks.start(asyncio.Event().wait(), "plait-once", failed=errors.append)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    await asyncio.sleep(0)
    assert (errors, caplog.text) == ([], "")


async def test_the_caller_gets_the_error_of_a_child_task(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(OverflowError):
        await tasks.child(failing(), "plait-part")
    assert caplog.text == ""


def test_an_unexpected_error_becomes_a_plait_error() -> None:
    lost = Unavailable("lost")
    assert tasks.error_of(lost) is lost
    assert isinstance(tasks.error_of(OverflowError("x")), InternalError)
