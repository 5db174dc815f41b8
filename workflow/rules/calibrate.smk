# Static encode scales of activations and KV, importance of the experts' input columns, idle experts, format errors.
rule calibrate:
    input:
        checkpoint=rules.checkpoint.output,
        data=rules.data.output,
    output:
        scales=PATHS.scales,
        metrics=PATHS.calibration_metrics,
        importance=PATHS.importance,
    log:
        f"{LOGS}/calibrate.log",
    benchmark:
        f"{BENCHMARKS}/calibrate.tsv"
    conda:
        "../envs/trace.yaml"
    params:
        config=settings("calibrate"),
        code=stages.code_digest("calibrate"),
    shell:
        "OMP_NUM_THREADS={threads} trace-rl calibrate --config {params.config:q} > {log} 2>&1"
