# One table over every run that the experiment asks for.


rule summarize:
    input:
        of_runs(f"{RUN}/record.json", RUNS),
        of_runs(f"{RUN}/perplexity.json", RUNS if EXPERIMENT.training.evaluate else []),
        of_runs(f"{RUN}/profile.json", RUNS if EXPERIMENT.training.profile else []),
        of_runs(f"{GRADIENTS}/validation.json", EXPERIMENT.gradient_runs(RUNS)),
        of_runs(f"{GRADIENTS}/norms.parquet", EXPERIMENT.norm_runs(RUNS)),
    output:
        f"{RESULTS}/results.jsonl",
        f"{RESULTS}/results.csv",
        f"{RESULTS}/summary.md",
    log:
        f"{LOGS}/summarize.log",
    retries: 0
    localrule: True
    params:
        source=source_digest("gradwire.report.summarize"),
    shell:
        f"{SUMMARIZE} > {{log:q}} 2>&1"
