"""The history of a run, by its folder: any step made again, in one process, without Ray.

The package is not called replay, since `raypipe.replay` is a function.
"""
