"""The tree of commands, and the exit code of each kind of failure."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

from cyclopts import App, CycloptsError, Parameter

from plait.errors import PlaitError
from plait.version import VERSION

EXIT_USAGE = 2
#: As a shell reports a program ended by a signal: Ctrl-C, and a closed pipe.
EXIT_INTERRUPTED = 130
EXIT_PIPE_CLOSED = 141

app = App(
    name="plait",
    help="A durable message queue: one process and one data directory, or a cluster of them.",
    version=VERSION,
    # Rendering Markdown would take half of the time of --help, and no help text uses it.
    help_format="plaintext",
    result_action="return_value",
    exit_on_error=False,
    print_error=False,
    default_parameter=Parameter(negative=()),
    # run() handles interrupts of all commands.
    suppress_keyboard_interrupt=False,
)
app.command("plait.cli.serving.broker_process:serve", name="serve", help="Run a node on a data directory.")
app.command("plait.cli.serving.meta:meta", name="meta", help="Run a meta server of a cluster.")
app.command("plait.cli.serving.broker_process:broker", name="broker", help="Run a broker of a cluster.")
app.command("plait.cli.commands.send:send", name="send", help="Send one message, or each line of standard input.")
app.command("plait.cli.commands.tail:tail", name="tail", help="Print messages as they arrive.")
app.command("plait.cli.commands.why:why", name="why", help="Explain where a message is for a group, and why.")
app.command("plait.cli.commands.query:query", name="query", help="Find messages by key, id, headers and time.")
app.command(
    "plait.cli.commands.subject:app", name="subject", help="List, describe, create, change, expand and delete subjects."
)
app.command("plait.cli.commands.group:app", name="group", help="Consumer groups and their parked keys.")
app.command("plait.cli.commands.dlq:app", name="dlq", help="List, show, resend and purge dead letters.")
app.command("plait.cli.commands.schedule:app", name="schedule", help="List, count, cancel and move delayed messages.")
app.command("plait.cli.commands.cron:app", name="cron", help="Recurring messages: by a cron expression or an interval.")
app.command(
    "plait.cli.commands.transactions:app",
    name="transactions",
    help="List, show, commit and roll back undecided transactions.",
)
app.command(
    "plait.cli.commands.cluster:app", name="cluster", help="List the brokers of a cluster and set their states."
)
app.command(
    "plait.cli.commands.spark.commands:app", name="spark", help="Archive, audit, look up messages, send them again."
)
app.command("plait.cli.commands.bench:bench", name="bench", help="Measure throughput and latency in a few seconds.")
app.command("plait.cli.commands.doctor:doctor", name="doctor", help="Check a data directory for damage.")


class _Debug:
    """Whether to print tracebacks. Set when the arguments are parsed."""

    wanted = False


app.meta.suppress_keyboard_interrupt = False


@app.meta.default
def _launch(
    *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    debug: Annotated[
        bool, Parameter(env_var="PLAIT_DEBUG", help="Print the traceback of an error.", show_default=False)
    ] = False,
) -> object:
    _Debug.wanted = debug
    return app(tokens)


def run(arguments: Sequence[str]) -> int:
    """Run a command and return its exit code."""
    _Debug.wanted = bool(os.environ.get("PLAIT_DEBUG"))
    try:
        result = app.meta(arguments, result_action="return_value", exit_on_error=False, print_error=False)
        sys.stdout.flush()
    except CycloptsError as error:
        return _print_error(str(error), EXIT_USAGE, "usage")
    except PlaitError as error:
        return _print_error(error.message, error.exit_code, error.code)
    except BrokenPipeError:
        # The reader is gone: discard the buffered output, or the interpreter would report an error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE_CLOSED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except OSError as error:
        return _print_error(str(error), PlaitError.exit_code, "system")
    return result if isinstance(result, int) else 0


def _print_error(message: str, exit_code: int, code: str) -> int:
    if _Debug.wanted:
        traceback.print_exc()
    text = " ".join(message.split())
    sys.stdout.flush()
    sys.stderr.write(f"error: {text} ({code})\n")
    return exit_code
