"""One of Lightning's two packages is in use, and objects of the other one are refused by name."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import lightning_fed
from lightning_fed import FederatedError, FederatedTrainer
from lightning_fed.cli.main import main
from lightning_fed.compat.package import NAMES, OTHER, USED, VARIABLE, choose, pl, refuse_foreign
from lightning_fed.models import MLPClassifier
from tests.helpers.training import Net, clients, data, trainer

BOTH = set(NAMES)


@pytest.mark.parametrize("asked", [None, *NAMES])
@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize("imported", NAMES)
def test_imported_package_is_used(imported: str, installed: bool, asked: str | None) -> None:
    assert choose({imported}, asked, installed)[0] == imported


@pytest.mark.parametrize("imported", [set(), BOTH])
@pytest.mark.parametrize("asked", NAMES)
def test_environment_variable_decides_if_imports_do_not(imported: set[str], asked: str) -> None:
    package, reason = choose(imported, asked, lightning_is_installed=True)
    assert package == asked
    assert VARIABLE in reason


def test_installed_package_is_used_by_default() -> None:
    assert choose(set(), None, lightning_is_installed=True)[0] == "lightning"  # it always includes the other one
    assert choose(set(), None, lightning_is_installed=False)[0] == "pytorch_lightning"


def test_importing_both_packages_is_rejected_with_remedies() -> None:
    with pytest.raises(ImportError, match=rf"(?s)Both lightning and pytorch_lightning.*only one.*{VARIABLE}"):
        choose(BOTH, None, lightning_is_installed=True)


def test_environment_variable_with_an_unknown_package_is_rejected() -> None:
    with pytest.raises(ImportError, match=rf"{VARIABLE}='pl': set it to lightning or pytorch_lightning"):
        choose(set(), "pl", lightning_is_installed=True)


def test_child_processes_inherit_the_package() -> None:
    assert os.environ[VARIABLE] == USED
    assert pl.__name__ == NAMES[USED][0]


def test_requested_but_missing_package_raises_with_an_install_hint(tmp_path: Path) -> None:
    path = Path(lightning_fed.__file__).with_name("compat") / "package.py"
    probe = f"import runpy; runpy.run_path({str(path)!r})"  # takes 0.1 s, since it skips PyTorch
    environment = {**os.environ, VARIABLE: OTHER, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(path.parents[2])])}
    (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.modules[{OTHER!r}] = None")
    done = subprocess.run([sys.executable, "-c", probe], env=environment, capture_output=True, text=True, timeout=60)
    assert f"is to use the package {OTHER}, since the environment variable {VARIABLE}" in done.stderr
    assert f"pip install '{OTHER.replace('_', '-')}==2.6.*'" in done.stderr


def of_the_other(name: str) -> type:
    """Return a class as if the other package defined it."""
    return type(name, (), {"__module__": f"{NAMES[OTHER][0]}.parts"})


class Mine(of_the_other("LightningModule")):  # type: ignore[misc]
    pass


class Steps(of_the_other("Callback")):  # type: ignore[misc]
    pass


class Brought(Steps, pl.Callback):
    """A callback with the hooks that Lightning calls before the first round."""


class OwnCallbacks(Net):
    def configure_callbacks(self) -> Any:
        return [Brought()]


def refused(call: Callable[[], Any], name: str) -> None:
    with pytest.raises(
        FederatedError, match=rf"{name}.* a class of the package {OTHER}, while lightning_fed uses {USED}:"
    ):
        call()


CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "module": (lambda: trainer().fit(Mine(), data()), "Mine derives from"),
    "module to validate": (lambda: trainer().validate(Mine()), "Mine derives from"),
    "data module": (lambda: trainer().fit(Net(), datamodule=of_the_other("Data")()), "Data is"),
    "data module by position": (lambda: trainer().fit(Net(), of_the_other("Data")()), "Data is"),
    "callback": (lambda: trainer(callbacks=Steps()), "Steps derives from"),
    "callbacks": (lambda: trainer(callbacks=[pl.Callback(), Steps()]), "Steps derives from"),
    "class of a callback": (lambda: trainer(callbacks=[Steps]), "Steps derives from"),
    "logger": (lambda: trainer(logger=[of_the_other("Logger")()]), "Logger is"),
    "strategy": (lambda: trainer(strategy=of_the_other("Strategy")()), "Strategy is"),
    "plugin": (lambda: trainer(plugins=[of_the_other("Plugin")()]), "Plugin is"),
    "profiler": (lambda: trainer(profiler=of_the_other("Profiler")()), "Profiler is"),
}


@pytest.mark.parametrize("name", CALLS)
def test_objects_of_the_other_package_are_rejected(name: str) -> None:
    refused(*CALLS[name])


def test_rejection_explains_the_reason_and_the_remedy() -> None:
    with pytest.raises(FederatedError) as caught:
        refuse_foreign(Mine())
    text = str(caught.value)
    assert f"{NAMES[OTHER][0]}.parts.LightningModule" in text
    assert f"write {NAMES[USED][0]} in place of {NAMES[OTHER][0]}" in text
    assert f"import it before lightning_fed is used, or set the environment variable {VARIABLE}={OTHER}" in text


def test_callbacks_of_a_module_are_checked() -> None:
    refused(lambda: trainer().fit(OwnCallbacks(), data()), "Brought derives from")


@pytest.mark.parametrize("path", [f"{NAMES[OTHER][0]}.callbacks.ModelCheckpoint", f"{__name__}.Steps"])
def test_configuration_with_the_other_package_is_rejected(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": [{"class_path": path}], "local_epochs": 1}}))
    with pytest.raises(SystemExit):
        main(["fit", "--config", "run.yaml"])
    said = capsys.readouterr().err
    assert f"a class of the package {OTHER}, while lightning_fed uses {USED}" in said
    assert f"{VARIABLE}={OTHER}" in said


def test_command_line_module_of_the_other_package_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fit", "--model", f"{__name__}.Mine", "--data", "lightning_fed.data.Digits"])
    assert f"Mine derives from {NAMES[OTHER][0]}.parts.LightningModule" in capsys.readouterr().err


def test_unqualified_names_refer_to_the_package_in_use() -> None:
    assert FederatedTrainer.__mro__[1] is pl.Trainer
    assert issubclass(MLPClassifier, pl.LightningModule)
    refuse_foreign(MLPClassifier(in_features=2, num_classes=2), pl.Callback(), clients(), None, "auto")
