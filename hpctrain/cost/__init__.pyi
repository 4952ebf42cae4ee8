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
from hpctrain.cost.step import Model as Model
from hpctrain.cost.step import step_time as step_time

__all__: list[str]
