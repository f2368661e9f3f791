"""Modules are imported only when a command needs them, except those that PyTorch and Lightning import.

The tests count modules in a fresh interpreter. Seconds would depend on the machine.
"""

import json
import subprocess
import sys

import pytest

from lightning_fed.compat.package import pl

# All checks share one interpreter, since each start takes seconds. It imports the package, PyTorch, Lightning, the
# trainer and the command line, in this order. torchvision imports PyTorch: it needs the package's declarations if its
# native library does not load.
PROBE = """
import importlib.util, json, sys
for name in ("sitecustomize", "usercustomize"):  # which a system's Python may import by itself
    sys.modules.pop(name, None)
stages = []
import lightning_fed
import lightning_fed.deploy
stages.append(sorted(sys.modules))
if importlib.util.find_spec('torchvision'):
    import torchvision
import torch
threads = sys.modules["lightning_fed.trainer.threads"]
counts = [threads._AT_IMPORT == torch.get_num_threads()]
torch.set_num_threads(threads._AT_IMPORT + 1)
stages.append(sorted(sys.modules))
importlib.import_module(sys.argv[1])
stages.append(sorted(sys.modules))
lightning_fed.FederatedTrainer
counts.append(threads._AT_IMPORT + 1 == torch.get_num_threads())
stages.append(sorted(sys.modules))
from lightning_fed.cli.main import main
try:
    main(["fit", "--help"])
except SystemExit as end:
    assert not end.code
stages.append(sorted(sys.modules))
print("\\n" + json.dumps([stages, counts]))
"""
PACKAGE = frozenset({"lightning_fed", "filelock", "safetensors"})  # the lock and files of states on disk: 5 ms
NUMPY_TYPING = {"numpy.typing", "numpy._typing._add_docstring"}  # NumPy 1 does not import them itself: 0.6 ms
# the command line's parser imports installed packages, so this lists only the parts that it never needs
ON_DEMAND = {"sklearn", "tensorboard", "pandas", "pyarrow", "opacus"}
READY = {"lightning_fed.trainer", "lightning_fed.trainer.threads", "lightning_fed.compat.torchvision"}


def added(before: set[str], after: set[str], allowed: frozenset[str] = frozenset()) -> set[str]:
    """Return the new modules outside of the allowed packages and Python's standard library."""
    known = allowed | set(sys.stdlib_module_names)
    return {name for name in after - before if name.split(".")[0] not in known}


def own(names: set[str]) -> set[str]:
    return {name for name in names if name.startswith("lightning_fed")}


@pytest.mark.thorough  # nine seconds of starts; .ci/run has it with the checks
def test_imports_are_lazy_and_package_is_ready_after_pytorch() -> None:
    command = [sys.executable, "-c", PROBE, pl.__name__]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    stages, threads_are_known = json.loads(done.stdout.splitlines()[-1])
    alone, with_torch, lightning, package, helped = map(set, stages)

    assert "lightning_fed.deploy" in alone  # the probe works
    others = {name.split(".")[0] for name in added(set(), alone) if not name.startswith("_")}
    assert others == {"lightning_fed"}, "the package alone needs nothing but Python"

    assert own(with_torch - alone) == READY
    assert not {name.split(".")[0] for name in with_torch} & ON_DEMAND
    assert threads_are_known == [True, True], "a number of threads that a user sets is not taken for PyTorch's own"

    assert "lightning_fed.compat.package" not in lightning, "which Lightning is in use is decided at the first use"
    assert added(lightning, package, PACKAGE) <= NUMPY_TYPING
    assert len(own(package)) < 225, "each own module costs about a millisecond"

    assert {f"{pl.__name__}.cli", "lightning_fed.cli.main"} <= helped
    new = helped - lightning
    assert not {name.split(".")[0] for name in new} & ON_DEMAND
    ours = ("lightning_fed.lab", "lightning_fed.lab.diagnosis", "lightning_fed.cli.data")
    assert not {name for name in new if name.startswith(ours)}
