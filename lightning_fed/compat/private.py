"""The only file that imports Lightning's private names, which may change.

Tested with Lightning 2.6.6. A missing name raises here, at import, with the version found. ``private_names.yaml`` in
this folder gives the purpose of each private name, of other packages too, and its possible replacement.
"""

import logging
import warnings

from lightning_fed.compat.package import SERIES, install_command, pl

try:
    Tqdm = pl.callbacks.progress.tqdm_progress.Tqdm
    DummyLogger = pl.loggers.logger.DummyLogger
    _FitLoop = pl.loops._FitLoop
    _TrainingEpochLoop = pl.loops._TrainingEpochLoop
    _EvaluationLoop = pl.loops.evaluation_loop._EvaluationLoop
    _DataFetcher = pl.loops.fetchers._DataFetcher
    _AutomaticOptimization = pl.loops.optimization._AutomaticOptimization
    Closure = pl.loops.optimization.automatic.Closure
    ClosureResult = pl.loops.optimization.automatic.ClosureResult
    _sync_module_states = pl.overrides.distributed._sync_module_states
    PassThroughProfiler = pl.profilers.PassThroughProfiler
    _MultiProcessingLauncher = pl.strategies.launchers.multiprocessing._MultiProcessingLauncher
    _SubprocessScriptLauncher = pl.strategies.launchers.subprocess_script._SubprocessScriptLauncher
    call = pl.trainer.call
    _CheckpointConnector = pl.trainer.connectors.checkpoint_connector._CheckpointConnector
    _LoggerConnector = pl.trainer.connectors.logger_connector.logger_connector._LoggerConnector
    _ResultCollection = pl.trainer.connectors.logger_connector.result._ResultCollection
    _SignalConnector = pl.trainer.connectors.signal_connector._SignalConnector
    TrainerFn = pl.trainer.states.TrainerFn
    TrainerState = pl.trainer.states.TrainerState
    MisconfigurationException = pl.utilities.exceptions.MisconfigurationException
    SIGTERMException = pl.utilities.exceptions.SIGTERMException
    is_overridden = pl.utilities.model_helpers.is_overridden
    rank_zero_info = pl.utilities.rank_zero.rank_zero_info
    rank_zero_warn = pl.utilities.rank_zero.rank_zero_warn
    is_param_in_hook_signature = pl.utilities.signature_utils.is_param_in_hook_signature
except AttributeError as error:
    raise ImportError(
        f"lightning_fed builds on internals of Lightning {SERIES} that {pl.__name__} {pl.__version__} does not have"
        f" ({error}). Install a tested version: {install_command()}."
    ) from error

# users cannot change that Lightning 2.6 uses PyTorch's tree specs in a way that newer releases deprecate
warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
# a resumed run writes to a new folder; lightning_fed restores the scores that Lightning then leaves out
warnings.filterwarnings("ignore", message="The dirpath has changed from")
logging.getLogger(f"{pl.__name__}.utilities.rank_zero").addFilter(  # advertisements
    lambda record: not str(record.msg).startswith("\N{ELECTRIC LIGHT BULB} Tip: For seamless cloud")
)
