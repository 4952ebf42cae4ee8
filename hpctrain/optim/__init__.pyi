from hpctrain.optim.groups import exclusions as exclusions
from hpctrain.optim.lamb import LAMB as LAMB
from hpctrain.optim.lars import LARS as LARS
from hpctrain.optim.learning_rates import InverseTimeLR as InverseTimeLR
from hpctrain.optim.learning_rates import linear_scaling as linear_scaling
from hpctrain.optim.learning_rates import square_root_scaling as square_root_scaling
from hpctrain.optim.loss_spikes import LossSpikes as LossSpikes
from hpctrain.optim.noise_scale import NoiseScale as NoiseScale

__all__: list[str]
