# Two gates before any training, in the number formats of its method. Scope audit: trainer, engine and export agree on the
# format of every tensor. Parity: trainer and engine agree on log-probs, fresh and after one update and refit.
rule audit:
    input:
        checkpoint=rules.checkpoint.output,
        scales=rules.calibrate.output.scales,
        calibration=rules.calibrate.output.metrics,  # scales of a method in a format of its own
    output:
        AUDIT,
    log:
        f"{LOGS}/audit/{{format}}.log",
    benchmark:
        f"{BENCHMARKS}/audit/{{format}}.tsv"
    conda:
        "../envs/trace.yaml"
    params:
        config=settings("audit"),
        code=stages.code_digest("audit"),
    shell:
        "OMP_NUM_THREADS={threads} trace-rl audit --config {params.config:q} --format {wildcards.format} > {log} 2>&1"


rule parity:
    input:
        checkpoint=rules.checkpoint.output,
        data=rules.data.output,
        scales=rules.calibrate.output.scales,
        calibration=rules.calibrate.output.metrics,
        audit=rules.audit.output,
    output:
        PARITY,
    log:
        f"{LOGS}/parity/{{format}}.log",
    benchmark:
        f"{BENCHMARKS}/parity/{{format}}.tsv"
    conda:
        "../envs/trace.yaml"
    params:
        config=settings("parity"),
        code=stages.code_digest("parity"),
    shell:
        "OMP_NUM_THREADS={threads} trace-rl parity --config {params.config:q} --format {wildcards.format} > {log} 2>&1"
