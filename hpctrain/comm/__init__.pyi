from hpctrain.comm.communicator import Communicator as Communicator

__all__: list[str]
