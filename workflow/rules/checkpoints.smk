# The policy before RL: trained from scratch, taken from a directory, downloaded, or upcycled.
rule checkpoint:
    input:
        data=rules.data.output,
    output:
        directory(PATHS.checkpoint),
    log:
        f"{LOGS}/checkpoint.log",
    benchmark:
        f"{BENCHMARKS}/checkpoint.tsv"
    retries: 2 if EXPERIMENT.checkpoint.source == "hub" else 0
    conda:
        "../envs/trace.yaml"
    params:
        config=settings("checkpoint"),
        code=stages.code_digest("checkpoint"),
    shell:
        "OMP_NUM_THREADS={threads} trace-rl checkpoint --config {params.config:q} > {log} 2>&1"
