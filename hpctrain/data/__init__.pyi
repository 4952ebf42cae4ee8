from hpctrain.data.data_split import Split as Split
from hpctrain.data.format.dataset_manifest import MANIFEST as MANIFEST
from hpctrain.data.format.dataset_manifest import Field as Field
from hpctrain.data.loader import Loader as Loader
from hpctrain.data.mixture import Mixture as Mixture
from hpctrain.data.order.window import WindowShape as WindowShape
from hpctrain.data.reader import ShardedDataset as ShardedDataset
from hpctrain.data.samples import collate as collate
from hpctrain.data.staging import stage as stage
from hpctrain.data.subset import Subset as Subset
from hpctrain.data.transform import PerSample as PerSample
from hpctrain.data.writer import ShardWriter as ShardWriter
from hpctrain.data.writer import write_arrays as write_arrays

__all__: list[str]
