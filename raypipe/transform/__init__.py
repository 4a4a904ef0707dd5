"""Encoded bytes → the arrays of a micro-batch: decoding, crops, presets, steps, masks and boxes. Neither Ray nor torch."""
