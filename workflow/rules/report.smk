# A table and a page over all runs of the experiment.
from importlib.resources import files

from gradwire.base.files import sha256_file

TEMPLATES = files("gradwire.bench.report.page") / "templates"


rule summarize:
    input:
        of_runs(f"{RUN}/record.json", RUNS),
        of_runs(
            f"{RUN}/perplexity.json",
            [run for run in RUNS if EXPERIMENT.training_of(run).evaluate],
        ),
        of_runs(f"{RUN}/profile.json", TRACED),
        of_runs(f"{GRADIENTS}/validation.json", EXPERIMENT.gradient_runs(RUNS)),
        of_runs(f"{GRADIENTS}/norms.parquet", EXPERIMENT.norm_runs(RUNS)),
        answers(),
    output:
        f"{RESULTS}/results.jsonl",
        report(
            f"{RESULTS}/results.csv",
            caption="../report/results.rst",
            category="Tables",
            labels={"table": "all runs"},
        ),
        f"{RESULTS}/summary.md",
    log:
        f"{LOGS}/summarize.log",
    retries: 0
    localrule: True
    params:
        source=source_digest("gradwire.bench.report.summarize"),
        targets=EXPERIMENT.targets and EXPERIMENT.targets.model_dump(mode="json"),
    shell:
        f"{SUMMARIZE} > {{log:q}} 2>&1"


rule report:
    input:
        rules.summarize.output,
    output:
        report(
            f"{RESULTS}/report.html",
            caption="../report/page.rst",
            category="Page",
            labels={"experiment": EXPERIMENT.name},
        ),
        report(
            directory(f"{RESULTS}/figures"),
            patterns=["{figure}.svg"],
            caption="../report/figures.rst",
            category="Figures",
            labels={"figure": "{figure}"},
        ),
        report(
            directory(f"{RESULTS}/tables"),
            patterns=["{table}.csv"],
            caption="../report/tables.rst",
            category="Tables",
            labels={"table": "{table}"},
        ),
    log:
        f"{LOGS}/report.log",
    retries: 0
    localrule: True
    params:
        source=source_digest("gradwire.bench.report.report"),
        templates={path.name: sha256_file(path) for path in sorted(TEMPLATES.iterdir())},
    shell:
        f"{REPORT} > {{log:q}} 2>&1"
