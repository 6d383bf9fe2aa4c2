# The rules of the package, with the target that an include would not set.   snakemake --cores all --configfile FILE
include: "src/gradwire/workflow/Snakefile"


workflow.default_target = "all"
