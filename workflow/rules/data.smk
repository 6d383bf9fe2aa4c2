# download -> tokenizer -> shards. The folders carry digests of what made them, so experiments share them.
DATASET = EXPERIMENT.dataset


rule download:
    output:
        ensure(f"{CORPUS}/corpus.json", non_empty=True),
    log:
        f"{LOGS}/download.log",
    retries: 2
    params:
        source=source_digest("gradwire.data.download"),
        flags=to_flags(DATASET, "source", "path", "revision", "max_mb"),
    shell:
        "gradwire download {params.flags:q} --output {output:q} > {log:q} 2>&1"


rule tokenizer:
    input:
        corpus=rules.download.output,
    output:
        directory(f"{TOKENS}/tokenizer"),
    log:
        f"{LOGS}/tokenizer.log",
    params:
        source=source_digest("gradwire.data.tokenize"),
        folder=subpath(output[0], parent=True),
        flags=to_flags(DATASET, "tokenizer", "vocab_size"),
    shell:
        "gradwire tokenize --tokenizer_only --data_path {input.corpus:q} --output_dir {params.folder:q}"
        " {params.flags:q} > {log:q} 2>&1"


rule shards:
    input:
        corpus=rules.download.output,
        tokenizer=rules.tokenizer.output,
    output:
        train=f"{TOKENS}/shards/train/shards.meta.pt",
        val=f"{TOKENS}/shards/val/shards.meta.pt",
    log:
        f"{LOGS}/shards.log",
    params:
        source=source_digest("gradwire.data.tokenize"),
        folder=subpath(output.train, ancestor=3),
        dataset=DATASET.source,
        flags=to_flags(DATASET, "max_length", "shard_size", "val_fraction"),
    shell:
        "gradwire tokenize --data_path {input.corpus:q} --output_dir {params.folder:q} --tokenizer {input.tokenizer:q}"
        " --dataset {params.dataset:q} {params.flags:q} > {log:q} 2>&1"
