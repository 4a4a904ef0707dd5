"""Copy any store into a new LMDB, Parquet or WebDataset store, on the cluster that it is submitted to.

    uv run jobs/convert.py photos.tar train.lmdb --short-side 256
    ray job submit --working-dir . -- python jobs/convert.py s3://bucket/raw.parquet /shared/train.lmdb

The last line of standard output is one JSON object: samples, classes, bytes, skipped, without_size.
"""

import sys

from raypipe.commands.cli import main

if __name__ == "__main__":
    main(["convert", *sys.argv[1:]])
