from hpctrain.cost.machine import Link as Link
from hpctrain.cost.machine import Machine as Machine
from hpctrain.cost.simulate import allreduce_times as allreduce_times
from hpctrain.cost.simulate import parameter_server_times as parameter_server_times
from hpctrain.cost.simulate import two_level_times as two_level_times
from hpctrain.cost.simulated_run import SimulatedRun as SimulatedRun
from hpctrain.cost.simulated_run import best_interval as best_interval
from hpctrain.cost.simulated_run import simulate_run as simulate_run
from hpctrain.cost.simulated_run import simulated_goodput as simulated_goodput
from hpctrain.cost.simulated_step import SimulatedStep as SimulatedStep
from hpctrain.cost.simulated_step import Workload as Workload
from hpctrain.cost.simulated_step import simulate_steps as simulate_steps

__all__: list[str]
