rule data:
    output:
        directory(PATHS.data),
    log:
        f"{LOGS}/data.log",
    benchmark:
        f"{BENCHMARKS}/data.tsv"
    conda:
        "../envs/trace.yaml"
    params:
        config=settings("data"),
        code=stages.code_digest("data"),
    shell:
        "OMP_NUM_THREADS={threads} trace-rl data --config {params.config:q} > {log} 2>&1"
