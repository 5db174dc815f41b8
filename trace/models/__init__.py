"""Models: architecture families, the miniature, the hub, and export."""
