# Names, folders and helpers that the rules share. gradwire.bench.config decides which runs there are.
import json
import os
import sys
from functools import cache
from pathlib import Path

from snakemake.logging import logger
from snakemake.settings.types import DeploymentMethod
from snakemake_interface_logger_plugins.common import LogEvent

from gradwire.bench.config import Run
from gradwire.bench.config.grid import ISLANDS, PATH
from gradwire.lm.data.sources import modules as source_modules
from gradwire.base.errors import BadInput
from gradwire.base.files import lock, write_json
from gradwire.bench.image import (
    CONTAINERS,
    check_image,
    crossing,
    image_file,
    variant_for,
)
from gradwire.bench.launch.fork import share
from gradwire.bench.launch.leases import VISIBLE, devices
from gradwire.bench.launch.links import probe
from gradwire.bench.launch.ranks import rank_variables
from gradwire.base.strict import to_flags
from gradwire.lm.models.presets import content as model_content
from gradwire.base.parent_watch import PARENT
from gradwire.base.source_digest import PACKAGE, source_digest
from gradwire.bench.training.settings import modules
from gradwire.bench.training.train import PRELOAD
from gradwire.bench.workflow.dry_run import ShortDryRun
from gradwire.bench.config.file import EXTENDS, check, merged, read


def refuse(reason):
    """End Snakemake with the exit code of bad input."""
    logger.error(str(reason), extra={"event": LogEvent.ERROR})
    raise SystemExit(BadInput.exit_code)


def permitted_gpus():
    """The GPUs that jobs may use; None without a limit."""
    resource = workflow.global_resources.get("gpu")
    return resource and resource.value


def why_left_out(run):
    """Why `run` is left out: the experiment excludes it or this machine cannot shape links; None if it is not."""
    no_link = f"no link of {run.link} here: {NO_LINKS}"
    return EXPERIMENT.excluded(run) or (
        no_link if NO_LINKS and run.link != "none" else None
    )


# `-n` fits a screen; `-n -p` shows each job, and `gradwire run -n` reads the events.
PRINTED = workflow.output_settings
if PRINTED.dryrun and not PRINTED.printshellcmds and not PRINTED.log_handler_settings:
    logger.addFilter(ShortDryRun())

IN_IMAGE = DeploymentMethod.APPTAINER in workflow.deployment_settings.deployment_method

# `gradwire` is installed next to Snakemake's Python; an image has its own, which runs the same source. Either exits when
# the Snakemake that started it does.
shell.prefix(
    f"[ -e /.singularity.d ] || PATH=$PATH:{Path(sys.executable).parent}; export {PARENT}={os.getpid()}; "
)

# The number of ranks per node depends on the machine, so a profile sets it (`config: ranks_per_node=8`).
RANKS_PER_NODE = config.pop("ranks_per_node", None)
if RANKS_PER_NODE is not None and not (
    isinstance(RANKS_PER_NODE, int) and RANKS_PER_NODE > 0
):
    refuse(
        f"invalid ranks_per_node {RANKS_PER_NODE}: set a positive integer in a profile (`config: ranks_per_node=8`)."
    )

try:
    # Adds what a file extends; rejects a key that is given twice, of which Snakemake takes the last.
    for file in workflow.configfiles:
        config.update(merged(read(file), config, "--config"))
    config.pop(EXTENDS, None)
    EXPERIMENT = check(
        config
    )  # the schema of schemas/ is generated from this check, and is for editors
    CELLS = EXPERIMENT.cells()
    TIMED = EXPERIMENT.timed
    NO_LINKS = probe().reason if EXPERIMENT.needs_links else ""
    SIMULATED = EXPERIMENT.simulated()
    RUNS = [run for run in EXPERIMENT.runs() if why_left_out(run) is None]
    TRACED = [
        run for run in RUNS if EXPERIMENT.training.profile and run not in SIMULATED
    ]
    CORPUS = f"results/data/{EXPERIMENT.dataset.corpus_folder}"
    VARIANT = variant_for(EXPERIMENT.training.device)
    if IN_IMAGE:
        check_image(VARIANT)
except BadInput as error:
    refuse(error)

# Runs on one machine share its GPUs, or as many as `--resources gpu=N` permits; those on a cluster get theirs from it.
if VARIANT == "cuda" and workflow.is_main_process and workflow.nodes is None:
    permitted, here = permitted_gpus(), len(devices())
    workflow.register_resource(
        "gpu", here if permitted is None else min(permitted, here)
    )

# A relative path: neither another image nor another folder has the same name. Without a checkout there is no recipe.
IMAGE = os.path.relpath(image_file(VARIANT)) if CONTAINERS.is_dir() else None
os.environ.update(crossing(os.environ, PACKAGE.parent, gpus=VARIANT == "cuda"))

TOKENS = f"{CORPUS}/{EXPERIMENT.dataset.tokens_folder}"
RESULTS = f"results/{EXPERIMENT.name}"
RUN_PATH = PATH
RUN = f"{RESULTS}/runs/{RUN_PATH}"
GRADIENTS = f"{RESULTS}/gradients/{RUN_PATH}"
LOGS = f"{RESULTS}/logs"
PRIORITIES = {run.path: len(RUNS) - at for at, run in enumerate(RUNS)}
CLAIMED = []  # locks, held while referenced
SUMMARIZE = f"gradwire summarize --results_dir {RESULTS}"
REPORT = f"gradwire report --results_dir {RESULTS}"


wildcard_constraints:
    strategy="[a-z0-9]+",
    compressor="[A-Za-z0-9][A-Za-z0-9._+-]*",
    world_size="[0-9]+",
    islands=f"({ISLANDS}[0-9]+)?",
    link="[^/]+",
    seed="[0-9]+",
    dim="[0-9]+",


def of_runs(pattern, runs):
    """`pattern` formatted for each of `runs`."""
    return [pattern.format(**run.wildcards) for run in runs]


def answers():
    """The answers to the experiment's query, one per store."""
    gradients = EXPERIMENT.gradients
    if gradients is None or gradients.query is None:
        return []
    runs = EXPERIMENT.gradient_runs(RUNS)
    return [of_runs(f"{GRADIENTS}/dim{dim}/query.json", runs) for dim in gradients.dim]


def literal(value):
    """`value` as a param without wildcards, as it may contain braces."""

    def param(wildcards):
        return value

    return param


def method_of(wildcards):
    """The compressor method of a cell."""
    return CELLS[wildcards.compressor].method


def cell_json(wildcards):
    """A cell's options as `--comm_config_json` takes them."""
    return json.dumps(EXPERIMENT.cell_of(run_of(wildcards)).flat())


def training_flags(wildcards):
    """The training settings of a run as flags."""
    return to_flags(EXPERIMENT.training_of(run_of(wildcards)))


def run_of(wildcards):
    """The run of a job."""
    return Run.of(dict(wildcards.items()))


@cache
def source_of_cell(label, strategy):
    """A digest of the source that a cell's training depends on."""
    return source_digest(
        "gradwire.bench.launch.launch", *modules(CELLS[label], strategy)
    )


def train_source(wildcards):
    """The digest of the source that trains this run."""
    return source_of_cell(wildcards.compressor, wildcards.strategy)


def priority_of(wildcards):
    """The priority of a run: runs start in the order that the experiment draws."""
    return PRIORITIES[RUN_PATH.format(**wildcards)]


def world_size_of(wildcards):
    """The number of ranks, with one core each."""
    return int(wildcards.world_size)


def islands_of(wildcards):
    """The number of islands that the ranks form."""
    return run_of(wildcards).islands


def simulated(wildcards):
    """Whether the run's ranks take turns in one process."""
    return run_of(wildcards) in SIMULATED


def processes_of(wildcards):
    """The number of processes that train, with one core each."""
    return 1 if simulated(wildcards) else world_size_of(wildcards)


def simulation_of(wildcards):
    """The flag for ranks that take turns in one process."""
    return f"--simulated_ranks {wildcards.world_size}" if simulated(wildcards) else ""


def train_threads(wildcards):
    """One core per process; all cores in a timing experiment."""
    whole = workflow.cores if TIMED else None
    return whole or processes_of(
        wildcards
    )  # `cores` is set for the local executor only


def ranks_at_most(wildcards):
    """Number of processes that share the cores; in a timing experiment the most of any run, for equal shares."""
    if TIMED:
        return max(run.world_size for run in RUNS)
    return processes_of(wildcards)


def nodes_needed(wildcards):
    """The fewest nodes that share the ranks evenly, with at most RANKS_PER_NODE each; one for a shaped link."""
    ranks = processes_of(wildcards)
    if RANKS_PER_NODE is None or wildcards.link != "none":
        return 1
    return next(
        nodes
        for nodes in range(1, ranks + 1)
        if ranks % nodes == 0 and ranks // nodes <= RANKS_PER_NODE
    )


def on_many_nodes(value):
    """A resource for ranks on several nodes only: `value` of the wildcards, the nodes and the threads."""

    def resource(wildcards, threads):
        nodes = nodes_needed(wildcards)
        return value(wildcards, nodes, threads) if nodes > 1 else None

    return resource


def gpus_needed(wildcards):
    """One GPU per process if the experiment uses GPUs; several nodes request them with `gres`, which counts per node."""
    cuda = EXPERIMENT.training.device == "cuda"
    return processes_of(wildcards) if cuda and nodes_needed(wildcards) == 1 else None


def one_gpu(wildcards):
    """A GPU for the one process of a job that loads a model, if the experiment uses GPUs."""
    return 1 if EXPERIMENT.training.device == "cuda" else None


def granted_gpu(wildcards, resources):
    """The GPU that Snakemake granted, as in `granted_gpus`."""
    return f"--gpus {resources.gpu}" if one_gpu(wildcards) else ""


def gpus_per_node(wildcards, nodes, threads):
    """GPUs of each of several nodes, in Slurm's notation."""
    if EXPERIMENT.training.device != "cuda":
        return None
    return f"gpu:{processes_of(wildcards) // nodes}"


def granted_gpus(wildcards, resources):
    """The GPUs that Snakemake granted, which may be fewer than requested; `launch` then raises an error."""
    return f"--gpus {resources.gpu}" if gpus_needed(wildcards) else ""


def alone_of(wildcards):
    """The flag for timing experiments, whose runs have the machine to themselves, even among experiments."""
    return "--alone" if TIMED else ""


def dataset_flags(*names):
    """Fields of the dataset as flags."""
    return literal(to_flags(EXPERIMENT.dataset, *names))


def attempt_of(wildcards, attempt):
    """The number of the attempt; a command does not retry after bad input."""
    return attempt


# Resources of rules that start ranks. On several nodes Slurm gives the job one task per node, which `launch` starts
# (`mpi`).
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


ON_GPUS = "train", "grads_collect", "norms"  # rules whose ranks have a GPU each


def claim_folders():
    """Lock the experiment for this Snakemake, and its data against changes while others read them.

    A killed Snakemake would leave its own locks behind.
    """
    jobs = {job.rule.name for job in workflow.dag.needrun_jobs()}
    reads_only = not jobs & {"download", "tokenizer", "shards"}
    try:
        CLAIMED.append(lock(Path(RESULTS) / ".lock"))
        CLAIMED.append(lock(Path(CORPUS) / ".lock", share=reads_only))
    except BadInput as error:
        refuse(error)


def check_gpus():
    """Check that there are as many GPUs as the largest run has ranks."""
    jobs = workflow.dag.needrun_jobs()
    ranks = [
        gpus_needed(job.wildcards) or 0 for job in jobs if job.rule.name in ON_GPUS
    ]
    most, permitted = max(ranks, default=0), permitted_gpus()
    if permitted is not None and most > permitted:
        refuse(too_few(most, permitted))


def too_few(wanted, there):
    """The message for runs that want more GPUs than there are."""
    if not there:
        seen = os.environ.get(VISIBLE)
        hidden = "" if seen is None else f" ({VISIBLE} is {seen!r})"
        return (
            f"training.device is cuda and there is no GPU here{hidden}: `nvidia-smi` shows those of a machine. Run this"
            f" on one with {wanted}, or with `training: {{device: cpu}}`."
        )
    sizes = sorted({run.world_size for run in RUNS if run.world_size <= there})
    return (
        f"runs of {wanted} ranks need a GPU each and there are {there}: run this on a machine with {wanted}, or with "
        f"`world_sizes: {sizes}` in `grid`."
    )


def share_imports():
    """Import torch and transformers once, in a process that forks the jobs which need them.

    Jobs in an image, on other machines and on GPUs import them themselves.
    """
    commands = [job.rule.shellcmd or "" for job in workflow.dag.needrun_jobs()]
    launched = any("gradwire launch" in command for command in commands)
    if launched and workflow.local_exec and not IN_IMAGE and VARIANT == "cpu":
        share(PRELOAD, rank_variables(1))


def write_expected():
    """Write the requested runs, so that `summarize` has a row for runs that never started, and the configuration.

    The report's commands to reproduce a cell read this configuration.
    """
    asked = [
        {
            **run._asdict(),
            "excluded": why_left_out(run),
            "quality_from": EXPERIMENT.quality_from,
            "targets": EXPERIMENT.targets
            and EXPERIMENT.targets.model_dump(mode="json"),
            "shared": not TIMED,
        }
        for run in EXPERIMENT.asked()
    ]
    write_json(Path(RESULTS) / "expected.json", asked)
    write_json(Path(RESULTS) / "config.json", config)
