"""The report: what a run measured, beside what the paper reports, on one page that works offline."""
