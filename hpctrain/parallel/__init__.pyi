from hpctrain.parallel.mesh import build_mesh as build_mesh
from hpctrain.parallel.mesh import placement as placement

__all__: list[str]
