"""The benchmark scripts run, compare like with like, and say what is missing."""

import importlib
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
KEYS = {"system", "workload", "s_per_round", "min", "max", "peak_rss_mb", "setup_s", "loss_end", "config"}


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    threads, logger = torch.get_num_threads(), logging.getLogger("pytorch_lightning")
    level = logger.level
    yield importlib.import_module
    torch.set_num_threads(threads)
    logger.setLevel(level)
    for name in [name for name in sys.modules if name == "workloads" or name.split(".")[0] == "systems"]:
        del sys.modules[name]


@pytest.fixture
def run(scripts, tmp_path, capsys):
    workloads = scripts("workloads")

    def run(*arguments):
        status = workloads.main(["--workload", "tiny", "--rounds", "2", "--data", str(tmp_path), "--json", *arguments])
        captured = capsys.readouterr()
        return status, [json.loads(text) for text in captured.out.splitlines()], captured.err

    return run


def line(system, seconds, workload="W1", algorithm="FedAvg", loss=1.0):
    config = {"version": "1.0", "processes": 2, "engine": "vectorized", "chunk": 1}
    figures = {"s_per_round": seconds, "min": seconds / 2, "max": 2 * seconds, "peak_rss_mb": 100.0, "setup_s": 1.0}
    where = {"machine": {"cpu": "A CPU", "cores": 2}, "date": "2026-01-01", "rounds": 8, "warmup": 3}
    named = {"system": system, "workload": workload, "algorithm": algorithm}
    return {**named, **figures, "loss_end": loss, "config": config, **where}


def test_lightning_fed_and_the_plain_loop_end_with_one_loss(run):
    found = {}
    for system in ("torch", "lightning_fed"):
        status, (found[system],), _ = run("--system", system, "--devices", "1")
        assert status == 0
        assert found[system].keys() >= KEYS
        assert 0 < found[system]["min"] <= found[system]["s_per_round"] <= found[system]["max"]
        assert found[system]["peak_rss_mb"] > 10
    assert found["lightning_fed"]["loss_end"] == pytest.approx(found["torch"]["loss_end"], abs=1e-4)
    assert found["lightning_fed"]["config"]["engine"] == "vectorized"


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_the_engine_is_the_one_asked_for(run, engine):
    _, (found,), _ = run("--system", "lightning_fed", "--devices", "1", "--engine", engine, "--algorithm", "Scaffold")
    assert found["config"]["engine"] == engine
    assert found["algorithm"] == "Scaffold"


def test_a_peer_that_is_not_installed_is_skipped_with_a_message(run, scripts, monkeypatch):
    monkeypatch.setitem(scripts("workloads").PACKAGES, "fluke", "a_package_that_nobody_has")
    status, (found,), said = run("--system", "fluke")
    assert status == 0
    assert "--python fluke=PATH" in found["skipped"]
    assert "fluke is skipped" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--system is required"),
        (["--system", "pfl", "--algorithm", "Mime"], "for lightning_fed alone"),
        (["--system", "pfl", "--accelerator", "gpu"], "lightning_fed and torch alone"),
        (["--system", "pfl", "--python", "pfl=/no/such/python"], "is not a program"),
        (["--system", "torch", "--rounds", "0"], "above 0"),
    ],
)
def test_a_command_line_that_makes_no_sense_is_refused(run, capsys, arguments, message):
    with pytest.raises(SystemExit):
        run(*arguments)
    assert message in capsys.readouterr().err


def test_several_runs_are_compared_and_written_to_a_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- workloads:start -->\nold\n<!-- workloads:end -->\nafter\n")
    command = [sys.executable, BENCHMARKS / "workloads.py", "--system", "torch", "torch-2", "--workload", "tiny"]
    command += ["--rounds", "2", "--repeats", "1", "--data", tmp_path, "--json", "--render", page]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    plain, forked = map(json.loads, done.stdout.splitlines())
    assert plain["ratio"] == 1
    assert forked["loss_agrees"]
    assert forked["loss_end"] == pytest.approx(plain["loss_end"], abs=1e-4)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| tiny | torch-2 |" in text


def test_ratios_are_taken_within_a_repeat(scripts):
    repeats = [[line("torch", s), line("pfl", 2 * s), line("fluke", 2 * s, loss=2.0)] for s in (1.0, 5.0, 2.0)]
    plain, pfl, fluke = scripts("systems.summary").combine(repeats)
    assert (plain["s_per_round"], plain["min"], plain["max"]) == (2.0, 0.5, 10.0)
    assert pfl["ratio"] == 2
    assert pfl["loss_agrees"]
    assert not fluke["loss_agrees"]


def test_goals_are_judged(scripts):
    summary = scripts("systems.summary")
    seconds = {"torch": 1.0, "torch-2": 0.1, "lightning_fed": 0.5, "fedjax": 0.6, "pfl": 1.4}
    methods = [line("lightning_fed", 0.5 * ratio, algorithm=name) for name, ratio in (("Mime", 2.0), ("Scaffold", 1.5))]
    missing = {"system": "fluke", "workload": "W1", "algorithm": "FedAvg", "skipped": "not installed"}
    text = summary.tables(summary.combine([[*(line(*pair) for pair in seconds.items()), *methods, missing]]))
    assert "| W1 | 0.50 | 0.55, met | fedjax 0.60 | 2.00 | 2.3, met | 1.50 | 1.25, missed |" in text
    assert "Not installed: fluke." in text
    assert "A CPU, 2 cores" in text


def test_the_last_line_of_a_run_counts(scripts, tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text("".join(f"{json.dumps(line('torch', s))}\n" for s in (1.0, 3.0)))
    assert [row["s_per_round"] for row in scripts("systems.summary").read(path)] == [3.0]


def test_rounds_to_warm_up_are_set_up_and_not_timed(scripts, monkeypatch):
    measure = scripts("systems.measure")
    times = iter([0.0, 10.0, 20.0, 21.0, 24.0])
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(times))
    stopwatch = measure.Stopwatch(measure.Settings(rounds=2, warmup=1))
    for _ in range(4):
        stopwatch.tick()
    figures = stopwatch.figures()
    assert (figures["setup_s"], figures["min"], figures["s_per_round"], figures["max"]) == (20.0, 1.0, 2.0, 3.0)


def test_a_system_that_runs_too_few_rounds_is_found_out(scripts):
    measure = scripts("systems.measure")
    stopwatch = measure.Stopwatch(measure.Settings(rounds=2, warmup=1))
    stopwatch.tick()
    with pytest.raises(RuntimeError, match="1 times instead of 4"):
        stopwatch.figures()


def test_every_workload_has_its_goal(scripts):
    problem, summary = scripts("systems.problem"), scripts("systems.summary")
    assert set(summary.GOALS) == set(problem.WORKLOADS) - {"tiny"}


def test_networks_of_all_workloads_take_the_initial_parameters(scripts, tmp_path):
    problem, networks = scripts("systems.problem"), scripts("systems.networks")
    problem.prepare("tiny", tmp_path)
    made = problem.Problem("tiny", tmp_path)
    for workload in problem.WORKLOADS.values():
        made.workload = workload
        net = networks.build(made)
        assert all(torch.equal(p, torch.from_numpy(v)) for p, v in zip(net.parameters(), made.initial(), strict=True))
    assert made.cohort(3) == sorted(set(made.cohort(3)))


def test_data_is_the_same_when_made_again(scripts, tmp_path):
    problem = scripts("systems.problem")
    for folder in (tmp_path / "a", tmp_path / "b"):
        problem.prepare("tiny", folder)
    first, second = (problem.Problem("tiny", tmp_path / name) for name in "ab")
    assert (first.x == second.x).all()
    assert list(first.offsets[:3]) == [0, 5, 11]
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["tiny.npz"]
