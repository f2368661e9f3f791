"""The command line. ``--help``, ``--version``, ``new`` and ``compare`` do not import PyTorch, so they start fast."""

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
    """Lazily import :class:`FederatedCLI`, and Lightning with it."""
    if name != "FederatedCLI":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightning_fed.cli.stages import FederatedCLI

    return FederatedCLI


def main(args: list[str] | dict[str, Any] | None = None) -> None:
    """Run the command line: commands in ``OWN`` directly, and the others through LightningCLI.

    Args:
        args: The arguments. Defaults to the process's arguments.

    Raises:
        SystemExit: With the message alone, if a setting cannot be federated or a client's work fails. For an error in
            the user's code, the user's part of the trace is printed first.
    """
    words = sys.argv[1:] if args is None else args
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.append(os.getcwd())  # configurations name the user's classes; last, to shadow nothing
    try:
        if isinstance(words, list):
            words = [_underscored(word) for word in words]
            if words[0:1] in (["-q"], ["--quiet"]) and set(words[1:2]) & set(STAGES):
                words[:2] = words[1], words[0]  # -q may precede the command, like --config
            _check_command(words)
            if words[0] in OWN:
                module, _, function = OWN[words[0]][0].partition(":")
                getattr(importlib.import_module(module), function)(words[1:])
                sys.stdout.flush()  # flush here: a broken pipe is handled below
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
            raise  # a run that ends early must not end silently
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # `| head` has closed the pipe; Python flushes again at exit
        sys.exit(141)  # a shell's status for a process that a broken pipe ends
    except Exception as error:
        refusal = refusal_in(error) if isinstance(error, ValueError) else None
        if refusal is not None:
            print("".join(_own_trace(refusal)), file=sys.stderr, end="")
            sys.exit(f"lightning-fed: {refusal}")
        if type(error).__name__ == "MisconfigurationException":  # from Lightning, such as `test` without a test_step
            sys.exit(f"lightning-fed: {error}")
        raise


def _check_command(words: list[str]) -> None:
    """Handle ``--help`` and ``--version``, and exit with an error if no known command is named."""
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
    if first.startswith("-") and not set(STAGES) & set(words):  # Lightning's commands accept a leading --config
        own = next((word for word in words if word in OWN), None)
        if own is not None:
            parser.error(f"{own} must be the first word: lightning-fed {own} ...")
    elif first not in names and not first.startswith("-"):
        said = f"invalid choice: {first!r}" if words else "a command is missing"
        close = get_close_matches(first.lower(), names, n=1)
        hint = f"\nDid you mean {close[0]} instead of {first}?" if close else ""
        parser.error(f"{said} (choose from {', '.join(map(repr, names))}){hint}")


def _underscored(word: str) -> str:
    """Return a word; if it is an option, with underscores in its name, like the keys of configurations.

    Example:
        >>> _underscored("--max-clients=a-b"), _underscored("-q")
        ('--max_clients=a-b', '-q')
    """
    name, has_value, value = word.partition("=")
    return "--" + name[2:].replace("-", "_") + has_value + value if word.startswith("--") else word


def _own_trace(error: FederatedError) -> list[str]:
    """Return the traceback of the error in a client's work, from the first line outside of the frameworks."""
    cause = error.__cause__ if isinstance(error, ClientError) else None  # without a cause, no user code failed
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
