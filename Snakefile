include: "workflow/Snakefile"


# An included file cannot choose the default target.
rule default:
    default_target: True
    input:
        rules.all.input,
