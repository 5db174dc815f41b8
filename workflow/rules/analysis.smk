# What the paper lacks, once per seed: the sources of the gap between trainer and engine, on the policy before RL and on
# the trained `trace` policy of the seed, and how importance ratios follow the engine's under staleness.
rule gap_sources:
    input:
        checkpoint=rules.checkpoint.output,
        data=rules.data.output,
        scales=rules.calibrate.output.scales,
        calibration=rules.calibrate.output.metrics,
        policy=expand(rules.train.output.policy, method=targets.ANALYSED, allow_missing=True),
    output:
        ANALYSES["gap_sources"],
    log:
        f"{LOGS}/gap_sources/seed{{seed}}.log",
    benchmark:
        f"{BENCHMARKS}/gap_sources/seed{{seed}}.tsv"
    conda:
        "../envs/trace.yaml"
    params:
        config=settings("gap_sources"),
        code=stages.code_digest("gap_sources"),
    shell:
        "OMP_NUM_THREADS={threads} trace-rl gap-sources --config {params.config:q} --seed {wildcards.seed} > {log} 2>&1"


rule ratio:
    input:
        checkpoint=rules.checkpoint.output,
        data=rules.data.output,
        scales=rules.calibrate.output.scales,
        calibration=rules.calibrate.output.metrics,  # scales of a method in a format of its own
    output:
        ANALYSES["ratio"],
    log:
        f"{LOGS}/ratio/seed{{seed}}.log",
    benchmark:
        f"{BENCHMARKS}/ratio/seed{{seed}}.tsv"
    conda:
        "../envs/trace.yaml"
    params:
        config=settings("ratio"),
        method=lambda wildcards: stages.method_json(method_named("qat")),  # whose updates make the rollouts stale
        code=stages.code_digest("ratio"),
    shell:
        "OMP_NUM_THREADS={threads} trace-rl ratio --config {params.config:q} --seed {wildcards.seed} > {log} 2>&1"
