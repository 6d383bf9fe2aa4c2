# Measurements of a trained run: profiler traces and perplexity.


rule trace:
    input:
        f"{RUN}/profiler",
    output:
        f"{RUN}/profile.json",
    log:
        f"{LOGS}/trace/{RUN_PATH}.log",
    resources:
        attempt=attempt_of,
    params:
        source=source_digest("gradwire.bench.trace.trace"),
        folder=subpath(input[0], parent=True),
    shell:
        "gradwire trace --attempt {resources.attempt} --run_dir {params.folder:q} > {log:q} 2>&1"


rule perplexity:
    input:
        shards=rules.shards.output.complete,
        model=f"{RUN}/final_model",
    output:
        f"{RUN}/perplexity.json",
    log:
        f"{LOGS}/perplexity/{RUN_PATH}.log",
    resources:
        attempt=attempt_of,
        gpu=one_gpu,
    params:
        source=source_digest(
            "gradwire.bench.launch.launch", "gradwire.bench.training.perplexity"
        ),
        data=subpath(input.shards, parent=True),
        gpus=granted_gpu,
        device=EXPERIMENT.training.device,
    shell:
        "gradwire launch --attempt {resources.attempt} --world_size 1 {params.gpus} --"
        " perplexity --model_dir {input.model:q} --data_path {params.data:q} --output {output:q}"
        " --device {params.device} > {log:q} 2>&1"
