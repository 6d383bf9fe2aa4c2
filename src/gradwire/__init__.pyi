from gradwire.collectives import Reducer as Reducer
from gradwire.compressors import build as build
from gradwire.parallel import accumulation as accumulation
from gradwire.parallel import clip_grad_norm as clip_grad_norm
from gradwire.parallel import ddp_hook as ddp_hook
from gradwire.parallel import hook as hook
from gradwire.parallel import wrap as wrap
from gradwire.report.results import load_results as load_results

__version__: str
HOMES: dict[str, str]
