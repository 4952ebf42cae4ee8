from hpctrain.cost.collectives import CodecCost as CodecCost
from hpctrain.cost.collectives import Load as Load
from hpctrain.cost.collectives import Way as Way
from hpctrain.cost.collectives import allreduce as allreduce
from hpctrain.cost.collectives import bound as bound
from hpctrain.cost.collectives import codec_cost as codec_cost
from hpctrain.cost.collectives import parameter_server as parameter_server
from hpctrain.cost.failures import SimulatedRun as SimulatedRun
from hpctrain.cost.failures import best_interval as best_interval
from hpctrain.cost.failures import goodput as goodput
from hpctrain.cost.failures import simulate_run as simulate_run
from hpctrain.cost.learning import fewest_rounds as fewest_rounds
from hpctrain.cost.learning import most_local_steps as most_local_steps
from hpctrain.cost.learning import noise_scale as noise_scale
from hpctrain.cost.learning import samples_needed as samples_needed
from hpctrain.cost.machine import Link as Link
from hpctrain.cost.machine import Machine as Machine
from hpctrain.cost.planner import Goal as Goal
from hpctrain.cost.planner import advise as advise
from hpctrain.cost.simulate import allreduce_times as allreduce_times
from hpctrain.cost.step import Model as Model
from hpctrain.cost.step import StepTime as StepTime
from hpctrain.cost.step import least_step_s as least_step_s
from hpctrain.cost.step import simulate_steps as simulate_steps
from hpctrain.cost.step import step_time as step_time

__all__: list[str]
