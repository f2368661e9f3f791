"""The benchmark of real clients: its measurements of processes, and the runs that it refuses to compare."""

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.deploy.processes import needs_linux

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
WORK = "import time\nwhile time.process_time() < 0.3: pass"
PARENT = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {WORK!r}])\nprint(flush=True)\ninput()"

STARTER = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "input()"])
print(child.pid, flush=True)
child.wait()
"""


@pytest.fixture
def deploy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    for name in ("PYTHONPATH", "DEPLOY_BENCHMARK"):
        monkeypatch.setenv(name, "")  # restores the variable after the test
    before = set(sys.modules)
    name = "benchmark_of_deploy"  # "deploy" is already a folder of the examples and of the tests
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / "deploy.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(BENCHMARKS):
            del sys.modules[name]


def started(deploy: Any, folder: Path, roots: Callable[[], dict[int, str]] = dict) -> Any:
    return deploy.Started(roots, folder, lambda: "")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--rounds 2", "at least 3"),
        ("--transport nvflare nvflare-own", "nvflare-own runs --algorithm Scaffold"),
        ("--transport nvflare-own --algorithm Scaffold --clients 4", "one client a site"),
        ("--transport nvflare-own --algorithm Scaffold --cohort 1", "all clients in each round"),
        ("--transport carrier-pigeon", "invalid choice"),
    ],
)
def test_incomparable_runs_are_rejected(words: str, why: str, deploy: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        deploy.main(words.split())
    assert why in capsys.readouterr().err


@needs_linux
def test_transports_alternate_and_first_round_is_not_timed(
    deploy: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []

    def fake(name: str) -> Any:
        @contextmanager
        def transport(args: Any, folder: Path) -> Iterator[Any]:
            seen.append((name, args.rounds, args.algorithm))
            now = time.time() + 100  # after the first look
            (folder / "marks").write_text("".join(f"{now + later}\n" for later in (0, 1, 3)))
            yield started(deploy, folder)

        return transport

    for name in ("flower", "nvflare", "nvflare-own"):
        monkeypatch.setitem(deploy._TRANSPORTS, name, fake(name))
    turns = ["nvflare-own", "flower", "nvflare", "nvflare-own"]
    assert deploy.main(["--rounds", "3", "--algorithm", "Scaffold", "--json", "--transport", *turns]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["transport"] for line in lines] == turns
    assert seen == [(turn, 3, "Scaffold") for turn in turns]
    for line in lines:
        assert [line[name] for name in ("s_per_round", "min", "max", "cpu_s_per_round")] == [1.5, 1, 2, 0]


@needs_linux
def test_cpu_time_includes_ended_processes(deploy: Any, tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        watch = deploy.Watch(started(deploy, tmp_path, lambda: {parent.pid: "sites"}), [], tmp_path / "marks")
        watch.stop()
        _, spent = watch._cpu[-1]
        shared = psutil.Process(parent.pid).memory_full_info().pss / 1e6
        parent.communicate(b"\n")
    assert spent["sites"] > 0.29
    assert spent["server"] == 0
    begin, end = time.time(), time.time() + 10
    watch._cpu = [(begin, {"server": 1, "sites": 2}), (begin + 2, {"server": 4, "sites": 3}), (end + 1, {})]
    (tmp_path / "marks").write_text(f"{begin + 1}\n{begin + 2}\n{end}\n")
    figures = watch.figures()
    assert figures["cpu_s_per_round_server"] == 1.5  # the mean of two rounds
    assert figures["cpu_s_per_round_sites"] == 0.5
    assert figures["cpu_s_per_round"] == 2
    assert figures["peak_mb_of_all"] == pytest.approx(shared, rel=0.5)


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("/env/bin/python /env/bin/flower-superlink --insecure", "flower-superlink"),
        ("python3 /env/bin/flwr-clientapp --token", "flwr-clientapp"),
        ("/env/flower/bin/python -m nvflare.private.fed.app.simulator.simulator /job", "simulator"),
        ("python -m nvflare.private.fed.app.simulator.simulator_worker -o /job", "simulator_worker"),
        ("python -m lightning_fed.deploy.site_process", "site process"),
    ],
)
def test_process_kinds_are_distinguished(command: str, kind: str, deploy: Any) -> None:
    assert deploy._kind_of(command.split()) == kind


@needs_linux
def test_site_process_with_a_watched_parent_counts_once(deploy: Any, tmp_path: Path) -> None:
    """FLARE's process keeps running as the parent of the site's process, and the site's log names the child, too."""
    with subprocess.Popen([sys.executable, "-c", STARTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        (tmp_path / "site.log").write_text(f"Process {child} answers for 0.\n")
        run = started(deploy, tmp_path, lambda: {parent.pid: "server"})
        watch = deploy.Watch(run, [tmp_path], tmp_path / "marks")
        watch.stop()
        found = list(watch._processes())
        assert {(child, "sites"), (parent.pid, "server")} == {(process.pid, side) for side, _, process in found}
        assert len(found) == 2
        parent.communicate(b"\n")
