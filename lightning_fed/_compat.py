"""The only file that imports Lightning's private names, because they will move.

Tested with pytorch-lightning 2.6.6; a missing name fails here, at import, and names the version found.
"""

import warnings

import pytorch_lightning as pl

try:
    from pytorch_lightning.callbacks.progress.tqdm_progress import Tqdm
    from pytorch_lightning.loggers.logger import DummyLogger
    from pytorch_lightning.loops import _FitLoop, _TrainingEpochLoop
    from pytorch_lightning.loops.evaluation_loop import _EvaluationLoop
    from pytorch_lightning.loops.fetchers import _DataFetcher
    from pytorch_lightning.loops.optimization import _AutomaticOptimization
    from pytorch_lightning.loops.optimization.automatic import ClosureResult
    from pytorch_lightning.overrides.distributed import _sync_module_states
    from pytorch_lightning.profilers import PassThroughProfiler
    from pytorch_lightning.strategies.launchers.multiprocessing import _MultiProcessingLauncher
    from pytorch_lightning.trainer import call
    from pytorch_lightning.trainer.connectors.checkpoint_connector import _CheckpointConnector
    from pytorch_lightning.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
    from pytorch_lightning.trainer.connectors.logger_connector.result import _ResultCollection
    from pytorch_lightning.trainer.connectors.signal_connector import _SignalConnector
    from pytorch_lightning.trainer.states import TrainerFn, TrainerState
    from pytorch_lightning.utilities.exceptions import MisconfigurationException, SIGTERMException
    from pytorch_lightning.utilities.model_helpers import is_overridden
    from pytorch_lightning.utilities.rank_zero import rank_zero_info, rank_zero_warn
    from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature
except ImportError as error:
    raise ImportError(
        f"lightning_fed builds on internals of pytorch-lightning 2.6 that version {pl.__version__} does not have"
        f" ({error}). Install a tested version: pip install 'pytorch-lightning>=2.6.6,<2.7'."
    ) from error

# Lightning 2.6 asks PyTorch's tree specs in a way that newer releases call deprecated: nothing a user could change
warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")

__all__ = [
    "ClosureResult",
    "DummyLogger",
    "MisconfigurationException",
    "PassThroughProfiler",
    "SIGTERMException",
    "Tqdm",
    "TrainerFn",
    "TrainerState",
    "_AutomaticOptimization",
    "_CheckpointConnector",
    "_DataFetcher",
    "_EvaluationLoop",
    "_FitLoop",
    "_LoggerConnector",
    "_MultiProcessingLauncher",
    "_ResultCollection",
    "_SignalConnector",
    "_TrainingEpochLoop",
    "_sync_module_states",
    "call",
    "is_overridden",
    "is_param_in_hook_signature",
    "rank_zero_info",
    "rank_zero_warn",
]
