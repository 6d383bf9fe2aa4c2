# One job per run: strategy x compressor x world size x link x seed.


rule train:
    input:
        shards=rules.shards.output.complete,
    output:
        record=f"{RUN}/record.json",
        steps=f"{RUN}/steps.parquet",
        model=directory(f"{RUN}/final_model"),
        tensorboard=directory(f"{RUN}/logs/tensorboard"),
        environment=directory(f"{RUN}/environment"),
        profiler=directory(f"{RUN}/profiler"),
    log:
        f"{LOGS}/train/{RUN_PATH}.log",
    priority: priority_of
    threads: train_threads
    resources:
        **RANKS,
    params:
        source=train_source,
        folder=subpath(output.record, parent=True),
        data=subpath(input.shards, parent=True),
        model=literal(EXPERIMENT.model_text),
        model_options=literal(model_content(EXPERIMENT.model_text)),  # a preset may change
        method=method_of,
        cell=cell_json,
        gpus=granted_gpus,
        alone=alone_of,
        ranks=ranks_at_most,
        islands=islands_of,
        processes=processes_of,
        simulation=simulation_of,
        flags=training_flags,
    shell:
        "export OMP_NUM_THREADS=$(( {threads} > {params.ranks} ? {threads} / {params.ranks} : 1 ));"
        " gradwire launch --attempt {resources.attempt} --nodes {resources.nodes} --world_size {params.processes}"
        " --link {wildcards.link} {params.gpus} {params.alone} --"
        " train --data_path {params.data:q} --output_dir {params.folder:q} --model {params.model:q}"
        " --strategy {wildcards.strategy} --islands {params.islands} --comm_compress {params.method:q} --label {wildcards.compressor:q}"
        " --comm_config_json {params.cell:q} --seed {wildcards.seed} --resume --restart {params.simulation} {params.flags:q}"
        " > {log:q} 2>&1"
