# The paper's tables and figures, each with its own methods over all seeds, and one page of all (`paper`). A page asks for
# trainings and evaluations by name, so what two tables share is run once, whichever target asks first.
rule tables:
    input:
        gates=lambda wildcards: gates(target_methods(wildcards.target).values()),
        calibration=rules.calibrate.output.metrics,
        training=lambda wildcards: trainings(wildcards.target, target_methods(wildcards.target)),
        evaluation=lambda wildcards: evaluations(wildcards.target),
        analysis=lambda wildcards: analyses(wildcards.target),
    output:
        index=report(
            f"{PAGE}/index.html",
            caption="../report/tables.rst",
            category="Tables",
            labels={"target": "{target}"},
        ),
        markdown=f"{PAGE}/report.md",
        summary=f"{PAGE}/summary.json",
    log:
        f"{LOGS}/tables/{{target}}.log",
    benchmark:
        f"{BENCHMARKS}/tables/{{target}}.tsv"
    wildcard_constraints:
        target=one_of(targets.TARGETS),
    conda:
        "../envs/trace.yaml"
    params:
        config=settings("tables"),
        methods=target_settings,
        code=stages.code_digest("tables"),
    shell:
        "OMP_NUM_THREADS={threads} trace-rl tables --config {params.config:q} --target {wildcards.target} > {log} 2>&1"


# `snakemake table1`, ..., `snakemake paper`, `snakemake stability`.
for target in targets.TARGETS:

    rule:
        name:
            target
        input:
            expand(rules.tables.output, target=target),
            lambda wildcards, target=target: runs_behind(target),
