"""An experiment, read from its file."""

from lightning_fed.lab.reading import read_experiment
from tests.helpers.lab import Write


def test_claim_is_shown_as_written(write: Write) -> None:
    text = "2 * FedAvg <= SCAFFOLD < 3.5"
    entry = {"says": "So.", "source": "Table 1", "claim": f" {text.replace(' < ', '  <  ')} ", "quantity": "final"}
    (claim,) = read_experiment(write(claims=[entry])).claims
    assert claim.text == text


def test_experiment_lists_each_quantity_once(write: Write) -> None:
    control = {"says": "Not so.", "claim": "SCAFFOLD < FedAvg", "quantity": "rounds to 0.5"}
    claim = {"says": "So.", "source": "1", "claim": "FedAvg < SCAFFOLD", "quantity": "final", "controls": [control]}
    lr = {"key": "model.init_args.lr", "values": [0.1, 0.2]}
    experiment = read_experiment(
        write(
            claims=[claim],
            tables={"t": {"value": ["best", "final"]}},
            figures={"g": {}},
            tune={"by": "last 2", "grid": {"lr": lr}},
        )
    )
    assert [quantity.text for quantity in experiment.quantities] == ["best", "final", "rounds to 0.5", "last 2"]
