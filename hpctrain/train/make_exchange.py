"""Selection of the exchange of a run, which combines the gradients or steps of the ranks."""

from collections.abc import Callable

from hpctrain.comm.agreement import agreed
from hpctrain.comm.communicator import Communicator
from hpctrain.core.errors import ConfigError
from hpctrain.core.lazy import imported
from hpctrain.train.model import BuiltModel
from hpctrain.train.run_config import RunConfig
from hpctrain.train.step_exchange import StepExchange

_EXCHANGES = {
    "reproducible": "reproducible_exchange:ReproducibleExchange",
    "async": "async_exchange:AsyncExchange",
    "local": "local_exchange:LocalExchange",
    "parallel": "parallel_exchange:ParallelExchange",
    "averaged": "averaged_exchange:AveragedExchange",
    "sharded": "averaged_exchange:ShardedExchange",
}
"""Module and class of each exchange; a run imports only the module that it uses."""

_Constructor = Callable[[RunConfig, Communicator, BuiltModel], StepExchange]


def make_exchange(config: RunConfig, comm: Communicator, built: BuiltModel) -> StepExchange:
    """Build the exchange that ``config`` selects. Collective.

    The exchange may wrap or replace the model and the optimizer; callers must use
    ``exchange.model`` and ``exchange.optimizer`` from then on.

    Args:
        config: configuration of the run, with ``train.shard`` resolved.
        comm: all ranks.
        built: identical model on all ranks, and a plain optimizer without state.

    Raises:
        MismatchError: arguments of the method are invalid; on all ranks.
    """
    _check(config, comm)  # all ranks have the same configuration, so all raise or none
    with agreed(comm):
        kind: _Constructor = imported(f"hpctrain.train.{_EXCHANGES[_name(config)]}")
    return kind(config, comm, built)


def _name(config: RunConfig) -> str:
    if config.train.reproducible:
        return "reproducible"
    if config.sync.is_local:
        return "async" if config.sync.is_async else "local"
    if config.parallel.divides:
        return "parallel"
    return "averaged" if config.train.shard == "none" else "sharded"


def _check(config: RunConfig, comm: Communicator) -> None:
    """Raise ``ConfigError`` if a key has a value that the selected exchange does not support."""
    parallel = config.parallel
    if config.log.noise_scale and _name(config) != "averaged":
        raise ConfigError(
            "log.noise_scale must be false with train.shard, train.reproducible, a local "
            "sync.method or [parallel], got true; omit log.noise_scale, which needs the gradients "
            "of single ranks and their average, or omit the other key"
        )
    if _name(config) in ("averaged", "sharded") and parallel.dp not in (0, comm.size):
        raise ConfigError(
            f"parallel.dp must be the number of ranks, {comm.size}, if each rank has the whole "
            f"model, got {parallel.dp}; leave it out, or divide the model by tp, pp or cp too"
        )
