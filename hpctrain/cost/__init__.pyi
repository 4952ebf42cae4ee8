from hpctrain.cost.collectives import Load as Load
from hpctrain.cost.collectives import Way as Way
from hpctrain.cost.collectives import allreduce as allreduce
from hpctrain.cost.collectives import bound as bound
from hpctrain.cost.collectives import parameter_server as parameter_server
from hpctrain.cost.learning import fewest_rounds as fewest_rounds
from hpctrain.cost.learning import most_local_steps as most_local_steps
from hpctrain.cost.learning import noise_scale as noise_scale
from hpctrain.cost.learning import samples_needed as samples_needed
from hpctrain.cost.machine import Link as Link
from hpctrain.cost.machine import Machine as Machine
from hpctrain.cost.planner import Goal as Goal
from hpctrain.cost.planner import advise as advise
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
from hpctrain.cost.step import Model as Model
from hpctrain.cost.step import step_time as step_time

__all__: list[str]
