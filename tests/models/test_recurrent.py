"""The recurrent networks: sizes, integer codes, counted positions, word vectors."""

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed.core.errors import FederatedError
from lightning_fed.models import CharLSTM, SentimentLSTM
from tests.helpers.training import QUIET

TEXTS = torch.randint(80, (4, 6), generator=torch.Generator().manual_seed(0))
VECTORS = torch.arange(12, dtype=torch.float32).reshape(4, 3)


@pytest.mark.parametrize(
    ("model", "count"),
    [
        (CharLSTM, 133_520),
        (lambda: CharLSTM(hidden_size=256), 819_920),
        (lambda: CharLSTM(vocab_size=90, hidden_size=256), 820_522 + 2 * 4 * 256),  # Reddi et al. count Keras' biases
        (lambda: SentimentLSTM(1000), 1000 * 300 + 1_097_728 + 2 * 257),
        (lambda: SentimentLSTM(1000, hidden_size=100), 1000 * 300 + 241_600 + 2 * 101),
    ],
)
def test_parameter_count(model, count):
    assert sum(p.numel() for p in model().parameters()) == count


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_codes_can_have_any_integer_type(dtype):
    model = CharLSTM(hidden_size=5)
    assert torch.equal(model(TEXTS.to(dtype)), model(TEXTS))


def test_labels_of_every_position_have_equal_weight():
    model, labels = CharLSTM(hidden_size=5), TEXTS.roll(-1, dims=1)
    logits = model(TEXTS, every_position=True)
    assert logits.shape == (4, 6, 80)
    torch.testing.assert_close(logits[:, -1], model(TEXTS))
    want = sum(F.cross_entropy(logits[:, t], labels[:, t]) for t in range(6)) / 6
    torch.testing.assert_close(model.training_step((TEXTS, labels), 0), want)
    last = F.cross_entropy(model(TEXTS), labels[:, -1])
    torch.testing.assert_close(model.training_step((TEXTS, labels[:, -1]), 0), last)


def test_position_depends_only_on_earlier_positions():
    model, other = CharLSTM(hidden_size=5), TEXTS.clone()
    other[:, 4:] = 79 - other[:, 4:]
    ours, theirs = (model(codes, every_position=True) for codes in (TEXTS, other))
    assert torch.equal(ours[:, :4], theirs[:, :4])
    assert not torch.isclose(ours[:, 4:], theirs[:, 4:]).all()


def test_accuracy_over_positions_ignores_missing_labels():
    model, run = CharLSTM(hidden_size=5), pl.Trainer(**QUIET)
    labels = model(TEXTS, every_position=True).argmax(-1)
    labels[:, 3:] = -100
    labels[0, :3] = (labels[0, :3] + 1) % 80
    (logged,) = run.test(model, DataLoader(TensorDataset(TEXTS, labels), batch_size=3), verbose=False)
    assert logged["test_acc"] == pytest.approx(0.75)


@pytest.mark.parametrize("code", [80, -1])
def test_code_outside_the_vocabulary_is_rejected(code):
    codes = TEXTS.clone()
    codes[1, 2] = code
    with pytest.raises(FederatedError, match=r"CharLSTM got a code outside 0, ..., 79"):
        CharLSTM(hidden_size=5)(codes)


def test_empty_texts_are_rejected():
    with pytest.raises(FederatedError, match=r"CharLSTM got inputs of shape \[4, 0\]"):
        CharLSTM(hidden_size=5)(TEXTS[:, :0])


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("form", ["file", "text", "tensor"])
def test_word_vectors_initialize_the_embedding(form, frozen, tmp_path):
    path = tmp_path / "vectors.npy"
    np.save(path, VECTORS.numpy().astype(np.float64))
    vectors = {"file": path, "text": str(path), "tensor": VECTORS}[form]
    model = SentimentLSTM(4, 3, 5, vectors=vectors, freeze_embedding=frozen)
    weight = model.net.embedding.weight
    assert torch.equal(weight, VECTORS)
    assert weight.requires_grad is not frozen
    weight.data.zero_()
    assert VECTORS.any()  # the model has its own copy


@pytest.mark.parametrize("given", ["file", "tensor"])
def test_checkpoint_holds_the_vectors_and_loads_without_their_file(given, tmp_path):
    path = tmp_path / "vectors.npy"
    np.save(path, VECTORS.numpy())
    model = SentimentLSTM(4, 3, 5, vectors=str(path) if given == "file" else VECTORS, freeze_embedding=True)
    run = pl.Trainer(**QUIET, max_epochs=1)
    run.fit(model, DataLoader(TensorDataset(TEXTS % 4, torch.tensor([0, 1, 1, 0]))))
    run.save_checkpoint(tmp_path / "model.ckpt")
    path.unlink()
    again = SentimentLSTM.load_from_checkpoint(tmp_path / "model.ckpt", weights_only=True)
    assert torch.equal(again.net.embedding.weight, VECTORS)
    assert not again.net.embedding.weight.requires_grad
    assert "vectors" not in again.hparams


def test_invalid_vectors_are_rejected(tmp_path):
    with pytest.raises(
        FederatedError, match=r"a tensor holds shape \[4, 3\].*\[vocab_size, embedding_dim\] = \[5, 3\]"
    ):
        SentimentLSTM(5, 3, vectors=VECTORS)
    with pytest.raises(FederatedError, match=r"type torch.int64"):
        SentimentLSTM(4, 3, vectors=VECTORS.long())
    (tmp_path / "words.txt").write_text("the 0.1 0.2 0.3")
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object))
    np.save(tmp_path / "texts.npy", np.array(["a"]))
    (tmp_path / "empty.npy").touch()
    np.savez(tmp_path / "several.npz", a=VECTORS.numpy())
    for name in ("words.txt", "objects.npy", "texts.npy", "empty.npy", "several.npz", "missing.npy"):
        with pytest.raises(FederatedError, match=rf"vectors='.*{name}'\) cannot be read as an array of numbers"):
            SentimentLSTM(4, 3, vectors=str(tmp_path / name))
