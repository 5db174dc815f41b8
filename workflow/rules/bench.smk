# What the machine makes of it (`snakemake bench`). The profile gives each benchmark the whole machine, because a neighbour
# would be timed too; the engine itself runs on one thread, as in training.
rule bench_rollout:
    input:
        checkpoint=rules.checkpoint.output,
        data=rules.data.output,
        scales=rules.calibrate.output.scales,
    output:
        PATHS.bench_rollout,
    log:
        f"{LOGS}/bench_rollout.log",
    benchmark:
        f"{BENCHMARKS}/bench_rollout.tsv"
    conda:
        "../envs/trace.yaml"
    params:
        config=settings("bench"),
        code=stages.code_digest("bench"),
    shell:
        "OMP_NUM_THREADS=1 trace-rl bench rollout --config {params.config:q} > {log} 2>&1"


# One RL step by phase, for the methods of bench.step_methods; these need not be in the suite.
rule bench_step:
    input:
        checkpoint=rules.checkpoint.output,
        data=rules.data.output,
        scales=rules.calibrate.output.scales,
    output:
        PATHS.bench_step,
    log:
        f"{LOGS}/bench_step.log",
    benchmark:
        f"{BENCHMARKS}/bench_step.tsv"
    conda:
        "../envs/trace.yaml"
    params:
        config=settings("bench_step"),
        methods=lambda wildcards: stages.step_methods_json(EXPERIMENT),
        code=stages.code_digest("bench_step"),
    shell:
        "OMP_NUM_THREADS=1 trace-rl bench step --config {params.config:q} > {log} 2>&1"


# The quantization kernels beside a copy; processes with one thread and with two.
rule bench_kernels:
    output:
        PATHS.bench_kernels,
    log:
        f"{LOGS}/bench_kernels.log",
    benchmark:
        f"{BENCHMARKS}/bench_kernels.tsv"
    conda:
        "../envs/trace.yaml"
    params:
        code=stages.code_digest("bench_kernels"),
    shell:
        "trace-rl bench kernels --threads 1,2 --json {output} > {log} 2>&1"


# 4-bit expert weights that the CPU really multiplies with. A processor without the instructions is refused, and `bench`
# leaves this rule out there (moe_benchmark).
rule bench_moe:
    output:
        PATHS.bench_moe,
    log:
        f"{LOGS}/bench_moe.log",
    benchmark:
        f"{BENCHMARKS}/bench_moe.tsv"
    conda:
        "../envs/trace.yaml"
    params:
        code=stages.code_digest("bench_moe"),
    shell:
        "trace-rl bench moe --json {output} > {log} 2>&1"


# The analytic decode model, and its error where this host has measured a point of it.
rule bench_model:
    input:
        rules.bench_rollout.output,
        moe_benchmark,
    output:
        PATHS.bench_model,
    log:
        f"{LOGS}/bench_model.log",
    benchmark:
        f"{BENCHMARKS}/bench_model.tsv"
    conda:
        "../envs/trace.yaml"
    params:
        measured=measured_options,
        code=stages.code_digest("bench_model"),
    shell:
        "OMP_NUM_THREADS=1 trace-rl bench model {params.measured} --json {output} > {log} 2>&1"
