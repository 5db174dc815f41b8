# Tokens per second and bytes of BF16, FP4, and FP4 with recording. The profile gives it the whole machine, because a
# neighbour would be timed too; the engine itself runs on one thread, as in training.
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
