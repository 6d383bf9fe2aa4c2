from gradwire.bench.report.verbs.results import load_results as load_results
from gradwire.comm.parallel import Compression as Compression
from gradwire.comm.parallel import comm_hook as comm_hook
from gradwire.comm.parallel import compress_gradients as compress_gradients
from gradwire.comm.parallel.optimizers.adam import OneBitAdam as OneBitAdam
from gradwire.comm.parallel.optimizers.adam import ZeroOneAdam as ZeroOneAdam
from gradwire.comm.parallel.optimizers.demo import DeMo as DeMo
from gradwire.comm.parallel.optimizers.desloc import DesLoc as DesLoc
from gradwire.comm.parallel.optimizers.diloco import DiLoCo as DiLoCo
from gradwire.comm.parallel.optimizers.muon import Muon as Muon
from gradwire.comm.parallel.optimizers.streaming import StreamingDiLoCo as StreamingDiLoCo

__version__: str
HOMES: dict[str, str]
