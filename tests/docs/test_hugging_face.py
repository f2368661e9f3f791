"""The messages of ``engine="auto"`` for a small BERT of transformers, as quoted in docs/hugging_face.md."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from lightning_fed import FederatedDataModule, FederatedTrainer

pytestmark = pytest.mark.thorough  # importing transformers takes seconds
SINGLE = {"problem_type": "single_label_classification"}


class Bert(pl.LightningModule):
    def __init__(self, masked: bool, **config: Any) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers", reason='no transformers: pip install -e ".[pages]"')
        sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
        self.net = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=20, **sizes, **config))
        self.masked = masked

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        tokens, labels = batch
        mask = torch.ones_like(tokens) if self.masked else None
        return self.net(input_ids=tokens, attention_mask=mask, labels=labels).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize(
    ("masked", "config", "said"),
    [
        (False, SINGLE, r"engine='auto' takes 'vectorized', up to \d+ clients at once: .*"),
        (True, SINGLE, r"engine='auto' takes 'sequential', since .*\(a tensor's value is read, .* in \w+\.py, line .*"),
        (False, {}, r"engine='auto' takes 'vectorized', up to \d+ clients at once: .*"),
    ],
)
def test_auto_explains_its_engine_in_one_line(
    masked: bool, config: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    module = Bert(masked, **config)
    dataset = torch.utils.data.TensorDataset(torch.randint(0, 20, (12, 5)), torch.arange(12) % 2)
    data = FederatedDataModule(
        clients=[torch.utils.data.Subset(dataset, range(i, 12, 3)) for i in range(3)], batch_size=2
    )
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = FederatedTrainer(engine="auto", max_rounds=1, local_epochs=1, seed=0, enable_model_summary=False, **quiet)
    with caplog.at_level(logging.INFO):
        trainer.fit(module, data)
    (line,) = [record.getMessage() for record in caplog.records if "engine='auto'" in record.getMessage()]
    assert re.fullmatch(said, line), line
    assert len(line) < 400


class Adapted(Bert):
    """A BERT with dropout that trains only its LoRA adapter."""

    def __init__(self, checkpointing: bool | None, adapter: bool) -> None:
        super().__init__(masked=True, **SINGLE)
        if checkpointing is not None:
            self.net.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        if adapter:
            peft = pytest.importorskip("peft", reason='no peft: pip install -e ".[pages]"')
            if checkpointing:
                self.net.enable_input_require_grads()
            self.net = peft.get_peft_model(self.net, peft.LoraConfig(r=2, target_modules=["query", "value"]))
        self.net.train()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_keeps_the_results_and_resumes(reentrant: bool, adapter: bool, tmp_path: Path) -> None:
    stream = torch.Generator().manual_seed(0)
    dataset = torch.utils.data.TensorDataset(torch.randint(0, 20, (12, 5), generator=stream), torch.arange(12) % 2)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}

    def fitted(checkpointing: bool | None, rounds: int, **options: Any) -> Any:
        torch.manual_seed(0)
        module = Adapted(checkpointing, adapter)
        clients = [torch.utils.data.Subset(dataset, range(i, 12, 3)) for i in range(3)]
        trainer = FederatedTrainer(max_rounds=rounds, local_epochs=1, seed=0, enable_model_summary=False, **quiet)
        trainer.fit(module, FederatedDataModule(clients=clients, batch_size=2), **options)
        trainer.save_checkpoint(tmp_path / f"{rounds}.ckpt")
        return module.state_dict()

    straight = fitted(reentrant, 2)
    without = fitted(None, 2)
    for name, value in straight.items():
        torch.testing.assert_close(value, without[name])
    fitted(reentrant, 1)
    resumed = fitted(reentrant, 2, ckpt_path=tmp_path / "1.ckpt")
    assert all(torch.equal(value, resumed[name]) for name, value in straight.items())
    assert not all(torch.equal(value, fitted(reentrant, 0)[name]) for name, value in straight.items())
