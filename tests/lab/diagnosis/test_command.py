"""``lightning-fed diagnose`` on the command line: its output for configurations with one fault."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.diagnosis import causes, diagnose
from tests.helpers.optional import needs_opacus

PRIVATE = {
    "trainer__aggregator": {
        "class_path": "DifferentialPrivacy",
        "init_args": {"max_norm": 1.0, "noise_multiplier": 1.0, "delta": 0.01},
    },
    "trainer__sampler": {"class_path": "lightning_fed.server.BernoulliSampler", "init_args": {"probability": 0.5}},
}
RECORDS = {
    "trainer__client_privacy": {
        "class_path": "lightning_fed.server.ClientPrivacy",
        "init_args": {"noise_multiplier": 1.0, "max_grad_norm": 1.0},
    },
}

thorough = partial(pytest.param, marks=pytest.mark.thorough)


@pytest.mark.thorough
def test_fit_options_override_the_configuration() -> None:
    options = ["--model.lr=0.02", "--trainer.local_steps", "3", "--trainer.max_steps", "-1", "--seed_everything", "5"]
    written = diagnose(model={"init_args": {"lr": 0.02}}, trainer__local_steps=3, seed_everything=5)
    assert diagnose(*options) == written
    assert [trial["rate"] for trial in written["trials"]] == pytest.approx([0.002, 0.006, 0.02, 0.06, 0.2])


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (("--trainer.local_stops", "3"), "(?s)local_stops.*Did you mean --trainer.local_steps"),
        (("--trainer.local_step", "3"), "(?s)local_step .*Did you mean --trainer.local_steps"),  # no abbreviations
        (("--trainer.local_steps", "many"), "(?s)local_steps.*many"),
        (("--model.depth", "3"), "depth"),
    ],
)
def test_unknown_fit_option_is_rejected(option: tuple[str, str], said: str) -> None:
    with pytest.raises(SystemExit, match=said):
        diagnose(*option)


@pytest.mark.thorough
def test_sound_configuration_has_no_notable_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    report = diagnose()
    assert causes(report).keys() <= {"nothing stands out", "the step size is rather small"}
    assert report["check"]["outcome"] == "agrees"
    assert [trial["factor"] for trial in report["trials"]] == [0.1, 0.3, 1.0, 3.0, 10.0]
    assert [trial["rate"] for trial in report["trials"]] == pytest.approx([0.01, 0.03, 0.1, 0.3, 1.0])
    assert len({trial["losses"][0] for trial in report["trials"]}) == 1
    assert all(len(trial["losses"]) == 3 for trial in report["trials"])
    assert report["measured"]["clients"] == 6
    out = capsys.readouterr().out
    for part in ("The run", "What the clients are like", "What the theory suggests", "Self-check", "Verdicts"):
        assert part in out
    assert sorted(path.name for path in Path().iterdir()) == ["config.yaml", "r.json"]


@pytest.mark.parametrize(
    ("args", "overrides", "message"),
    [
        (["--out", "report.txt"], {}, "Use a name such as report.md"),
        thorough(["--ckpt_path", "no.ckpt"], {}, "There is no checkpoint no.ckpt"),
        thorough(["--ckpt_path", "last"], {}, "--ckpt_path last found no checkpoint under"),
        ([], {"trainers": {}}, "there is no key of a configuration 'trainers'. Did you mean 'trainer'?"),
        thorough([], {"model__init_args__rate": 1.0}, "Option 'rate' is not accepted"),
        ([], {"trainer__clients_per_round": 7}, "clients_per_round=7 asks for more clients than the 6"),
        pytest.param(
            [], PRIVATE, "A diagnosis measures single clients, which aggregator=Differential", marks=needs_opacus
        ),
        pytest.param(
            [], RECORDS, "A diagnosis measures single clients, which client_privacy=ClientPrivacy", marks=needs_opacus
        ),
        thorough([], {"trainer__local_epochs": 1}, "Pass local_epochs or local_steps, not both"),
    ],
    ids=str,
)
def test_runs_that_cannot_be_diagnosed_are_rejected(
    args: list[str], overrides: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        diagnose(*args, **overrides)
    assert message in str(end.value)
    assert not Path("r.json").exists()
