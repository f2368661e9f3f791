"""What ``engine="auto"`` says of a small BERT of transformers, as docs/hugging_face.md has it."""

import logging
import re
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
        (False, {}, r"engine='auto' takes 'sequential', since .* it changes the attribute 'net.config'\. .*"),
    ],
)
def test_auto_says_what_it_takes_in_one_line(
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
