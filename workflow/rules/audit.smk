# Two gates before any training. Scope audit: trainer, engine and export agree on the format of every tensor. Parity:
# trainer and engine agree on log-probs, fresh and after one update and refit.
rule audit:
    input:
        checkpoint=rules.checkpoint.output,
        scales=rules.calibrate.output.scales,
    output:
        PATHS.audit,
    log:
        f"{LOGS}/audit.log",
    benchmark:
        f"{BENCHMARKS}/audit.tsv"
    conda:
        "../envs/trace.yaml"
    params:
        config=settings("audit"),
        code=stages.code_digest("audit"),
    shell:
        "OMP_NUM_THREADS={threads} trace-rl audit --config {params.config:q} > {log} 2>&1"


rule parity:
    input:
        checkpoint=rules.checkpoint.output,
        data=rules.data.output,
        scales=rules.calibrate.output.scales,
        audit=rules.audit.output,
    output:
        PATHS.parity,
    log:
        f"{LOGS}/parity.log",
    benchmark:
        f"{BENCHMARKS}/parity.tsv"
    conda:
        "../envs/trace.yaml"
    params:
        config=settings("parity"),
        code=stages.code_digest("parity"),
    shell:
        "OMP_NUM_THREADS={threads} trace-rl parity --config {params.config:q} > {log} 2>&1"
