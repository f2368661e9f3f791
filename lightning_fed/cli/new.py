"""The command ``lightning-fed new``: write a small project to start from."""

import shutil
from collections import Counter
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path
from string import Template

from jsonargparse import ArgumentParser

from lightning_fed.compat.choice import NAMES, USED
from lightning_fed.core.errors import FederatedError

_TEMPLATES = Path(__file__).parent / "new_project"
_EACH = {"train": 60, "val": 20}  # images per digit


def new(args: list[str] | None = None) -> None:
    """Write a project into a new folder, and print how to train it."""
    folder = create(make_parser().parse_args(args).name)
    print(f"Made {folder}. Train it:\n\n    cd {folder} && lightning-fed fit --config config.yaml\n")


def make_parser() -> ArgumentParser:
    """Return the parser of the command."""
    parser = ArgumentParser(
        prog="lightning-fed new",
        description="Write a small project to start from: a model, its data, a configuration, a test.",
        allow_abbrev=False,
    )
    parser.add_argument("name", type=str, help="The name of the project, of its folder and of its module.")
    return parser


def create(name: str) -> Path:
    """Write a project into a new folder of the working directory, and return the folder.

    The project imports Lightning from the package in use.
    """
    if not (name.isascii() and name.isidentifier()) or iskeyword(name) or name.startswith("_"):
        close = "".join(c if c.isascii() and c.isalnum() else "_" for c in name).strip("_")
        hint = f", such as {close}" if close.isidentifier() and not iskeyword(close) else ""
        raise FederatedError(
            f"new {name!r}: a project has the name of a Python module: letters, digits and _, a letter first{hint}."
        )
    folder = Path(name)
    if not folder.exists() and find_spec(name) is not None:
        raise FederatedError(f"new {name}: an installed module has this name and would hide yours. Take another one.")
    try:
        folder.mkdir()
    except FileExistsError as error:
        raise FederatedError(f"new {name}: {folder.resolve()} is there already. Take another name.") from error
    except OSError as error:
        raise FederatedError(f"new {name}: {folder.resolve()} cannot be made: {error.strerror}.") from error
    try:
        for template in sorted(_TEMPLATES.glob("*.in")):
            file = folder / template.name.removesuffix(".in").replace("project", name)
            text = Template(template.read_text(encoding="utf-8")).substitute(name=name, lightning=NAMES[USED][0])
            file.write_text(text, encoding="utf-8")
        _write_digits(folder / "data")
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise FederatedError(f"new {name}: {folder.resolve()} cannot be written: {error.strerror}.") from error
    return folder


def _write_digits(root: Path) -> None:
    """Write some of scikit-learn's handwritten digits as images, ``root/<split>/<class>/<number>.png``."""
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    seen: Counter[int] = Counter()
    for image, label in zip(digits.images, map(int, digits.target), strict=True):
        number = seen[label]
        seen[label] += 1
        if number < sum(_EACH.values()):
            folder = root / ("train" if number < _EACH["train"] else "val") / str(label)
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray((image * (255 / 16)).astype("uint8")).save(folder / f"{number:03d}.png")
