from hpctrain.compress.auto import Auto as Auto
from hpctrain.compress.codec import Codec as Codec
from hpctrain.compress.int8 import Int8 as Int8
from hpctrain.compress.largest import DeepGradientCompression as DeepGradientCompression
from hpctrain.compress.largest import TopK as TopK
from hpctrain.compress.power_sgd import PowerSGD as PowerSGD
from hpctrain.compress.qsgd import QSGD as QSGD
from hpctrain.compress.rail_codec import RailCodec as RailCodec
from hpctrain.compress.sign import OneBit as OneBit
from hpctrain.compress.sign import SignSGD as SignSGD

__all__: list[str]
