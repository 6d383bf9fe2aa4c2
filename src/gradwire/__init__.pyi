from gradwire.bench.report.verbs.results import load_results as load_results
from gradwire.comm.collectives import Reducer as Reducer
from gradwire.comm.compressors import build as build
from gradwire.comm.parallel import accumulation as accumulation
from gradwire.comm.parallel import clip_grad_norm as clip_grad_norm
from gradwire.comm.parallel import ddp_hook as ddp_hook
from gradwire.comm.parallel import hook as hook
from gradwire.comm.parallel import wrap as wrap

__version__: str
HOMES: dict[str, str]
