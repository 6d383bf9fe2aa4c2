from gradwire.attribution.front.private import make_private as make_private
from gradwire.attribution.front.samples import per_sample as per_sample
from gradwire.attribution.query.gradient_store import GradientStore as GradientStore
from gradwire.bench.report.predict import predict as predict
from gradwire.bench.report.rows.record import load_results as load_results
from gradwire.comm.compressors.methods.bf16 import BF16 as BF16
from gradwire.comm.compressors.methods.bins import Bins as Bins
from gradwire.comm.compressors.methods.chunktopk import ChunkTopK as ChunkTopK
from gradwire.comm.compressors.methods.dcttopk import DCTTopK as DCTTopK
from gradwire.comm.compressors.methods.fp8 import FP8 as FP8
from gradwire.comm.compressors.methods.fp16 import FP16 as FP16
from gradwire.comm.compressors.methods.gradiveq import GradiVeQ as GradiVeQ
from gradwire.comm.compressors.methods.hadamard import Hadamard as Hadamard
from gradwire.comm.compressors.methods.int8 import Int8 as Int8
from gradwire.comm.compressors.methods.natural import Natural as Natural
from gradwire.comm.compressors.methods.none import Uncompressed as Uncompressed
from gradwire.comm.compressors.methods.onebit import OneBit as OneBit
from gradwire.comm.compressors.methods.powersgd import PowerSGD as PowerSGD
from gradwire.comm.compressors.methods.qsgd import QSGD as QSGD
from gradwire.comm.compressors.methods.randomk import RandomK as RandomK
from gradwire.comm.compressors.methods.signsgd import SignSGD as SignSGD
from gradwire.comm.compressors.methods.sketch import Sketch as Sketch
from gradwire.comm.compressors.methods.terngrad import TernGrad as TernGrad
from gradwire.comm.compressors.methods.threshold import Threshold as Threshold
from gradwire.comm.compressors.methods.topk import TopK as TopK
from gradwire.comm.compressors.methods.zero import Zero as Zero
from gradwire.comm.parallel import Compression as Compression
from gradwire.comm.parallel import comm_hook as comm_hook
from gradwire.comm.parallel import compress_gradients as compress_gradients
from gradwire.comm.parallel.optimizers.adam import OneBitAdam as OneBitAdam
from gradwire.comm.parallel.optimizers.demo import DeMo as DeMo
from gradwire.comm.parallel.optimizers.diloco import DiLoCo as DiLoCo
from gradwire.comm.parallel.optimizers.muon import Muon as Muon
from gradwire.comm.parallel.optimizers.replay import ReplayDiLoCo as ReplayDiLoCo
from gradwire.comm.parallel.optimizers.streaming import StreamingDiLoCo as StreamingDiLoCo

__version__: str
HOMES: dict[str, str]
