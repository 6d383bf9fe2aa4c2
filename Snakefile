# gradwire: corpus -> shards -> train -> (trace, perplexity, gradients) -> table.   snakemake --cores all
from snakemake.utils import min_version

min_version("9.20")


# Another experiment (--configfile configs/smoke.yaml) takes the place of this one instead of lying on top of it.
if "name" not in config:

    configfile: "config.yaml"


container: "containers/gradwire-cpu.sif"


include: "workflow/rules/common.smk"
include: "workflow/rules/data.smk"
include: "workflow/rules/train.smk"
include: "workflow/rules/measure.smk"
include: "workflow/rules/gradients.smk"
include: "workflow/rules/report.smk"


rule all:
    default_target: True
    input:
        rules.summarize.output,
        rules.summarize.input,  # the table may stand although a cell is missing (`onerror`), so each is a target


onstart:
    claim_folders()
    write_expected()


onerror:  # the table exists after a failure too; dated before its inputs, so that the next call makes it anew
    shell(f"{SUMMARIZE} && touch --date=2000-01-01 {rules.summarize.output}")
