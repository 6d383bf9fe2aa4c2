# download -> tokenizer -> shards. Folder names have digests of their inputs, so experiments share them.


rule download:
    output:
        ensure(f"{CORPUS}/corpus.json", non_empty=True),
    log:
        f"{LOGS}/download.log",
    retries: 2
    resources:
        attempt=attempt_of,
    params:
        source=source_digest(
            "gradwire.lm.data.download",
            *source_modules(EXPERIMENT.dataset.source),
        ),
        flags=dataset_flags("source", "max_mb", *EXPERIMENT.dataset.source_options),
    shell:
        "gradwire download --attempt {resources.attempt} {params.flags:q} --output {output:q} > {log:q} 2>&1"


rule tokenizer:
    input:
        corpus=rules.download.output,
    output:
        directory(f"{TOKENS}/tokenizer"),
    log:
        f"{LOGS}/tokenizer.log",
    resources:
        attempt=attempt_of,
    params:
        source=source_digest("gradwire.lm.data.tokenize"),
        folder=subpath(output[0], parent=True),
        flags=dataset_flags("tokenizer", "vocab_size"),
    shell:
        "gradwire tokenize --attempt {resources.attempt}"
        " --tokenizer_only --data_path {input.corpus:q} --output_dir {params.folder:q}"
        " {params.flags:q} > {log:q} 2>&1"


rule shards:
    input:
        corpus=rules.download.output,
        tokenizer=rules.tokenizer.output,
    output:
        # Not the shards themselves: Snakemake would delete them before a retry, which resumes from them.
        complete=touch(f"{TOKENS}/shards/complete"),
    log:
        f"{LOGS}/shards.log",
    resources:
        attempt=attempt_of,
    params:
        source=source_digest("gradwire.lm.data.tokenize"),
        folder=subpath(output[0], ancestor=2),
        dataset=EXPERIMENT.dataset.source,
        flags=dataset_flags("max_length", "shard_size", "val_fraction", "chat_format"),
    shell:
        "gradwire tokenize --attempt {resources.attempt}"
        " --data_path {input.corpus:q} --output_dir {params.folder:q} --tokenizer {input.tokenizer:q}"
        " --restart --dataset {params.dataset:q} {params.flags:q} > {log:q} 2>&1"
