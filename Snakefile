# gradwire: corpus -> shards -> train -> (trace, perplexity, gradients) -> table -> report.   snakemake --cores all
from snakemake.utils import min_version

min_version("9.20")


# Another experiment (--configfile configs/smoke.yaml) takes the place of this one instead of lying on top of it.
if "name" not in config:

    configfile: "config.yaml"


report: "workflow/report/experiment.rst"


include: "workflow/rules/common.smk"


container: IMAGE


include: "workflow/rules/data.smk"
include: "workflow/rules/train.smk"
include: "workflow/rules/measure.smk"
include: "workflow/rules/gradients.smk"
include: "workflow/rules/report.smk"


rule all:
    default_target: True
    input:
        rules.report.output,
        rules.summarize.output,
        rules.summarize.input,  # the table may stand although a cell is missing (`onerror`), so each is a target


onstart:
    claim_folders()
    write_expected()


onerror:  # table and page exist after a failure too; dated before their inputs, so that the next call makes them anew
    shell(
        f"{SUMMARIZE} && {REPORT} && touch --date=2000-01-01 {rules.summarize.output}"
    )
