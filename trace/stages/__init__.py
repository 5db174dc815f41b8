"""One file per CLI stage: what a rule of the workflow runs."""
