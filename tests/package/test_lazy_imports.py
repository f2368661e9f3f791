"""Nothing is imported before a command needs it, beyond what Lightning imports by itself.

Modules are counted, in a fresh interpreter, and not seconds, which differ from machine to machine.
"""

import json
import subprocess
import sys
from pathlib import Path

import lightning_fed
from lightning_fed.compat.package import pl

# Lightning comes first, so that what it imports by itself does not count; it may need the operators to import at all
PROBE = """
import importlib, json, runpy, sys
operators = runpy.run_path(sys.argv[1])  # the declarations live as long as this namespace
operators["declare_missing_operators"]()
importlib.import_module(sys.argv[2])
names = [sorted(sys.modules)]
import lightning_fed
assert "lightning_fed.compat.package" not in sys.modules, "which Lightning is in use is decided at the first use"
lightning_fed.FederatedTrainer
names.append(sorted(sys.modules))
from lightning_fed.cli.main import main
try:
    main(["--help"])
except SystemExit as end:
    assert not end.code
names.append(sorted(sys.modules))
print("\\n" + json.dumps(names))
"""
PACKAGE = {"lightning_fed", "filelock", "safetensors"}  # the lock and the files of client states on disk: 5 ms
# the parser behind the command line imports what it finds installed, so there the parts are named that it never needs
ON_DEMAND = {"sklearn", "tensorboard", "pandas", "pyarrow", "opacus"}


def added(before: list[str], after: list[str], allowed: set[str]) -> set[str]:
    """Return the modules that are new and of no allowed package, those of Python itself left out."""
    known = allowed | set(sys.stdlib_module_names)
    return {name for name in set(after) - set(before) if name.split(".")[0] not in known}


def test_the_package_and_its_help_import_nothing_that_they_do_not_need() -> None:
    operators = Path(lightning_fed.__file__).with_name("compat") / "torchvision.py"
    command = [sys.executable, "-c", PROBE, str(operators), pl.__name__]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    lightning, package, helped = json.loads(done.stdout.splitlines()[-1])
    assert added(lightning, package, PACKAGE) == set()
    assert {f"{pl.__name__}.cli", "lightning_fed.cli.main"} <= set(helped)  # the probe saw what it was to see
    new = set(helped) - set(lightning)
    assert not {name.split(".")[0] for name in new} & ON_DEMAND
    ours = ("lightning_fed.lab", "lightning_fed.lab.diagnosis", "lightning_fed.cli.data")
    assert not {name for name in new if name.startswith(ours)}
    assert len(set(package) - set(lightning)) < 230, "each own module costs about a millisecond"


LATER = """
import sys
import lightning_fed
import lightning_fed.deploy
assert "torch" not in sys.modules
import torchvision  # which needs what lightning_fed declares, where its native library does not load
threads = sys.modules["lightning_fed.trainer.threads"]
torch = sys.modules["torch"]
assert threads._AT_IMPORT == torch.get_num_threads()
torch.set_num_threads(threads._AT_IMPORT + 1)
from lightning_fed import FederatedTrainer
assert threads._AT_IMPORT + 1 == torch.get_num_threads()
"""


def test_the_package_waits_for_pytorch_and_is_ready_when_it_comes() -> None:
    subprocess.run([sys.executable, "-c", LATER], check=True, timeout=300)
