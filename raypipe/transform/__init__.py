"""Encoded bytes → the arrays of a micro-batch: decoding, crops, presets, steps, targets. Neither Ray nor torch."""
