# gradwire: corpus -> shards -> train -> (trace, perplexity, gradients) -> table -> report.   snakemake --cores all
from snakemake.utils import min_version

min_version("9.20")


# --configfile (such as configs/smoke.yaml) replaces config.yaml; Snakemake would merge the two.
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
        rules.summarize.input,  # `onerror` writes a table without failed cells, so each is a target


onstart:
    claim_folders()
    write_expected()


onerror:  # write table and page after a failure too; the old date makes the next run write them again
    shell(
        f"{SUMMARIZE} && {REPORT} && touch --date=2000-01-01 {rules.summarize.output}"
    )
