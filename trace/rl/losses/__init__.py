"""One file per loss; each works on the flat response tokens of a micro-batch and returns a sum."""
