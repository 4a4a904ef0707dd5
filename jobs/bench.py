"""Measure the stream against the ceiling of a cluster, as `raypipe bench` does for one machine.

    ray job submit --working-dir . -- python jobs/bench.py s3://bucket/train.parquet --repeats 3

The last line of its output is one JSON object: ceiling_images_per_s, stream_images_per_s, ratio, …
"""

import sys

from raypipe.commands.cli import main

if __name__ == "__main__":
    main(["bench", *sys.argv[1:]])
