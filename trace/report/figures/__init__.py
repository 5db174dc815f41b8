"""Figures of the report as inline SVG, a method's colour the same in every figure."""
