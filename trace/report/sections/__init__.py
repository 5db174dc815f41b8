"""Sections of the report, one idea a file: each opens with where this run disagrees with the paper."""
