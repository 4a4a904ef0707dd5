"""A run, looked at by its folder: any step made again, in one process, without Ray."""
