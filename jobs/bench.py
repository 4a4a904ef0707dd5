"""Measure the stream against the ceiling of the machines that it runs on.

    uv run jobs/bench.py train.lmdb --repeats 3
    ray job submit --working-dir . -- python jobs/bench.py s3://bucket/train.parquet --repeats 3

The last line of standard output is one JSON object: ceiling_images_per_s, stream_images_per_s, ratio, …
"""

import sys

from raypipe.commands.cli import main

if __name__ == "__main__":
    main(["bench", *sys.argv[1:]])
