"""Stacked LSTMs for text: next-character prediction and sentiment classification."""

from pathlib import Path
from typing import Any

import torch
from numpy.lib.format import read_array
from torch import Tensor, nn

from lightning_fed.core.arguments import check_count, check_flags
from lightning_fed.core.errors import FederatedError
from lightning_fed.models.classifier import Classifier, sized

_MAX_LAYERS = 100  # layers are built one by one


class CharLSTM(Classifier):
    """A stacked LSTM that predicts the next character, as for the plays of Shakespeare.

    The default is FedProx's network (Li et al., MLSys 2020, arXiv:1812.06127, appendix C.1): an 8-dimensional
    embedding, two layers of 100 units and one dense layer. Federated averaging (McMahan et al., AISTATS 2017,
    arXiv:1602.05629) uses 256 units. PyTorch's layers have two bias vectors and Keras' have one, which makes 4
    ``hidden_size`` more parameters per layer. Logging, checkpoints and predictions are as in :class:`Classifier`.

    Inputs are codes [B, T] of any integer type. Labels [B] are the characters after the texts. Labels [B, T] are those
    after every position, with equal weights (-100 ignores a position).

    Args:
        vocab_size: The number of different characters, which are the classes.
        embedding_dim: Dimensions of the embedding.
        hidden_size: Units of each LSTM layer.
        num_layers: LSTM layers.
        lr: The learning rate of the local steps.
        momentum: SGD's momentum.
        weight_decay: SGD's weight decay.

    Raises:
        FederatedError: If an argument is not allowed, or a batch does not fit.

    Example:
        >>> model = CharLSTM()
        >>> model(torch.zeros(2, 80, dtype=torch.uint8)).shape
        torch.Size([2, 80])
        >>> sum(p.numel() for p in model.parameters())
        133520
    """

    def __init__(
        self,
        vocab_size: int = 80,
        embedding_dim: int = 8,
        hidden_size: int = 100,
        num_layers: int = 2,
        lr: float = 0.8,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        check_count(self, "vocab_size", vocab_size, least=2)
        net = _StackedLSTM(type(self).__name__, vocab_size, embedding_dim, hidden_size, num_layers, vocab_size)
        super().__init__(net, vocab_size, lr, momentum, weight_decay)

    def forward(self, x: Tensor, every_position: bool = False) -> Tensor:
        """Return the logits of the next character.

        Args:
            x: Codes [B, T].
            every_position: Whether to return logits [B, T, vocab_size] after every position instead of those after the
                last one, [B, vocab_size].
        """
        logits: Tensor = self.net(x, every_position)
        return logits

    def _logits_and_labels(self, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = self._pair(batch)
        if y.shape == x.shape:
            return self(x, every_position=True).flatten(0, 1), y.flatten()
        return self(x), y


class SentimentLSTM(Classifier):
    """A stacked LSTM that classifies texts, as for the tweets of Sentiment140.

    The default is the network of FedProx (Li et al., MLSys 2020, arXiv:1812.06127, appendix C.1): two layers of 256
    units and one dense layer. The paper uses frozen 300-dimensional GloVe vectors: ``vectors="glove.npy",
    freeze_embedding=True``. Logging, checkpoints and predictions are as in :class:`Classifier`.

    Inputs are word codes [B, T] of any integer type. The logits depend on the output after the last position, so pad
    texts in front.

    Args:
        vocab_size: The number of different words, padding included.
        embedding_dim: Dimensions of the embedding.
        hidden_size: Units of each LSTM layer.
        num_layers: LSTM layers.
        num_classes: The number of classes.
        vectors: Initial word vectors [vocab_size, embedding_dim]: a ``.npy`` file, or a tensor; None for random ones.
            Checkpoints contain them, and load without the file.
        freeze_embedding: Whether to freeze the embedding; a frozen one is not exchanged.
        lr: The learning rate of the local steps.
        momentum: SGD's momentum.
        weight_decay: SGD's weight decay.

    Raises:
        FederatedError: If an argument is not allowed, the vectors cannot be read, or a batch does not fit.

    Example:
        >>> model = SentimentLSTM(
        ...     vocab_size=5,
        ...     embedding_dim=3,
        ...     vectors=torch.ones(5, 3),
        ...     freeze_embedding=True,
        ... )
        >>> model(torch.tensor([[0, 0, 4, 2], [1, 3, 1, 2]])).shape
        torch.Size([2, 2])
    """

    def __init__(
        self,
        vocab_size: int,
        embedding_dim: int = 300,
        hidden_size: int = 256,
        num_layers: int = 2,
        num_classes: int = 2,
        vectors: str | Path | Tensor | None = None,
        freeze_embedding: bool = False,
        lr: float = 0.3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        owner = type(self).__name__
        check_count(owner, "num_classes", num_classes, least=2)
        check_flags(owner, freeze_embedding=freeze_embedding)
        net = _StackedLSTM(owner, vocab_size, embedding_dim, hidden_size, num_layers, num_classes)
        if vectors is not None:
            net.embedding.weight.data.copy_(_read_vectors(owner, vectors, (vocab_size, embedding_dim)))
        net.embedding.weight.requires_grad_(not freeze_embedding)
        super().__init__(net, num_classes, lr, momentum, weight_decay)
        self.save_hyperparameters(ignore=["net", "vectors"])


class _StackedLSTM(nn.Module):
    """Embedding, LSTM layers and one dense layer: codes [B, T] to logits [B, outputs] or [B, T, outputs]."""

    def __init__(
        self, owner: str, vocab_size: int, embedding_dim: int, hidden_size: int, num_layers: int, outputs: int
    ) -> None:
        super().__init__()
        self.owner = owner
        check_count(owner, "vocab_size", vocab_size)
        sizes = {"embedding_dim": embedding_dim, "hidden_size": hidden_size, "num_layers": num_layers}
        for name, size in sizes.items():
            check_count(owner, name, size, most=_MAX_LAYERS if name == "num_layers" else 2**31)
        with sized(owner, vocab_size=vocab_size, num_classes=outputs, **sizes):
            self.embedding = nn.Embedding(vocab_size, embedding_dim)
            self.lstm = nn.LSTM(embedding_dim, hidden_size, num_layers, batch_first=True)
            self.head = nn.Linear(hidden_size, outputs)

    def forward(self, codes: Tensor, every_position: bool = False) -> Tensor:
        if codes.ndim != 2 or codes.shape[1] == 0 or codes.is_floating_point():
            raise FederatedError(
                f"{self.owner} got inputs of shape {list(codes.shape)} and type {codes.dtype} and expects integer codes"
                " [B, T]: one row per text, all rows of a batch equally long."
            )
        try:
            embedded = self.embedding(codes.long())
        except IndexError as error:
            raise FederatedError(
                f"{self.owner} got a code outside 0, ..., {self.embedding.num_embeddings - 1}. Map unknown ones to"
                " their own code, or set vocab_size."
            ) from error
        states, _ = self.lstm(embedded)
        logits: Tensor = self.head(states if every_position else states[:, -1])
        return logits


def _read_vectors(owner: str, vectors: str | Path | Tensor, shape: tuple[int, int]) -> Tensor:
    """Return word vectors of a given shape, from a tensor or a file."""
    if isinstance(vectors, Tensor):
        found, source = vectors, "a tensor"
    else:
        source = str(vectors)
        try:
            with Path(vectors).open("rb") as file:
                found = torch.as_tensor(read_array(file, allow_pickle=False))
        except (OSError, ValueError, TypeError) as error:
            raise FederatedError(
                f"{owner}(vectors={source!r}) cannot be read as an array of numbers: write it with numpy.save, as a"
                f" .npy file of shape {list(shape)}. {error}"
            ) from error
    if tuple(found.shape) != shape or not found.is_floating_point():
        raise FederatedError(
            f"{owner}(vectors=...): {source} holds shape {list(found.shape)} and type {found.dtype}; expected floating"
            f" point numbers of shape [vocab_size, embedding_dim] = {list(shape)}."
        )
    return found
