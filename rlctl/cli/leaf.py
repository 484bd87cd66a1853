"""One subcommand: from the function in its file to a command with shared options, plain help and exit codes."""

from __future__ import annotations

import inspect
import os
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

import typer
from typer._click.core import Context
from typer._click.exceptions import ClickException, NoSuchOption
from typer._click.formatting import HelpFormatter
from typer.core import TyperCommand

from rlctl.cli.options import SharedOptions, shared_parameters, take_shared
from rlctl.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, RlctlError, UsageError
from rlctl.report import Report
from rlctl.report.logs import logs_to
from rlctl.report.output import ReaderGoneError, own_stdout
from rlctl.units import parse_switch

Main = Callable[..., None]


class PlainCommand(TyperCommand):
    """A command whose help starts with what it does, one example, and where the docs are."""

    examples: dict[str, str]

    def format_help(self, ctx: Context, formatter: HelpFormatter) -> None:
        """Write the help: the three lines, the usage, the rest of the docstring, options, examples."""
        summary, _, rest = inspect.cleandoc(self.help or "").partition("\n")
        anchor = ctx.command_path.replace(" ", "-")
        formatter.write(f"{summary}\nExample: {next(iter(self.examples))}\nDocs: docs/cli.md#{anchor}\n\n")
        self.format_usage(ctx, formatter)
        if rest.strip():
            formatter.write_paragraph()
            formatter.write_text(rest.strip())
        self.format_options(ctx, formatter)
        formatter.write("\nExamples:\n")
        formatter.write("".join(f"  # {purpose}\n  {line}\n" for line, purpose in self.examples.items()))


def build(name: str) -> PlainCommand:
    """Import one subcommand's file and return its command.

    The file holds ``EXAMPLES`` (command line -> what it is good for) and ``main(report, ...)``, whose other
    parameters are its arguments and options. What ``main`` raises decides the exit code.
    """
    module = import_module(f"rlctl.commands.{name.replace('-', '_')}")
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    settings = {"help_option_names": ["-h", "--help"]}
    app.command(name, cls=PlainCommand, context_settings=settings)(_callback(name, module))
    command = typer.main.get_command(app)
    assert isinstance(command, PlainCommand)
    command.examples = module.EXAMPLES
    return command


def run(name: str, arguments: Sequence[str]) -> int:
    """Run one subcommand and return the exit code."""
    command = build(name)
    try:
        _refuse_empty(name, arguments)
        with command.make_context(f"rlctl {name}", list(arguments)) as context:
            return int(command.invoke(context))
    except typer.Exit as done:
        return done.exit_code
    except (ClickException, UsageError) as error:
        report = Report(name, json="--json" in arguments)
        shown = _usage_error(name, error) if isinstance(error, ClickException) else error
        report.error(shown, error.exit_code)
        return error.exit_code


def _callback(name: str, module: ModuleType) -> Callable[..., int]:
    def callback(**values: Any) -> int:
        return _call(name, module.main, take_shared(values), values)

    signature = inspect.signature(module.main, eval_str=True)
    report, *own = signature.parameters.values()
    assert report.annotation is Report, f"{name}: the first parameter of main must be the report"
    keyword_only = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    callback.__signature__ = inspect.Signature([*keyword_only, *shared_parameters()])  # type: ignore[attr-defined]
    callback.__annotations__ = {}
    callback.__doc__ = module.main.__doc__
    return callback


def _call(name: str, main: Main, options: SharedOptions, values: dict[str, Any]) -> int:
    with own_stdout() as out:
        report = Report(name, json=options.json, verbosity=options.verbosity, color=options.color, out=out)
        debug = options.debug
        try:
            debug = debug or _debug_by_environment()
            with logs_to(report):
                main(report, **values)
            assert report.documented or not options.json, f"{name} printed no document"
        except ReaderGoneError:
            return EXIT_FAILED
        except KeyboardInterrupt:
            _show_trace(debug)
            report.error(RlctlError("interrupted"), EXIT_INTERRUPTED)
            return EXIT_INTERRUPTED
        except RlctlError as error:
            _show_trace(debug)
            report.error(error, error.exit_code)
            return error.exit_code
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the last resort: it ends in a message and a code
            _show_trace(debug)
            # The file system says no: the user's to mend. A lost connection is ours.
            internal = not isinstance(error, OSError) or isinstance(error, ConnectionError)
            report.error(error, EXIT_FAILED, internal=internal)
            return EXIT_FAILED
    return EXIT_OK


def _debug_by_environment() -> bool:
    try:
        return parse_switch(os.environ.get("RLCTL_DEBUG") or "0")
    except ValueError as error:
        raise UsageError(str(error), where="RLCTL_DEBUG") from None


def _show_trace(debug: bool) -> None:
    if debug:
        traceback.print_exc()


def _refuse_empty(name: str, arguments: Sequence[str]) -> None:
    """An empty word is a variable that was not set; as a path it would be the current folder."""
    for before, word in zip(["", *arguments], arguments, strict=False):
        if word == "" or (word.startswith("--") and word.endswith("=")):
            where = word[:-1] or (before if before.startswith("-") else f"rlctl {name}")
            raise UsageError("an empty argument", where=where, fix="give a value, or leave it out")


def _usage_error(name: str, error: ClickException) -> UsageError:
    near = ""
    message = error.format_message()
    if isinstance(error, NoSuchOption):
        message = error.message
        near = f"did you mean {' or '.join(sorted(error.possibilities or ()))}? " if error.possibilities else ""
    message = message.replace("Value error, ", "").rstrip(".")
    return UsageError(message[:1].lower() + message[1:], fix=f"{near}see rlctl {name} --help")
