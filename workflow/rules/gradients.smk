# Per-sample gradients of trained runs with their sample ids: collect -> aggregate -> validate, query.
if EXPERIMENT.gradients is not None:

    rule grads_collect:
        input:
            shards=rules.shards.output.complete,
            model=f"{RUN}/final_model",
        output:
            [
                f"{GRADIENTS}/rank_0/dim{dim}/{name}"
                for dim in EXPERIMENT.gradients.dim
                for name in ("all_orig.pt", "all_ids.pkl")
            ],
        log:
            f"{LOGS}/grads_collect/{RUN_PATH}.log",
        threads: world_size_of
        resources:
            **RANKS,
        params:
            source=source_digest(
                "gradwire.bench.launch.launch", "gradwire.attribution.collect.collect"
            ),
            folder=subpath(output[0], ancestor=3),
            data=subpath(input.shards, parent=True),
            gpus=granted_gpus,
            flags=to_flags(
                EXPERIMENT.gradients,
                "dim",
                "grad_type",
                "adam_variant",
                "loss",
                "projection",
                "store",
                "method",
                "split",
                "max_samples",
                "save_interval",
            ),
            device=EXPERIMENT.training.device,
        shell:
            "export OMP_NUM_THREADS=$(( {threads} > {wildcards.world_size} ? {threads} / {wildcards.world_size} : 1 ));"
            " gradwire launch --attempt {resources.attempt} --nodes {resources.nodes} --world_size {wildcards.world_size}"
            " {params.gpus} --"
            " grads collect --model_dir {input.model:q} --data_path {params.data:q} --output_path {params.folder:q}"
            " --device {params.device} {params.flags:q} --restart > {log:q} 2>&1"

    rule grads_aggregate:
        input:
            f"{GRADIENTS}/rank_0/dim{{dim}}/all_orig.pt",
            f"{GRADIENTS}/rank_0/dim{{dim}}/all_ids.pkl",
        output:
            f"{GRADIENTS}/dim{{dim}}/all_orig.pt",
            f"{GRADIENTS}/dim{{dim}}/all_ids.pkl",
            f"{GRADIENTS}/dim{{dim}}/manifest.json",
        log:
            f"{LOGS}/grads_aggregate/{RUN_PATH}.dim{{dim}}.log",
        resources:
            attempt=attempt_of,
        params:
            source=source_digest(
                "gradwire.bench.launch.launch", "gradwire.attribution.store.aggregate"
            ),
            folder=subpath(output[0], ancestor=2),
        shell:
            "gradwire launch --attempt {resources.attempt} --world_size 1 --"
            " grads aggregate --base_path {params.folder:q} --output_dir {params.folder:q}"
            " --num_gpus {wildcards.world_size} --dim {wildcards.dim} > {log:q} 2>&1"

    rule grads_validate:
        input:
            [f"{GRADIENTS}/dim{dim}/manifest.json" for dim in EXPERIMENT.gradients.dim],
        output:
            f"{GRADIENTS}/validation.json",
        log:
            f"{LOGS}/grads_validate/{RUN_PATH}.log",
        resources:
            attempt=attempt_of,
            gpu=one_gpu,
        params:
            source=source_digest(
                "gradwire.bench.launch.launch", "gradwire.attribution.collect.validate"
            ),
            folder=subpath(output[0], parent=True),
            flags=to_flags(EXPERIMENT.gradients, "dim", "recompute"),
            gpus=granted_gpu,
            device=EXPERIMENT.training.device,
        shell:
            "gradwire launch --attempt {resources.attempt} --world_size 1 {params.gpus} --"
            " grads validate --output_dir {params.folder:q} --check_ranks --check_aggregated"
            " --num_gpus {wildcards.world_size} --device {params.device} {params.flags:q} > {log:q} 2>&1"

    rule grads_query:
        input:
            store=f"{GRADIENTS}/dim{{dim}}/manifest.json",
            shards=rules.shards.output.complete,
            model=f"{RUN}/final_model",
        output:
            f"{GRADIENTS}/dim{{dim}}/query.json",
        log:
            f"{LOGS}/grads_query/{RUN_PATH}.dim{{dim}}.log",
        resources:
            attempt=attempt_of,
        params:
            source=source_digest(
                "gradwire.bench.launch.launch", "gradwire.attribution.query.query"
            ),
            folder=subpath(output[0], parent=True),
            data=subpath(input.shards, parent=True),
            prompt=literal(EXPERIMENT.gradients.query),
        shell:
            "gradwire launch --attempt {resources.attempt} --world_size 1 --"
            " grads query --store {params.folder:q} --output_dir {params.folder:q} --prompt={params.prompt:q}"
            " --model_dir {input.model:q} --shards {params.data:q} --device cpu > {log:q} 2>&1"

    rule norms:
        input:
            shards=rules.shards.output.complete,
            model=f"{RUN}/final_model",
        output:
            f"{GRADIENTS}/norms.parquet",
        log:
            f"{LOGS}/norms/{RUN_PATH}.log",
        threads: world_size_of
        resources:
            **RANKS,
        params:
            source=source_digest(
                "gradwire.bench.launch.launch", "gradwire.attribution.collect.norms"
            ),
            folder=subpath(output[0], parent=True),
            data=subpath(input.shards, parent=True),
            gpus=granted_gpus,
            flags=to_flags(
                EXPERIMENT.gradients, "loss", "split", "max_samples", "recompute"
            ),
            device=EXPERIMENT.training.device,
        shell:
            "export OMP_NUM_THREADS=$(( {threads} > {wildcards.world_size} ? {threads} / {wildcards.world_size} : 1 ));"
            " gradwire launch --attempt {resources.attempt} --nodes {resources.nodes} --world_size {wildcards.world_size}"
            " {params.gpus} --"
            " norms --model_dir {input.model:q} --data_path {params.data:q} --output_dir {params.folder:q}"
            " --device {params.device} {params.flags:q} > {log:q} 2>&1"
