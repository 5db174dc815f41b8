# The core suite, one seed: a table (`snakemake summary` needs no MLflow) and a page beside the paper's numbers.
rule summary:
    input:
        gates=gates(CORE.values()),
        calibration=rules.calibrate.output.metrics,
        training=expand(rules.train.output, method=CORE_TRAINED, seed=CORE_SEEDS),
        start=rules.evaluate_start.output,
        evaluation=expand(rules.evaluate.output, method=CORE, seed=CORE_SEEDS),
    output:
        summary=report(
            PATHS.summary,
            caption="../report/summary.rst",
            category="Summary",
        ),
        table=PATHS.base / "summary.txt",
    log:
        f"{LOGS}/summary.log",
    benchmark:
        f"{BENCHMARKS}/summary.tsv"
    conda:
        "../envs/trace.yaml"
    params:
        config=settings("summary"),
        methods=[method.model_dump_json() for method in CORE.values()],
        code=stages.code_digest("summary"),
    shell:
        "trace-rl summary --config {params.config:q} > {output.table} 2> {log}"


rule report:
    input:
        summary=rules.summary.output.summary,
        gates=rules.summary.input.gates,
        calibration=rules.calibrate.output.metrics,
        training=rules.summary.input.training,
        bench=rules.bench_rollout.output,
    output:
        index=report(
            PATHS.report / "index.html",
            caption="../report/index.rst",
            category="Report",
        ),
        markdown=PATHS.report / "report.md",
    log:
        f"{LOGS}/report.log",
    benchmark:
        f"{BENCHMARKS}/report.tsv"
    conda:
        "../envs/trace.yaml"
    params:
        config=settings("report"),
        methods=[method.model_dump_json() for method in CORE.values()],
        code=stages.code_digest("report"),
    shell:
        "trace-rl report --config {params.config:q} > {log} 2>&1"
