"""The benchmark scripts run, make fair comparisons, and report missing parts."""

import dataclasses
import importlib
import json
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.optional import needs_opacus, needs_pyarrow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
KEYS = {"system", "workload", "s_per_round", "min", "max", "peak_rss_mb", "setup_s", "loss_end", "config"}


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    threads, logger = torch.get_num_threads(), logging.getLogger("pytorch_lightning")
    level = logger.level
    yield importlib.import_module
    torch.set_num_threads(threads)
    logger.setLevel(level)
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or "/").is_relative_to(BENCHMARKS):
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


@pytest.mark.thorough
def test_lightning_fed_and_plain_loop_reach_the_same_loss(run):
    found = {}
    for system in ("torch", "lightning_fed"):
        status, (found[system],), _ = run("--system", system, "--devices", "1")
        assert status == 0
        assert found[system].keys() >= KEYS
        assert 0 < found[system]["min"] <= found[system]["s_per_round"] <= found[system]["max"]
        assert found[system]["peak_rss_mb"] > 10
    assert found["lightning_fed"]["loss_end"] == pytest.approx(found["torch"]["loss_end"], abs=1e-4)
    assert found["lightning_fed"]["config"]["engine"] == "vectorized"


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_requested_engine_is_used(run, engine):
    _, (found,), _ = run("--system", "lightning_fed", "--devices", "1", "--engine", engine, "--algorithm", "Scaffold")
    assert found["config"]["engine"] == engine
    assert found["algorithm"] == "Scaffold"


def test_missing_peer_is_skipped_with_a_message(run, scripts, monkeypatch):
    monkeypatch.setitem(scripts("workloads").PACKAGES, "fluke", "a_package_that_nobody_has")
    status, (found,), said = run("--system", "fluke")
    assert status == 0
    assert "--python fluke=PATH" in found["skipped"]
    assert "fluke is skipped" in said


def test_invalid_command_line_is_rejected(run, capsys):
    for arguments, message in [
        ([], "--system is required"),
        (["--system", "pfl", "--algorithm", "Mime"], "for lightning_fed alone"),
        (["--system", "pfl", "--accelerator", "gpu"], "lightning_fed and torch alone"),
        (["--system", "pfl", "--python", "pfl=/no/such/python"], "is not a program"),
        (["--system", "torch", "--rounds", "0"], "above 0"),
        (["--system", "torch", "--in-turns", "4"], "only one run"),
        (["--system", "torch", "--without", "interleaved"], "they take no --system"),
        (["--against", ".", "--without", "interleaved"], "not allowed with"),
    ]:
        with pytest.raises(SystemExit):
            run(*arguments)
        assert message in capsys.readouterr().err


@pytest.mark.thorough
@pytest.mark.parametrize("apart", [False, True])
def test_runs_are_compared_and_written_to_a_page(run, scripts, monkeypatch, tmp_path, apart):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- workloads:start -->\nold\n<!-- workloads:end -->\nafter\n")
    if not apart:
        workloads = scripts("workloads")
        monkeypatch.setattr(
            workloads, "_run_one_by_one", lambda args, runs: [workloads._run_here(args, *one) for one in runs]
        )
    status, (plain, forked), _ = run("--system", "torch", "torch-2", "--repeats", "1", "--render", str(page))
    assert status == 0
    assert plain["ratio"] == 1
    assert forked["loss_agrees"]
    assert forked["loss_end"] == pytest.approx(plain["loss_end"], abs=1e-4)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| tiny | torch-2 |" in text


@pytest.mark.thorough
def test_systems_take_turns(tmp_path):
    command = [
        sys.executable,
        BENCHMARKS / "workloads.py",
        "--system",
        "torch",
        "lightning_fed",
        "pfl",
        "--in-turns",
        "2",
    ]
    command += ["--workload", "tiny", "--rounds", "3", "--warmup", "2", "--repeats", "1", "--devices", "2"]
    done = subprocess.run([*command, "--data", tmp_path, "--json"], capture_output=True, text=True, check=True)
    plain, own, missing = map(json.loads, done.stdout.splitlines())
    assert (plain["rounds"], own["rounds"], own["config"]["processes"]) == (3, 3, 2)
    assert plain["in_turns"] == own["in_turns"] == 2
    assert own["loss_agrees"]
    assert "not installed" in missing["skipped"]


@pytest.mark.thorough
def test_failing_system_does_not_stop_other_turns(scripts, monkeypatch, tmp_path):
    workloads = scripts("workloads")
    args = workloads._parser().parse_args(
        ["--system", "torch", "--in-turns", "1", "--rounds", "2", "--data", str(tmp_path)]
    )
    args.python = [("pfl", "/bin/false")]
    good, bad = workloads._run_in_turns(args, [("tiny", "torch", "FedAvg"), ("tiny", "pfl", "FedAvg")])
    assert good["rounds"] == 2
    assert bad["failed"] == "exit code 1"


def test_round_times_exclude_the_turns_of_other_systems(scripts, monkeypatch):
    measure = scripts("systems.measure")
    now, stops = [0.0], []

    def stop(group, number):
        stops.append((group, number))
        now[0] += 100.0

    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(measure.os, "killpg", stop)
    stopwatch = measure.Stopwatch(measure.Settings(rounds=3, warmup=1, in_turns=2))
    for took in (5.0, 7.0, 1.0, 2.0, 3.0):
        now[0] += took
        stopwatch.tick()
    assert stops == [(os.getpgrp(), signal.SIGSTOP)] * 2
    figures = stopwatch.figures()
    assert (figures["setup_s"], figures["min"], figures["s_per_round"], figures["max"]) == (12.0, 1.0, 2.0, 3.0)


def test_ratios_are_computed_within_a_repeat(scripts):
    repeats = [[line("torch", s), line("pfl", 2 * s), line("fluke", 2 * s, loss=2.0)] for s in (1.0, 5.0, 2.0)]
    plain, pfl, fluke = scripts("systems.summary").combine(repeats)
    assert (plain["s_per_round"], plain["min"], plain["max"]) == (2.0, 0.5, 10.0)
    assert pfl["ratio"] == 2
    assert pfl["loss_agrees"]
    assert not fluke["loss_agrees"]


def test_tables_show_whether_goals_are_met(scripts):
    summary = scripts("systems.summary")
    seconds = {"torch": 1.0, "torch-2": 0.1, "lightning_fed": 0.5, "fedjax": 0.6, "pfl": 1.4}
    methods = [line("lightning_fed", 0.5 * ratio, algorithm=name) for name, ratio in (("Mime", 2.0), ("Scaffold", 1.5))]
    missing = {"system": "fluke", "workload": "W1", "algorithm": "FedAvg", "skipped": "not installed"}
    text = summary.tables(summary.combine([[*(line(*pair) for pair in seconds.items()), *methods, missing]]))
    assert "| W1 | 0.50 | 0.55, met | fedjax 0.60 | 2.00 | 2.6, met | 1.50 | 1.25, missed |" in text
    assert "Not installed: fluke." in text
    assert "A CPU, 2 cores" in text


def test_tables_describe_the_medians_of_each_workload(scripts):
    summary = scripts("systems.summary")
    first, second = line("torch", 1.0), line("torch", 1.0) | {"workload": "W2"}
    what = f"{first['rounds']} rounds after {first['warmup']} to warm up"
    assert f"Medians of 1 repeat of {what}. " in summary.tables([first, second])
    third = first | {"workload": "W4", "rounds": 40, "in_turns": 8, "repeats": 3}
    other = f"3 repeats of 40 rounds after {first['warmup']} to warm up, in turns"
    found = summary.tables([first, second, third])
    assert f"Medians, for W1 and W2 of 1 repeat of {what}; for W4 of {other}. " in found


def test_last_result_line_of_a_run_is_used(scripts, tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text("".join(f"{json.dumps(line('torch', s))}\n" for s in (1.0, 3.0)))
    assert [row["s_per_round"] for row in scripts("systems.summary").read(path)] == [3.0]


def test_warmup_rounds_count_as_setup_and_are_not_timed(scripts, monkeypatch):
    measure = scripts("systems.measure")
    times = iter([0.0, 10.0, 10.0, 20.0, 20.0, 21.0, 21.0, 24.0, 24.0])
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(times))
    stopwatch = measure.Stopwatch(measure.Settings(rounds=2, warmup=1))
    for _ in range(4):
        stopwatch.tick()
    figures = stopwatch.figures()
    assert (figures["setup_s"], figures["min"], figures["s_per_round"], figures["max"]) == (20.0, 1.0, 2.0, 3.0)


def test_system_that_runs_too_few_rounds_raises(scripts):
    measure = scripts("systems.measure")
    stopwatch = measure.Stopwatch(measure.Settings(rounds=2, warmup=1))
    stopwatch.tick()
    with pytest.raises(RuntimeError, match="1 times instead of 4"):
        stopwatch.figures()


def test_every_workload_has_a_goal(scripts):
    problem, summary = scripts("systems.problem"), scripts("systems.summary")
    assert set(summary.GOALS) == set(problem.WORKLOADS) - {"tiny"}


@pytest.mark.thorough
def test_all_workload_networks_use_the_initial_parameters(scripts, tmp_path):
    problem, networks = scripts("systems.problem"), scripts("systems.networks")
    problem.prepare("tiny", tmp_path)
    made = problem.Problem("tiny", tmp_path)
    for workload in problem.WORKLOADS.values():
        made.workload = workload
        net = networks.build(made)
        assert all(torch.equal(p, torch.from_numpy(v)) for p, v in zip(net.parameters(), made.initial(), strict=True))
    assert made.cohort(3) == sorted(set(made.cohort(3)))


def test_data_preparation_is_deterministic(scripts, tmp_path):
    problem = scripts("systems.problem")
    for folder in (tmp_path / "a", tmp_path / "b"):
        problem.prepare("tiny", folder)
    first, second = (problem.Problem("tiny", tmp_path / name) for name in "ab")
    assert (first.x == second.x).all()
    assert list(first.offsets[:3]) == [0, 5, 11]
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["tiny.npz"]


def test_workload_defines_its_warmup_and_repeats(run, scripts, monkeypatch, tmp_path):
    workloads, problem = scripts("workloads"), scripts("systems.problem")
    own = dataclasses.replace(problem.WORKLOADS["tiny"], warmup=4, repeats=2)
    monkeypatch.setitem(problem.WORKLOADS, "tiny", own)
    _, (found,), _ = run("--system", "torch")
    assert found["warmup"] == 4
    asked = []
    monkeypatch.setattr(
        workloads, "_run_one_by_one", lambda _, runs: asked.extend(runs) or [line(run[1], 1.0, run[0]) for run in runs]
    )
    run("--system", "torch", "pfl", "--results", str(tmp_path / "results.jsonl"))
    assert asked == [("tiny", "torch", "FedAvg"), ("tiny", "pfl", "FedAvg")] * 2
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 2


@pytest.mark.thorough
def test_scale_point_figures_in_process(scripts):
    scale = scripts("scale")
    found = scale.measure(scale.Point("Scaffold", cohort=4, population=4, parameters=200_000, chunk=2), 1, 1)
    assert found["parameters"] == pytest.approx(200_000, rel=0.01)
    assert (found["kept_clients"], found["rounds"]) == (4, 1)
    assert found["kept_mb"] == pytest.approx(4 * found["model_mb"], abs=0.1)
    assert found["s_per_round"] > 0


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["FedAvg", "Scaffold"])
def test_scale_point_is_measured_in_a_separate_process(scripts, method):
    scale = scripts("scale")
    point = scale.Point(method, cohort=4, population=4, parameters=2_000_000, chunk=2)
    found = scale._run_apart("cohort", point, rounds=1, warmup=1)  # in this process, freed memory would be reused
    assert found["parameters"] == pytest.approx(2_000_000, rel=0.01)
    assert found["model_mb"] == pytest.approx(8, rel=0.01)
    assert found["kept_mb"] == pytest.approx(4 * found["model_mb"] if method == "Scaffold" else 0, abs=0.1)
    assert found["peak_above_mb"] > 3 * found["model_mb"] + found["kept_mb"]
    assert found["s_per_round"] > 0


@pytest.mark.thorough
def test_scale_script_writes_tables_and_a_figure(scripts, monkeypatch, tmp_path):
    scale = scripts("scale")
    page, results = tmp_path / "page.md", tmp_path / "results.jsonl"
    page.write_text(
        "".join(f"<!-- {n}:start -->\n<!-- {n}:end -->\n" for n in ("scale", *(f"scale-{a}" for a in scale.AXES)))
    )

    def fake(axis, point, rounds, warmup):
        found = {
            **dataclasses.asdict(point),
            "wanted_parameters": point.parameters,
            "wanted_rounds": point.rounds,
            "model_mb": 2.0,
            "kept_mb": 5.0,
            "kept_clients": 7,
        }
        figures = {
            "s_per_round": 1.5 / point.processes,
            "peak_above_mb": 20.0,
            "peak_rss_mb": 400.0,
            "rounds": 5,
            "warmup": 1,
        }
        return {"axis": axis, **found, **figures, "machine": {"cpu": "A CPU", "cores": 2}, "date": "2026-01-01"}

    monkeypatch.setattr(scale, "_run_apart", fake)
    arguments = ["--axis", *scale.AXES, "--up-to", "100000", "--results", str(results), "--render", str(page)]
    assert scale.main(arguments) == 0
    text = page.read_text()
    assert "| FedAvg | 1,000 | 1.5000 | 1.50 | 20.0 | 5.0 | disk |" in text
    assert "| Scaffold | 10,000 | 1.5000 | 750.00 | 20.0 | 5.0 | memory | 10.0 |" in text
    assert "| Scaffold | 2 | 0.7500 | 7.50 | 400 | 2.00 |" in text
    assert "1,000,000" not in text  # above --up-to
    assert "2026-01-01; A CPU, 2 cores. Medians of 5 rounds after 1 to warm up." in text
    assert 0 < (tmp_path / "images" / "scale.png").stat().st_size < 100_000


def test_failing_scale_point_is_reported(scripts, monkeypatch, tmp_path, capsys):
    scale = scripts("scale")
    monkeypatch.setattr(scale, "AXES", {"cohort": [scale.Point()]})
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    assert scale.main(["--axis", "cohort", "--results", str(tmp_path / "results.jsonl")]) == 1
    assert "exit code" in json.loads(capsys.readouterr().out)["failed"]
    assert not (tmp_path / "results.jsonl").exists()


@pytest.mark.thorough
def test_soak_results_are_written_to_a_page(scripts, tmp_path):
    soak = scripts("soak")
    page, results = tmp_path / "page.md", tmp_path / "results.jsonl"
    page.write_text("<!-- soak:start -->\n<!-- soak:end -->\n")
    assert soak.main(["--rounds", "10", "--cohort", "2", "--results", str(results), "--engine", "sequential"]) == 0
    assert soak.main(["--results", str(results), "--render", str(page)]) == 0
    assert "| Scaffold, sequential, states in memory | 10 | 2 | 1,000 |" in page.read_text()


def test_page_has_markers_for_all_figures(scripts):
    page = (BENCHMARKS.parent / "docs" / "benchmarks.md").read_text()
    for name in ("workloads", "scale", "soak", *(f"scale-{axis}" for axis in scripts("scale").AXES)):
        assert page.index(f"<!-- {name}:start -->") < page.index(f"<!-- {name}:end -->")


@pytest.mark.thorough
@pytest.mark.skipif(sys.version_info < (3, 11), reason="code objects have no qualified names before Python 3.11")
@pytest.mark.parametrize("watched", [[], ["--fit"]])
def test_reach_counts_entered_functions(scripts, capsys, watched):
    script = scripts("reach")
    assert script.main(["--engine", "sequential", "--algorithm", "FedAvg", "--json", "--list", *watched]) == 0
    assert sys.getprofile() is None
    said = json.loads(capsys.readouterr().out)
    (found,) = said["runs"]
    assert 10 < found["files"] < found["defined"] <= found["functions"] < found["calls"]
    for key in ("functions", "defined", "calls"):
        assert found[key] == sum(folder[key] for folder in found["folders"].values())
    entered = {(file, name): count for file, name, count in found["entered"]}
    steps = entered.get(("engines/optimizer.py", "FederatedOptimizer.step"), 0)
    starts = entered.get(("trainer/run_state.py", "RunState.start"), 0)
    assert (steps, starts) == ((0, 1) if watched else (script.CLIENTS * script.STEPS, 0))


def test_reach_names_missed_targets(scripts):
    script = scripts("reach")
    enters = {"what": "round", "engine": "vectorized", "algorithm": "FedAvg", "functions": 301, "defined": 171}
    assert script._missed([enters]) == ["vectorized round: 301 functions, at most 300"]
    assert script._missed([enters | {"engine": "sequential", "what": "fit"}]) == [
        "sequential fit: 171 defined, at most 170"
    ]
    assert not script._missed([enters | {"algorithm": "Mime"}, enters | {"functions": 300}])


@pytest.mark.thorough
def test_engines_differ_only_by_rounding(scripts, capsys):
    script = scripts("rounding")
    assert script.main(["--runs", "1", "--seed", "17", "--json"]) == 0
    small, large = map(json.loads, capsys.readouterr().out.splitlines())
    assert (small["network"], small["method"], small["eps"], large["eps"]) == ("attention", "FedDyn", 1e-8, 1e-3)
    assert small["engines"][0] < 1e-13  # it would be about 1e-4 in the keys' bias
    assert max(large["engines"]) < 1e-13


def test_differences_beyond_rounding_are_reported(scripts):
    script, found = scripts("rounding"), {"engines": (1e-12, 1e-4), "start": (1e-15, 1e-4), "gradients": (1e-16, 0.0)}
    assert not script._is_explained(found)
    assert script._is_explained(found | {"engines": (1e-14, 0.1)})
    lines = [{**vars(script.draw(0, 1e-8)), **found, "explained": False}]
    assert "1 of 1 runs are further apart" in script._table(lines)
    assert "NOT EXPLAINED" in script._line(lines[0])


def with_rounds(name, times, loss=1.0):
    own = line(name, sorted(times)[len(times) // 2], loss=loss)
    own |= {"rounds_s": times, "rounds_cpu_s": [2 * t for t in times], "cpu_s_per_round": 0.5, "setup_cpu_s": 0.25}
    return own


def test_checkouts_are_compared_per_round(scripts):
    variants = scripts("systems.variants")
    base, other = with_rounds("this checkout", [1.0, 2.0, 4.0]), with_rounds("the other checkout", [2.0, 4.0, 40.0])
    slower = with_rounds("the other checkout", [3.0, 6.0, 12.0], loss=2.0)
    (found,) = variants.compare([[base, other], [base, slower]])
    assert (found["ratios"], found["ratio"]) == ([2.0, 3.0], 2.5)  # the disturbed round does not count
    assert found["cpu_ratios"] == [round(46 / 7, 4), 3.0]  # the CPU time includes it
    assert found["loss_differs"] == 1.0
    text = variants.table([found], is_against=True)
    assert "| W1 FedAvg | 0.400 |" in text
    assert "| geometric mean | 0.400 |" in text
    failed = {"system": "the other checkout", "workload": "W1", "algorithm": "FedAvg", "failed": "exit code 1"}
    assert variants.compare([[base, failed]]) == [failed]
    assert variants.compare([[failed, base]]) == [failed]
    assert "W1 FedAvg, the other checkout: did not finish." in variants.table([failed], is_against=True)


def test_compared_checkouts_take_turns_in_starting_first(scripts, run, monkeypatch, tmp_path):
    workloads, order = scripts("workloads"), []

    def started(_, runs):
        order.append([variant.name for _, variant, _ in runs])
        return [with_rounds(name, [1.0 if name == "this checkout" else 2.0]) for name in order[-1]]

    monkeypatch.setattr(workloads, "_run_in_turns", started)
    _, (found,), _ = run("--against", str(BENCHMARKS.parent), "--repeats", "3")
    assert order[0] == order[1][::-1] == order[2]
    assert found["ratios"] == [2.0, 2.0, 2.0]


def test_every_ablation_patches_existing_code(scripts):
    ablations = scripts("systems.ablations")
    assert all(len(list(ablations.places_of(name))) == len(its.places) for name, its in ablations.ABLATIONS.items())


def test_mechanism_is_patched_out_or_missing_target_raises(scripts, monkeypatch):
    ablations = scripts("systems.ablations")
    for module, what in (
        ("engines.optimizer:FederatedOptimizer.step", "there"),
        ("engines.optimizer:FederatedOptimizer.gone", "elsewhere"),
    ):
        monkeypatch.setitem(ablations.ABLATIONS, what, ablations.Ablation(what, {module: ablations._always(3)}))
    optimizer = importlib.import_module("lightning_fed.engines.optimizer").FederatedOptimizer
    monkeypatch.setattr(optimizer, "step", optimizer.step)
    ablations.switch_off("there")
    assert optimizer.step(None) == 3
    with pytest.raises(SystemExit, match="no engines.optimizer:FederatedOptimizer.gone in lightning_fed any more"):
        ablations.switch_off("elsewhere")


def test_disabling_a_mechanism_requires_its_attribute(scripts):
    class Engine:
        def __init__(self):
            self.is_fast = True

    then = scripts("systems.ablations")._then
    patched = type("Patched", (Engine,), {"__init__": then("is_fast", False)(Engine.__init__)})
    assert not patched().is_fast
    with pytest.raises(AttributeError, match="was_fast"):
        type("Renamed", (Engine,), {"__init__": then("was_fast", False)(Engine.__init__)})()


def test_unknown_mechanisms_are_rejected_before_running(run):
    for arguments, message in [
        (["--without", "stagger"], "no such mechanism(.|\n)*  interleaved "),
        (["--without", "interleaved+lean"], "lean: that is a mechanism of the sequential engine"),
        (
            ["--without", "interleaved", "--engine", "sequential"],
            "a mechanism of the vectorized engine",
        ),
    ]:
        with pytest.raises(SystemExit, match=message):
            run(*arguments)


@pytest.mark.thorough
def test_run_without_mechanisms_is_compared_with_the_full_run(run):
    status, found, _ = run("--without", "interleaved", "tracing+lookups")
    assert status == 0
    assert [line["variant"] for line in found] == ["without interleaved", "without tracing+lookups"]
    assert all(line["loss_differs"] < 1e-5 and line["cpu_ratio"] > 0 for line in found)


def test_every_workload_has_a_comparison_length(scripts):
    assert set(scripts("systems.variants").LENGTHS) == set(scripts("systems.problem").WORKLOADS)


def test_folder_without_the_package_is_not_a_checkout(run, tmp_path):
    with pytest.raises(SystemExit, match="no package lightning_fed"):
        run("--against", str(tmp_path))


@pytest.mark.thorough
def test_checkout_is_compared_with_another(run, tmp_path):
    status, (found,), _ = run("--against", str(BENCHMARKS.parent), "--algorithm", "Scaffold")
    assert status == 0
    assert found["loss_differs"] == 0
    assert 0.2 < found["cpu_ratio"] < 5
    (tmp_path / "lightning_fed").mkdir()
    (tmp_path / "lightning_fed" / "__init__.py").write_text("raise RuntimeError('the other one')")
    status, (found,), _ = run("--against", str(tmp_path))
    assert status == 1
    assert found["failed"] == "exit code 1"


def test_attacks_run_under_every_rule_and_rules_are_timed(scripts, capsys):
    attacks = scripts("attacks")
    assert attacks.main(["--cost", "--clients", "19", "--entries", "50"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split(" | ")[0].strip("| ") for row in rows[2:]] == list(attacks.RULES)[2:]
    assert 0 <= attacks.accuracy(attacks.ATTACKS["label flip"], attacks.RULES["Bulyan"], rounds=1) <= 1


@pytest.mark.thorough
@needs_opacus
def test_cost_of_record_privacy_is_measured(scripts):
    costs = scripts("record_privacy")
    for name in ("ordinary", "private, one by one"):
        assert costs.seconds(costs.MODELS["MLP"](), costs.HOW[name], rounds=1) > 0


def test_growth_exponent_is_the_log_log_slope(scripts):
    slope = scripts("scale_page")._slope
    assert slope([(10, 3.0), (100, 30.0), (1000, 300.0)]) == pytest.approx(1.0)
    assert slope([(10, 5.0), (1000, 5.0)]) == pytest.approx(0.0)
    assert math.isnan(slope([(10, 5.0), (10, 6.0)]))


@pytest.mark.thorough
def test_options_are_timed_alternating_with_the_baseline(scripts, monkeypatch, capsys):
    options = scripts("options")
    monkeypatch.setattr(options, "STEPS", 1)
    chosen = ["`on_client_start` sets each client's rate", "`UpdateNormSampler`"]
    monkeypatch.setattr(options, "OPTIONS", {name: options.OPTIONS[name] for name in chosen})
    assert options.main(["--rounds", "1", "--turns", "1"]) == 0
    rows = [row for row in capsys.readouterr().out.splitlines() if row.startswith("|")]
    assert [row.split(" | ")[0].strip("| ") for row in rows[2:]] == chosen
    assert rows[2].count(" = ") == 1
    assert rows[3].count(" = ") == 2


@needs_pyarrow
@pytest.mark.thorough
def test_table_rules_are_timed(scripts, capsys):
    tables = scripts("client_tables")
    assert tables.main(["--rows", "400"]) == 0
    rows = [row for row in capsys.readouterr().out.splitlines() if row.startswith("|")]
    assert [row.split(" | ")[0].strip("| ") for row in rows[2:]] == list(tables.CASES)
