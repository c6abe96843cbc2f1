"""The command ``fugaku-gpt``. A verb's module is imported when it is used, so ``--help`` stays fast."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Dict, NoReturn, Optional, Sequence

import click

from fugaku_gpt import __version__
from fugaku_gpt.cli.lazy import LazyGroup
from fugaku_gpt.cli.output import echo
from fugaku_gpt.errors import EXIT_OK, EXIT_RUN_FAILED, EXIT_USAGE, FugakuGptError, missing_package
from fugaku_gpt.limits import MESSAGE_LINE, MESSAGE_LINES

# errors of a disk or a file server, which may come from any call and name no file
_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ENOLCK, errno.ESTALE, errno.EFBIG)
COMMANDS: Dict[str, str] = {
    "ckpt": "fugaku_gpt.cli.ckpt:ckpt",
    "compare": "fugaku_gpt.cli.compare.command:compare",
    "data": "fugaku_gpt.cli.data:data",
    "doctor": "fugaku_gpt.cli.doctor:doctor",
    "env": "fugaku_gpt.cli.env:env",
    "eval": "fugaku_gpt.cli.eval:eval_",
    "generate": "fugaku_gpt.cli.generate:generate",
    "help": "fugaku_gpt.cli.help:help_",
    "job": "fugaku_gpt.cli.job.group:job",
    "plan": "fugaku_gpt.cli.plan.group:plan",
    "report": "fugaku_gpt.cli.report:report",
    "runs": "fugaku_gpt.cli.runs:runs",
    "sim": "fugaku_gpt.cli.sim:sim",
    "sweep": "fugaku_gpt.cli.sweep:sweep",
    "train": "fugaku_gpt.cli.train:train",
    "watch": "fugaku_gpt.cli.watch:watch",
}


@click.group(
    cls=LazyGroup,
    commands_at=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="fugaku-gpt")
def cli() -> None:
    """Train GPT models on CPU supercomputers over MPI; write, check and follow jobs; sweep, and print the tables.

    Exit codes: 0 ok, 1 a run failed, 2 usage or config error, 3 findings of a check, 75 can be resumed.
    """


def run(arguments: Optional[Sequence[str]] = None) -> int:
    """Run one command line and return its exit code; a user's mistake is printed as a message, never as a traceback."""
    try:
        argument_list = list(arguments) if arguments is not None else sys.argv[1:]
        # without standalone mode, click returns the code of an Exit, or what the command returned; ``obj`` is for
        # commands that start themselves on ranks
        code = cli.main(args=argument_list, prog_name="fugaku-gpt", standalone_mode=False, obj=argument_list)
    except click.Abort:
        echo("interrupted", err=True)
        return EXIT_RUN_FAILED
    except click.ClickException as error:
        message = io.StringIO()
        error.show(message)
        echo(_cut(message.getvalue()), nl=False, err=True)
        return EXIT_USAGE
    except FugakuGptError as error:
        for line in _cut(str(error)).splitlines():
            echo(f"fugaku-gpt: {line}", err=True)
        return error.exit_code
    except ModuleNotFoundError as error:
        missing = missing_package(error)
        if missing is None:
            raise
        echo(f"fugaku-gpt: {missing}", err=True)
        return missing.exit_code
    except OSError as error:
        if error.filename is None and error.errno not in _OF_DISKS:
            raise
        where = f"{error.filename}: " if error.filename is not None else ""
        echo(f"fugaku-gpt: {where}cannot be read or written: {error.strerror}", err=True)
        return EXIT_RUN_FAILED
    except SystemExit:  # only click raises it here, for a broken pipe, as in `... | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    return code if isinstance(code, int) else EXIT_OK


def _cut(message: str) -> str:
    """The lines of a message, not more and not longer than anybody reads: it may quote files of any size."""
    lines = message.split("\n")
    more = [f"and {len(lines) - MESSAGE_LINES.value:,} more lines"] if len(lines) > MESSAGE_LINES.value else []
    most = MESSAGE_LINE.value
    shown = [line if len(line) <= most else f"{line[: most - 1]}…" for line in lines[: MESSAGE_LINES.value]]
    return "\n".join([*shown, *more])


def main() -> NoReturn:
    """Entry point of the console script."""
    sys.exit(run())
