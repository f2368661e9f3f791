"""What the stages of a trainer are called with: models, data and checkpoints of wrong types are refused by name."""

from collections.abc import Callable, Iterable
from functools import wraps
from inspect import signature
from typing import Any, ParamSpec, TypeVar

from torch._dynamo import OptimizedModule

from lightning_fed.compat.one_package import refuse_foreign
from lightning_fed.compat.package import pl
from lightning_fed.core.arguments import check_flags, check_paths
from lightning_fed.core.errors import FederatedError

__all__ = ["check_call", "checked"]

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_LOADERS = {"validate": "val_dataloader", "test": "test_dataloader", "predict": "predict_dataloader"}


def checked(stage: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return a stage of Lightning's Trainer that looks at its arguments first; see :func:`check_call`."""

    @wraps(stage)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        given = signature(stage).bind(*args, **kwargs).arguments
        check_call(stage.__name__, given.pop("self"), **given)
        return stage(*args, **kwargs)

    return call


def check_call(
    stage: str,
    trainer: pl.Trainer,
    model: Any = None,
    dataloaders: Any = None,
    datamodule: Any = None,
    ckpt_path: Any = None,
    weights_only: Any = None,
    **_: Any,
) -> None:
    """Refuse what no stage can take.

    Args:
        stage: "fit", "validate", "test" or "predict".
        trainer: The trainer.
        model: A LightningModule; None for that of the previous stage.
        dataloaders: Loaders, or a data module.
        datamodule: A data module.
        ckpt_path: A path, or a word of Lightning's such as "best".
        weights_only: As for :func:`torch.load`.

    Raises:
        FederatedError: Naming the argument, what was found and what is allowed.
    """
    owner = f"FederatedTrainer.{stage}"
    refuse_foreign(model, dataloaders, datamodule)
    _check_model(owner, model if model is not None or stage == "fit" else trainer.lightning_module)
    if datamodule is not None and not isinstance(datamodule, pl.LightningDataModule):
        raise FederatedError(f"{owner}(datamodule={_shown(datamodule)}): datamodule must be a LightningDataModule.")
    if ckpt_path is not None:
        check_paths(owner, ckpt_path=ckpt_path)
    if weights_only is not None:
        check_flags(owner, weights_only=weights_only)
    if stage == "fit":
        return
    is_data = isinstance(dataloaders, Iterable) and not isinstance(dataloaders, (str, bytes, type))
    if dataloaders is not None and not is_data and not isinstance(dataloaders, pl.LightningDataModule):
        raise FederatedError(f"{owner}(dataloaders={_shown(dataloaders)}): pass a data module, or loaders of batches.")
    hook = _LOADERS[stage]
    has_own = model is not None and getattr(type(model), hook, None) is not getattr(pl.LightningModule, hook)
    if dataloaders is None and datamodule is None and model is not None and not has_own:
        raise FederatedError(f"{owner} has no data. Pass a data module: trainer.{stage}(model, datamodule).")


def _check_model(owner: str, model: Any) -> None:
    if isinstance(model, (pl.LightningModule, OptimizedModule)):
        return
    made = f"; write {model.__name__}()" if isinstance(model, type) else ""
    raise FederatedError(f"{owner}(model={_shown(model)}): model must be a LightningModule{made}.")


def _shown(value: Any) -> str:
    text = (
        f"an integer of {value.bit_length()} bits"
        if isinstance(value, int) and value.bit_length() > 64
        else repr(value)
    )
    return text if len(text) <= 200 else f"{text[:197]}..."
