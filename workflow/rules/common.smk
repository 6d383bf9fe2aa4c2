# Names, folders and small helpers that the rules share. What is asked for is decided in gradwire.config, not here.
import json
import os
import sys
from functools import cache
from pathlib import Path

from snakemake.exceptions import WorkflowError
from snakemake.settings.types import DeploymentMethod
from snakemake.utils import validate

from gradwire.config import experiment, to_flags
from gradwire.data.download import SOURCES
from gradwire.errors import BadInput
from gradwire.files import claim, write_json
from gradwire.image import check_image, crossing, image_file, variant_for
from gradwire.launch.keeper import KEEPER
from gradwire.launch.links import probe
from gradwire.parsing import read_yaml
from gradwire.source import source_digest
from gradwire.training.settings import modules


def why_left_out(run):
    """Why there will be no result of `run`: the experiment says so, or this machine cannot shape links; or None."""
    no_link = f"no link of {run.link} here: {NO_LINKS}"
    return EXPERIMENT.excluded(run) or (
        no_link if NO_LINKS and run.link != "none" else None
    )


IN_IMAGE = DeploymentMethod.APPTAINER in workflow.deployment_settings.deployment_method

# `gradwire` stands beside Snakemake's own Python; an image has one of its own, which runs the same source. Either ends
# with the Snakemake that started it.
shell.prefix(
    f"[ -e /.singularity.d ] || PATH=$PATH:{Path(sys.executable).parent}; export {KEEPER}={os.getpid()}; "
)

# How many ranks a node takes is a matter of the machine, so a profile says it (`config: ranks_per_node=8`).
RANKS_PER_NODE = config.pop("ranks_per_node", None)
if RANKS_PER_NODE is not None and not (
    isinstance(RANKS_PER_NODE, int) and RANKS_PER_NODE > 0
):
    raise WorkflowError(
        f"ranks_per_node: {RANKS_PER_NODE} is not a number of ranks; a profile sets it with `config: ranks_per_node=8`."
    )

try:
    # Snakemake takes the last of two equal keys, and validating follows each alias.
    for file in workflow.configfiles:
        read_yaml(file)
    # Defaults are not filled in here: gradwire.config does that.
    validate(config, "../schemas/config.schema.json", set_default=False)
    EXPERIMENT = experiment(config)
    CELLS = EXPERIMENT.cells()
    TIMED = EXPERIMENT.timed
    NO_LINKS = probe().reason if EXPERIMENT.needs_links else ""
    RUNS = [run for run in EXPERIMENT.runs() if why_left_out(run) is None]
    CORPUS = f"results/data/{EXPERIMENT.dataset.corpus_folder}"
    VARIANT = variant_for(EXPERIMENT.training.device)
    if IN_IMAGE:
        check_image(VARIANT)
except BadInput as error:
    raise WorkflowError(str(error)) from None

# Named as seen from here, so that neither another image nor another folder passes for this one.
IMAGE = os.path.relpath(image_file(VARIANT))
os.environ.update(
    crossing(os.environ, Path(workflow.basedir) / "src", gpus=VARIANT == "cuda")
)

TOKENS = f"{CORPUS}/{EXPERIMENT.dataset.tokens_folder}"
RESULTS = f"results/{EXPERIMENT.name}"
CELL = "{strategy}/{compressor}/ws{world_size}/{link}/seed{seed}"
RUN = f"{RESULTS}/runs/{CELL}"
GRADIENTS = f"{RESULTS}/gradients/{CELL}"
LOGS = f"{RESULTS}/logs"
PRIORITIES = {run.path: len(RUNS) - at for at, run in enumerate(RUNS)}
CLAIMED = []  # locks, which hold as long as somebody keeps them
SUMMARIZE = f"gradwire summarize --results_dir {RESULTS}"
REPORT = f"gradwire report --results_dir {RESULTS}"


wildcard_constraints:
    strategy="[a-z0-9]+",
    compressor="[A-Za-z0-9][A-Za-z0-9._+-]*",
    world_size="[0-9]+",
    link="[^/]+",
    seed="[0-9]+",
    dim="[0-9]+",


def of_runs(pattern, runs):
    """`pattern` filled in for each of `runs`."""
    return [pattern.format(**run._asdict()) for run in runs]


def literal(value):
    """`value` as a param in which Snakemake looks for no wildcards, for it may hold braces."""

    def param(wildcards):
        return value

    return param


def method_of(wildcards):
    """The compressor method of a cell."""
    return CELLS[wildcards.compressor].method


def cell_json(wildcards):
    """A cell's options as `--comm_config_json` takes them."""
    return json.dumps(CELLS[wildcards.compressor].flat())


@cache
def source_of_cell(label):
    """A digest of the source that a cell's training stands on."""
    return source_digest("gradwire.launch.launch", *modules(CELLS[label]))


def train_source(wildcards):
    """The same of a job's cell."""
    return source_of_cell(wildcards.compressor)


def priority_of(wildcards):
    """Cells start in the order that the experiment draws: the earlier, the higher."""
    return PRIORITIES[CELL.format(**wildcards)]


def world_size_of(wildcards):
    """The number of ranks: a core for each."""
    return int(wildcards.world_size)


def train_threads(wildcards):
    """A core for each rank; the whole machine where times are what the experiment is about."""
    whole = workflow.cores if TIMED else None
    return whole or world_size_of(
        wildcards
    )  # executors other than the local one know no cores


def ranks_at_most(wildcards):
    """How many ranks share the cores; the most of any run in a timing experiment, or fewer ranks would be faster ones."""
    if TIMED:
        return max(run.world_size for run in RUNS)
    return int(wildcards.world_size)


def nodes_needed(wildcards):
    """The fewest nodes that share the ranks evenly, none with more than it takes; a shaped link lives on one machine."""
    ranks = int(wildcards.world_size)
    if RANKS_PER_NODE is None or wildcards.link != "none":
        return 1
    return next(
        nodes
        for nodes in range(1, ranks + 1)
        if ranks % nodes == 0 and ranks // nodes <= RANKS_PER_NODE
    )


def on_many_nodes(value):
    """A resource that only ranks on several nodes ask for: `value` of the wildcards, the nodes and the threads."""

    def resource(wildcards, threads):
        nodes = nodes_needed(wildcards)
        return value(wildcards, nodes, threads) if nodes > 1 else None

    return resource


def gpus_needed(wildcards):
    """A GPU for each rank, where the experiment asks for GPUs; several nodes ask by `gres`, which counts per node."""
    cuda = EXPERIMENT.training.device == "cuda"
    return int(wildcards.world_size) if cuda and nodes_needed(wildcards) == 1 else None


def gpus_per_node(wildcards, nodes, threads):
    """The same for each of several nodes, as Slurm writes it."""
    if EXPERIMENT.training.device != "cuda":
        return None
    return f"gpu:{int(wildcards.world_size) // nodes}"


def granted_gpus(wildcards, resources):
    """Snakemake shrinks a request to what there is, so `launch` is told what was granted and refuses too few."""
    return f"--gpus {resources.gpu}" if gpus_needed(wildcards) else ""


def alone_of(wildcards):
    """A timing experiment's cells have the machine for themselves, also from other experiments' cells."""
    return "--alone" if TIMED else ""


def dataset_flags(*names):
    """Some fields of the dataset as flags."""
    return literal(to_flags(EXPERIMENT.dataset, *names))


def attempt_of(wildcards, attempt):
    """The number of the try, so that a verb does not repeat what ended by bad input."""
    return attempt


# What a rule that starts ranks asks for. On several nodes Slurm gives the job one task per node, and leaves it to `launch`
# to start something there (`mpi`).
RANKS = dict(
    attempt=attempt_of,
    gpu=gpus_needed,
    nodes=nodes_needed,
    mpi=on_many_nodes(lambda wildcards, nodes, threads: "srun"),
    tasks=on_many_nodes(lambda wildcards, nodes, threads: nodes),
    tasks_per_gpu=on_many_nodes(lambda wildcards, nodes, threads: 0),
    cpus_per_task=on_many_nodes(lambda wildcards, nodes, threads: threads // nodes),
    gres=on_many_nodes(gpus_per_node),
)


def claim_folders():
    """One Snakemake at a time works on an experiment, and none on data that others read.

    Snakemake's own locks would be left behind by one that was killed.
    """
    jobs = {job.rule.name for job in workflow.dag.needrun_jobs()}
    reads_only = not jobs & {"download", "tokenizer", "shards"}
    try:
        CLAIMED.append(claim(Path(RESULTS) / ".lock"))
        CLAIMED.append(claim(Path(CORPUS) / ".lock", share=reads_only))
    except BadInput as error:
        raise WorkflowError(str(error)) from None


def write_expected():
    """Tell `summarize` which runs were asked for, so that a run that never started is a row too; keep what asked for them.

    The report's commands to reproduce a cell read the configuration there.
    """
    asked = [
        {
            **run._asdict(),
            "excluded": why_left_out(run),
            "quality_from": EXPERIMENT.quality_from,
            "shared": not TIMED,
        }
        for run in EXPERIMENT.asked()
    ]
    write_json(Path(RESULTS) / "expected.json", asked)
    write_json(Path(RESULTS) / "config.json", config)
