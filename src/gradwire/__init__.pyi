from gradwire.bench.report.verbs.results import load_results as load_results
from gradwire.comm.parallel import Compression as Compression
from gradwire.comm.parallel import comm_hook as comm_hook
from gradwire.comm.parallel import compress_gradients as compress_gradients

__version__: str
HOMES: dict[str, str]
