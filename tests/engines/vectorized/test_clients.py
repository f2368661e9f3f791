"""How many clients are run at once."""

from types import SimpleNamespace

import pytest
import torch

from lightning_fed import FederatedDataModule
from lightning_fed.algorithms import Scaffold
from lightning_fed.engines.vectorized.clients import default_chunk_size
from tests.helpers.selection import few
from tests.helpers.training import classification, clients, fit, parameters, seeded


@pytest.mark.parametrize("sizes", few([(4,) * 8 + (90,), (13, 8, 21, 5, 16, 9)], [(4,) * 8 + (90,)]))
def test_the_result_is_that_of_the_sequential_engine(sizes: tuple[int, ...]) -> None:
    found = {}
    for engine in ("sequential", "auto"):
        model, own = seeded(dropout=0.0), clients(sizes)
        n = [len(d) for d in own]
        whole = torch.utils.data.TensorDataset(*(torch.cat([d.tensors[j] for d in own]) for j in (0, 1)))
        cut = [part.numpy() for part in torch.arange(sum(n)).split(n)]
        data = FederatedDataModule(
            train=whole, partition=lambda _, cut=cut: cut, val=classification(10, 7), batch_size=4
        )
        fit(model, data, engine=engine, algorithm=Scaffold(), max_rounds=3, clients_per_round=len(n) - 1)
        found[engine] = parameters(model)
    assert float((found["auto"] - found["sequential"]).norm() / found["sequential"].norm()) < 1e-5


@pytest.mark.parametrize(("total", "numel", "expected"), [(2**34, 2**20, 128), (2**34, 10**9, 1), (2**34, 10, 1024)])
def test_a_gpu_runs_as_many_at_once_whatever_happens_to_be_free(
    total: int, numel: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    y = SimpleNamespace(device=SimpleNamespace(type="cuda"), numel=lambda: numel, element_size=lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=total))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: pytest.fail("differs from run to run"))
    assert default_chunk_size(y) == expected
