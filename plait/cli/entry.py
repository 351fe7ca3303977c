"""From arguments to an exit code: the tree of commands, and how each kind of failure ends."""

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
#: As a shell reports a program that a signal ended: Ctrl-C, and a reader that went away.
EXIT_INTERRUPTED = 130
EXIT_PIPE_CLOSED = 141

app = App(
    name="plait",
    help="A durable message queue: one process and one data directory, or a cluster of them.",
    version=VERSION,
    # Markdown takes half of the time that help takes, and no text here has any.
    help_format="plaintext",
    result_action="return_value",
    exit_on_error=False,
    print_error=False,
    default_parameter=Parameter(negative=()),
    # Interrupted commands end by what run() says, wherever they are.
    suppress_keyboard_interrupt=False,
)
app.command("plait.cli.serving.serve:serve", name="serve", help="Run a node on a data directory.")
app.command("plait.cli.serving.meta:meta", name="meta", help="Run a meta server of a cluster.")
app.command("plait.cli.serving.broker:broker", name="broker", help="Run a broker of a cluster.")
app.command("plait.cli.commands.send:send", name="send", help="Send one message, or a line each from standard input.")
app.command("plait.cli.commands.tail:tail", name="tail", help="Print messages as they come.")
app.command(
    "plait.cli.commands.subject:app", name="subject", help="List, describe, create, change, expand and delete subjects."
)
app.command("plait.cli.commands.group:app", name="group", help="Consumer groups and their parked keys.")
app.command("plait.cli.commands.dlq:app", name="dlq", help="List, show, resend and purge dead letters.")
app.command("plait.cli.commands.schedule:app", name="schedule", help="List, count, cancel and move delayed messages.")
app.command(
    "plait.cli.commands.cluster:app", name="cluster", help="List the brokers of a cluster and set their states."
)
app.command(
    "plait.cli.commands.spark.commands:app", name="spark", help="Archive, audit, look messages up, send them again."
)
app.command("plait.cli.commands.bench:bench", name="bench", help="Measure throughput and latency in a few seconds.")
app.command("plait.cli.commands.doctor:doctor", name="doctor", help="Check a data directory and say what is damaged.")


class _Debug:
    """Whether tracebacks are wanted; known once the arguments are read."""

    wanted = False


app.meta.suppress_keyboard_interrupt = False


@app.meta.default
def _launch(
    *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    debug: Annotated[
        bool, Parameter(env_var="PLAIT_DEBUG", help="Show where an error comes from.", show_default=False)
    ] = False,
) -> object:
    _Debug.wanted = debug
    return app(tokens)


def run(arguments: Sequence[str]) -> int:
    """Run a command; its exit code."""
    _Debug.wanted = bool(os.environ.get("PLAIT_DEBUG"))
    try:
        result = app.meta(arguments, result_action="return_value", exit_on_error=False, print_error=False)
        sys.stdout.flush()
    except CycloptsError as error:
        return _complain(str(error), EXIT_USAGE, "usage")
    except PlaitError as error:
        return _complain(error.message, error.exit_code, error.code)
    except BrokenPipeError:
        # What is still buffered has nobody to go to; without this the interpreter would complain at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE_CLOSED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except OSError as error:
        return _complain(str(error), PlaitError.exit_code, "system")
    return result if isinstance(result, int) else 0


def _complain(message: str, exit_code: int, code: str) -> int:
    if _Debug.wanted:
        traceback.print_exc()
    text = " ".join(message.split())
    sys.stdout.flush()
    sys.stderr.write(f"error: {text} ({code})\n")
    return exit_code
