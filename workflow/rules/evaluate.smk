# Accuracy on every task in BF16 and in FP4 execution: of the policy before RL, and of every method and seed.
rule evaluate_start:
    input:
        policy=rules.checkpoint.output,
        data=rules.data.output,
        scales=rules.calibrate.output.scales,
        calibration=rules.calibrate.output.metrics,  # scales of a method in a format of its own
    output:
        PATHS.evaluation_start,
    log:
        f"{LOGS}/evaluate/start.log",
    benchmark:
        f"{BENCHMARKS}/evaluate/start.tsv"
    conda:
        "../envs/trace.yaml"
    params:
        config=settings("evaluate"),
        code=stages.code_digest("evaluate"),
    shell:
        "OMP_NUM_THREADS={threads} trace-rl evaluate --config {params.config:q} > {log} 2>&1"


rule evaluate:
    input:
        policy=evaluated_policy,
        data=rules.data.output,
        scales=rules.calibrate.output.scales,
        calibration=rules.calibrate.output.metrics,  # scales of a method in a format of its own
    output:
        f"{EVALUATED}/metrics.json",
    log:
        f"{LOGS}/evaluate/{{method}}/seed{{seed}}.log",
    benchmark:
        f"{BENCHMARKS}/evaluate/{{method}}/seed{{seed}}.tsv"
    conda:
        "../envs/trace.yaml"
    params:
        config=settings("evaluate"),
        method=method_settings,
        code=stages.code_digest("evaluate"),
    shell:
        "OMP_NUM_THREADS={threads} trace-rl evaluate --config {params.config:q}"
        " --method {wildcards.method:q} --seed {wildcards.seed} > {log} 2>&1"
