# A trained policy quantized afterwards: packed weights in the field's checkpoint layout.
rule quantize:
    input:
        policy=base_policy,
        scales=rules.calibrate.output.scales,
        calibration=rules.calibrate.output.metrics,  # scales of a method in a format of its own
        importance=rules.calibrate.output.importance,
    output:
        directory(QUANTIZED),
    log:
        f"{LOGS}/quantize/{{method}}/seed{{seed}}.log",
    benchmark:
        f"{BENCHMARKS}/quantize/{{method}}/seed{{seed}}.tsv"
    conda:
        "../envs/trace.yaml"
    params:
        config=settings("quantize"),
        method=method_settings,
        code=stages.code_digest("quantize"),
    shell:
        "OMP_NUM_THREADS={threads} trace-rl quantize --config {params.config:q}"
        " --method {wildcards.method:q} --seed {wildcards.seed} > {log} 2>&1"
