# The rules of the package, with the target that an include would not set.   snakemake --cores all --configfile FILE
include: "workflow/Snakefile"


workflow.default_target = "all"
