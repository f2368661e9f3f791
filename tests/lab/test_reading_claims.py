"""Claims in an experiment's file."""

from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_fed import FederatedError
from lightning_fed.lab.axes import read_axis
from lightning_fed.lab.quantities import Metric
from lightning_fed.lab.reading_claims import ClaimReader
from tests.helpers.lab import Write, check_mistakes

CLAIM = {"says": "So.", "source": "Table 1", "claim": "SCAFFOLD < FedAvg", "quantity": "final"}

MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"claims": [{**CLAIM, "claim": "SCAFFOLD < FedAvgg"}]}, "Did you mean 'FedAvg'"),
    ({"claims": [{**CLAIM, "claim": "SCAFFOLD FedAvg"}]}, "labels and numbers with"),
    ({"claims": [{**CLAIM, "claim": "2 * FedAvgg < FedAvg"}]}, "no label 'FedAvgg'"),
    ({"claims": [{**CLAIM, "claim": "__import__('os') < 1"}]}, "no label"),
    ({"claims": [{**CLAIM, "claim": "nan < FedAvg"}]}, "no label 'nan'"),
    ({"claims": [{**CLAIM, "claim": "2 < 3"}]}, "compares two numbers, which says nothing"),
    ({"claims": [{**CLAIM, "claim": "SCAFFOLD < FedAvg < FedAvg"}]}, "compares FedAvg with itself"),
    ({"claims": [{**CLAIM, "quantity": "rounds to x"}]}, "is not a quantity"),
    ({"claims": [{**CLAIM, "compare": "G"}]}, "no axis 'G'"),
    ({"claims": [{**CLAIM, "at": {"method": "FedAvg"}}]}, "method is compared, .* Name it once"),
    ({"claims": [{**CLAIM, "scales": ["huge"]}]}, "no scale 'huge'"),
    ({"claims": [{**CLAIM, "mean_over": "G"}]}, r"claims\[1\].mean_over: there is no axis 'G'"),
    ({"claims": [{**CLAIM, "mean_over": [["G"]]}]}, "no axis"),
    ({"claims": [{**CLAIM, "mean_over": ["method"]}]}, "method is compared, .* Name it once"),
    ({"claims": [{**CLAIM, "within": 2}]}, "between 0 and 1"),
    ({"claims": [{k: v for k, v in CLAIM.items() if k != "source"}]}, r"claims\[1\] lacks source"),
    ({"claims": [{**CLAIM, "paper": 0.5}]}, r"claims\[1\].paper must be a text, found 0.5. Put numbers in quotes"),
    ({"claims": [{**CLAIM, "controls": [CLAIM]}]}, r"controls\[1\]: there is no key 'source'"),
    ({"claims": [{**CLAIM, "difference": {"method": ["FedAvg", "SCAFFOLD"]}}]}, "method is compared, .* once"),
    ({"claims": [{**CLAIM, "difference": {"method": ["FedAvg"]}}]}, "an axis and two of its labels"),
    (
        {"axes": {"K": {"key": "trainer.x", "values": [1]}}, "claims": [{**CLAIM, "difference": {"K": [1, 1]}}]},
        "which is another one",
    ),
    ({"departures": [{"what": "rounds"}]}, r"departures\[1\] lacks paper, here, why"),
    ({"departures": "rounds"}, "departures must be a list"),
]


def test_invalid_claims_are_rejected(write: Write) -> None:
    check_mistakes(write, MISTAKES)


@given(st.text(alphabet="a1 <>=~*\t", min_size=1, max_size=9))
def test_accepted_label_round_trips_through_a_claim(label: str) -> None:
    try:
        axis = read_axis("axes.x", "x", {label: {}, "b": {}})
    except FederatedError:
        assume(False)
    entry = {"says": "", "source": "Table 1", "claim": f"{label} < b <= {label}", "quantity": "final", "compare": "x"}
    metrics = {"loss": Metric("loss", "min", "loss")}
    (claim,) = ClaimReader({"x": tuple(axis.choices)}, metrics, ()).read("", [entry])
    assert claim.terms == ((1.0, label), (1.0, "b"), (1.0, label))
