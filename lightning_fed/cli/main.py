"""The command line. ``--help``, ``--version``, ``new`` and ``compare`` import no PyTorch, and answer at once."""

import importlib
import os
import sys
import traceback
from argparse import ArgumentParser
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from lightning_fed._version import __version__
from lightning_fed.cli.commands import OWN, STAGES
from lightning_fed.core.errors import ClientError, FederatedError, refusal_in

__all__ = ["main"]

_ABOUT = (
    "Train an ordinary LightningModule across clients: `lightning-fed fit --config FILE`."
    " To start a project: `lightning-fed new NAME`. The options of a command: `lightning-fed COMMAND --help`."
)


def __getattr__(name: str) -> Any:
    """Import :class:`FederatedCLI`, and with it Lightning, when it is first used."""
    if name != "FederatedCLI":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightning_fed.cli.stages import FederatedCLI

    return FederatedCLI


def main(args: list[str] | dict[str, Any] | None = None) -> None:
    """Run the command line: the commands of ``OWN`` by themselves, and LightningCLI's for the rest.

    Args:
        args: The arguments; those of the process if None.

    Raises:
        SystemExit: With the message alone, if a setting cannot be federated or a client's work fails. For an error in
            the user's code, the user's part of the trace is printed first.
    """
    words = sys.argv[1:] if args is None else args
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())  # a configuration names classes of the user's own; last, so as to hide nothing
    try:
        if isinstance(words, list):
            words = [_underscored(word) for word in words]
            if words[0:1] in (["-q"], ["--quiet"]) and set(words[1:2]) & set(STAGES):
                words[:2] = words[1], words[0]  # it may stand before the command, as --config may
            _check_command(words)
            if words[0] in OWN:
                module, _, function = OWN[words[0]][0].partition(":")
                getattr(importlib.import_module(module), function)(words[1:])
                sys.stdout.flush()  # here, where a broken pipe is handled
                return
        from lightning_fed.cli.stages import run

        if args is None:  # Lightning warns about arguments other than the process's
            sys.argv[1:] = words
        run(args if args is None else words, words[0] if isinstance(words, list) else "")
    except KeyboardInterrupt:
        print("lightning-fed: interrupted.", file=sys.stderr)
        sys.exit(130)
    except SystemExit as stop:
        if type(stop).__name__ == "SIGTERMException":  # Lightning's, whose status is that of a finished run
            sys.exit(143)  # as a shell reports what SIGTERM ends
        raise
    except BrokenPipeError:
        if not isinstance(words, list) or words[0] not in OWN:
            raise  # a run that ends early must say so
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # `| head` reads no more, and Python flushes once again at its end
        sys.exit(141)  # as a shell reports what such a pipe ends
    except Exception as error:
        refusal = refusal_in(error) if isinstance(error, ValueError) else None
        if refusal is not None:
            print("".join(_own_trace(refusal)), file=sys.stderr, end="")
            sys.exit(f"lightning-fed: {refusal}")
        if type(error).__name__ == "MisconfigurationException":  # Lightning's, such as `test` without a test_step
            sys.exit(f"lightning-fed: {error}")
        raise


def _check_command(words: list[str]) -> None:
    """Answer ``--help`` and ``--version``, and end where no command is named that there is."""
    parser = ArgumentParser(
        prog="lightning-fed",
        usage="lightning-fed COMMAND --config FILE [--OPTION VALUE ...]",
        description=_ABOUT,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"lightning-fed {__version__}")
    commands = parser.add_subparsers(title="Available subcommands", metavar="COMMAND")
    for name, about in {**STAGES, **{name: about for name, (_, about) in OWN.items()}}.items():
        commands.add_parser(name, help=about)
    names = list(commands.choices)
    first = words[0] if words else ""
    if first in ("-h", "--help", "--version"):
        parser.parse_args(words[:1])
    if first.startswith("-") and not set(STAGES) & set(words):  # Lightning's take --config before the command, too
        own = next((word for word in words if word in OWN), None)
        if own is not None:
            parser.error(f"{own} must be the first word: lightning-fed {own} ...")
    elif first not in names and not first.startswith("-"):
        said = f"invalid choice: {first!r}" if words else "a command is missing"
        close = get_close_matches(first.lower(), names, n=1)
        hint = f"\nDid you mean {close[0]} instead of {first}?" if close else ""
        parser.error(f"{said} (choose from {', '.join(map(repr, names))}){hint}")


def _underscored(word: str) -> str:
    """Return a word whose option, if it is one, is written with underscores, as the keys of configurations are.

    Example:
        >>> _underscored("--max-clients=a-b"), _underscored("-q")
        ('--max_clients=a-b', '-q')
    """
    name, has_value, value = word.partition("=")
    return "--" + name[2:].replace("-", "_") + has_value + value if word.startswith("--") else word


def _own_trace(error: FederatedError) -> list[str]:
    """Return the trace of what a client's work ran into, from the first line of code that is not a framework's."""
    cause = error.__cause__ if isinstance(error, ClientError) else None  # without one, no code of the user's has failed
    while cause is not None and cause.__cause__ is not None:
        cause = cause.__cause__
    frames = [] if cause is None else traceback.extract_tb(cause.__traceback__)
    own = next((i for i, frame in enumerate(frames) if _is_users(Path(frame.filename))), None)
    if own is None or cause is None:
        return []
    return [
        "Traceback (from the user's own code on):\n",
        *traceback.format_list(frames[own:]),
        *traceback.format_exception_only(cause),
    ]


def _is_users(file: Path) -> bool:
    import torch

    from lightning_fed.compat.package import pl

    frameworks = (Path(__file__).parents[1], *(Path(str(package.__file__)).parent for package in (pl, torch)))
    of_python = file.is_relative_to(Path(os.__file__).parent) and "site-packages" not in file.parts
    return file.is_file() and not of_python and not any(file.is_relative_to(folder) for folder in frameworks)


if __name__ == "__main__":
    main()
