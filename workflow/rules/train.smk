# RL of one method with one seed. Snakemake deletes declared outputs before a job starts, so a killed run keeps its state
# in an undeclared directory (RunPaths.state) and continues from there.
rule train:
    input:
        checkpoint=rules.checkpoint.output,
        data=rules.data.output,
        scales=rules.calibrate.output.scales,
        calibration=rules.calibrate.output.metrics,  # scales of a method in a format of its own
        gates=lambda wildcards: gates([method_named(wildcards.method)]),
    output:
        policy=directory(f"{TRAIN}/policy"),
        steps=f"{TRAIN}/metrics.jsonl",
        metrics=f"{TRAIN}/metrics.json",
    log:
        f"{LOGS}/train/{{method}}/seed{{seed}}.log",
    benchmark:
        f"{BENCHMARKS}/train/{{method}}/seed{{seed}}.tsv"
    conda:
        "../envs/trace.yaml"
    params:
        config=settings("train"),
        method=method_settings,
        code=stages.code_digest("train"),
    shell:
        "OMP_NUM_THREADS={threads} trace-rl train --config {params.config:q}"
        " --method {wildcards.method:q} --seed {wildcards.seed} > {log} 2>&1"
