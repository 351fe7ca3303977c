"""``python -m examples.demo``; exits with 0 if every check succeeds."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import Annotated

from cyclopts import App, CycloptsError, Parameter

from examples.demo.processes import DemoFailed
from examples.demo.scenario import Plan, run
from plait.cli.entry import EXIT_INTERRUPTED, EXIT_USAGE
from plait.cli.event_loop import run_loop
from plait.errors import InvalidArgument, PlaitError

app = App(
    name="examples.demo",
    version_flags=[],
    help="Producers, groups, a killed consumer, ordered consumers under faults; archive, history and audit.",
)


@app.default
def demo(
    *,
    orders: Annotated[int, Parameter(help="Orders of each producer; an order is four messages.")] = 20_000,
    producers: Annotated[int, Parameter(help="Producer processes.")] = 3,
    seconds: Annotated[float, Parameter(help="How long the producers send.")] = 8.0,
    ordered: Annotated[int, Parameter(help="Orders whose events are consumed in order.")] = 1_500,
    spark: Annotated[bool, Parameter(negative="--no-spark", help="Whether Spark counts, archives and audits.")] = True,
) -> int:
    """Show a node at work, and check that nothing is lost."""
    for name, value in (("orders", orders), ("producers", producers), ("ordered", ordered)):
        if value < 1:
            raise InvalidArgument(f"--{name} must be 1 or more, not {value}")
    return run_loop(_run(Plan(producers, orders, seconds, ordered, spark)))


async def _run(plan: Plan) -> int:
    task = asyncio.current_task()
    assert task is not None
    # On SIGTERM the demo still ends its processes and removes its directory.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await run(plan)
    return 0


def main() -> int:
    try:
        result = app(exit_on_error=False, print_error=False, result_action="return_value")
    except DemoFailed as error:
        sys.stderr.write(f"demo failed: {error}\n")
        return 1
    except CycloptsError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_USAGE
    except PlaitError as error:
        sys.stderr.write(f"error: {error.message} ({error.code})\n")
        return error.exit_code
    except (KeyboardInterrupt, asyncio.CancelledError):
        return EXIT_INTERRUPTED
    return result if isinstance(result, int) else 0


if __name__ == "__main__":
    sys.exit(main())
