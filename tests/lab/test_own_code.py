"""Cells get new keys if a method or model is edited."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_fed.lab import own_code as module
from lightning_fed.lab.configurations import key_of
from lightning_fed.lab.own_code import own_code

FILES = {
    "own_method_of_test": "from own_helper_of_test import rate\nimport torch\nclass Mine:\n    beta = rate()\n",
    "own_helper_of_test": "def rate():\n    return 0.1\n",
    "own_other_of_test": "class Other: pass\n",
}


def config(class_path: str) -> dict[str, Any]:
    return {"trainer": {"algorithm": {"class_path": class_path, "init_args": {"text": "a. b.c", "rate": 0.1}}}}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, text in FILES.items():
        (tmp_path / f"{name}.py").write_text(text)
    for name in FILES:
        importlib.import_module(name)
    module._read.cache_clear()
    yield tmp_path
    module._read.cache_clear()
    for name in FILES:
        del sys.modules[name]


@pytest.mark.parametrize("edited", ["own_method_of_test", "own_helper_of_test"])
def test_edited_method_or_helper_changes_the_cell_key(folder: Path, edited: str) -> None:
    mine, other = config("own_method_of_test.Mine"), config("own_other_of_test.Other")
    before, others = key_of(mine), key_of(other)
    assert key_of(mine) == before
    (folder / f"{edited}.py").write_text(FILES[edited] + "\n# edited\n")
    module._read.cache_clear()  # as in another process
    assert key_of(mine) != before
    assert key_of(other) == others


def test_code_of_this_package_and_installed_packages_is_ignored(folder: Path) -> None:
    assert own_code(config("lightning_fed.algorithms.FedAvg")) == {}
    assert own_code(config("torch.optim.SGD")) == {}
    assert own_code(config("json.JSONDecoder")) == {}
    assert own_code(config("own_method_of_test.Mine")).keys() == {"own_method_of_test", "own_helper_of_test"}
